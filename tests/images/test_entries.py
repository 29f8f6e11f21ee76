"""The index of entries: made once, used for the very bytes that it was made of, refused for other data."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import cv2
import pytest
from busy_support import HANG
from hypothesis import given, settings
from hypothesis import strategies as st
from jpeg_support import by_opencv, jpeg, noise

from penstock.errors import ConfigError, ImageError, ManifestError, ManifestIOError, StateError
from penstock.images import entries as entries_module
from penstock.images import native
from penstock.images.entries import ImageIndex, UnreadImage, index_path, write_index
from penstock.manifest import Manifest

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

OTHER = "damaged or belong to another image file"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Six rows: four JPEGs, a progressive one, and a PNG."""
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(noise(60 + 9 * number, 80, number)))
    (tmp_path / "4.jpg").write_bytes(by_opencv(noise(40, 40), cv2.IMWRITE_JPEG_PROGRESSIVE, 1))
    assert cv2.imwrite(str(tmp_path / "5.png"), noise(40, 40))
    names = [*(f"{number}.jpg" for number in range(5)), "5.png"]
    (tmp_path / "train.txt").write_text("".join(f"{name} {row}\n" for row, name in enumerate(names)))
    return Manifest.open(tmp_path / "train.txt", root=tmp_path)


def made(manifest: Manifest, **options: int) -> ImageIndex:
    return ImageIndex.open(write_index(manifest, **options).path, manifest)


def data_of(manifest: Manifest, row: int) -> bytes:
    return Path(manifest[row].path).read_bytes()


