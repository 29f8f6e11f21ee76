"""Odd addresses, headers, folders and clocks: an error of ours that says what is wrong, or the right bytes."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from full_run import full_only

from penstock.errors import StorageAuthError, StorageChangedError, StorageError, StorageNotFoundError
from penstock.storage import Cache, Storage, open_source, read_object

DATA = os.urandom(100_000)
QUICK = Storage(idle=0.5, deadline=5.0, attempts=2)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:port/x",
        "http://127.0.0.1:99999/x",
        "http://[::1/x?signature=hush",
        f"http://{'a' * 70}.com/x",
        "http://a b/x",
        "http:///x",
    ],
)
def test_no_addresses(url: str) -> None:
    for reading in (QUICK.read, QUICK.open):
        with pytest.raises(StorageError) as caught:
            reading(url)
        assert url.partition("?")[0] in str(caught.value)
        assert "hush" not in str(caught.value)


def test_line_feeds_are_not_left_out(server: Any) -> None:
    url = server.put("xy", DATA)
    with pytest.raises(StorageError, match="control characters"):
        QUICK.read(url.replace("xy", "x\ny"))
    assert server.requests == []


@pytest.mark.parametrize("value", ["a\nb", "\u20ac"])
def test_headers_that_cannot_be_sent(server: Any, value: str) -> None:
    url = server.put("a.bin", DATA)
    with pytest.raises(StorageError, match=r"a\.bin"):
        Storage({"headers": {url: {"Cookie": value}}}).read(url)


def test_redirections_to_nowhere(server: Any) -> None:
    url = server.put("a.bin", DATA)
    for target in ("http://[bad/", "ftp://x/y", "file:///etc/passwd"):
        server.redirect["/r"] = target
        with pytest.raises(StorageError, match=r"/r: "):
            QUICK.read(url.replace("a.bin", "r"))


def test_percent_signs_and_weak_tags(server: Any) -> None:
    url = server.put("100%.bin", DATA, etag='W/"x"')
    source = open_source(url)
    assert source.read_at(5, 5) == DATA[5:10]
    assert read_object(url) == DATA


def test_errors_at_once_note_the_rank(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    url = server.put("a.bin", DATA)
    server.faults("500", "403")
    with pytest.raises(StorageAuthError) as caught:
        QUICK.read(url)
    assert caught.value.__notes__ == ["in attempt 2 (rank 3 of 8)"]


def test_folders_match_no_pattern(s3: Any) -> None:
    for key in ("lists/a.txt", "lists/more/b.txt"):
        s3.put_object(Bucket="data", Key=key, Body=b"a 1\n")
    assert Storage().glob("s3://data/lists/*") == ["s3://data/lists/a.txt"]
    with pytest.raises(StorageNotFoundError, match="no object matches"):
        Storage().glob("s3://data/li*")
    with pytest.raises(StorageError, match=r"s3://data/lists/a\.txt.*nonsense.*option of s3fs"):
        Storage({"nonsense": 1}).read("s3://data/lists/a.txt")


def held(cache: Cache) -> int:
    return sum(entry.size for entry in cache.entries())


class TestCache:
    def test_many_downloads_at_a_time_are_within_the_bound_in_the_end(self, server: Any, tmp_path: Path) -> None:
        cache = Cache(tmp_path, max_bytes=250_000)
        urls = [server.put(str(number), bytes([number]) * 100_000) for number in range(5)]
        server.fault = lambda *_: "drip:0.1"
        wrong: list[str] = []

        def read(number: int) -> None:
            copy = Storage(cache=cache).open(urls[number]).local()  # type: ignore[union-attr]
            if copy.read_at(0, copy.size) != bytes([number]) * 100_000:
                wrong.append(urls[number])

        threads = [threading.Thread(target=read, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert server.most_under_way > 2
        assert wrong == []
        assert held(cache) <= 250_000

    def test_a_clock_that_went_back_keeps_nothing_for_ever(self, server: Any, tmp_path: Path) -> None:
        cache = Cache(tmp_path, max_bytes=250_000)
        storage = Storage(cache=cache)
        urls = [server.put(str(number), DATA) for number in range(4)]
        for url in urls[:2]:
            storage.local_path(url)
        for entry in cache.entries():
            os.utime(entry.folder, (time.time() + 90_000,) * 2)
        for url in urls[2:]:
            storage.open(url).local()  # type: ignore[union-attr]
        assert held(cache) <= 250_000

    def test_a_folder_that_may_only_be_read(self, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = Storage(cache=Cache(tmp_path))
        url, other = server.put("a.bin", DATA), server.put("b.bin", DATA)
        path = storage.local_path(url)

        def refuse(*arguments: Any, **options: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
        for name in ("utime", "mkdir", "rename"):
            monkeypatch.setattr(os, name, refuse)
        assert storage.local_path(url) == path
        with pytest.raises(StorageError, match=r"cannot keep a copy of .*/b\.bin in the cache .*Permission denied"):
            storage.local_path(other)

    def test_a_limit_on_the_size_of_files(self, server: Any, tmp_path: Path) -> None:
        storage, url = Storage(cache=tmp_path), server.put("a.bin", DATA)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        try:
            with pytest.raises(StorageError, match=r"a\.bin in the cache .*ulimit -f"):
                storage.local_path(url)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert Path(storage.local_path(url)).read_bytes() == DATA


@full_only("waits between attempts")
def test_https_does_not_become_http(server: Any, tmp_path: Path) -> None:
    import ssl

    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    plain = server.put("a.bin", DATA)
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    secure = plain.replace("http:", "https:")
    storage = Storage({"ca_file": str(cert)}, idle=2, deadline=5.0, attempts=2)
    assert storage.read(secure) == DATA
    server.redirect |= {"/same": secure, "/down": plain}
    assert storage.read(secure.replace("a.bin", "same")) == DATA
    with pytest.raises(StorageError, match=r"/down: the server sends us to http://.*, which has no TLS"):
        storage.read(secure.replace("a.bin", "down"))
    with pytest.raises(StorageError, match="certificate is not trusted"):
        QUICK.read(secure)


def test_the_beginning_of_an_object(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is replaced meanwhile is an error; an empty object is not."""
    storage = Storage()
    assert storage.read_begin(server.put("a.bin", b"abc"), 2)[0] == b"ab"
    data, stat = storage.read_begin(server.put("empty.bin", b""), 2)
    assert (data, stat.size) == (b"", 0)

    def replaced(*_: Any, **__: Any) -> None:
        raise StorageChangedError("replaced")

    url = server.put("b.bin", b"abc")
    monkeypatch.setattr("penstock.storage.remote.transfer", replaced)
    with pytest.raises(StorageChangedError, match="replaced"):
        storage.read_begin(url, 2)
