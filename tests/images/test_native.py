"""The C extension: the same pixels as a whole decode, and every file that is not quite right."""

from __future__ import annotations

import base64
import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from jpeg_support import LIMIT, SUBSAMPLINGS, boxes, by_hand, by_opencv, drawn, jpeg, noise, outward, with_frame

from penstock.images import native
from penstock.images.region import decode_region

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

# 40 x 24 pixels, arithmetic-coded, 4:2:0: no encoder that is at hand in Python writes these.
ARITHMETIC = base64.b64decode(
    "/9j/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBkeFxlZ2P/2wBD"
    "ARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/yQARCAAYACgD"
    "ASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AJyFnwv1V+ifbG3Ol2kMLOsvsfOUzXRhPNjLKyLrkaZ+iJUUoVzQ"
    "ILGo4yUKXW8jC5rUg7xokSlHgAzwXxmnNG2mjG268mfA/9k="
)

# 36 x 64 pixels, luminance at 2 x 4 and colours at 1 x 1: libjpeg shrinks these by different factors.
TWO_BY_FOUR = base64.b64decode(
    "/9j/2wBDABsSFBcUERsXFhceHBsgKEIrKCUlKFE6PTBCYFVlZF9VXVtqeJmBanGQc1tdhbWGkJ6jq62rZ4C8ybqmx5moq6T/2wBDARwe"
    "HigjKE4rK06kbl1upKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKSkpKT/wAARCABAACQDASQAAhEB"
    "AxEB/8QAGQAAAwEBAQAAAAAAAAAAAAAAAwQFAAIB/8QALhAAAgIBAwEGBQQDAAAAAAAAAQIAAxEEITFBBRITIjLBQlFhcYFSYpGiseHw"
    "/8QAFwEBAQEBAAAAAAAAAAAAAAAAAgQBA//EACQRAAICAQMCBwAAAAAAAAAAAAECAAMREiFREzEiI0FSYXGh/9oADAMBAAIRAxEAPwCX"
    "pqONpW01HG0HRUFxmPJhKy7kIi8mCrRa0Nlhwo3JMUuufVuAAVqX0r7mcX3tqnHw1L6V9z9YahCcd0Ymtr7nCj9hqrd9ztKaeHShdyAF"
    "5J6SJ2tq7NbaibrUu4X3P15jF1zatwACtS+lfcxZK/EtZuhO0bIFVLH4sYAzOaKy2PlD3V7on5MFqNSNMPDrwbj/AFhTTnIBYzbrFU9K"
    "vv6xCujyjaaUERQvBM0M92moPcssAbnGCf8AE0lhAd2OWO5J3mjxZwIRVZDaekkgmVdNRxtONNROe0+0BotO1dGDeRgH9Oev3nmq1fgD"
    "w68G0/wv+5KvQsyqSST5iT1/7eM6eksctkk7knrOcBrWYb77QCsk5YYHzKH8tNTnfiG7Q1q0Oy1kG1uP2j5/eT6lZ2zvk7knkwVFTO3e"
    "YksTkk9ZU01HG0401GMZj6Faqy7HuqvLGCRVRDZaQqryflE7rn1bgAFal9K+5iL58K7/AFJ6QTsghK6PKNppSSkBRnAmk2zX6h3JqbuJ"
    "0BAJ/M07ro8o2mnPptxLhS3un//Z"
)