class TestMaking:
    @pytest.mark.parametrize("workers", [1, 3, None])
    @pytest.mark.parametrize("step", [1, 8])
    def test_each_row_has_the_entries_of_its_image(self, manifest: Manifest, workers: int | None, step: int) -> None:
        report = write_index(manifest, step=step, workers=workers)
        assert report.path == index_path(manifest) == Path(f"{manifest.sources[0]}.entries")
        assert report[1:] == (6, 4, sum(len(data_of(manifest, row)) for row in range(6)), 0, [])
        index = ImageIndex.open(report.path, manifest)
        assert (len(index), index.step) == (6, step)
        for row in range(6):
            data = data_of(manifest, row)
            assert index.entries(row, data) == native.entries_of(data, step=step)
        assert index.entries(0, data_of(manifest, 0)) is not None
        assert index.entries(4, data_of(manifest, 4)) is None

    def test_what_cannot_be_read_is_counted_and_named(
        self, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "1.jpg").unlink()
        (tmp_path / "3.jpg").unlink()
        monkeypatch.setattr(entries_module, "MAX_ERRORS", 1)
        report = write_index(manifest)
        assert (report.images, report.indexed, report.unread) == (6, 2, 2)
        assert [(type(one), one.row, Path(one.path).name) for one in report.errors] == [(UnreadImage, 1, "1.jpg")]
        assert "No such file" in report.errors[0].message
        assert ImageIndex.open(report.path, manifest).entries(2, data_of(manifest, 2)) is not None

    def test_many_blocks_in_order(self, manifest: Manifest, tmp_path: Path) -> None:
        rows = 4 * entries_module._BLOCK + 3
        (tmp_path / "many.txt").write_text("".join(f"{row % 4}.jpg {row}\n" for row in range(rows)))
        many = Manifest.open(tmp_path / "many.txt", root=tmp_path)
        steps: list[tuple[int, int]] = []
        report = write_index(many, workers=2, progress=lambda *step: steps.append(step))
        assert report.indexed == rows
        assert steps == [(min((n + 1) * 64, rows), rows) for n in range(5)]
        index = ImageIndex.open(report.path, many)
        files = [data_of(many, row) for row in range(4)]
        assert [index.entries(row, files[row % 4]) for row in range(rows)] == [
            native.entries_of(files[row % 4]) for row in range(rows)
        ]

    def test_of_a_view_its_rows(self, manifest: Manifest) -> None:
        index = made(manifest[1:4:2])
        found = [index.entries(row, data_of(manifest, row)) is not None for row in range(6)]
        assert found == [False, True, False, True, False, False]

    def test_without_any_entries_nothing_is_written(self, manifest: Manifest, tmp_path: Path) -> None:
        with pytest.raises(ImageError, match="none of 2 images has entries, so nothing is written"):
            write_index(manifest[4:])
        (tmp_path / "4.jpg").unlink()
        with pytest.raises(
            ImageError, match=r"none of 2 images .*nothing is written: 1 cannot be read, the first: .*4\.jpg"
        ):
            write_index(manifest[4:])
        assert not list(tmp_path.glob("*.entries")) + list(tmp_path.glob(".*.tmp"))

    def test_arguments(self, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
        for step in (0, 65536):
            with pytest.raises(ConfigError, match="step"):
                write_index(manifest, step=step)
        with pytest.raises(ConfigError, match="workers"):
            write_index(manifest, workers=0)
        monkeypatch.setattr(native, "_jpeg", None)
        with pytest.raises(ConfigError, match="penstock doctor"):
            write_index(manifest)

    def test_several_files_need_a_path(self, manifest: Manifest, tmp_path: Path) -> None:
        both = Manifest.open([manifest.sources[0]] * 2, root=tmp_path)
        with pytest.raises(ConfigError, match="of 2 files"):
            write_index(both)
        report = write_index(both, path=tmp_path / "both.entries")
        assert ImageIndex.open(report.path, both).entries(9, data_of(manifest, 3)) is not None

    def test_places_that_cannot_be_written(self, manifest: Manifest, tmp_path: Path) -> None:
        with pytest.raises(ManifestIOError, match="nowhere"):
            write_index(manifest, path=tmp_path / "nowhere" / "index")
        program = (
            "import resource, sys\n"
            "from penstock.images.entries import write_index\n"
            "from penstock.manifest import Manifest\n"
            "manifest = Manifest.open(sys.argv[1], root=sys.argv[2])\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))\n"
            "write_index(manifest, step=1)\n"
        )
        command = [sys.executable, "-c", program, manifest.sources[0], tmp_path]
        result = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
        assert "ManifestIOError" in result.stderr
        assert "--out" in result.stderr
        assert not list(tmp_path.glob("*.entries")) + list(tmp_path.glob(".*.tmp"))


def test_what_is_no_index_is_not_written_over(manifest: Manifest) -> None:
    path = Path(manifest.sources[0])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"{path} exists and is not an index of entries"):
        write_index(manifest, path=path)
    assert path.read_bytes() == before
    assert write_index(manifest).path == write_index(manifest).path  # an older one is


