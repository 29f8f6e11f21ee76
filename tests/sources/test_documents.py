"""Documents of tokens: three formats read, two written, the same documents; damage is an error that names the file."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ConfigError, DataFileChangedError, DataFileError, DataFileIOError
from penstock.sources.tokens import DocumentFiles
from penstock.storage import cache_root
from penstock.tokens.folder import TokenFolder, TokenShardWriter

Documents = list[list[int]]

DOCUMENTS: Documents = [[1, 2, 9], [], [3, 9], [60_000, 5, 6, 7, 9], [9], [4, 4, 9]]


def write(where: Path, documents: Documents, format: str = "penstock", most: int = 6, dtype: str = "uint16") -> Path:
    """Write documents as `penstock tokenize` does; return the folder."""
    where.mkdir(exist_ok=True)
    folder = TokenFolder(format, dtype, len(documents), {})
    with TokenShardWriter(where, folder, most) as writer:
        for begin in range(0, len(documents), 3):
            some = documents[begin : begin + 3]
            flat = [token for document in some for token in document]
            writer.write(np.array(flat, dtype), np.array([len(document) for document in some]))
        writer.finish()
    return where


def items(files: Any, rows: Any = None, **options: Any) -> Documents:
    found = files if isinstance(files, DocumentFiles) else DocumentFiles(files, **options)
    return [item.tolist() for item in found.records(np.arange(len(found)) if rows is None else np.array(rows))]


def in_penstock(where: Path, documents: Documents) -> DocumentFiles:
    return DocumentFiles(write(where, documents))


def in_megatron(where: Path, documents: Documents) -> DocumentFiles:
    return DocumentFiles(str(write(where, documents, "megatron") / "tokens-*.idx"))


def in_one_pair(where: Path, documents: Documents) -> DocumentFiles:
    return DocumentFiles(write(where, documents, "megatron", most=10**6, dtype="int32") / "tokens-00000.bin")


FORMATS: dict[str, Callable[[Path, Documents], DocumentFiles]] = {
    "penstock": in_penstock,
    "megatron": in_megatron,
    "one pair": in_one_pair,
}


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=15)
@given(documents=st.lists(st.lists(st.integers(0, 65_535), max_size=9), min_size=1, max_size=12), data=st.data())
def test_what_is_written_is_read(
    format: str, documents: Documents, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = FORMATS[format](tmp_path_factory.mktemp("round"), documents)
    assert items(files) == documents
    rows = data.draw(st.lists(st.integers(-len(documents), len(documents) - 1), max_size=6))
    assert items(files, rows) == [documents[row] for row in rows]
    assert files.lengths.tolist() == list(map(len, documents))
    assert files.lengths.dtype == np.int32
    assert files.tokens == sum(map(len, documents))


@given(tokens=st.lists(st.integers(0, 3), max_size=30))
def test_an_end_token_cuts(tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "train.bin"
    np.array(tokens, np.uint16).tofile(path)
    wanted: Documents = [[]]
    for token in tokens:
        wanted[-1].append(token)
        if token == 0:
            wanted.append([])
    wanted = [document for document in wanted if document]
    files = DocumentFiles(path, dtype="uint16", end_token=0)
    assert items(files) == wanted
    assert files.lengths.tolist() == list(map(len, wanted))


def test_shards_end_where_documents_do(tmp_path: Path) -> None:
    folder = TokenFolder.read(str(write(tmp_path, DOCUMENTS, most=6) / "tokens.json"))
    # The third document would be the sixth token, the fourth would be too many.
    assert [(shard.documents, shard.tokens) for shard in folder.shards] == [(3, 5), (2, 6), (1, 3)]
    one_each = TokenFolder.read(str(write(tmp_path / "one", DOCUMENTS, most=1) / "tokens.json"))
    assert [shard.tokens for shard in one_each.shards] == [3, 0, 2, 5, 1, 3]


def of_megatron(dtype: str, code: int, sizes: list[int], documents: list[int]) -> bytes:
    """Write an index by the letter of the format."""
    width = np.dtype(dtype).itemsize
    starts = [sum(sizes[:k]) * width for k in range(len(sizes))]
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    header += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(documents))
    body = b"".join(struct.pack("<i", size) for size in sizes) + b"".join(struct.pack("<q", at) for at in starts)
    return header + body + b"".join(struct.pack("<q", at) for at in documents)


@pytest.mark.parametrize(("dtype", "code"), [("uint16", 8), ("int32", 4), ("uint8", 1)])
def test_a_megatron_pair_is_written_by_the_letter(tmp_path: Path, dtype: str, code: int) -> None:
    documents = [[1, 2, 3], [], [4]]
    write(tmp_path, documents, "megatron", dtype=dtype)
    assert (tmp_path / "tokens-00000.idx").read_bytes() == of_megatron(dtype, code, [3, 0, 1], [0, 1, 2, 3])
    assert (tmp_path / "tokens-00000.bin").read_bytes() == np.array(
        [1, 2, 3, 4], f"<{np.dtype(dtype).str[1:]}"
    ).tobytes()


def test_a_megatron_document_may_have_several_sequences(tmp_path: Path) -> None:
    np.arange(10, dtype="<i4").tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(of_megatron("int32", 4, [2, 3, 1, 4], [0, 2, 2, 4]))
    files = DocumentFiles(tmp_path / "a.idx")
    assert items(files) == [[0, 1, 2, 3, 4], [], [5, 6, 7, 8, 9]]
    assert files.lengths.tolist() == [5, 0, 5]
    # Files of several modalities have a mode of each sequence at the end.
    (tmp_path / "b.idx").write_bytes((tmp_path / "a.idx").read_bytes() + bytes(4))
    (tmp_path / "b.bin").write_bytes((tmp_path / "a.bin").read_bytes())
    assert items(tmp_path / "b.idx") == items(files)


def test_lengths_of_one_megatron_pair_are_those_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = in_one_pair(tmp_path, DOCUMENTS)
    assert files.lengths.tolist() == list(map(len, DOCUMENTS))
    assert not files.lengths.flags.owndata
    assert not files.lengths.flags.writeable
    assert not list((cache_root() / "tokens").glob("*.idx"))


def test_lengths_are_made_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = in_penstock(tmp_path / "a", DOCUMENTS).lengths
    kept = list((tmp_path / "cache" / "penstock" / "tokens").iterdir())
    assert len(kept) == 1
    again = DocumentFiles(tmp_path / "a").lengths
    assert isinstance(again, np.memmap)
    assert (again == first).all()
    assert list((tmp_path / "cache" / "penstock" / "tokens").iterdir()) == kept


def test_a_pickle_is_a_handle(tmp_path: Path) -> None:
    for name, make in FORMATS.items():
        files = make(tmp_path / name, DOCUMENTS)
        again = pickle.loads(pickle.dumps(files))
        assert (items(again), again.fingerprint) == (DOCUMENTS, files.fingerprint)
    assert len(pickle.dumps(in_penstock(tmp_path / "long", [[1]] * 500))) < 20_000 + 100 * 200


def test_fingerprints_tell_where_documents_end(tmp_path: Path) -> None:
    one = DocumentFiles(write(tmp_path / "a", [[1, 2], [3]], most=10))
    two = DocumentFiles(write(tmp_path / "b", [[1], [2, 3]], most=10))
    same = DocumentFiles(write(tmp_path / "c", [[1, 2], [3]], most=10))
    assert one.fingerprint == same.fingerprint != two.fingerprint


def test_the_version_covers_indexes(tmp_path: Path) -> None:
    folder = write(tmp_path, [[1, 2], [3]], most=10)
    version = DocumentFiles(folder).version
    index = folder / "tokens-00000.idx.npy"
    os.utime(index, ns=(0, index.stat().st_mtime_ns + 10**9))
    assert DocumentFiles(folder).version != version


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "not an index": ("tokens-00000.idx", lambda data: b"x" + data[1:], "no index of Megatron's"),
    "empty": ("tokens-00000.idx", lambda data: b"", "no index of Megatron's"),
    "version": ("tokens-00000.idx", lambda data: data[:9] + b"\x02" + data[10:], "version 2"),
    "floats": ("tokens-00000.idx", lambda data: data[:17] + b"\x06" + data[18:], "none of integers"),
    "unknown type": ("tokens-00000.idx", lambda data: data[:17] + b"\x63" + data[18:], "none of integers"),
    "truncated": ("tokens-00000.idx", lambda data: data[:-3], "truncated or damaged"),
    "too many": ("tokens-00000.idx", lambda data: data[:18] + b"\xff" * 8 + data[26:], "truncated or damaged"),
    "tokens truncated": ("tokens-00000.bin", lambda data: data[:-2], "of another pair"),
    "half a token": ("tokens-00000.bin", lambda data: data[:-1], "not a whole number"),
    "documents": ("tokens-00000.idx", lambda data: data[:-8] + struct.pack("<q", 3), "do not begin"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_pair_is_an_error(tmp_path: Path, name: str) -> None:
    file, damage, match = DAMAGE[name]
    write(tmp_path, DOCUMENTS, "megatron", most=100)
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    with pytest.raises(DataFileError, match=rf"tokens-00000\..*{match}"):
        DocumentFiles(tmp_path / "tokens-00000.idx")


@given(at=st.integers(34, 34 + 6 * 12 + 8 * 7 - 1), value=st.integers(0, 255))
def test_any_changed_byte_of_an_index_is_an_error_or_other_documents(
    at: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Never memory of somebody else's, an IndexError or a crash."""
    folder = write(tmp_path_factory.mktemp("fuzz"), DOCUMENTS, "megatron", most=100)
    path = folder / "tokens-00000.idx"
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(data)
    with contextlib.suppress(DataFileError):
        files = DocumentFiles(path)
        items(files)
        assert len(files.lengths) == len(files)


