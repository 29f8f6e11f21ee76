"""Entries: a box is decoded from the nearest ones on, and its pixels are those of a full decode, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from busy_support import HANG
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jpeg_support import SUBSAMPLINGS, boxes, by_opencv, drawn, jpeg, noise, outward

from penstock.images import native
from penstock.images.jpeg import segments

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

OPTIMIZED = (cv2.IMWRITE_JPEG_OPTIMIZE, 1)


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture with few details, so that optimised tables lack codes."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def check(data: bytes, whole: np.ndarray, entries: bytes | None, seed: int, count: int = 20) -> None:
    for box in boxes(*whole.shape[:2], count, seed):
        assert np.array_equal(drawn(data, box, entries=entries), whole[outward(box)]), box


class TestBoxes:
    @pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
    @pytest.mark.parametrize("size", [(1, 1), (7, 5), (16, 16), (33, 47), (130, 201)])
    @pytest.mark.parametrize("step", [1, 3, 8, 99])
    def test_any_subsampling(self, subsampling: str, size: tuple[int, int], step: int) -> None:
        data = jpeg(noise(*size), subsampling)
        entries = native.entries_of(data, step=step)
        assert (entries is None) == (subsampling in ("440", "411"))
        check(data, simplejpeg.decode_jpeg(data, "RGB"), entries, step)

    @given(
        st.integers(0, 1 << 32),
        st.sampled_from(SUBSAMPLINGS),
        st.integers(1, 120),
        st.integers(1, 120),
        st.integers(1, 12),
        st.integers(1, 100),
    )
    @settings(max_examples=examples(60, 600))
    def test_any_file(self, seed: int, subsampling: str, height: int, width: int, step: int, quality: int) -> None:
        data = jpeg(noise(height, width, seed), subsampling, quality)
        check(data, simplejpeg.decode_jpeg(data, "RGB"), native.entries_of(data, step=step), seed, 4)

    @pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
    @pytest.mark.parametrize("width", [33, 34, 35, 36, 37, 49, 51, 52])
    def test_the_last_columns(self, subsampling: str, width: int) -> None:
        """libjpeg upsamples colours of one or two columns in another way."""
        data = jpeg(noise(40, width), subsampling, 30)
        whole = simplejpeg.decode_jpeg(data, "RGB")
        entries = native.entries_of(data, step=1)
        for left in range(width - 9, width):
            box = (left, 0, width, 40)
            assert np.array_equal(drawn(data, box, entries=entries), whole[:, left:]), left

    @pytest.mark.parametrize("seed", range(8))
    def test_tables_that_lack_codes(self, seed: int) -> None:
        data = by_opencv(smooth(150, 170, seed), *OPTIMIZED, cv2.IMWRITE_JPEG_QUALITY, 40 + 8 * seed)
        check(data, simplejpeg.decode_jpeg(data, "RGB"), native.entries_of(data, step=2), seed)

    @pytest.mark.parametrize("image", ["noise", "smooth"])
    def test_gray(self, image: str) -> None:
        pixels = noise(90, 110) if image == "noise" else smooth(90, 110)
        data = jpeg(np.ascontiguousarray(pixels[..., :1]), "Gray")
        whole = np.repeat(simplejpeg.decode_jpeg(data, "GRAY"), 3, axis=2)
        check(data, whole, native.entries_of(data, step=2), 1)

    @pytest.mark.parametrize("scale", [2, 4, 8])
    @pytest.mark.parametrize("subsampling", ["444", "422", "420"])
    def test_shrunken(self, subsampling: str, scale: int) -> None:
        data = jpeg(noise(170, 203), subsampling)
        entries = native.entries_of(data, step=2)
        for box in boxes(170, 203, 60):
            plain = drawn(data, box, scale=scale)
            assert np.array_equal(drawn(data, box, scale=scale, entries=entries), plain)

    def test_real_files(self, data_dir: Path) -> None:
        """20,000 boxes in a full run."""
        checked = 0
        for k, path in enumerate(sorted((data_dir / "imagenet-sample").glob("*.JPEG"))):
            data = path.read_bytes()
            whole = simplejpeg.decode_jpeg(data, "RGB", strict=False)
            entries = native.entries_of(data)
            assert entries is not None
            check(data, whole, entries, k, examples(1, 40))
            checked += 1
        assert checked == 500


class TestRestartMarkers:
    @pytest.mark.parametrize("interval", [1, 2, 4, 8, 16, 24, 3, 5, 1000])
    @pytest.mark.parametrize("shape", [(100, 128), (150, 256)])
    def test_boxes_begin_at_markers(self, interval: int, shape: tuple[int, int]) -> None:
        """Of every interval, whether rows of MCUs are whole numbers of it or not: 8 and 16 are such rows."""
        data = by_opencv(noise(*shape), cv2.IMWRITE_JPEG_RST_INTERVAL, interval)
        assert any(marker == 0xDD for marker, _, _ in segments(data))
        assert native.entries_of(data) is None
        check(data, simplejpeg.decode_jpeg(data, "RGB"), None, interval)


class TestWhatHasNone:
    def test_progressive(self) -> None:
        assert native.entries_of(by_opencv(noise(40, 40), cv2.IMWRITE_JPEG_PROGRESSIVE, 1)) is None

    def test_truncated_and_damaged(self) -> None:
        data = jpeg(noise(40, 60))
        scan = next(stop for marker, _, stop in segments(data) if marker == 0xDA)
        assert native.entries_of(data[: scan + 20]) is None
        assert native.entries_of(data[: scan + 20] + data[-2:]) is None
        assert native.entries_of(b"") is None
        assert native.entries_of(b"\xff\xd8 and no more") is None


class TestOtherEntries:
    def test_of_a_smaller_image_they_are_not_used(self) -> None:
        data, other = jpeg(noise(90, 120)), jpeg(noise(60, 120))
        check(data, simplejpeg.decode_jpeg(data, "RGB"), native.entries_of(other), 3)

    def test_of_a_size_of_its_own_they_are_not_used(self) -> None:
        data = jpeg(noise(90, 120))
        entries = native.entries_of(data)
        assert entries is not None
        for other in (b"", entries[:20], entries[:-1], entries + b"x"):
            check(data, simplejpeg.decode_jpeg(data, "RGB"), other, 3, 5)


CHANGED = """
import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