class TestOtherData:
    def test_entries_of_another_file_are_not_used_and_noticed_once(self, manifest: Manifest) -> None:
        index = made(manifest)
        with pytest.warns(UserWarning, match=f"row 0, .*{OTHER}"):
            assert index.entries(0, data_of(manifest, 1)) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert index.entries(1, data_of(manifest, 1) + b"\0") is None
            assert index.entries(1, data_of(manifest, 1)) is not None

    @settings(max_examples=30)
    @given(draw=st.data())
    def test_any_change_of_a_file_or_of_the_index_is_noticed(
        self, draw: st.DataObject, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """One bit anywhere: an error when it is opened, or the entries of some row are not used."""
        folder = tmp_path_factory.mktemp("index")
        data = jpeg(noise(40, 60))
        (folder / "0.jpg").write_bytes(data)
        (folder / "train.txt").write_text("0.jpg 0\n")
        manifest = Manifest.open(folder / "train.txt", root=folder)
        path = write_index(manifest, step=2).path
        content = bytearray(path.read_bytes())
        right = native.entries_of(data, step=2)
        bit = draw.draw(st.integers(0, 8 * len(content) - 1), label="bit")
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = ImageIndex.open(path, manifest).entries(0, data)
            except (ManifestError, StateError):
                assert bit < 8 * entries_module.TABLE
                return
        assert found is None
        changed = bytearray(data)
        bit = draw.draw(st.integers(0, 8 * len(data) - 1), label="bit of the file")
        changed[bit // 8] ^= 1 << bit % 8
        index = ImageIndex.open(write_index(manifest, step=2).path, manifest)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            assert index.entries(0, bytes(changed)) is None
        assert [OTHER in str(one.message) for one in given] == [True] * (bit >= 16)  # else it is no JPEG any more
        assert index.entries(0, data) == right

    def test_another_manifest_is_refused(self, manifest: Manifest, tmp_path: Path) -> None:
        path = write_index(manifest).path
        (tmp_path / "train.txt").write_text("0.jpg 0\n1.jpg 1\n")
        with pytest.raises(StateError, match="build it again with: penstock images index FILE"):
            ImageIndex.open(path, Manifest.open(tmp_path / "train.txt", root=tmp_path))

    def test_views_use_the_index_of_the_whole(self, manifest: Manifest) -> None:
        path = write_index(manifest).path
        view = manifest[2:4]
        assert view.whole_fingerprint == manifest.whole_fingerprint == manifest.fingerprint != view.fingerprint
        assert ImageIndex.open(path, view).entries(view[1].row, data_of(view, 1)) is not None

    def test_missing_foreign_and_damaged_files(self, manifest: Manifest, tmp_path: Path) -> None:
        with pytest.raises(ManifestIOError, match="build one with: penstock images index FILE"):
            ImageIndex.open(index_path(manifest), manifest)
        path = write_index(manifest).path
        content = path.read_bytes()
        for broken in (b"", b"garbage" * 100, content[:-1], content + b"\0", content[:40]):
            path.write_bytes(broken)
            with pytest.raises(ManifestError, match=r"train\.txt\.entries.* build it again"):
                ImageIndex.open(path, manifest)

    def test_truncated_while_it_is_open(self, manifest: Manifest) -> None:
        index = made(manifest)
        with open(index.path, "r+b") as file:
            file.truncate(70)
        with pytest.warns(UserWarning, match="truncated while it was open.* decoding takes longer"):
            assert index.entries(0, data_of(manifest, 0)) is None
        assert index.entries(1, data_of(manifest, 1)) is None  # the warning comes once
        with pytest.raises(ManifestError, match="truncated while it was open"):
            index.is_of(0, data_of(manifest, 0))

    def test_replaced_while_it_is_open_it_goes_on_with_the_old_one(self, manifest: Manifest) -> None:
        index, data = made(manifest), data_of(manifest, 0)
        assert made(manifest, step=2).entries(0, data) == native.entries_of(data, step=2)
        assert index.entries(0, data) == native.entries_of(data)

    @pytest.mark.parametrize("row", [-1, 6])
    def test_rows_that_there_are_not(self, manifest: Manifest, row: int) -> None:
        with pytest.raises(IndexError, match="6 rows"):
            made(manifest).entries(row, data_of(manifest, 0))


def test_a_pickle_is_a_path(manifest: Manifest) -> None:
    index = made(manifest)
    data = pickle.dumps(index)
    assert len(data) < 500
    assert pickle.loads(data).entries(3, data_of(manifest, 3)) == native.entries_of(data_of(manifest, 3))
    index.path.write_bytes(b"")
    with pytest.raises(ManifestError, match="build it again"):
        pickle.loads(data)


def test_real_files(data_dir: Path, tmp_path: Path) -> None:
    folder = data_dir / "imagenet-sample"
    names = sorted(path.name for path in folder.glob("*.JPEG"))
    (tmp_path / "train.txt").write_text("".join(f"{name} {row}\n" for row, name in enumerate(names)))
    manifest = Manifest.open(tmp_path / "train.txt", root=folder)
    report = write_index(manifest)
    assert (report.images, report.indexed, report.unread) == (500, 500, 0)
    assert report.path.stat().st_size < 0.05 * report.nbytes
    index = ImageIndex.open(report.path, manifest)
    data = data_of(manifest, 77)
    assert index.entries(77, data) == native.entries_of(data)
