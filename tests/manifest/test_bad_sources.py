"""Bad input: each an error of `penstock.errors` that names the file and says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, ManifestError, ManifestIOError, StorageError
from penstock.manifest import Manifest

WriteFile = Callable[..., Path]
RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("name", ["e.txt", "e.csv", "e.tsv", "e.jsonl"])
@pytest.mark.parametrize("content", ["", "\n", "\ufeff", "\r\n \n\n"])
def test_an_empty_file_has_no_rows(write: WriteFile, name: str, content: str) -> None:
    if name.endswith("sv"):
        content = content.replace(" ", "")  # a blank in CSV is a field
    manifest = Manifest.open(write(content, name))
    assert len(manifest) == 0
    assert list(manifest) == manifest.records([]) == []
    assert manifest.take([]).num_rows == len(manifest.column("path")) == 0
    if not name.endswith("sv"):
        assert len(manifest.raw([])) == 0
    assert manifest.gather([]).num_rows == 0
    assert manifest.parse(manifest.gather([]), []) == []
    with pytest.raises(IndexError, match="row 0 is out of range for a manifest of 0 rows"):
        manifest[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 1\n\0\0\n", r"is a binary file \(NUL at byte 4\)"),
        (b"\x1f\x8b\x08\0", r"is compressed \(gzip\); decompress it"),
        (b"\x28\xb5\x2f\xfd\0", r"is compressed \(zstd\)"),
        (b"PK\x03\x04", r"is compressed \(zip\)"),
        ("a 1\n".encode("utf-16"), r"is UTF-16; convert it"),
        (b"PAR1\0", r"pass format='parquet'"),
        (b"ARROW1\0\0", r"pass format='arrow'"),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
def test_what_is_not_text(write: WriteFile, content: bytes, message: str, suffix: str) -> None:
    path = write(content, suffix=suffix)
    with pytest.raises(ManifestError, match=f"{path.name} {message}|{path.name} .*{message}"):
        Manifest.open(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ManifestIOError, match=r"cannot read .*none\.txt: there is no such file"):
        Manifest.open(tmp_path / "none.txt")
    with pytest.raises(ManifestIOError, match=r"this is a folder; name a file in it.*penstock\.open opens a folder"):
        Manifest.open(tmp_path)
    with pytest.raises(ManifestIOError, match=r"no file matches .*\*\.csv"):
        Manifest.open(tmp_path / "*.csv")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ManifestIOError, match="not a regular file"):
        Manifest.open(tmp_path / "pipe.txt")
    with pytest.raises(OSError) as caught:
        Manifest.open(tmp_path / "none.txt")
    assert isinstance(caught.value, ValueError)
    assert caught.value.errno == 2


def test_addresses(write: WriteFile) -> None:
    path = write("a 1\n")
    assert Manifest.open(f"file://{path}").sources == (path,)
    assert Manifest.open(path, root="s3://bucket/images")[0].path == "s3://bucket/images/a"
    with pytest.raises(ManifestError, match="cache_dir 's3://bucket/cache' must be a folder of this machine"):
        Manifest.open(path, cache_dir="s3://bucket/cache")
    with pytest.raises(ConfigError, match="lost a slash"):
        Manifest.open(Path("s3://bucket/meta.txt"))
    with pytest.raises(StorageError, match="nowhere://"):
        Manifest.open("nowhere://bucket/meta.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "int32"}, "unknown type 'int32'; use int, float, str"),
        ({"label": "int[0]"}, "unknown type"),
        ({"columns": ["label"]}, "must have one named 'path'"),
        ({"columns": ["path"]}, "has no 'label'.*or pass label=None"),
        ({"columns": ["path", "label"], "label": None}, "label=None, but columns has one"),
        ({"columns": ["path", "label", "label"]}, "same name twice"),
        ({"columns": ["path:int", "label"]}, "'path' must be str"),
        ({"columns": ["label", "path"]}, "in text the first one must be 'path'"),
        ({"columns": {"path": "a", "label": "b"}}, "text has no column names"),
        ({"columns": "path,label"}, "not the string"),
        ({"columns": ["path", ":int"]}, "has no name"),
        ({"header": True}, "header=True is not supported by the format 'text'"),
        ({"header": "yes"}, "header must be True, False or 'auto'"),
        ({"blank": "no"}, "blank must be 'skip' or 'error'"),
        ({"comment": ""}, "comment must be the characters"),
        ({"format": "xml"}, "unknown format 'xml'; use one of auto, text, csv"),
    ],
)
def test_arguments_that_make_no_sense(write: WriteFile, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Manifest.open(write("a 1\n"), **options)


def test_no_source_at_all() -> None:
    with pytest.raises(ConfigError, match="no source given"):
        Manifest.open([])
    with pytest.raises(ConfigError, match="must be a path or URL, as str or Path"):
        Manifest.open([b"bytes.txt"])  # type: ignore[list-item]


# ---------------------------------------------------------------------- rights and space, in processes of their own


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


AS_NOBODY = """
import os, sys
import filelock, penstock.manifest.formats.text  # nobody may not read this Python's packages
from penstock.errors import *
from penstock.manifest import Manifest
folder, cache = sys.argv[1:]
os.environ["XDG_CACHE_HOME"] = cache
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
"""


def test_a_read_only_folder_falls_back_to_the_cache(open_folder: Path, run_python: RunPython) -> None:
    cache = open_folder / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    source = open_folder / "data"
    source.mkdir()
    (source / "meta.txt").write_text("a 1\nb 2\n")
    source.chmod(0o555)
    program = AS_NOBODY + "print(len(Manifest.open(folder + '/meta.txt')), Manifest.open(folder + '/meta.txt')[1].path)"
    try:
        assert run_python(program, source, cache).stdout == "2 b\n"
        assert [p.name for p in source.iterdir()] == ["meta.txt"]
        assert [p.suffix for p in (cache / "penstock" / "manifests").iterdir()] == [".pstk"]
    finally:
        source.chmod(0o755)


def test_no_permission(open_folder: Path, run_python: RunPython) -> None:
    (open_folder / "meta.txt").write_text("a 1\n")
    (open_folder / "meta.txt").chmod(0)
    program = (
        AS_NOBODY
        + """