from penstock.images import native

data = Path(sys.argv[1]).read_bytes()
size = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
memory = mmap.mmap(-1, size + mmap.PAGESIZE)
behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0  # cannot be read
file = memoryview(memory)[size - len(data) : size]
file[:] = data
coded = file[data.index(b"\\xff\\xda") + 14 : -2]
one, other = bytes(coded), bytes(coded[:99]) + b"\\xff\\0" * len(coded)
parent, writer = os.getpid(), os.fork()
while writer == 0:
    coded[:] = other[: len(coded)]
    coded[:] = one
    if os.getppid() != parent:
        os._exit(0)
try:
    ends, found = time.monotonic() + 0.5, 0
    while time.monotonic() < ends or not found:
        found += native.entries_of(file, step=1) is not None
finally:
    os.kill(writer, 9)
    os.waitpid(writer, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect, and a fork beside numpy")
def test_nothing_behind_a_file_is_read_while_another_process_changes_it(tmp_path: Path) -> None:
    (tmp_path / "file.jpg").write_bytes(jpeg(noise(120, 160), "444", 95))
    command = [sys.executable, "-c", CHANGED, str(tmp_path / "file.jpg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


def test_an_end_in_front_of_the_scan_is_not_the_end_of_the_image() -> None:
    """Found by fuzzing: the end of a thumbnail hid that the image has none."""
    data = jpeg(noise(24, 40))
    cut = data[:2] + b"\xff\xe1\0\4\xff\xd9" + data[2:-2]
    assert native.entries_of(cut + data[-2:]) is not None
    assert native.entries_of(cut) is None
    with pytest.raises(ValueError, match=r"(?i)premature end"):
        drawn(cut)
