"""Writers: what they write is read back, by everybody, and is what WebDataset writes."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shard_support import by_tarfile

from penstock.errors import ConfigError, ShardError, ShardIOError
from penstock.shards import StreamShards, open_stream, walk_stream
from penstock.shards.writer import ShardWriter, TarWriter

rng = np.random.default_rng(0)
SAMPLES: list[dict[str, Any]] = [
    {"__key__": "a/b", "txt": "é", "cls": 3, "json": {"x": [1, 2]}, "jpg": b"raw", "__url__": "u", "_note": "n"},
    {"__key__": "c", "npy": np.arange(6).reshape(2, 3), "png": rng.random((4, 5, 3)), "index": 7, "seg.txt": "s"},
    {"__key__": "d", "jpg": rng.integers(0, 255, (8, 8, 3)).astype(np.uint8), "pyd": {1: 2}, "txt.gz": "packed"},
    {"__key__": "e", "ppm": Image.new("RGB", (3, 2)), "jpeg": Image.new("L", (3, 2)), "html": "<p>"},
    {"__key__": "f" * 180, "id": "text", "JSON": None},
]


def written(samples: list[dict[str, Any]], **options: Any) -> bytes:
    out = io.BytesIO()
    with TarWriter(out, mtime=5, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return out.getvalue()


def test_content_is_webdatasets() -> None:
    wds = pytest.importorskip("webdataset")
    for sample in SAMPLES:
        out = io.BytesIO()
        with wds.TarWriter(out) as writer:
            writer.write(sample)
        theirs, ours = by_tarfile(out.getvalue()), by_tarfile(written([sample]))
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        for (name, one), (_, other) in zip(ours, theirs, strict=True):
            if name.endswith(".gz"):
                assert gzip.decompress(one) == gzip.decompress(other)
            else:
                assert one == other, name


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=150),
            st.binary(max_size=1500),
        ),
        max_size=5,
    )
)
def test_read_back(samples: list[tuple[str, bytes]]) -> None:
    data = written([{"__key__": key, "x": value} for key, value in samples])
    expected = [(f"{key}.x", value) for key, value in samples]
    assert by_tarfile(data) == expected
    assert [(m.name, d) for m, d in walk_stream(io.BytesIO(data), "u")] == expected
    assert len(data) % 10240 == 0


def test_gnu_tar_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(written(SAMPLES))
    listed = subprocess.run(["tar", "-tvf", path], capture_output=True, text=True, check=True)
    assert "bigdata/bigdata" in listed.stdout
    assert listed.stderr == ""
    assert "f" * 180 + ".id" in listed.stdout


def test_header_fields() -> None:
    with tarfile.open(fileobj=io.BytesIO(written([{"__key__": "a", "x": b"1"}], mode=0o600, user="me"))) as archive:
        info = archive.next()
    assert info is not None
    assert (info.mode, info.mtime, info.uname, info.gname) == (0o600, 5, "me", "bigdata")


def test_meta_and_encoders() -> None:
    kept = by_tarfile(written([{"__key__": "a", "_m": "text", "x": b"1"}], keep_meta=True))
    assert kept == [("a._m", b"text"), ("a.x", b"1")]
    own = by_tarfile(written([{"__key__": "a", "x": 5, "cls": 1}], encoder={"x": lambda value: bytes(value)}))
    assert own == [("a.cls", b"1"), ("a.x", bytes(5))]
    for sample, options, message in (
        ({"x": b""}, {}, "object must contain a __key__"),
        ({"__key__": "a", "x": 1}, {}, "no handler found for x"),
        ({"__key__": "a", "x": 1}, {"encoder": False}, "doesn't map to a bytes after encoding"),
        ({"__key__": "a", "_x": 1}, {"keep_meta": True}, "must be of string type"),
        ({"__key__": "a", "json": object()}, {}, "cannot be written as json"),
        ({"__key__": "a", "png": np.full((2, 2, 3), 7.0)}, {}, "from 0 to 1"),
    ):
        with pytest.raises(ShardError, match=message):
            written([sample], **options)


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst"])
def test_compression_by_name(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    with TarWriter(path) as writer:
        assert writer.write({"__key__": "a", "txt": "xyz"}) == 3
    with open_stream(path) as file:
        assert [(m.name, d) for m, d in walk_stream(file, "u")] == [("a.txt", b"xyz")]
    if ending != "tar.zst":
        assert tarfile.open(path).getnames() == ["a.txt"]  # noqa: SIM115
    with pytest.raises(ConfigError, match="lzo"):
        TarWriter(path, compress="lzo")


def test_a_shard_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    writer = TarWriter(path)
    writer.write({"__key__": "a", "txt": "1"})
    assert not path.exists()
    writer.close()
    writer.close()
    assert os.listdir(tmp_path) == ["a.tar"]
    with pytest.raises(ShardError, match="closed"):
        writer.write({"__key__": "a"})
    with pytest.raises(KeyError), TarWriter(tmp_path / "b.tar") as other:
        other.write({"__key__": "a", "txt": "1"})
        raise KeyError
    assert os.listdir(tmp_path) == ["a.tar"]
    with pytest.raises(ShardIOError, match="no such file"):
        TarWriter(tmp_path / "none" / "a.tar")


def test_shard_writer(tmp_path: Path) -> None:
    finished: list[str] = []
    with ShardWriter(str(tmp_path / "s-%04d.tar"), maxcount=3, post=finished.append, mtime=1) as writer:
        for i in range(8):
            writer.write({"__key__": f"{i}", "cls": i})
    assert [os.path.basename(name) for name in finished] == ["s-0000.tar", "s-0001.tar", "s-0002.tar"]
    assert writer.total == 8
    read = [d for name in finished for _, d in by_tarfile(Path(name).read_bytes())]
    assert read == [str(i).encode() for i in range(8)]
    with ShardWriter(str(tmp_path / "t-%d.tar"), maxsize=10, start_shard=5) as writer:
        for i in range(4):
            writer.write({"__key__": f"{i}", "x": b"123456"})
    assert sorted(path.name for path in tmp_path.glob("t-*")) == ["t-5.tar", "t-6.tar"]
    with pytest.raises(ConfigError, match="%06d"):
        ShardWriter(str(tmp_path / "same.tar"))
    opened: list[io.BytesIO] = []

    class Kept(io.BytesIO):
        def close(self) -> None:
            opened.append(io.BytesIO(self.getvalue()))

    with ShardWriter("x-%d.tar.gz", opener=lambda name: Kept()) as writer:
        writer.write({"__key__": "a", "json": [1]})
    assert json.loads(by_tarfile(gzip.decompress(opened[0].getvalue()))[0][1]) == [1]


def test_close_calls_the_finish_of_a_subclass(tmp_path: Path) -> None:
    finished = []

    class Named(ShardWriter):
        def finish(self) -> None:
            finished.append(self.fname)
            super().finish()

    pattern = str(tmp_path / "%d.tar")
    with Named(pattern) as writer:
        writer.write({"__key__": "a", "txt": b"a"})
    assert finished[-1] == pattern % 0
    assert os.path.exists(pattern % 0)


@pytest.mark.parametrize("compress", ["", ".gz"])
def test_the_file_of_an_opener_is_closed_after_an_exception(tmp_path: Path, compress: str) -> None:
    files: list[Any] = []
    finished: list[str] = []

    def opener(name: str) -> Any:
        files.append(io.FileIO(tmp_path / name, "wb"))
        return files[-1]

    with (
        pytest.raises(KeyError, match="mine"),
        ShardWriter(f"%d.tar{compress}", opener=opener, maxcount=1, post=finished.append) as writer,
    ):
        writer.write({"__key__": "a", "x": b"1"})
        writer.write({"__key__": "b", "x": b"2"})
        raise KeyError("mine")
    assert [file.closed for file in files] == [True, True]
    assert finished == [f"0.tar{compress}"]
    with pytest.raises(ShardError):
        list(StreamShards([tmp_path / f"1.tar{compress}"]))


@pytest.mark.parametrize("compress", ["gz", "bz2", "xz", "zst"])
def test_an_abandoned_archive_gets_no_end(compress: str) -> None:
    file = io.BytesIO()
    writer = TarWriter(file, compress=compress)
    writer.write({"__key__": "a", "x": b"1"})
    before = file.getvalue()
    writer.abandon()
    del writer
    gc.collect()
    assert file.getvalue() == before


def test_the_file_of_an_opener_is_closed_when_a_shard_cannot_be_finished() -> None:
    full: Any = io.FileIO("/dev/full", "wb")
    with pytest.raises(ShardIOError, match="disk is full"), ShardWriter("%d.tar", opener=lambda name: full):
        pass
    assert full.closed


def test_a_full_disk_is_named_for_an_open_file_too() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        writer = TarWriter(full)
        with pytest.raises(ShardIOError, match="disk is full"):
            writer.write({"__key__": "a", "x": b""})


def test_an_archive_with_a_hole_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[str] = []
    shards = ShardWriter(f"{tmp_path}/%d.tar", post=finished.append)
    shards.write({"__key__": "a", "x": b"1"})
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(shards.tarstream, "_out", full)
        with pytest.raises(ShardIOError, match="disk is full"):
            shards.write({"__key__": "b", "x": b"1"})
    with pytest.raises(ShardError, match="closed"):
        shards.write({"__key__": "c", "x": b"1"})
    with pytest.raises(ShardIOError, match="disk is full"):
        shards.close()
    assert not finished
    assert not os.listdir(tmp_path)


def test_images_that_cannot_be_written_are_named() -> None:
    for array in (np.zeros((2, 2), np.int32), np.full((2, 2), 7.0)):
        with pytest.raises(ShardError, match=r"left\.png: .* as png: (an image|float images) must be"):
            TarWriter(io.BytesIO()).write({"__key__": "a", "left.png": array})


def test_a_forked_child_that_drops_its_writer_leaves_the_shard_alone(tmp_path: Path) -> None:
    writer = TarWriter(tmp_path / "a.tar")
    writer.write({"__key__": "a", "txt": "x"})  # which is in a buffer now
    child = os.fork()
    if not child:
        del writer
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    writer.write({"__key__": "b", "txt": "y"})
    writer.close()
    assert by_tarfile((tmp_path / "a.tar").read_bytes()) == [("a.txt", b"x"), ("b.txt", b"y")]


def test_a_device_is_not_replaced_by_a_shard(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar")
    for other in (tmp_path / "pipe.tar", tmp_path):
        advice = "a folder, device or pipe of this name exists: move it, or choose another name"
        with pytest.raises(ShardIOError, match=f"cannot write {re.escape(str(other))}: {advice}"):
            TarWriter(other)
    assert (tmp_path / "pipe.tar").is_fifo()
