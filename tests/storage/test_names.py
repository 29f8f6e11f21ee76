"""Names of sources: braces, lists, patterns, ``::``, file addresses; the same for all formats."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock import wds
from penstock.errors import ConfigError, DataFileIOError, ManifestIOError, ShardIOError, StorageError
from penstock.shards.stream import StreamShards
from penstock.sources.arrays import ArrayFiles
from penstock.sources.tokens import DocumentFiles
from penstock.storage import File, Storage, local_path, open_source, read_object
from penstock.storage.files import MANIFEST, STORED
from penstock.storage.names import braces, expand, expand_versions
from penstock.storage.remote import read_file
from penstock.storage.transfer import Stat
from penstock.storage.urls import path_of


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a.tar", ["a.tar"]),
        ("x-{08..11}.tar", ["x-08.tar", "x-09.tar", "x-10.tar", "x-11.tar"]),
        ("{0..8..4}", ["0", "4", "8"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{a..c}{1,2}", ["a1", "a2", "b1", "b2", "c1", "c2"]),
        ("{a,b{1..2},}", ["a", "b1", "b2", ""]),
        ("{x}", ["{x}"]),
        ("{-1..1}", ["-1", "0", "1"]),
        (r"a\{1,2\}", ["a{1,2}"]),
        ("${V}-{0,1}", ["${V}-0", "${V}-1"]),
        ("s3://b/{0..1}.tar::a.tar", ["s3://b/0.tar", "s3://b/1.tar", "a.tar"]),
        ("pipe:cat {0,1}*.tar", ["pipe:cat 0*.tar", "pipe:cat 1*.tar"]),
    ],
)
def test_expand(text: str, expected: list[str]) -> None:
    assert [url for part in text.split("::") for url in braces(part)] == expected
    if "" not in expected:
        assert expand(text) == expected


def test_lists_are_expanded_and_paths_are_not() -> None:
    assert expand(["{a,b}", Path("{a,b}"), "c"]) == ["a", "b", "{a,b}", "c"]


@pytest.mark.parametrize("text", ["{a", "a}", "{a,{b}"])
def test_unbalanced(text: str) -> None:
    with pytest.raises(ConfigError, match="unbalanced"):
        expand(text)


def test_too_many() -> None:
    for text in ("{0..99999}{0..99999}", "{0..99999999999999999999}", "{1000001..1}"):
        with pytest.raises(ConfigError, match="more than 1,000,000 names"):
            expand(text)
    assert len(expand("{0..99999999999999999999..99999999999999999999}")) == 2


def test_lists_that_multiply_are_refused_before_they_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(expand("{a,b}{{1,2},{3,4}}{0..9}")) == 80
    monkeypatch.setattr("braceexpand.braceexpand", lambda text: pytest.fail("this takes a minute"))
    with pytest.raises(ConfigError, match="more than 1,000,000 names"):
        expand("{a,b}" * 40)


def test_nothing() -> None:
    for urls in ([], "", "a::"):
        with pytest.raises(ConfigError, match="no source given"):
            expand(urls)
    for given in (5, b"a", [b"a"], [5]):
        with pytest.raises(ConfigError, match="must be a path or URL"):
            expand(given)  # type: ignore[arg-type]


def test_patterns(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar", "c.tgz", "w[1].tar"):
        (tmp_path / name).touch()
    assert expand(str(tmp_path / "?.tar")) == [str(tmp_path / "a.tar"), str(tmp_path / "b.tar")]
    assert expand(str(tmp_path / "{a,c}.t*")) == [str(tmp_path / "a.tar"), str(tmp_path / "c.tgz")]
    assert expand(str(tmp_path / "w[1].tar")) == [str(tmp_path / "w[1].tar")]
    with pytest.raises(ShardIOError, match="no file matches"):
        expand(str(tmp_path / "*.zip"))


def test_an_existing_file_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("{a,b}", "x::y", "{", "*", "pipe:c", "n[0]"):
        Path(name).touch()
        assert expand(name) == expand([Path(name)]) == [name]
    assert expand("n[0]::{a,b}{c,d}") == ["n[0]", "ac", "ad", "bc", "bd"]


def test_patterns_leave_out_indexes(tmp_path: Path) -> None:
    for name in ("a.txt", "a.txt.pstk", "a.tar.pidx", "a.tar.entries", "a.txt.sizes.arrow", "b.arrow"):
        (tmp_path / name).touch()
    assert expand(str(tmp_path / "*")) == [str(tmp_path / "a.txt"), str(tmp_path / "b.arrow")]
    assert expand(tmp_path / "a.txt.pstk") == [str(tmp_path / "a.txt.pstk")]
    with pytest.raises(ManifestIOError, match="no file matches"):
        expand(tmp_path / "*.p*", error=ManifestIOError)


def test_local() -> None:
    assert path_of("a/b.tar") == "a/b.tar"
    assert path_of("file:///a%20b/c?d#e.tar") == path_of("FILE://localhost/a%20b/c?d#e.tar") == "/a b/c?d#e.tar"
    assert path_of("file:a.tar") == "a.tar"
    assert path_of("s3://b/a.tar") is None
    assert path_of("pipe:cat a.tar") is None
    assert path_of(r"C:\a.tar") == r"C:\a.tar"
    for name, message in (("file://host/a", "names the host 'host'"), (Path("s3://b/a"), "lost a slash")):
        with pytest.raises(ConfigError, match=message):
            expand(name)


def test_neither_a_file_nor_in_a_store() -> None:
    with pytest.raises(StorageError, match="pipe:true is neither a file nor an address in a store"):
        open_source("pipe:true")


def test_patterns_in_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, asked = Storage(options={"a": 1}), []

    def found(self: Storage, url: str) -> list[tuple[str, Stat]]:
        assert self is storage
        asked.append(url)
        return [(url.replace("*", str(i)), Stat(i)) for i in range(2)]

    monkeypatch.setattr(Storage, "list_objects", found)
    assert expand(["s3://b/{x,y}-*.tar", "http://h/*.tar?a=*"], storage) == [
        *("s3://b/x-0.tar", "s3://b/x-1.tar", "s3://b/y-0.tar", "s3://b/y-1.tar"),
        "http://h/*.tar?a=*",
    ]
    assert asked == ["s3://b/x-*.tar", "s3://b/y-*.tar"]
    assert expand_versions("s3://b/x-*.tar", storage) == [("s3://b/x-0.tar", Stat(0)), ("s3://b/x-1.tar", Stat(1))]


# ------------------------------------------------------------------ the same names for all formats


def _tar(path: Path, number: int) -> None:
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo(f"{number}.cls")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"%d" % number))


def _one_class(dataset: Any) -> list[int]:
    return [int(sample["cls"]) for sample in dataset]


FORMATS: dict[str, tuple[str, Callable[[Path, int], object], Callable[[Any], list[int]]]] = {
    "manifest": (
        "txt",
        lambda path, number: path.write_text(f"x {number}\n"),
        lambda names: [record.label for record in ps.Manifest.open(names)],
    ),
    "table": (
        "parquet",
        lambda path, number: pq.write_table(pa.table({"n": [number]}), path),
        lambda names: [row["n"] for row in ps.TableDataset(names)],
    ),
    "JSON lines": (
        "jsonl",
        lambda path, number: path.write_text(f'{{"n": {number}}}\n'),
        lambda names: [row["n"] for row in ps.TableDataset(names)],
    ),
    "shards": ("tar", _tar, lambda names: _one_class(ps.ShardSet(names))),
    "stream": ("tar", _tar, lambda names: _one_class(StreamShards(names))),
    "wds": ("tar", _tar, lambda names: _one_class(wds.WebDataset(names, shardshuffle=False))),
    "arrays": (
        "npy",
        lambda path, number: np.save(path, np.array([number])),
        lambda names: [int(row) for row in ArrayFiles(names).records(np.arange(len(ArrayFiles(names))))],
    ),
    "tokens": (
        "bin",
        lambda path, number: np.array([number], "u2").tofile(path),
        lambda names: np.ravel([np.asarray(row) for row in ps.TokenDataset(names, 1, dtype="u2")]).tolist(),
    ),
    "documents": (
        "bin",
        lambda path, number: np.array([number, 9], "u2").tofile(path),
        lambda names: [int(row[0]) for row in DocumentFiles(names, dtype="u2", end_token=9).records(np.arange(2))],
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_all_formats_read_names_alike(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending, write, read = FORMATS[kind]
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for number in range(2):
        write(Path(f"part-{number}.{ending}"), number)
    first, second = (f"part-{number}.{ending}" for number in range(2))
    address = f"file://{folder}/part-{{0,1}}.{ending}".replace(" ", "%20")
    for names in (
        f"part-{{0..1}}.{ending}",
        f"{first}::{second}",
        f"{folder}/part-?.{ending}",
        f"{first}::part-[1].{ending}",
        "part-*",  # by now with the indexes of some formats
        address,
        [first, Path(second)],
        [f"part-{{0,1}}.{ending}"],
        Path(f"part-?.{ending}"),
    ):
        assert read(names) == [0, 1], names
    os.rename(first, f"{{x,y}}::1.{ending}")
    os.rename(second, f"z[1].{ending}")
    assert read([f"{{x,y}}::1.{ending}", f"z[1].{ending}"]) == [0, 1]
    with pytest.raises(ManifestIOError if kind == "manifest" else ShardIOError, match="no file matches"):
        read(f"{folder}/q*")


@pytest.mark.parametrize("text", ["{" * 3000, "{a," * 3000 + "}" * 3000, f"{{{'0' * 5000}..1}}"])
def test_braces_that_cannot_be_expanded(text: str) -> None:
    with pytest.raises(ConfigError, match="braces"):
        expand(text)


@pytest.mark.parametrize("name", ["file:a.txt", "what?.txt"])
def test_a_file_that_exists_under_a_name_is_that_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("p.jpg 3\n")
    for given in (name, Path(name), [name], f"{tmp_path.as_uri()}/{name.replace('?', '%3F')}"):
        assert ps.open(given, shuffle="none", rank=0, world_size=1)[0] == ("p.jpg", 3, 0)


@pytest.mark.parametrize("name", ["a\0b.txt", "a\ud800b.txt", "a\0*.txt", "s3://bucket/a\0b", "s3://bucket/a\ud800b"])
def test_names_that_nothing_can_have(name: str) -> None:
    calls: list[Any] = [expand, open_source, read_object, local_path, ps.open, ps.Manifest.open, ps.ShardSet]
    for call in (*calls, lambda text: Storage().put(text, b"")):
        with pytest.raises(ConfigError, match="cannot be the name of a file or an object") as raised:
            call(name)
        str(raised.value).encode()  # it can be printed
    for family in (MANIFEST, STORED):
        with pytest.raises(family.failed, match="cannot read 'a"):
            File(name.partition("bucket/")[2] or name, family)
    with pytest.raises(DataFileIOError, match="cannot read 'a"):
        read_file(name.partition("bucket/")[2] or name)