def test_a_damaged_folder_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS, most=100)
    said = tmp_path / "tokens.json"
    index = tmp_path / "tokens-00000.idx.npy"
    good, offsets = json.loads(said.read_text()), np.load(index)
    for change, match in (
        ({"version": 2}, "version 2"),
        ({"complete": False, "rows": 9}, "6 of 9 rows are tokenized"),
        ({"shards": 3}, "is damaged"),
        ({"unknown": 3}, "is damaged"),
    ):
        said.write_text(json.dumps({**good, **change}))
        with pytest.raises(DataFileError, match=match):
            DocumentFiles(tmp_path)
    said.write_text("[")
    with pytest.raises(DataFileError, match="is damaged"):
        DocumentFiles(tmp_path)
    said.write_text(json.dumps(good))
    for wrong, match in (
        (offsets[:-1], "of another pair"),
        (offsets + 1, "no index"),
        (offsets.astype("f8"), "no index"),
    ):
        np.save(index, wrong)
        with pytest.raises(DataFileError, match=match):
            DocumentFiles(tmp_path)
    offsets[2] = 50
    np.save(index, offsets)
    files = DocumentFiles(tmp_path)
    assert items(files, [0]) == DOCUMENTS[:1]
    for read in (lambda: items(files, [1]), lambda: files.lengths):
        with pytest.raises(DataFileError, match=r"tokens-00000\.bin"):
            read()
    (tmp_path / "tokens-00000.bin").write_bytes(b"12")
    with pytest.raises(DataFileError, match="has 1 tokens"):
        DocumentFiles(tmp_path)
    with pytest.raises(DataFileChangedError):
        items(files, [0])


