"""The commands of ``penstock manifest`` on real files: what they print, write, and exit with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from busy_support import HANG
from cli_support import said
from typer.testing import CliRunner

from penstock.errors import ConfigError, ImageError, ManifestIOError, PenstockError
from penstock.images.sizes import Sizes
from penstock.manifest import Manifest
from penstock.tools.cli.app import app

COMMANDS = ["check", "info", "head", "build", "sizes", "warm"]


def run(*arguments: object, code: int = 0) -> str:
    """Run ``penstock manifest``; the standard output, with runs of blanks as one."""
    return said("manifest", *arguments, code=code)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["manifest", *map(str, arguments)])


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """``meta.txt`` and its three images: 30 x 20, 20 x 30, 25 x 25."""
    for number, (width, height) in enumerate([(30, 20), (20, 30), (25, 25)]):
        assert cv2.imwrite(str(tmp_path / f"{number}.jpg"), np.zeros((height, width, 3), np.uint8))
    path = tmp_path / "meta.txt"
    path.write_text("0.jpg 5\n1.jpg -2\n2.jpg 5\n")
    return path


class TestHelp:
    def test_every_command_is_listed(self) -> None:
        text = run("--help")
        assert all(f" {name} " in text for name in COMMANDS)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_help_has_an_example_and_all_options(self, name: str) -> None:
        text = run(name, "--help")
        assert f"Example: penstock manifest {name} " in text
        for option in ("--root", "--format", "--label", "--columns", "--header", "--blank", "--comment", "--cache-dir"):
            assert option in text


class TestCheck:
    def test_a_good_file(self, images: Path) -> None:
        text = run("check", images, "--files", "--root", images.parent)
        assert "3 rows checked" in text
        assert "no problems" in text
        assert "missing files" in text

    def test_all_kinds_of_problems(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.txt"
        path.write_bytes(b"a.jpg 1\nb.jpg\nc\xff.jpg 3\nd.jpg x\na.jpg 4\ne.jpg 99999999999999999999\n")
        (tmp_path / "a.jpg").touch()
        text = run("check", path, "--files", "--root", tmp_path, code=1)
        for kind, count, where in [
            ("fields", 1, "bad.txt, line 2"),
            ("utf-8", 1, "bad.txt, line 3"),
            ("label", 2, "bad.txt, line 4"),
            ("duplicate", 1, "bad.txt, line 5"),
            ("missing", 1, "c"),
        ]:
            assert re.search(rf"^ {kind} {count} .*{re.escape(where)}", text, re.MULTILINE), (kind, text)
        assert "6 problems in 6 rows" in text

    def test_without_files_and_duplicates(self, tmp_path: Path) -> None:
        path = tmp_path / "twice.txt"
        path.write_text("a.jpg 1\na.jpg 2\n")
        assert "duplicate 1" in run("check", path, code=1)
        assert "no problems" in run("check", path, "--no-duplicates")

    def test_examples_are_limited(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.txt"
        path.write_text("x\n" * 30)
        text = run("check", path, "--examples", 2, "--no-duplicates", code=1)
        assert text.count("bad.txt, line") == 2
        assert "and 28 more" in text
        assert "line" not in run("check", path, "--examples", 0, "--no-duplicates", code=1)

    def test_options_reach_the_reader(self, tmp_path: Path) -> None:
        path = tmp_path / "table.csv"
        path.write_text("# exported\nfile,class,score\na.jpg,cat,0.5\nb.jpg,dog,0.25\n")
        options = ("--columns", "path=file, label=class", "--label", "str", "--comment", "#", "--header", "yes")
        assert "2 rows checked" in run("check", path, *options)
        assert "line 3: label 'cat' is not an integer" in run("check", path, *options[:2], *options[4:], code=1)

    def test_several_files_are_one_manifest(self, images: Path, tmp_path: Path) -> None:
        (tmp_path / "more.txt").write_text("0.jpg 1\n")
        text = run("check", images, tmp_path / "more.txt", code=1)
        assert "more.txt, line 1" in text
        assert "1 problem in 4 rows" in text

    def test_a_missing_file_is_a_problem(self, tmp_path: Path) -> None:
        assert "no such file" in run("check", tmp_path / "missing.txt", code=1)


class TestInfo:
    def test_rows_index_fingerprint_and_labels(self, images: Path) -> None:
        text = run("info", images)
        manifest = Manifest.open(images)
        assert " rows 3 " in text
        assert f" size {images.stat().st_size} B in 1 file" in text
        assert f" index {(images.parent / 'meta.txt.pstk').stat().st_size} B: {images}.pstk" in text
        assert f" fingerprint {manifest.fingerprint}" in text
        assert " columns path (string), label (int64)" in text
        assert " labels -2 to 5; 2 classes of 1 to 2 rows each" in text

    def test_labels_only_where_they_are_numbers(self, images: Path) -> None:
        assert "classes" not in run("info", images, "--label", "str")
        assert "pass --labels" in run("info", images, "--no-labels")

    def test_parquet_shows_its_conversion(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"file": ["a.jpg", "b.jpg"], "label": [1, 2]}), tmp_path / "t.parquet")
        text = run("info", tmp_path / "t.parquet", "--columns", "path=file,label=label")
        assert re.search(r" index [\d.]+ kB: .*t\.parquet.*\.arrow", text)
        assert "1 to 2; 2 classes of 1 row each" in text

    def test_arrow_shows_its_index(self, tmp_path: Path) -> None:
        table = pa.table({"path": ["a.jpg"], "label": [1]})
        with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
            writer.write_table(table)
        assert f"{tmp_path}/t.arrow.pstk" in run("info", tmp_path / "t.arrow")
        assert f"{tmp_path}/cache/" in run("info", tmp_path / "t.arrow", "--cache-dir", tmp_path / "cache")

    def test_errors_are_left_to_main(self, tmp_path: Path) -> None:
        with pytest.raises(ManifestIOError, match=r"missing\.txt"):
            run("info", tmp_path / "missing.txt")
        (tmp_path / "x.txt").write_text("a 1\n")
        with pytest.raises(ConfigError, match="--columns"):
            run("info", tmp_path / "x.txt", "--columns", "path,label=class")
        assert invoke("info", tmp_path / "x.txt", "--header", "perhaps").exit_code == 2


class TestHead:
    def test_rows_and_columns(self, tmp_path: Path) -> None:
        path = tmp_path / "table.csv"
        path.write_text("path,label,note\na [b].jpg,3,first\n" + "".join(f"{i}.jpg,{i},more\n" for i in range(20)))
        text = run("head", path, "-n", 2, "--root", "/images", "--columns", "path,label,note")
        assert " row path label note " in text
        assert " 0 /images/a [b].jpg 3 first" in text
        assert " 1 /images/0.jpg 0 more" in text
        assert "/images/1.jpg" not in text
        assert "19 more rows" in text

    def test_short_files_and_no_labels(self, images: Path) -> None:
        text = run("head", images, "--label", "none")
        assert " 2 2.jpg 5 " in text
        assert "label" not in text
        assert "more" not in text

    def test_strange_bytes_are_escaped(self, tmp_path: Path) -> None:
        (tmp_path / "odd.txt").write_bytes(b"caf\xc3\xa9 \xff\x1b[31m.jpg 1\n")
        assert "café \\xff\\x1b[31m.jpg" in run("head", tmp_path / "odd.txt")


class TestBuild:
    def test_builds_once_and_by_force(self, images: Path) -> None:
        index = images.parent / "meta.txt.pstk"
        assert re.search(r" built 25 B in [\d.]+ ms: [\d.]+ k?B/s", run("build", images))
        os.utime(index, (1, 1))
        inode = index.stat().st_ino
        assert "nothing: all are up to date" in run("build", images)
        assert index.stat().st_ino == inode
        assert " built 25 B" in run("build", images, "--force")
        assert index.stat().st_mtime > 1

    def test_patterns(self, images: Path, tmp_path: Path) -> None:
        (tmp_path / "other.txt").write_text("9.jpg 9\n")
        assert " rows 4 " in run("build", tmp_path / "*.txt")
        assert (tmp_path / "other.txt.pstk").exists()


class TestSizes:
    def test_written_beside_the_manifest(self, images: Path) -> None:
        text = run("sizes", images, "--root", images.parent, "--workers", 2)
        assert f" written {images}.sizes.arrow" in text
        assert " width 20 to 30, median 25" in text
        assert " wider than high 33.3%" in text
        sizes = Sizes.open(f"{images}.sizes.arrow", Manifest.open(images))
        assert sizes.widths.tolist() == [30, 20, 25]
        assert sizes.group_ids().tolist() == [0, 1, 1]

    def test_broken_images_give_exit_code_1(self, images: Path, tmp_path: Path) -> None:
        (tmp_path / "1.jpg").write_bytes(b"junk")
        (tmp_path / "2.jpg").unlink()
        text = run("sizes", images, "--root", tmp_path, "--output", tmp_path / "out.arrow", "--examples", 1, code=1)
        assert "2 of 3 images have no size" in text
        assert "row 1: image" in text
        assert "row 2: image" not in text
        assert Sizes.open(tmp_path / "out.arrow", Manifest.open(images)).widths.tolist() == [30, 0, 0]

    def test_no_image_at_all_writes_nothing_and_leads_to_root(
        self, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with pytest.raises(
            ImageError, match=r"none of 3 images can be read, so nothing is written; the first one: .*--root"
        ):
            run("sizes", images)
        assert not Path(f"{images}.sizes.arrow").exists()

    def test_a_place_that_cannot_be_written(self, images: Path, tmp_path: Path) -> None:
        with pytest.raises(ManifestIOError, match="--output"):
            run("sizes", images, "--output", tmp_path / "nowhere" / "out.arrow")

    def test_options_become_part_of_the_identity(self, images: Path) -> None:
        run("sizes", images, "--root", images.parent, "--label", "str")
        with pytest.raises(PenstockError, match="measure again"):
            Sizes.open(f"{images}.sizes.arrow", Manifest.open(images))
        assert len(Sizes.open(f"{images}.sizes.arrow", Manifest.open(images, label="str"))) == 3


class TestWarm:
    def test_manifest_alone(self, images: Path) -> None:
        text = run("warm", images)
        total = images.stat().st_size + Path(f"{images}.pstk").stat().st_size
        assert f" manifest {total} B in " in text
        assert " files " not in text

    def test_files_too(self, images: Path, tmp_path: Path) -> None:
        total = sum((tmp_path / f"{i}.jpg").stat().st_size for i in range(3))
        assert re.search(rf" files 3, {total / 1000:.3g} kB in ", run("warm", images, "--files", "--root", tmp_path))
        (tmp_path / "1.jpg").unlink()
        text = run("warm", images, "--files", "--root", tmp_path, "--workers", 1, code=1)
        assert "row 1: " in text
        assert "1 of 3 files cannot be read" in text

    def test_pages_are_in_the_cache_afterwards(self, tmp_path: Path) -> None:
        """Asks the system which pages of the file are in memory, before and after."""
        path = tmp_path / "large.txt"
        path.write_text("".join(f"{i:07d}.jpg {i}\n" for i in range(200_000)))
        run("build", path)
        os.sync()
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident_share(path) > 0.5:
            pytest.skip("this file system keeps its pages in memory (tmpfs)")
        run("warm", path)
        assert resident_share(path) == 1.0


def resident_share(path: Path) -> float:
    """The share of a file's pages that is in the page cache, as mincore(2) says."""
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        view = np.frombuffer(mapped, np.uint8)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
        assert libc.mincore(address, length, vector) == 0, os.strerror(ctypes.get_errno())
        del view
    return sum(page & 1 for page in vector) / pages


