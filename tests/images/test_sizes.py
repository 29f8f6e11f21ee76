"""Sizes beside a manifest: measured once, mapped again, refused for other data."""

from __future__ import annotations

import bisect
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pytest
from busy_support import HANG
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ManifestError, ManifestIOError, StateError
from penstock.images import sizes as sizes_module
from penstock.images.sizes import SizeError, Sizes, measure, sizes_path, write_sizes
from penstock.manifest import Manifest

SHAPES = [(30, 20), (20, 30), (25, 25), (100, 10)]  # (width, height)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Four images of known shapes, in two formats, and their manifest."""
    lines = []
    for number, (width, height) in enumerate(SHAPES):
        name = f"image {number}.{'png' if number % 2 else 'jpg'}"
        assert cv2.imwrite(str(tmp_path / name), np.zeros((height, width, 3), np.uint8))
        lines.append(f"{name} {number}\n")
    (tmp_path / "meta.txt").write_text("".join(lines))
    return Manifest.open(tmp_path / "meta.txt", root=tmp_path)


def stored(manifest: Manifest, shapes: list[tuple[int, int]]) -> Sizes:
    array = np.array(shapes, np.int32).reshape(-1, 2)
    return Sizes.open(write_sizes(manifest, array[:, 0], array[:, 1]), manifest)


def manifest_of(folder: Path, rows: int) -> Manifest:
    path = folder / "rows.txt"
    path.write_text("".join(f"{row}.jpg {row}\n" for row in range(rows)))
    return Manifest.open(path)


