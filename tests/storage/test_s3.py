"""A real S3 interface over HTTP: reading, versions, credentials, patterns; manifests and images on top of it."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from full_run import full_only

from penstock import DataLoader, ImageDataset, Manifest
from penstock.errors import (
    ManifestChangedError,
    StorageAuthError,
    StorageChangedError,
    StorageError,
    StorageNotFoundError,
)
from penstock.storage import Storage, local_path, open_source, read_object

DATA = os.urandom((9 << 20) + 99)


def test_reading(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="data", Key="a/b.bin", Body=DATA)
    url = "s3://data/a/b.bin"
    source = open_source(url)
    assert source.size == len(DATA)
    assert source.etag == s3.head_object(Bucket="data", Key="a/b.bin")["ETag"]
    assert source.read_at(5, 100) == DATA[5:105]
    assert source.read_at(len(DATA) - 5, 100) == DATA[-5:]
    assert source.stream().read() == read_object(url) == DATA
    path = local_path(url, cache=tmp_path)
    assert Path(path).read_bytes() == DATA
    assert Path(path).name == "b.bin"


def test_an_empty_object(s3: Any) -> None:
    s3.put_object(Bucket="data", Key="empty", Body=b"")
    assert open_source("s3://data/empty").stream().read() == read_object("s3://data/empty") == b""
    assert Path(local_path("s3://data/empty")).read_bytes() == b""


def test_a_changed_object(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="data", Key="a", Body=DATA)
    source = open_source("s3://data/a")
    old = local_path("s3://data/a", cache=tmp_path)
    s3.put_object(Bucket="data", Key="a", Body=bytes(len(DATA)))
    with pytest.raises(StorageChangedError, match="s3://data/a changed while it was read: its etag was"):
        source.read_at(0, 10)
    new = local_path("s3://data/a", cache=tmp_path)
    assert new != old
    assert Path(new).read_bytes() == bytes(len(DATA))
    s3.put_object(Bucket="data", Key="a", Body=b"x")
    with pytest.raises(StorageChangedError):
        source.read_at(1 << 20, 10)


def test_what_is_not_there(s3: Any) -> None:
    with pytest.raises(StorageNotFoundError, match="s3://data/none does not exist"):
        open_source("s3://data/none")
    with pytest.raises(StorageNotFoundError, match="does not exist"):
        open_source("s3://no-such-bucket/none")
    with pytest.raises(StorageNotFoundError, match="does not exist"):
        read_object("s3://data/none")
    with pytest.raises(StorageError, match="an object has a URL such as s3://bucket/key"):
        open_source("s3://data")


def test_no_credentials(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageAuthError, match=r"no credentials for S3 found.*'anon': True"):
        Storage(idle=29).open("s3://data/a")  # other options, so that a client of its own is made


def test_options(s3: Any, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket="data", Key="a", Body=b"abc")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    storage = Storage({"endpoint_url": s3_endpoint, "key": "testing", "secret": "testing"})
    assert storage.read("s3://data/a") == b"abc"
    assert pickle.loads(pickle.dumps(storage)) == storage


@full_only("imports everything anew", but=["fork"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(s3: Any, method: str) -> None:
    """A client that was used before a fork is left to the parent."""
    s3.put_object(Bucket="data", Key="a", Body=DATA)
    assert read_object("s3://data/a") == DATA
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(read_object, ("s3://data/a",)).get(50) == DATA
    assert read_object("s3://data/a") == DATA


class TestManifests:
    @pytest.fixture
    def lists(self, s3: Any) -> Any:
        for number in range(3):
            lines = "".join(f"class_{i % 3}/{number}_{i}.jpg {i % 3}\n" for i in range(20))
            s3.put_object(Bucket="data", Key=f"lists/part-{number}.txt", Body=lines.encode())
        return s3

    def test_one_and_patterns(self, lists: Any) -> None:
        manifest = Manifest.open("s3://data/lists/part-1.txt")
        assert len(manifest) == 20
        assert manifest[3].path == "class_0/1_3.jpg"
        whole = Manifest.open("s3://data/lists/part-*.txt", root="s3://data/images")
        assert len(whole) == 60
        assert whole[59].path == "s3://data/images/class_1/2_19.jpg"
        with pytest.raises(StorageNotFoundError, match="no object matches"):
            Manifest.open("s3://data/lists/nothing-*.txt")
        with pytest.raises(FileNotFoundError):
            Manifest.open("s3://data/lists/nothing.txt")

    def test_pickled(self, lists: Any) -> None:
        manifest = Manifest.open("s3://data/lists/part-1.txt", storage=Storage(attempts=3))
        again = pickle.loads(pickle.dumps(manifest[5:9]))
        assert list(again) == list(manifest[5:9])
        assert again.storage == Storage(attempts=3)
        data = pickle.dumps(manifest)
        lists.put_object(Bucket="data", Key="lists/part-1.txt", Body=b"other.jpg 1\n")
        with pytest.raises(ManifestChangedError):
            pickle.loads(data)
        assert manifest[0].path == "class_0/1_0.jpg"  # the old copy stays open

    @full_only("workers for each", but=["thread"])
    @pytest.mark.parametrize("executor", ["inline", "thread", "process"])
    def test_images(self, lists: Any, executor: Any) -> None:
        lines = []
        for i in range(12):
            ok, encoded = cv2.imencode(".png", np.full((8, 10, 3), i * 20, np.uint8))
            assert ok
            lists.put_object(Bucket="data", Key=f"images/{i}.png", Body=encoded.tobytes())
            lines.append(f"{i}.png {i}\n")
        lists.put_object(Bucket="data", Key="train.txt", Body="".join(lines).encode())
        dataset = ImageDataset(Manifest.open("s3://data/train.txt", root="s3://data/images"))
        loader = DataLoader(dataset, batch_size=4, num_workers=0 if executor == "inline" else 2, executor=executor)
        seen = [
            (int(label), int(image[0, 0, 0]))
            for images, labels in loader
            for image, label in zip(images, labels, strict=True)
        ]
        assert seen == [(i, i * 20) for i in range(12)]

    def test_a_missing_image_is_named(self, lists: Any) -> None:
        dataset = ImageDataset(Manifest.open("s3://data/lists/part-0.txt", root="s3://data/nowhere"))
        with pytest.raises(ValueError, match=r"s3://data/nowhere/class_0/0_0\.jpg does not exist"):
            dataset[0]

    def test_compressed_columns(self, s3: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        out = io.BytesIO()
        pq.write_table(pa.table({"path": ["a", "b"], "label": [1, 2]}), out)
        s3.put_object(Bucket="data", Key="t.parquet", Body=out.getvalue())
        assert [record.label for record in Manifest.open("s3://data/t.parquet")] == [1, 2]