def test_the_installed_command(images: Path) -> None:
    """The whole way: entry point, exit code, errors on standard error, nothing but results on standard output."""
    command = [sys.executable, "-c", "from penstock.tools.cli import main; main()", "manifest"]
    result = subprocess.run([*command, "head", images], capture_output=True, text=True, timeout=HANG)
    assert (result.returncode, result.stderr) == (0, "")
    assert "1.jpg" in result.stdout
    result = subprocess.run([*command, "info", f"{images}.no"], capture_output=True, text=True, timeout=HANG)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: cannot read")


def test_real_images(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "imagenet-sample"
    names = sorted(path.name for path in folder.glob("*.JPEG"))
    (tmp_path / "meta.txt").write_text("".join(f"{name} {i}\n" for i, name in enumerate(names)))
    assert "no problems" in run("check", tmp_path / "meta.txt", "--files", "--root", folder)
    assert " images 500 in " in run("sizes", tmp_path / "meta.txt", "--root", folder)
    assert " files 500, 54.5 MB " in run("warm", tmp_path / "meta.txt", "--files", "--root", folder)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["check", "--files"], "3 rows checked"),
        (["info"], "rows 3"),
        (["head"], "2.jpg"),
        (["build"], "rows 3"),
        (["sizes", "--output", "sizes.arrow"], "images 3"),
        (["warm", "--files"], "files 3"),
    ],
)
def test_a_folder_of_images(images: Path, command: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = images.parent / "classes"
    for path in images.parent.glob("*.jpg"):
        (folder / path.stem).mkdir(parents=True)
        path.rename(folder / path.stem / path.name)
    monkeypatch.chdir(images.parent)
    name, *options = command
    assert expected in run(name, folder, *options)


def test_info_says_which_label_does_not_parse_and_shows_the_rest(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("a.jpg 1\nb.jpg two\n")
    text = run("info", tmp_path / "m.txt")
    assert " rows 2" in text
    assert "line 2" in text