def test_what_says_no_ends_is_refused(tmp_path: Path) -> None:
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="nothing says where its documents end"):
        DocumentFiles(tmp_path / "a.bin", dtype="uint16")
    with pytest.raises(DataFileIOError, match=r"a\.idx"):
        DocumentFiles(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="in which no token is end_token=70000"):
        DocumentFiles(tmp_path / "a.bin", dtype="uint16", end_token=70_000)
    with pytest.raises(ConfigError, match="leave dtype= and end_token= out"):
        DocumentFiles(write(tmp_path / "b", DOCUMENTS), end_token=9)
    with pytest.raises(ConfigError, match="cannot hold"):
        DocumentFiles(write(tmp_path / "b", DOCUMENTS), token_type="int16")
    with pytest.raises(DataFileIOError, match="cannot read"):
        DocumentFiles(tmp_path)


def test_the_data_set(tmp_path: Path) -> None:
    write(tmp_path, DOCUMENTS)
    dataset = ps.DocumentDataset(tmp_path, seed=1)
    rows = dataset.rows(range(len(dataset)))
    assert [item.tolist() for item in dataset] == [DOCUMENTS[row] for row in rows]
    assert rows.tolist() != sorted(rows)
    assert dataset.lengths[rows].tolist() == [len(item) for item in dataset]
    loader = ps.DataLoader(dataset, batch_size=4, collate_fn=list, num_workers=1)
    assert [item.tolist() for batch in loader for item in batch] == [DOCUMENTS[row] for row in rows]
    shares = [ps.DocumentDataset(tmp_path, rank=rank, world_size=2, token_type="int32") for rank in range(2)]
    assert sorted(item.tolist() for share in shares for item in share) == sorted(DOCUMENTS)
    with pytest.raises(ConfigError, match="token_type"):
        ps.DocumentDataset(tmp_path, token_type="float32")
