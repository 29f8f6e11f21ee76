"""Streams by address, commands, stores, copies; and the writers."""

from __future__ import annotations

import functools
import http.server
import importlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wds_support import classes, write_shards

import penstock.wds as wds
from penstock.errors import NotAllowedError


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("penstock.wds.utils"), "_allowed", set())


def test_commands_have_to_be_allowed(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 3)
    for make in (lambda: list(wds.WebDataset(f"pipe:cat {urls}")), lambda: wds.gopen("pipe:true")):
        with pytest.raises(NotAllowedError, match=r'runs a command by a shell.*allow\("pipe"\)'):
            make()
    with pytest.raises(NotAllowedError):
        list(wds.WebDataset(f"pipe:cat {urls}", handler=wds.ignore_and_continue))
    dataset = wds.WebDataset(f"pipe:cat {urls}", allow=("pipe",), shardshuffle=True).shuffle(5)
    first = classes(dataset)
    assert sorted(first) == list(range(30))
    again = wds.WebDataset(f"pipe:cat {urls}", allow=("pipe",), shardshuffle=True).shuffle(5)
    items = iter(again)
    for _ in range(13):
        next(items)
    third = wds.WebDataset(f"pipe:cat {urls}", allow=("pipe",), shardshuffle=True).shuffle(5)
    third.load_state_dict(again.state_dict())
    assert classes(third) == first[13:]


def test_a_command_that_fails(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 1)
    wds.allow("pipe")
    with pytest.raises(OSError, match="ended with status 3"):
        list(wds.WebDataset("pipe:exit 3"))
    with pytest.raises(OSError, match="status 4"):
        list(wds.WebDataset(f"pipe:head -c 5000 {urls.replace('{000..000}', '000')}; exit 4"))
    stream = wds.gopen("pipe:yes")  # closed before its end: no error
    assert stream.read(4) == b"y\ny\n"
    stream.close()
    with wds.gopen(f"pipe:cat > {tmp_path}/out", "wb") as out:
        out.write(b"abc")
    assert (tmp_path / "out").read_bytes() == b"abc"


def test_own_schemes_and_unknown_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, 2)

    def mine(url: str, mode: str, bufsize: int) -> Any:
        return open(tmp_path / url.partition("://")[2], mode)

    monkeypatch.setitem(wds.gopen_schemes, "mine", mine)
    assert classes(wds.WebDataset("mine://{000..001}.tar")) == list(range(20))
    with pytest.raises(ValueError, match="no gopen handler defined"):
        wds.gopen("nobody://x")
    with wds.gopen(str(tmp_path / "a#b?c"), "wb") as out:
        out.write(b"1")
    assert (tmp_path / "a#b?c").read_bytes() == b"1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *args: Any) -> None:
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path)))
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{web.server_port}", asked
    web.shutdown()
    web.server_close()
    thread.join()


