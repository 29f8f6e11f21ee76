"""Restart markers put into a JPEG: the coefficients, the tables and everything beside the image are as they were."""

from __future__ import annotations

import io
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jpeg_support import FAR, LIMIT, SUBSAMPLINGS, boxes, by_opencv, drawn, jpeg, noise
from PIL import Image

from penstock.images import native
from penstock.images.headers import orientation
from penstock.images.jpeg import segments
from penstock.images.region import decode_region

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

BESIDE = {0xFE, *range(0xE0, 0xF0)}  # COM, APP0 to APP15


def marked(data: bytes, interval: int | None = None) -> bytes:
    found = native.with_restart_markers(data, interval=interval, max_pixels=LIMIT)
    assert found is not None
    return found


def contents(data: bytes, *markers: int) -> list[tuple[int, bytes]]:
    """The segments of some kinds before the coded data, in their order."""
    found = []
    for marker, start, stop in segments(data):
        if marker in markers:
            found.append((marker, data[start:stop]))
        if marker == 0xDA:
            break
    return found


def interval_of(data: bytes) -> int | None:
    found = contents(data, 0xDD)
    return int.from_bytes(found[0][1], "big") if found else None


def check(data: bytes, interval: int | None) -> bytes:
    """One that was re-marked has the pixels, the frame and the coefficients of what it was made of."""
    made = marked(data, interval)
    assert np.array_equal(simplejpeg.decode_jpeg(made, "RGB"), simplejpeg.decode_jpeg(data, "RGB", strict=False))
    assert contents(made, 0xC0, 0xC1) == contents(data, 0xC0, 0xC1)
    assert contents(made, *BESIDE) == contents(data, *BESIDE)
    # Files without markers are functions of their coefficients.
    assert marked(made, 0) == marked(data, 0)
    assert marked(made, interval) == made
    return made


class TestTheSameImage:
    @pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
    @pytest.mark.parametrize("size", [(1, 1), (7, 5), (16, 16), (33, 47), (130, 201)])
    @pytest.mark.parametrize("interval", [None, 0, 1, 3, 8, 65535])
    def test_any_subsampling(self, subsampling: str, size: tuple[int, int], interval: int | None) -> None:
        made = check(jpeg(noise(*size), subsampling), interval)
        assert interval is None or interval_of(made) == (interval or None)

    @given(
        st.integers(0, 1 << 32),
        st.sampled_from(SUBSAMPLINGS),
        st.integers(1, 120),
        st.integers(1, 120),
        st.none() | st.integers(0, 12),
        st.integers(1, 100),
        st.integers(0, 9),
    )
    @settings(max_examples=examples(60, 600))
    def test_any_file(
        self, seed: int, subsampling: str, height: int, width: int, interval: int | None, quality: int, before: int
    ) -> None:
        """Of one that had markers, too, every so many MCUs."""
        check(marked(jpeg(noise(height, width, seed), subsampling, quality), before), interval)

    def test_gray_and_cmyk(self) -> None:
        gray = jpeg(np.ascontiguousarray(noise(90, 110)[..., :1]), "Gray")
        check(gray, None)
        out = io.BytesIO()
        Image.fromarray(noise(60, 90)).convert("CMYK").save(out, "JPEG")
        made = marked(out.getvalue())
        assert np.array_equal(Image.open(io.BytesIO(made)), Image.open(io.BytesIO(out.getvalue())))
        assert contents(made, *BESIDE) == contents(out.getvalue(), *BESIDE)

    @pytest.mark.parametrize("quality", [1, 30, 75, 100])
    def test_quantisation(self, quality: int) -> None:
        data = jpeg(noise(50, 70), quality=quality)
        before, after = (Image.open(io.BytesIO(one)) for one in (data, marked(data)))
        assert before.quantization == after.quantization  # type: ignore[attr-defined]

    def test_real_files(self, data_dir: Path) -> None:
        before = after = 0
        for path in sorted((data_dir / "imagenet-sample").glob("*.JPEG"))[:: examples(10, 1)]:
            data = path.read_bytes()
            before += len(data)
            after += len(check(data, None))
        assert before < after < 1.015 * before


class TestBeside:
    def test_exif_icc_comments_and_what_follows_the_image(self) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        exif[0x010E] = "a description"
        profile = np.random.default_rng(3).bytes(150_000)  # of three segments
        out = io.BytesIO()
        Image.fromarray(noise(60, 90)).save(out, "JPEG", exif=exif, icc_profile=profile, comment=b"a comment")
        unknown = b"\xff\xeb\x00\x06abcd"
        data = out.getvalue()[:2] + unknown + out.getvalue()[2:] + b"behind the end"
        made = check(data, None)
        assert orientation(made) == 6
        assert made.endswith(b"\xff\xd9behind the end")
        with Image.open(io.BytesIO(made)) as image:
            assert image.info["icc_profile"] == profile
            assert image.info["comment"] == b"a comment"
            assert image.getexif()[0x010E] == "a description"

    def test_without_any(self) -> None:
        """Without JFIF and Adobe segments: none are added, and colours are still told by the names of components."""
        data = jpeg(noise(40, 60))
        bare = data[:2] + data[next(stop for marker, _, stop in segments(data) if marker == 0xE0) :]
        assert contents(bare, *BESIDE) == contents(check(bare, None), *BESIDE) == []
        rgb = bytearray(bare)
        frame = next(start for marker, start, _ in segments(bare) if marker == 0xC0)
        scan = next(start for marker, start, _ in segments(bare) if marker == 0xDA)
        for k, name in enumerate(b"RGB"):
            rgb[frame + 6 + 3 * k] = rgb[scan + 1 + 2 * k] = name
        check(bytes(rgb), None)