class TestRegion:
    @pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
    @pytest.mark.parametrize("size", [(1, 1), (7, 5), (16, 16), (33, 47), (130, 201)])
    def test_a_box_has_the_pixels_of_a_full_decode(self, subsampling: str, size: tuple[int, int]) -> None:
        data = jpeg(noise(*size), subsampling)
        whole = simplejpeg.decode_jpeg(data, "RGB")
        for box in boxes(*size, 60):
            assert np.array_equal(drawn(data, box), whole[outward(box)]), box

    @given(st.integers(0, 1 << 32), st.sampled_from(SUBSAMPLINGS), st.integers(1, 90), st.integers(1, 90))
    def test_any_size_any_box(self, seed: int, subsampling: str, height: int, width: int) -> None:
        data = jpeg(noise(height, width, seed), subsampling, 60)
        whole = simplejpeg.decode_jpeg(data, "RGB")
        for box in boxes(height, width, 4, seed):
            assert np.array_equal(drawn(data, box), whole[outward(box)]), box

    def test_real_files(self, data_dir: Path) -> None:
        checked = 0
        for k, path in enumerate(sorted((data_dir / "imagenet-sample").glob("*.JPEG"))):
            data = path.read_bytes()
            whole = simplejpeg.decode_jpeg(data, "RGB")
            for box in boxes(*whole.shape[:2], 1, seed=k)[2:]:
                assert np.array_equal(drawn(data, box), whole[outward(box)]), (path, box)
                checked += 1
        assert checked == 500

    @pytest.mark.parametrize("space", ["gray", "rgb"])
    def test_gray(self, space: str) -> None:
        image = noise(50, 70)
        data = jpeg(image[..., :1] if space == "gray" else image, "Gray" if space == "gray" else "420")
        whole = simplejpeg.decode_jpeg(data, "GRAY")
        box = (10.5, 3, 60, 44.2)
        assert np.array_equal(drawn(data, box, channels=1), whole[outward(box)])
        if space == "gray":
            assert np.array_equal(drawn(data, box), np.repeat(whole[outward(box)], 3, axis=2))