for name, where in ("meta.txt", None), ("other.txt", "/proc/nowhere"):
    try:
        Manifest.open(os.path.join(folder, name), cache_dir=where)
    except ManifestIOError as error:
        print(error)
"""
    )
    (open_folder / "other.txt").write_text("a 1\n")
    first, second = run_python(program, open_folder, open_folder).stdout.splitlines()
    assert "meta.txt: no permission; check the rights" in first
    assert "cannot write the index of" in second
    assert "/proc/nowhere" in second


FULL = """
import os, sys, resource
from penstock.errors import *
from penstock.manifest import Manifest
if sys.argv[3] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    Manifest.open(sys.argv[1], cache_dir=sys.argv[2] or None)
except ManifestIOError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["meta.txt", "meta.parquet"])
def test_a_limit_on_file_sizes(write: WriteFile, run_python: RunPython, tmp_path: Path, kind: str) -> None:
    path = big_source(tmp_path / kind)
    cache = tmp_path / "cache"
    printed = run_python(FULL, path, cache, "limit").stdout
    assert str(path) in printed
    assert "larger than allowed (ulimit -f)" in printed
    assert list(cache.iterdir()) == []
    assert len(Manifest.open(path, cache_dir=cache)) == 20_000


@pytest.mark.parametrize("kind", ["meta.txt", "meta.parquet"])
def test_a_full_disk(run_python: RunPython, tmp_path: Path, kind: str) -> None:
    path = big_source(tmp_path / kind)
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        printed = run_python(FULL, path, small, "disk").stdout
        assert "the disk is full; free some space, or choose another folder with cache_dir=" in printed
        assert str(small) in printed
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def big_source(path: Path) -> Path:
    """A manifest of 20,000 rows, whose index or conversion takes 160 kB or more."""
    rows = [(f"dir/img_{k}.jpg", k) for k in range(20_000)]
    if path.suffix == ".txt":
        path.write_text("".join(f"{name} {label}\n" for name, label in rows))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"path": [r[0] for r in rows], "label": [r[1] for r in rows]}), path)
    return path


def test_an_interrupted_build_leaves_nothing(write: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while indexing."""
    path = write("a 1\n" * 1000)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rich.progress.Progress.advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Manifest.open(path, progress=True)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_too_many_open_files(write: WriteFile, run_python: RunPython) -> None:
    program = """
import resource, sys
from penstock.errors import ManifestIOError
from penstock.manifest import Manifest
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
try:
    Manifest.open([sys.argv[1]] * 100)
except ManifestIOError as error:
    print(error)
"""
    assert "too many open files; raise the limit (ulimit -n)" in run_python(program, write("a 1\n")).stdout
