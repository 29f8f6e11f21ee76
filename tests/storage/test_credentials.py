"""What a request to S3 is signed with, and where it goes: options, the environment, ``~/.aws``, nothing at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageAuthError, StorageError
from penstock.storage import Storage

pytest.importorskip("botocore")
DATA = b"0123456789" * 100


@pytest.fixture
def endpoint(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server that has an object, and no credentials but those of the test."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "DEFAULT_REGION", "REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    address: str = server.put("bucket/a.bin", DATA).removesuffix("/bucket/a.bin")
    return address


def signed(server: Any, options: dict[str, Any]) -> tuple[str, str] | None:
    """Key and region that a request came with."""
    assert Storage(options).read("s3://bucket/a.bin") == DATA
    given = server.authorizations[-1][1]
    found = re.search(r"Credential=(\w+)/\d+/([\w-]+)/s3/", given or "")
    return None if found is None else (found[1], found[2])


def test_names_of_s3fs_and_of_obstore(server: Any, endpoint: str) -> None:
    older = {"key": "K1", "secret": "s", "endpoint_url": endpoint, "client_kwargs": {"region_name": "eu-west-3"}}
    newer = {"access_key_id": "K2", "secret_access_key": "s", "endpoint": endpoint, "region": "eu-west-2"}
    assert signed(server, older) == ("K1", "eu-west-3")
    assert signed(server, newer) == ("K2", "eu-west-2")
    assert signed(server, {"anon": True, "client_kwargs": {"endpoint_url": endpoint}}) is None


def test_the_environment(server: Any, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "K3"), ("SECRET_ACCESS_KEY", "s"), ("DEFAULT_REGION", "us-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert signed(server, {"client_options": {"user_agent": "a"}}) == ("K3", "us-west-1")


def test_profiles(server: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = K4\naws_secret_access_key = s\n")
    (tmp_path / "config").write_text(f"[profile other]\nregion = ap-south-1\nendpoint_url = {endpoint}\n")
    assert signed(server, {"profile": "other"}) == ("K4", "ap-south-1")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert signed(server, {"client_options": {"user_agent": "b"}}) == ("K4", "ap-south-1")
    with pytest.raises(StorageAuthError, match=r"s3://bucket/a\.bin: The config profile \(none\) could not be found"):
        Storage({"profile": "none"}).read("s3://bucket/a.bin")


def test_secrets_are_not_printed(server: Any, endpoint: str) -> None:
    server.faults("403", "400")
    storage = Storage({"key": "K5", "secret": "hush", "endpoint_url": endpoint})
    for kind in (StorageAuthError, StorageError):
        with pytest.raises(kind) as caught:
            storage.read("s3://bucket/a.bin")
        assert "hush" not in str(caught.value)
        assert "hush" not in repr(storage)


@pytest.mark.parametrize("url", ["http", "s3"])
def test_a_server_that_says_200_to_a_part(server: Any, endpoint: str, url: str, tmp_path: Path) -> None:
    """It is read as a whole, once, into the cache."""
    address = server.put("bucket/b.bin", DATA, partial_status=200)
    options = {} if url == "http" else {"anon": True, "endpoint_url": endpoint}
    source = Storage(options, cache=tmp_path / "cache").open(address if url == "http" else "s3://bucket/b.bin")
    assert [source.read_at(begin, 10) for begin in range(0, 1000, 10)] == [b"0123456789"] * 100
    assert len(server.requests) == 3
