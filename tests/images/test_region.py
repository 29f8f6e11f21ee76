"""decode_region: with the extension and without, the same box of the same pixels."""

from __future__ import annotations

import contextlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from jpeg_support import by_hand, jpeg, with_frame

from penstock.errors import ConfigError, ImageError
from penstock.images import native
from penstock.images.decode import decode
from penstock.images.region import decode_region

FAR = (4096, 4096)
BOX = (10.25, 7.0, 90.75, 59.5)


@pytest.fixture(params=["native", "without"])
def _extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(native, "is_available", lambda: False)
    elif not native.is_available():
        pytest.skip("penstock.images._jpeg was not built")


pytestmark = pytest.mark.usefixtures("_extension")


def picture(height: int = 64, width: int = 100) -> np.ndarray:
    small = np.random.default_rng(0).integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def encoded(form: str, image: np.ndarray) -> bytes:
    if form == ".cmyk":
        return simplejpeg.encode_jpeg(np.dstack([image, image[..., :1]]), colorspace="CMYK")
    ok, data = cv2.imencode(form, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    assert ok
    return data.tobytes()


@pytest.mark.parametrize("mode", ["rgb", "gray"])
@pytest.mark.parametrize("form", [".jpg", ".cmyk", ".png", ".webp", ".bmp", ".tiff"])
def test_the_box_of_a_whole_decode(form: str, mode: str) -> None:
    data = encoded(form, picture())
    array, inner = decode_region(data, BOX, target=FAR, mode=mode)
    assert np.array_equal(array, decode(data, mode=mode)[7:60, 10:91])
    assert inner == (0.25, 0.0, 80.75, 52.5)


@pytest.mark.parametrize("data_type", [bytes, bytearray, memoryview])
def test_any_buffer(data_type: type) -> None:
    data = encoded(".jpg", picture())
    array, _ = decode_region(data_type(data), BOX, target=FAR)
    assert np.array_equal(array, decode(data)[7:60, 10:91])


@pytest.mark.parametrize("target", [(26, 40), (13, 20), (5, 10), (1, 1)])
def test_never_smaller_than_the_target_and_the_box_in_the_same_place(target: tuple[int, int]) -> None:
    """A smooth ramp: the mean of the box is known, wherever and however small it was decoded."""
    y, x = np.mgrid[:64, :100]
    ramp = np.stack([x * 2, y * 3, x + y], axis=-1).astype(np.uint8)
    array, inner = decode_region(encoded(".jpg", ramp), BOX, target=target)
    width, height = inner[2] - inner[0], inner[3] - inner[1]
    assert width >= target[1]
    assert height >= target[0]
    assert width / height == pytest.approx(80.5 / 52.5)
    assert 0 <= inner[0] < 1
    assert 0 <= inner[1] < 1
    assert inner[2] <= array.shape[1] < inner[2] + 1
    assert inner[3] <= array.shape[0] < inner[3] + 1
    scale = 80.5 / width
    middle = array[array.shape[0] // 2, array.shape[1] // 2].astype(float)
    at_x = (array.shape[1] // 2 + 0.5 - inner[0]) * scale + BOX[0] - 0.5
    at_y = (array.shape[0] // 2 + 0.5 - inner[1]) * scale + BOX[1] - 0.5
    assert middle == pytest.approx([at_x * 2, at_y * 3, at_x + at_y], abs=3)


@pytest.mark.parametrize(
    "box", [(0, 0, 101, 64), (0, 0, 100, 64.5), (-1, 0, 5, 5), (5, 5, 5, 9), (5, 9, 9, 5), (float("nan"), 0, 5, 5)]
)
@pytest.mark.parametrize("form", [".jpg", ".png"])
def test_a_box_that_cannot_be(box: tuple[float, float, float, float], form: str) -> None:
    with pytest.raises(ConfigError, match="box"):
        decode_region(encoded(form, picture()), box, target=FAR)


def test_errors_name_the_sample() -> None:
    data = encoded(".jpg", picture())
    for broken, words in [
        (data[: len(data) // 2], "truncated"),
        (b"", "empty"),
        (b"\xff\xd8 no", "image"),
        (b"?", "?"),
    ]:
        with pytest.raises(ImageError, match=r"'cat\.jpg'") as caught:
            decode_region(broken, (0, 0, 4, 4), target=FAR, path="cat.jpg")
        assert words in str(caught.value)
    with pytest.raises(ImageError, match=r"'cat\.jpg'.*100 x 64 pixels, more than the limit of 6399"):
        decode_region(data, (0, 0, 4, 4), target=FAR, path="cat.jpg", max_pixels=6399)


def test_lossless_files_are_right_or_an_error_that_says_so() -> None:
    gray = by_hand(0xC3, (64, 100), {0: "0"}, {0: "0"}, (1, 0), "0" * 6400)
    damaged = with_frame(jpeg(picture()[..., :1], "Gray"), 0xC3)
    for mode in ("gray", "rgb"):
        for box in ((0, 0, 100, 64), BOX, (0, 50, 100, 60)):
            with contextlib.suppress(ImageError):  # as the versions of libjpeg have it
                assert (decode_region(gray, box, target=(8, 8), mode=mode)[0] == 128).all()
            with pytest.raises(ImageError, match="lossless JPEG"):
                decode_region(damaged, box, target=(8, 8), mode=mode)


def test_stray_bytes_are_forgiven() -> None:
    data = encoded(".jpg", picture())
    stray = data[:-2] + b"\x12\x34" + data[-2:]
    array, _ = decode_region(stray, BOX, target=FAR)
    assert np.array_equal(array, decode(data)[7:60, 10:91])


def test_real_files_with_and_without_the_extension(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is shrunk, an installation without a compiler trains on the same pixels."""
    monkeypatch.undo()
    for k, path in enumerate(sorted((data_dir / "imagenet-sample").glob("*.JPEG"))[:60]):
        data = path.read_bytes()
        height, width = decode(data).shape[:2]
        rng = np.random.default_rng(k)
        left, top = rng.uniform(0, width - 2), rng.uniform(0, height - 2)
        box = (left, top, rng.uniform(left + 1, width), rng.uniform(top + 1, height))
        one = decode_region(data, box, target=FAR, path=path)
        with monkeypatch.context() as patch:
            patch.setattr(native, "is_available", lambda: False)
            other = decode_region(data, box, target=FAR, path=path)
        assert np.array_equal(one[0], other[0])
        assert one[1] == other[1]