def test_shards_by_http_and_copies_of_them(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    pytest.importorskip("fsspec")
    address, asked = server
    write_shards(tmp_path, 2)
    urls = f"{address}/{{000..001}}.tar"
    assert classes(wds.WebDataset(urls)) == list(range(20))
    assert classes(wds.WebDataset(urls, select_files=lambda n: n.endswith("cls"))) == list(range(20))
    cache = tmp_path / "cache"
    cache.mkdir()
    dataset = wds.WebDataset(urls, cache_dir=str(cache))
    assert classes(dataset) == list(range(20))
    asked.clear()
    samples = list(dataset)
    assert classes(samples) == list(range(20))
    assert len(asked) <= 2, "asked for the version alone"
    assert samples[0]["__local_path__"].startswith(str(cache))
    assert samples[0]["__url__"] == f"{address}/000.tar"


def test_copies_of_commands_are_named_by_the_whole_address(tmp_path: Path) -> None:
    wds.allow("pipe")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_shards(tmp_path / folder, 2 if folder == "b" else 1)
    cache = tmp_path / "cache"
    cache.mkdir()
    urls = [f"pipe:cat {tmp_path}/a/000.tar", f"pipe:cat {tmp_path}/b/001.tar"]
    for _ in range(2):
        assert classes(wds.WebDataset(urls, cache_dir=cache)) == list(range(20))


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.tar.gz", "a.tar.bz2", "a.tar.xz"])
def test_written_and_read_back(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with wds.TarWriter(path, "me", "us") as writer:
        for i in range(5):
            assert writer.write({"__key__": f"k{i}", "cls": i, "txt": f"t{i}", "json": [i], "npy": np.ones(i)}) > 0
    samples = list(wds.WebDataset(path).decode())
    assert [(s["__key__"], s["cls"], s["txt"], s["json"]) for s in samples] == [
        (f"k{i}", i, f"t{i}", [i]) for i in range(5)
    ]


def test_shard_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    counts: list[int] = []

    def post(name: str) -> None:
        done.append(name)
        counts.append(writer.count)

    with wds.ShardWriter(str(tmp_path / "s-%04d.tar"), 4, post=post, verbose=1, encoder=False) as writer:
        for i in range(10):
            writer.write({"__key__": f"{i:04d}", "cls": str(i).encode()})
        assert (writer.shard, writer.count, writer.total, writer.size) == (3, 2, 10, 2)
        assert writer.tarstream is not None
        with pytest.raises(ValueError, match="doesn't map to a bytes after encoding"):
            writer.write({"__key__": "x", "cls": 5})
    assert done == [str(tmp_path / f"s-000{i}.tar") for i in range(3)]
    assert counts == [4, 4, 2]
    assert classes(wds.WebDataset(str(tmp_path / "s-{0000..0002}.tar"))) == list(range(10))
    assert capsys.readouterr() == ("", "")
    with wds.TarWriter(str(tmp_path / "x.tar")) as writer, pytest.raises(ValueError, match="must contain a __key__"):
        writer.write({"cls": 5})


def test_written_to_a_command(tmp_path: Path) -> None:
    wds.allow("pipe")
    with pytest.raises(KeyError), wds.TarWriter(f"pipe:cat > {tmp_path}/part.tar") as writer:
        raise KeyError("mine")
    with pytest.raises(ValueError, match="closed"):
        writer._file.write(b"")
    writer = wds.TarWriter(f"pipe:cat > {tmp_path}/piped.tar")
    writer.write({"__key__": "a", "cls": 1})
    writer.close()
    assert classes(wds.WebDataset(str(tmp_path / "piped.tar"))) == [1]


def test_a_command_does_not_take_part_of_an_archive_for_the_whole(tmp_path: Path) -> None:
    """The shell, and what is behind a bar of it, would go on at the end of their input."""
    wds.allow("pipe")
    for number, write in enumerate((wds.gopen, wds.TarWriter, wds.ShardWriter)):
        uploaded = tmp_path / f"{number}-uploaded"
        address = f"pipe:cat | (cat > {tmp_path}/%d-part; touch {uploaded})"
        options: dict[str, Any] = {"mode": "wb"} if write is wds.gopen else {}
        url = address if write is wds.ShardWriter else address % number
        with pytest.raises(KeyError), write(url, **options) as out:
            out.write(b"abc" if write is wds.gopen else {"__key__": "a", "cls": 1})
            raise KeyError("mine")
        time.sleep(0.3)
        assert not uploaded.exists()


def test_a_command_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("penstock.wds.gopen"), "_GRACE", 0.2)
    command = f"pipe:trap '' TERM; cat > {tmp_path}/part; touch {tmp_path}/uploaded"
    out: Any = wds.gopen(command, "wb", allow=("pipe",))
    time.sleep(0.3)  # until the trap is set
    out.abandon()
    out.abandon()
    assert not (tmp_path / "uploaded").exists()


def test_what_webdataset_reads_of_ours_and_ours_of_webdataset(tmp_path: Path) -> None:
    theirs: Any = pytest.importorskip("webdataset")
    sample = {"__key__": "a/b", "cls": 3, "txt": "é", "json": {"a": 1}, "npy": np.arange(3), "bin": b"\0"}
    for number, (writes, reads) in enumerate(((wds, theirs), (theirs, wds))):
        path = str(tmp_path / f"{number}.tar")
        with writes.TarWriter(path) as writer:
            writer.write(sample)
        (found,) = list(reads.WebDataset(path, shardshuffle=False).decode())
        assert {k: v for k, v in found.items() if k != "npy" and not k.startswith("__")} == {
            k: v for k, v in sample.items() if k != "npy" and not k.startswith("__")
        }
        assert (found["npy"] == np.arange(3)).all()
    assert sys.modules["webdataset"] is theirs