class TestInterval:
    @pytest.mark.parametrize(
        ("mcus", "expected"),
        [
            *((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (7, 7), (8, 8), (9, 9), (12, 6), (13, 13), (14, 7), (16, 8)),
            *((20, 10), (25, 5), (27, 9), (31, 31), (32, 8), (38, 19), (44, 11), (51, 17), (63, 9), (64, 8), (68, 4)),
        ],
    )
    def test_it_divides_the_row(self, mcus: int, expected: int) -> None:
        data = jpeg(noise(40, 16 * mcus - 3), "420")
        assert interval_of(marked(data)) == expected
        gray = jpeg(np.ascontiguousarray(noise(40, 8 * mcus - 3)[..., :1]), "Gray")
        assert interval_of(marked(gray)) == expected

    @pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
    @pytest.mark.parametrize("width", [128, 201, 250, 376])
    def test_crops(self, subsampling: str, width: int) -> None:
        data = jpeg(noise(130, width), subsampling)
        made = marked(data)
        for box in boxes(130, width, 30):
            before, inner = decode_region(data, box, target=FAR)
            before = before.copy()
            after, other = decode_region(made, box, target=FAR)
            assert inner == other
            assert np.array_equal(before, after), box

    def test_a_damaged_part_is_not_read_for_a_crop_elsewhere(self) -> None:
        """So crops of what was re-marked begin at its markers: at those of their rows, and of their columns."""
        whole = noise(256, 512)
        made = marked(jpeg(whole, "444"))
        expected = simplejpeg.decode_jpeg(made, "RGB")
        assert interval_of(made) == 8
        restart = [at for at in range(len(made) - 1) if made[at] == 0xFF and 0xD0 <= made[at + 1] <= 0xD7]
        damaged = bytearray(made)
        for segment in (3, 8 * 20 + 7):  # in the row on top, and right of the box
            damaged[restart[segment] + 2 : restart[segment + 1]] = b"\x00" * (
                restart[segment + 1] - restart[segment] - 2
            )
        box = (80, 150, 200, 200)
        array, _ = decode_region(bytes(damaged), box, target=FAR)
        assert np.array_equal(array, expected[150:200, 80:200])

    @pytest.mark.parametrize("interval", [-1, 65536])
    def test_one_that_there_is_not(self, interval: int) -> None:
        with pytest.raises(IndexError, match="0 to 65,535"):
            native.with_restart_markers(jpeg(noise(8, 8)), interval=interval, max_pixels=LIMIT)


def left(data: bytes, max_pixels: int = LIMIT) -> bool:
    return native.with_restart_markers(data, max_pixels=max_pixels) is None


class TestWhatStaysAsItIs:
    def test_progressive(self) -> None:
        assert left(by_opencv(noise(40, 40), cv2.IMWRITE_JPEG_PROGRESSIVE, 1))

    def test_other_formats(self) -> None:
        assert left(b"")
        assert left(b"\xff\xd8")
        assert left(cv2.imencode(".png", noise(40, 40))[1].tobytes())

    def test_damaged(self) -> None:
        data = jpeg(noise(140, 160))
        scan = next(stop for marker, _, stop in segments(data) if marker == 0xDA)
        assert left(data[: scan + 90])
        assert left(data[: scan + 90] + data[-2:])
        assert left(data[:-2])
        assert left(data[: scan + 60] + b"\xff\xd9\x00" + data[scan + 60 :])

    def test_several_scans(self) -> None:
        """The second one is not announced: decoders do not come to it, but all coefficients would be of it."""
        data, other = (jpeg(np.full((40, 40, 1), level, np.uint8), "Gray") for level in (90, 160))
        start = next(start for marker, start, _ in segments(other) if marker == 0xDA) - 4
        both = data[:-2] + other[start:]
        assert left(both)
        assert not left(data[:-2] + other[-2:])
        assert abs(int(drawn(both).mean()) - 90) < 3

    def test_too_many_pixels(self) -> None:
        data = jpeg(noise(40, 50))
        assert left(data, 1999)
        assert not left(data, 2000)


def test_files_that_grow_by_much() -> None:
    """The first memory is too small for a plain picture with a marker at each MCU."""
    data = jpeg(np.full((2000, 2000, 3), 128, np.uint8), "444")
    made = check(data, 1)
    assert len(made) > len(data) + len(data) // 8 + 4096


def test_much_data_behind_the_image() -> None:
    data = jpeg(noise(40, 30))
    behind = bytes(range(256)) * 400
    for repeated in (1, 2, 9):
        assert marked(data + behind * repeated) == marked(data) + behind * repeated


def test_threads() -> None:
    files = [jpeg(noise(60 + 7 * k, 90, k), SUBSAMPLINGS[k % 5]) for k in range(40)]
    expected = [marked(data) for data in files]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(marked, files * 5)) == expected * 5


def test_no_memory_stays_behind() -> None:
    data = jpeg(noise(1000, 1000), "444")

    def convert(times: int) -> int:
        for _ in range(times):
            assert left(data[:-2])  # 6 MB of coefficients, and then an error
            assert not left(data)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = convert(20)  # a sanitizer keeps what was freed for a while
    assert convert(20) < before + 40_000


@pytest.mark.parametrize("segment", [b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0", b"\xff\xfe\0\4ab"])
def test_segments_behind_the_scan_leave_a_file_as_it_is(segment: bytes) -> None:
    """Found by fuzzing: written in front of the scan, Adobe's segment changed the colours."""
    data = jpeg(noise(24, 40))
    assert native.with_restart_markers(data[:-2] + segment + data[-2:], max_pixels=LIMIT) is None
    assert native.with_restart_markers(data[:2] + segment + data[2:], max_pixels=LIMIT) is not None