class TestScale:
    @pytest.mark.parametrize(
        ("target", "scale"),
        [((101, 150), 1), ((100, 150), 2), ((50, 75), 4), ((25, 38), 4), ((25, 37), 8), ((1, 1), 8)],
    )
    def test_only_where_the_box_is_twice_the_target(self, target: tuple[int, int], scale: int) -> None:
        data, box = jpeg(noise(230, 330)), (13, 7, 313, 207)
        array, (left, _, right, _) = decode_region(data, box, target=target)
        assert 300 / (right - left) == scale
        assert array.shape[0] >= target[0]
        assert array.shape[1] >= target[1]
        assert np.array_equal(array, drawn(data, box, scale=scale))

    @pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
    @pytest.mark.parametrize("scale", [2, 4, 8])
    def test_a_scaled_box_has_the_pixels_of_a_scaled_decode(self, subsampling: str, scale: int) -> None:
        height, width = 170, 203
        data = jpeg(noise(height, width), subsampling)
        shape = -(-height // scale), -(-width // scale)
        whole = simplejpeg.decode_jpeg(data, "RGB", min_height=shape[0], min_width=shape[1])
        assert whole.shape[:2] == shape
        for box in boxes(height, width, 200):
            part = outward(tuple(edge / scale for edge in box))
            assert np.array_equal(drawn(data, box, scale=scale), whole[part]), box

    def test_rare_sampling_factors_are_not_cropped_by_libjpeg(self) -> None:
        whole = drawn(TWO_BY_FOUR, scale=2)
        for box in boxes(64, 36, 300):
            part = outward(tuple(edge / 2 for edge in box))
            assert np.array_equal(drawn(TWO_BY_FOUR, box, scale=2), whole[part]), box

    def test_it_is_the_shrunken_picture(self) -> None:
        image = cv2.GaussianBlur(noise(160, 160), (0, 0), 8)
        array = drawn(jpeg(image, "444", 95), (16, 32, 144, 96), scale=4)
        expected = cv2.resize(image[32:96, 16:144], None, fx=0.25, fy=0.25, interpolation=cv2.INTER_AREA)
        assert np.abs(array.astype(int) - expected).max() <= 6


class TestOtherFiles:
    @pytest.mark.parametrize("kind", ["progressive", "restart", "arithmetic"])
    def test_decoded_whole_and_cut(self, kind: str) -> None:
        image = noise(90, 120)
        data = {
            "progressive": by_opencv(image, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
            "restart": by_opencv(image, cv2.IMWRITE_JPEG_RST_INTERVAL, 2),
            "arithmetic": ARITHMETIC,
        }[kind]
        marker = {"progressive": b"\xff\xc2", "restart": b"\xff\xdd", "arithmetic": b"\xff\xc9"}[kind]
        assert marker in data
        whole = simplejpeg.decode_jpeg(data, "RGB")
        for box in boxes(*whole.shape[:2], 40):
            assert np.array_equal(drawn(data, box), whole[outward(box)])
        array, inner = decode_region(data, (0, 0, 40, 24), target=(6, 6))
        assert inner == (0, 0, 10, 6)
        assert np.array_equal(array, drawn(data, (0, 0, 40, 24), scale=4))

    def test_cmyk_is_not_for_us(self) -> None:
        data = simplejpeg.encode_jpeg(np.zeros((20, 20, 4), np.uint8), colorspace="CMYK")
        with pytest.raises(NotImplementedError, match="colours"):
            drawn(data, (0, 0, 5, 5))

    @pytest.mark.parametrize("box", [(0, 900, 16, 1000), (0, 0, 16, 1024)])
    @pytest.mark.parametrize("kind", ["lossless", "with the tables of a baseline file", "of 12 bits"])
    def test_lossless_files_and_ones_of_more_bits_are_not_for_us(self, kind: str, box: tuple[int, ...]) -> None:
        """libjpeg-turbo 3 reads their headers. A data unit of a lossless file is one pixel: taken for a block, rows are
        written beside memory, or none at all."""
        data = jpeg(np.full((1024, 16, 1), 100, np.uint8), "Gray")
        if kind == "lossless":
            data = by_hand(0xC3, (1024, 16), {0: "0"}, {0: "0"}, (1, 0), "0" * 16 * 1024)
        elif kind == "of 12 bits":
            data = with_frame(data, 0xC1).replace(b"\xff\xc1\0\x0b\x08", b"\xff\xc1\0\x0b\x0c")
        else:
            data = with_frame(data, 0xC3)
        out = np.zeros((32, 16, 3), np.uint8)
        refused = pytest.raises((NotImplementedError, ValueError), match=r"lossless|0xc3|precision")
        for channels in (1, 3):
            with refused:
                drawn(data, box, channels=channels)
            with refused:
                drawn(data, channels=channels, partial=True)
        with refused:
            native.draw_box(data, box, out, max_pixels=LIMIT)
        assert native.entries_of(data) is None
        assert native.with_restart_markers(data, max_pixels=LIMIT) is None

    def test_extended_files_are_ordinary_ones(self) -> None:
        data = jpeg(noise(90, 120))
        extended = with_frame(data, 0xC1)
        assert native.entries_of(extended) == native.entries_of(data) is not None
        assert np.array_equal(drawn(extended), simplejpeg.decode_jpeg(data, "RGB"))

    def test_stray_bytes_before_a_marker_are_forgiven(self) -> None:
        data = jpeg(noise(40, 40))
        stray = data[:-2] + b"\x12\x34" + data[-2:]
        assert np.array_equal(drawn(stray), simplejpeg.decode_jpeg(data, "RGB"))

    @pytest.mark.parametrize("cut", [2, 3, 10, 100, 300, 600])
    def test_a_truncated_file_raises_wherever_the_box_is(self, cut: int) -> None:
        data = jpeg(noise(64, 64))
        for box in [(0, 0, 8, 8), (0, 0, 64, 64), (50, 60, 64, 64)]:
            with pytest.raises(ValueError, match=r"end|JPEG|Huffman"):
                drawn(data[:-cut], box)

    def test_partial_gives_what_there_is(self) -> None:
        data = jpeg(noise(64, 64), "444")
        whole = drawn(data)
        part = drawn(data[: len(data) * 2 // 3], partial=True)
        assert part.shape == whole.shape
        assert np.array_equal(part[:16], whole[:16])
        assert not np.array_equal(part, whole)

    def test_narrow_boxes_of_rare_sampling_factors(self) -> None:
        """Luminance at 4 x 1, blue at 1 x 1 and red at 2 x 1, for which the coded pixels were not made."""
        data = jpeg(noise(40, 70), "411").replace(b"\x03\x11\x01", b"\x03\x21\x01", 1)
        whole = drawn(data, partial=True)
        for left, width in itertools.product(range(67), (1, 2, 3)):
            box = (left, 3, left + width, 30)
            assert np.array_equal(drawn(data, box, partial=True), whole[outward(box)]), box

    def test_damage_in_or_above_the_box_raises(self) -> None:
        data = bytearray(jpeg(noise(64, 64)))
        middle = data.index(b"\xff\xda") + 200
        data[middle : middle + 6] = b"\xff\xd3\xff\xd1\xff\xd5"
        with pytest.raises(ValueError, match="orrupt"):
            drawn(data, (0, 40, 64, 64))

    @pytest.mark.parametrize("data", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"GIF89a" * 9, bytes(5000)])
    def test_no_jpeg(self, data: bytes) -> None:
        for partial in (False, True):
            with pytest.raises(ValueError):
                drawn(data, partial=partial)


class TestLimits:
    def test_pixels(self) -> None:
        data = jpeg(noise(40, 50))
        assert drawn(data, max_pixels=2000).shape == (40, 50, 3)
        with pytest.raises(OverflowError, match="50 x 40 pixels, more than the limit of 1999"):
            drawn(data, max_pixels=1999)

    def test_a_header_that_lies(self) -> None:
        """4 GB of pixels by the header, nothing behind it: refused at once, by the limit or the missing data."""
        data = bytearray(jpeg(noise(40, 50)))
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = b"\xff\xdc\xff\xdc"
        with pytest.raises(OverflowError):
            drawn(data, (0, 0, 10, 10))

    def test_scans(self) -> None:
        data = by_opencv(noise(40, 40), cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
        first = data.index(b"\xff\xda")
        after = data.index(b"\xff\xc4", first)
        assert drawn(data[:after] + data[first:after] * 3 + data[after:]).any()
        bomb = data[:after] + data[first:after] * 300 + data[after:]
        with pytest.raises(OverflowError, match="scans"):
            drawn(bomb)

    @pytest.mark.parametrize(
        "box",
        [
            *[(0, 0, 50.5, 40), (0, 0, 50, 40.1), (-1, 0, 5, 5), (5, 0, 5, 5), (0, 9, 5, 5)],
            *[(0, 0, 1e300, 1), (0, 0, 5, 1e9), (float("nan"), 0, 5, 5), (0, 0, 5, float("nan"))],
            (0, float("inf"), 5, float("inf")),
        ],
    )
    def test_boxes_outside(self, box: tuple[float, float, float, float]) -> None:
        with pytest.raises(IndexError):
            native.draw_box(jpeg(noise(40, 50)), box, np.empty((4, 5, 3), np.uint8), max_pixels=LIMIT)


class TestMemory:
    def test_arguments_are_let_go(self) -> None:
        data, broken = bytearray(jpeg(noise(50, 50))), bytearray(b"\xff\xd8 no JPEG")
        references = sys.getrefcount(data)
        for _ in range(10):
            drawn(data)
            with pytest.raises(ValueError):
                drawn(broken)
            with pytest.raises(IndexError):
                drawn(data, (0, 0, 99, 99))
        assert sys.getrefcount(data) == references
        data.append(0)  # a buffer that is still exported could not grow
        broken.append(0)


class TestThreads:
    def test_many_at_once(self) -> None:
        files = [jpeg(noise(60 + k, 90 - k, k), SUBSAMPLINGS[k % 5]) for k in range(24)]
        broken = [data[: len(data) // 2] for data in files]
        expected = [simplejpeg.decode_jpeg(data, "RGB")[10:50, 5:61] for data in files]

        def work(k: int) -> bool:
            with pytest.raises(ValueError):
                drawn(broken[k % 24], (0, 0, 30, 30))
            return np.array_equal(drawn(files[k % 24], (5, 10, 61, 50)), expected[k % 24])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(480)))

    def test_the_gil_is_released(self) -> None:
        """While one thread decodes for a tenth of a second, this one goes on: its longest pause is much shorter."""
        data = jpeg(noise(3000, 3000))
        shares = []
        for _ in range(10):
            took: list[float] = []

            def decode(took: list[float] = took) -> None:
                start = time.perf_counter()
                drawn(data)
                took.append(time.perf_counter() - start)

            thread = threading.Thread(target=decode)
            thread.start()
            longest, last = 0.0, time.perf_counter()
            while thread.is_alive():
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            shares.append(longest / took[0])
            if min(shares) < 0.5:
                break
        assert min(shares) < 0.5
