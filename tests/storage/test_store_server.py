"""The store that tests and benchmarks read from: ranges, listings, latency, faults and counts."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_server import Store

DATA = bytes(range(256)) * 1000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    bucket = tmp_path / "store" / "bucket"
    (bucket / "a").mkdir(parents=True)
    (bucket / "a" / "one.bin").write_bytes(DATA)
    (bucket / "a" / "two.bin").write_bytes(b"two")
    (bucket / "three.bin").write_bytes(b"three")
    with Store(tmp_path / "store") as made:
        yield made


def get(store: Store, key: str, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return urllib.request.urlopen(urllib.request.Request(f"{store.url}/bucket/{key}", headers=named), timeout=20)


def test_ranges_versions_and_counts(store: Store) -> None:
    with get(store, "a/one.bin") as whole:
        assert whole.status == 200
        assert whole.read() == DATA
    with get(store, "a/one.bin", Range="bytes=5-9", If_Match=whole.headers["ETag"]) as part:
        assert (part.status, part.read(), part.headers["Content-Range"]) == (206, DATA[5:10], "bytes 5-9/256000")
    with get(store, "a/one.bin", Range="bytes=-3") as last:
        assert last.read() == DATA[-3:]
    for status, headers in ((416, {"Range": "bytes=256000-"}), (412, {"If_Match": '"other"'})):
        with pytest.raises(urllib.error.HTTPError, match=str(status)):
            get(store, "a/one.bin", **headers)
    counts = store.counts()
    assert counts["requests"] == {"GET": 5}
    assert counts["bytes"] == len(DATA) + 8
    assert counts["objects"] == {"bucket/a/one.bin": {"GET": 5, "bytes": len(DATA) + 8}}
    store.reset()
    assert store.counts()["requests"] == {}


def test_s3_by_boto(store: Store) -> None:
    boto3 = pytest.importorskip("boto3")
    from botocore.config import Config

    client = boto3.client(
        "s3", endpoint_url=store.url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )  # fmt: skip
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", PaginationConfig={"PageSize": 2})
    assert [item["Key"] for page in pages for item in page["Contents"]] == ["a/one.bin", "a/two.bin", "three.bin"]
    top = client.list_objects_v2(Bucket="bucket", Delimiter="/")
    assert [item["Prefix"] for item in top["CommonPrefixes"]] == ["a/"]
    assert [item["Key"] for item in top["Contents"]] == ["three.bin"]
    client.put_object(Bucket="bucket", Key="new/four.bin", Body=DATA)
    assert client.head_object(Bucket="bucket", Key="new/four.bin")["ContentLength"] == len(DATA)
    assert client.get_object(Bucket="bucket", Key="new/four.bin", Range="bytes=1-2")["Body"].read() == DATA[1:3]
    client.delete_object(Bucket="bucket", Key="new/four.bin")
    with pytest.raises(client.exceptions.NoSuchKey):
        client.get_object(Bucket="bucket", Key="new/four.bin")
    with pytest.raises(client.exceptions.ClientError, match="NotImplemented"):
        client.create_multipart_upload(Bucket="bucket", Key="new/parts.bin")


def outcomes(store: Store, requests: int) -> list[str]:
    """What became of requests one after the other."""
    found = []
    for _ in range(requests):
        try:
            with get(store, "a/one.bin") as answer:
                assert answer.read() == DATA
            found.append("whole")
        except urllib.error.HTTPError as error:
            found.append("unavailable" if error.code == 503 else str(error))
        except http.client.IncompleteRead:
            found.append("cut")
    return found


def test_faults_follow_the_seed(store: Store) -> None:
    store.behave(seed=3, unavailable=0.2, cut=0.2)
    first = outcomes(store, 40)
    assert set(first) == {"whole", "unavailable", "cut"}
    assert store.counts()["faults"] == {kind: first.count(kind) for kind in ("unavailable", "cut")}
    store.reset()
    assert outcomes(store, 40) == first
    store.reset()
    store.behave(seed=4, unavailable=0.2, cut=0.2)
    assert outcomes(store, 40) != first


def test_an_outage_begins_at_a_request_and_ends(store: Store) -> None:
    store.behave(outage=60, outage_after=3)
    assert outcomes(store, 4) == ["whole", "whole", "unavailable", "unavailable"]
    store.behave()
    assert outcomes(store, 1) == ["whole"]


def test_an_object_is_replaced_at_a_request(store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    store.behave(replace={"bucket/a/one.bin": (2, str(tmp_path / "other"))})
    with get(store, "a/one.bin") as before:
        assert before.read() == DATA
    with get(store, "a/one.bin") as after:
        assert after.read() == b"other"
    assert before.headers["ETag"] != after.headers["ETag"]


def test_rates_and_latency_leave_data_as_they_are(store: Store) -> None:
    store.behave(latency=0.01, rate=50e6, slow=1.0, slow_seconds=0.01)
    assert outcomes(store, 2) == ["whole", "whole"]
    assert store.counts()["faults"] == {"slow": 2}
