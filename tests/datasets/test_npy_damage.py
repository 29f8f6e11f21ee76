"""Damaged ``.npy`` and ``.npz`` files: every byte of a header changed, in all places that read one."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from full_run import full_only

import penstock as ps
from penstock.errors import DataFileError, ShardError
from penstock.manifest import Record
from penstock.shards.decode import Decode
from penstock.shards.grouping import KEY, URL
from penstock.wds.autodecode import decoders

FLIPS = [0x00, 0x01, 0x08, 0x20, 0x80, 0xFF]
WRONG_HEADERS = [
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }((((",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 30 + b",), }",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (-3, -4), }",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4L), }",
    b"{'descr': '<f4',\n\x0c 'fortran_order': False, 'shape': '",
    b"\xff\xfe",
    b"(" * 900,
    b"",
]


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(12, dtype=np.float32).reshape(3, 4))
    return file.getvalue()


def damaged() -> Iterator[bytes]:
    """One byte of the header changed, cut anywhere, and headers that NumPy's parser stumbles over."""
    data = npy()
    for place in range(128):
        for flip in FLIPS:
            changed = bytearray(data)
            changed[place] = changed[place] ^ flip if flip else 0
            yield bytes(changed)
    for end in range(0, len(data), 7):
        yield data[:end]
    for header in WRONG_HEADERS:
        for version, size in ((1, 2), (2, 4), (3, 4)):
            padded = header.ljust(117) + b"\n"
            yield b"\x93NUMPY" + bytes([version, 0]) + len(padded).to_bytes(size, "little") + padded + data[128:]


def refusals(read: Callable[[bytes], object], cases: Iterable[bytes], error: type[Exception]) -> list[str]:
    """What the errors of this type say; any other one goes on its way."""
    said = []
    for data in cases:
        try:
            read(data)
        except error as caught:
            said.append(str(caught))
    return said


@pytest.mark.filterwarnings("ignore")  # NumPy's, of headers that Python 2 wrote
def test_what_reads_an_array_says_which_file_is_damaged(tmp_path: Path) -> None:
    path, load = tmp_path / "rows.npy", ps.LoadArray()

    def rows(data: bytes) -> object:
        path.write_bytes(data)
        return ps.ArrayDataset(path, rank=0, world_size=1)[0]

    def whole(data: bytes) -> object:
        path.write_bytes(data)
        return load(Record(str(path), None, 0, {}))

    for read in (rows, whole):
        said = refusals(read, damaged(), DataFileError)
        assert len(said) > 400
        assert all("rows.npy" in text and "\n" not in text for text in said)


@full_only("a program; test_what_reads_an_array has one")
@pytest.mark.filterwarnings("ignore")
def test_what_reads_a_sample_of_a_shard_says_which_is_damaged() -> None:
    archive = io.BytesIO()
    np.savez(archive, x=np.arange(3))
    data = archive.getvalue()
    archives = [data[:end] for end in range(0, len(data), 9)]
    archives += [data[:k] + bytes([data[k] ^ 0x41]) + data[k + 1 :] for k in range(0, len(data), 3)]
    cases = {"npy": list(damaged()), "npz": archives, "json": [b"[" * 100_000, b"{", b"\xff"]}
    for extension, some in cases.items():
        name = f"x.{extension}"
        said = refusals(lambda one, name=name: Decode()({URL: "a.tar", KEY: "7", name: one}), some, ShardError)  # type: ignore[misc]
        assert len(said) > len(some) // 4
        assert all(f"a.tar: sample '7': {name}" in text for text in said)
        if extension != "json":
            assert refusals(decoders[extension], some, ValueError)