class TestMeasure:
    @pytest.mark.parametrize("workers", [1, 3, None])
    def test_measured_and_stored(self, manifest: Manifest, workers: int | None) -> None:
        widths, heights, errors = measure(manifest, workers=workers)
        assert widths.dtype == heights.dtype == np.int32
        assert list(zip(widths.tolist(), heights.tolist(), strict=True)) == SHAPES
        assert errors == []
        path = write_sizes(manifest, widths, heights)
        assert path == sizes_path(manifest)
        assert path.name == "meta.txt.sizes.arrow"
        assert path.parent == Path(manifest.sources[0]).parent
        sizes = Sizes.open(path, manifest)
        assert np.array_equal(sizes.widths, widths)
        assert np.array_equal(sizes.heights, heights)

    def test_broken_images_are_counted_and_named(self, manifest: Manifest, tmp_path: Path) -> None:
        (tmp_path / "image 1.png").unlink()
        (tmp_path / "image 2.jpg").write_bytes(b"junk")
        widths, heights, errors = measure(manifest)
        assert widths.tolist() == [30, 0, 0, 100]
        assert heights.tolist() == [20, 0, 0, 10]
        assert [(error.row, Path(error.path).name) for error in errors] == [(1, "image 1.png"), (2, "image 2.jpg")]
        assert "No such file" in errors[0].message
        assert isinstance(errors[0], SizeError)

    def test_many_rows_progress_and_bounded_errors(
        self, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """More rows than one block; every third image is missing, and only the first few errors are kept."""
        monkeypatch.setattr(sizes_module, "MAX_ERRORS", 7)
        names = ["image 0.jpg 0\n", "image 1.png 1\n", "missing.jpg 2\n"]
        (tmp_path / "many.txt").write_text("".join(names) * 700)
        many = Manifest.open(tmp_path / "many.txt", root=tmp_path)
        steps: list[tuple[int, int]] = []
        widths, _, errors = measure(many, workers=2, progress=lambda *step: steps.append(step))
        assert widths.tolist() == [30, 20, 0] * 700
        assert [error.row for error in errors] == list(range(2, 23, 3))
        assert len(steps) > 1
        assert steps == sorted(steps)
        assert steps[-1] == (2100, 2100)

    def test_bad_arguments(self, manifest: Manifest) -> None:
        with pytest.raises(ConfigError, match="workers"):
            measure(manifest, workers=0)
        with pytest.raises(ConfigError, match="3 widths"):
            write_sizes(manifest, np.ones(3, np.int32), np.ones(4, np.int32))

    def test_empty_manifest(self, tmp_path: Path) -> None:
        empty = manifest_of(tmp_path, 0)
        widths, heights, errors = measure(empty)
        sizes = Sizes.open(write_sizes(empty, widths, heights), empty)
        assert (len(widths), len(sizes), errors) == (0, 0, [])
        assert len(sizes.group_ids()) == 0

    def test_real_images(self, data_dir: Path, tmp_path: Path) -> None:
        folder = data_dir / "imagenet-sample"
        paths = sorted(folder.glob("*.JPEG"))
        (tmp_path / "meta.txt").write_text("".join(f"{path.name} {i}\n" for i, path in enumerate(paths)))
        manifest = Manifest.open(tmp_path / "meta.txt", root=folder)
        widths, heights, errors = measure(manifest)
        assert errors == []
        for row in range(0, 500, 25):
            assert cv2.imread(str(paths[row]), cv2.IMREAD_IGNORE_ORIENTATION).shape[:2] == (heights[row], widths[row])
        groups = stored(manifest, list(zip(widths, heights, strict=True))).group_ids()
        assert set(groups.tolist()) == {0, 1}


class TestFile:
    def test_another_manifest_is_refused(self, manifest: Manifest, tmp_path: Path) -> None:
        path = stored(manifest, SHAPES).path
        (tmp_path / "meta.txt").write_text("a.jpg 0\nb.jpg 1\nc.jpg 2\nd.jpg 3\n")
        with pytest.raises(StateError, match="measure again"):
            Sizes.open(path, Manifest.open(tmp_path / "meta.txt"))

    def test_missing_garbage_and_foreign_files(self, manifest: Manifest, tmp_path: Path) -> None:
        with pytest.raises(ManifestIOError, match="penstock manifest sizes"):
            Sizes.open(sizes_path(manifest), manifest)
        for content in (b"", b"garbage" * 100, stored(manifest, SHAPES).path.read_bytes()[:-40]):
            (tmp_path / "broken.arrow").write_bytes(content)
            with pytest.raises(ManifestError, match=r"broken\.arrow"):
                Sizes.open(tmp_path / "broken.arrow", manifest)
        table = pa.table({"width": [1, 2, 3, 4]})
        with pa.ipc.new_file(tmp_path / "foreign.arrow", table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(ManifestError, match="not a file of image sizes"):
            Sizes.open(tmp_path / "foreign.arrow", manifest)

    def test_a_full_disk_is_an_error_and_leaves_nothing(self, manifest: Manifest, tmp_path: Path) -> None:
        """In a process of its own that may not write files of more than 1,000 bytes."""
        program = (
            "import resource, sys\n"
            "import numpy as np\n"
            "from penstock.images.sizes import write_sizes\n"
            "from penstock.manifest import Manifest\n"
            "manifest = Manifest.open(sys.argv[1], root=sys.argv[2])\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
            "ones = np.ones(len(manifest), np.int32)\n"
            "write_sizes(manifest, ones, ones)\n"
        )
        (tmp_path / "meta.txt").write_text("x.jpg 1\n" * 500)
        command = [sys.executable, "-c", program, tmp_path / "meta.txt", tmp_path]
        result = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
        assert "ManifestIOError" in result.stderr
        assert "--output" in result.stderr
        assert not list(tmp_path.glob("*.arrow*")) + list(tmp_path.glob(".*.tmp"))

    def test_a_failed_write_leaves_nothing(self, manifest: Manifest, tmp_path: Path) -> None:
        ones = np.ones(4, np.int32)
        with pytest.raises(ManifestIOError, match="nowhere"):
            write_sizes(manifest, ones, ones, path=tmp_path / "nowhere" / "sizes.arrow")
        (tmp_path / "taken").mkdir()
        with pytest.raises(ManifestIOError, match="taken"):
            write_sizes(manifest, ones, ones, path=tmp_path / "taken")
        assert list(tmp_path.glob(".*.tmp")) == []

    def test_rewriting_keeps_open_sizes_valid(self, manifest: Manifest) -> None:
        old = stored(manifest, SHAPES)
        new = stored(manifest, [(1, 1)] * 4)
        assert old.widths.tolist() == [30, 20, 25, 100]
        assert new.widths.tolist() == [1, 1, 1, 1]
        assert new.path.stat().st_mode & 0o777 == 0o644

    def test_mapped_read_only_and_picklable(self, manifest: Manifest) -> None:
        sizes = stored(manifest, SHAPES)
        assert not sizes.widths.flags.writeable
        data = pickle.dumps(sizes)
        assert len(data) < 1000
        assert pickle.loads(data).heights.tolist() == [20, 30, 25, 10]

    def test_several_sources_need_a_path(self, tmp_path: Path) -> None:
        for name in ("a.txt", "b.txt"):
            (tmp_path / name).write_text("x.jpg 1\n")
        both = Manifest.open([tmp_path / "a.txt", tmp_path / "b.txt"])
        with pytest.raises(ConfigError, match="2 files"):
            sizes_path(both)
        ones = np.ones(2, np.int32)
        path = write_sizes(both, ones, ones, path=tmp_path / "both.arrow")
        assert Sizes.open(path, both).widths.tolist() == [1, 1]


class TestGroups:
    def test_default_groups(self, manifest: Manifest) -> None:
        groups = stored(manifest, SHAPES).group_ids()
        assert groups.dtype == np.uint8
        assert groups.tolist() == [0, 1, 1, 0]

    @settings(max_examples=30)
    @given(
        st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=50),
        st.lists(st.sampled_from([0.25, 0.5, 1 / 3, 1.0, 4 / 3, 2.0, 7.5]), max_size=6),
    )
    def test_as_maskrcnn_benchmark_does(
        self, tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]], boundaries: list[float]
    ) -> None:
        manifest = manifest_of(tmp_path_factory.mktemp("groups"), len(shapes))
        expected = [bisect.bisect_right(sorted(boundaries), float(h) / float(w)) for w, h in shapes]
        assert stored(manifest, shapes).group_ids(boundaries).tolist() == expected

    def test_broken_images_count_as_square(self, manifest: Manifest) -> None:
        assert stored(manifest, [(0, 0), *SHAPES[1:]]).group_ids((0.5, 1.5)).tolist() == [1, 2, 1, 0]

    def test_many_groups_and_blocks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sizes_module, "_GROUP_CHUNK", 7)
        sizes = stored(manifest_of(tmp_path, 300), [(100, height) for height in range(1, 301)])
        groups = sizes.group_ids([height / 100 for height in range(1, 301)])
        assert groups.dtype == np.int16
        assert groups.tolist() == list(range(1, 301))

    def test_bad_boundaries(self, manifest: Manifest) -> None:
        sizes = stored(manifest, SHAPES)
        for boundaries in ([float("nan")], [1.0] * 40_000, [[1.0]]):
            with pytest.raises(ConfigError, match="boundaries"):
                sizes.group_ids(boundaries)  # type: ignore[arg-type]


def test_sizes_of_an_unwritable_folder(manifest: Manifest, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ManifestIOError, match="--output"):
            stored(manifest, SHAPES)
    finally:
        tmp_path.chmod(0o700)
