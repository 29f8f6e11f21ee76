"""Back ends: one contract, whichever library decodes."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from interpreter_support import FULL
from PIL import Image

from penstock.errors import ConfigError, ImageError
from penstock.images import backends, headers
from penstock.images.backends import BACKENDS, TOLERANCE, choose, installed, oriented
from penstock.images.decode import decode, image_size
from penstock.images.headers import size_of_file
from penstock.images.region import decode_region

FORMATS = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "bmp": "BMP", "tiff": "TIFF", "gif": "GIF"}


def picture(height: int = 40, width: int = 64) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 99 // (height + width)], axis=-1).astype(np.uint8)


def encoded(kind: str, image: Image.Image | np.ndarray | None = None, **options: object) -> bytes:
    file = io.BytesIO()
    image = picture() if image is None else image
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, FORMATS[kind], **options)
    return file.getvalue()


def distance(a: np.ndarray, b: np.ndarray) -> int:
    assert a.shape == b.shape
    assert a.dtype == np.uint8
    return int(np.abs(a.astype(int) - b).max())


def check(image: np.ndarray, expected: np.ndarray, tolerance: int) -> None:
    assert image.flags.c_contiguous
    assert image.flags.writeable
    assert distance(image, expected) <= tolerance


def reading(*kinds: str) -> pytest.MarkDecorator:
    """Each back end that is installed, with each of these formats that it reads."""
    pairs = [(name, kind) for name in installed() for kind in kinds if BACKENDS[name].reads(kind)]
    return pytest.mark.parametrize(("name", "kind"), pairs)


def of_jpeg() -> list[str]:
    """Those that are installed and read JPEG."""
    return [name for name in installed() if BACKENDS[name].reads("jpeg")]


every = pytest.mark.parametrize("name", installed())


class TestContract:
    @reading(*FORMATS)
    def test_rgb(self, name: str, kind: str) -> None:
        lossless = {"webp": {"lossless": True}}.get(kind, {})
        data = encoded(kind, **lossless)
        expected = picture()
        if kind in ("jpeg", "gif"):
            expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        check(decode(data, backend=name), expected, TOLERANCE if kind == "jpeg" else 0)

    @reading(*FORMATS)
    @pytest.mark.parametrize("source", ["L", "RGB"])
    def test_gray(self, name: str, kind: str, source: str) -> None:
        data = encoded(kind, Image.fromarray(picture()).convert(source))
        gray = np.asarray(Image.open(io.BytesIO(data)).convert("RGB").convert("L"))[:, :, None]
        check(decode(data, backend=name, mode="gray"), gray, TOLERANCE)
        if source == "L":
            check(decode(data, backend=name), np.repeat(gray, 3, axis=2), TOLERANCE)

    @pytest.mark.parametrize("source", ["RGBA", "LA", "P", "1", "I;16", "transparent"])
    @reading("png")
    def test_kinds_of_png(self, name: str, kind: str, source: str) -> None:
        image = Image.fromarray(picture())
        options = {}
        if source == "I;16":
            deep = picture()[..., 0].astype(np.uint16) * 257
            data, expected = encoded("png", Image.fromarray(deep)), np.repeat(picture()[..., :1], 3, axis=2)
        else:
            if source == "transparent":
                image, options = image.quantize(), {"transparency": 3}
            else:
                image = image.convert(source)
            if source in ("RGBA", "LA"):
                image.putalpha(7)
            data, expected = encoded("png", image, **options), np.asarray(image.convert("RGB"))
        check(decode(data, backend=name), expected, 0)

    @reading("png")
    def test_sixteen_bits_of_colour(self, name: str, kind: str) -> None:
        ok, data = cv2.imencode(".png", cv2.cvtColor(picture(), cv2.COLOR_RGB2BGR).astype(np.uint16) * 257)
        assert ok
        check(decode(data.tobytes(), backend=name), picture(), 0)

    @pytest.mark.parametrize("space", ["CMYK", "YCCK"])
    @pytest.mark.parametrize("name", of_jpeg())
    def test_cmyk(self, name: str, space: str) -> None:
        black = np.full((40, 64, 1), 180, np.uint8)
        if space == "YCCK":
            data = simplejpeg.encode_jpeg(np.dstack([picture(), black]), quality=95, colorspace="CMYK")
        else:
            inverted = Image.fromarray(255 - np.dstack([picture(), black]), "CMYK")
            data = encoded("jpeg", inverted, quality=95)
        expected = picture().astype(int) * 180 // 255
        assert float(np.abs(decode(data, backend=name).astype(int) - expected).mean()) < 3

    @reading("gif")
    def test_the_first_frame(self, name: str, kind: str) -> None:
        frames = [Image.fromarray(np.full((20, 30, 3), level, np.uint8)) for level in (50, 100, 200)]
        data = encoded("gif", frames[0], save_all=True, append_images=frames[1:])
        check(decode(data, backend=name), np.full((20, 30, 3), 50, np.uint8), 0)

    @reading("jpeg", "png", "tiff", "webp")
    @pytest.mark.parametrize("how", range(1, 9))
    def test_orientation(self, name: str, kind: str, how: int) -> None:
        tags = Image.Exif()
        tags[0x112] = how
        options = {"tiff": {"tiffinfo": {0x112: how}}, "webp": {"exif": tags, "lossless": True}}
        data = encoded(kind, **options.get(kind, {"exif": tags}))
        stored = decode(encoded(kind, **({"lossless": True} if kind == "webp" else {})), backend=name)
        check(decode(data, backend=name), stored, 0)
        turned = decode(data, backend=name, orientation="apply")
        check(turned, oriented(stored, how), 0)
        by_hand = Image.fromarray(stored)
        by_hand.getexif()[0x112] = how
        from PIL import ImageOps

        assert np.array_equal(turned, np.asarray(ImageOps.exif_transpose(by_hand)))

    @reading("jpeg", "png")
    @pytest.mark.parametrize("cut", [2, 40, 300])
    def test_truncated(self, name: str, kind: str, cut: int) -> None:
        if kind == "jpeg":
            data = encoded("jpeg", quality=95)
            with pytest.raises(ImageError, match=r"image 'a\.jpg' is truncated \(\d+ bytes\): (?!truncated)"):
                decode(data[:-cut], path="a.jpg", backend=name)
        else:
            with pytest.raises(ImageError, match=r"image 'a\.png'"):
                decode(encoded("png")[: -cut - 30], path="a.png", backend=name)

    @reading("png")
    def test_a_damaged_png(self, name: str, kind: str) -> None:
        """A byte of the pixels is another: the check sum behind them says so."""
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        data = bytearray(encoded("png", noise))
        data[len(data) // 2] ^= 1
        with pytest.raises(ImageError, match=r"image 'a\.png' cannot be decoded"):
            decode(bytes(data), path="a.png", backend=name)

    @reading(*FORMATS)
    def test_partial(self, name: str, kind: str) -> None:
        """A part, or a refusal that names who gives one; never the argument without effect."""
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        data = encoded(kind, noise, **({"quality": 90} if kind == "jpeg" else {}))
        cut = data[: len(data) * 3 // 4]
        if kind not in BACKENDS[name].partial:
            for given in (data, cut):
                with pytest.raises(ConfigError, match="leave partial= out" if kind == "webp" else "use .*'pillow'"):
                    decode(given, backend=name, partial=True)
            return
        whole, part = decode(data, backend=name), decode(cut, backend=name, partial=True)
        assert part.shape == whole.shape
        first, last = (slice(-8, None), slice(0, 8)) if kind == "bmp" else (slice(0, 8), slice(-8, None))
        assert np.array_equal(part[first], whole[first])
        assert not np.array_equal(part[last], whole[last])
        assert np.array_equal(decode(data, backend=name, partial=True), whole)

    @pytest.mark.parametrize("name", of_jpeg())
    def test_a_trailer_behind_the_image_is_not_looked_at(self, name: str) -> None:
        data = encoded("jpeg")
        stray = data[:20] + b"\0\0\0" + data[20:]  # behind APP0
        assert data[:4] == b"\xff\xd8\xff\xe0"
        assert data[4:6] == b"\0\x10"
        for whole in (data, stray):
            check(decode(whole + bytes(10_000), backend=name), decode(data, backend=name), 0)

    @every
    @pytest.mark.parametrize("data", [b"", b"no image at all", b"\xff\xd8\xff\xe0 nothing", bytes(9000)])
    def test_no_image(self, name: str, data: bytes) -> None:
        with pytest.raises((ImageError, ConfigError)) as caught:
            decode(data, path="x.jpg", backend=name)
        assert isinstance(caught.value, ConfigError) or "'x.jpg'" in str(caught.value)

    @reading("jpeg", "png", "gif", "bmp", "webp", "tiff")
    def test_a_bomb(self, name: str, kind: str) -> None:
        assert decode(encoded(kind), backend=name, max_pixels=2560).shape == (40, 64, 3)
        with pytest.raises(ImageError, match=r"'x'.*64 x 40 pixels, more than the limit of 2559"):
            decode(encoded(kind), path="x", backend=name, max_pixels=2559)


class TestReal:
    def test_equal_arrays(self, data_dir: Path) -> None:
        """By every back end that is installed: within TOLERANCE of simplejpeg. In full it takes all 500 images."""
        files = sorted((data_dir / "imagenet-sample").glob("*.JPEG"))
        assert len(files) == 500
        files = files[:: 1 if FULL else 5]
        others = [name for name in of_jpeg() if name != "simplejpeg"]
        worst = dict.fromkeys(others, 0)
        for path in files:
            data = path.read_bytes()
            expected = decode(data, path=path, backend="simplejpeg")
            for name in others:
                image = decode(data, path=path, backend=name)
                assert image.shape == expected.shape
                if not np.array_equal(image, expected):
                    worst[name] = max(worst[name], int(cv2.absdiff(image, expected).max()))
        assert max(worst.values()) <= TOLERANCE, worst


class TestChoice:
    def test_names(self) -> None:
        assert choose("auto", "jpeg").name == "simplejpeg"
        assert {choose("auto", kind).name for kind in ("png", "webp", "gif", "bmp", "tiff", "other")} == {"opencv"}
        assert {"simplejpeg", "opencv"} <= set(installed())
        with pytest.raises(ConfigError, match="'auto' or one of native, simplejpeg"):
            decode(encoded("png"), backend="libpng")
        with pytest.raises(ConfigError, match="reads no png"):
            decode(encoded("png"), backend="simplejpeg")

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "_is_installed", lambda name: name != "pillow")
        with pytest.raises(ConfigError, match="not installed here"):
            decode(encoded("png"), backend="pillow")
        assert "pillow" not in installed()

    def test_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
        for kind in FORMATS:
            data = encoded(kind, noise)
            cut = data[: len(data) * 3 // 4]
            assert np.array_equal(decode(data, partial=True), decode(data))
            if kind == "webp":
                with pytest.raises(ImageError, match="'a'"):
                    decode(cut, path="a", partial=True)
            else:
                assert decode(cut, partial=True).shape == (64, 64, 3)
        assert {choose("auto", kind, True).name for kind in ("png", "bmp", "gif", "tiff")} == {"pillow"}
        for name in ("auto", "pillow"):
            with pytest.raises(ImageError, match="'a'"):
                decode(b"no image at all", path="a", backend=name, partial=True)
        monkeypatch.setattr(backends, "_is_installed", lambda name: name != "pillow")
        assert {choose("auto", kind, True).name for kind in ("png", "bmp", "gif", "tiff", "other")} == {"opencv"}


class TestExif:
    @pytest.mark.parametrize("order", "<>")
    def test_damaged_blocks_are_ignored(self, order: str) -> None:
        mark = b"II" if order == "<" else b"MM"
        good = mark + struct.pack(order + "HIHHHIHH", 42, 8, 1, 0x112, 3, 1, 6, 0)
        assert headers.orientation(with_exif(good)) == 6
        for cut in range(len(good) - 2):
            assert headers.orientation(with_exif(good[:cut])) == 1
        for value in (0, 9, 65535):
            bad = mark + struct.pack(order + "HIHHHIHH", 42, 8, 1, 0x112, 3, 1, value, 0)
            assert headers.orientation(with_exif(bad)) == 1
        far = mark + struct.pack(order + "HIHHHIHH", 42, 2**31, 1, 0x112, 3, 1, 6, 0)
        assert headers.orientation(with_exif(far)) == 1

    def test_tiff_size(self) -> None:
        assert size_of_file(encoded("tiff")) == (64, 40)
        assert size_of_file(encoded("tiff")[:9]) is None

    def test_image_size_agrees_with_stored_pixels(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jpg"
        tags = Image.Exif()
        tags[0x112] = 6
        path.write_bytes(encoded("jpeg", exif=tags))
        assert image_size(path) == (64, 40)


def with_exif(block: bytes) -> bytes:
    body = b"Exif\0\0" + block
    return b"\xff\xd8\xff\xe1" + struct.pack(">H", len(body) + 2) + body + encoded("jpeg")[2:]


def test_the_limit_holds_where_the_header_does_not_say() -> None:
    data = io.BytesIO()
    Image.new("RGB", (93, 61)).save(data, "JPEG")
    whole = data.getvalue()
    at = 4 + struct.unpack(">H", whole[4:6])[0]
    stray = whole[:at] + b"\0\0" + whole[at:]
    assert decode(stray).shape == (61, 93, 3)
    with pytest.raises(ImageError, match="more than the limit of 1000"):
        decode(stray, max_pixels=1000)
    assert decode_region(whole, (0, 0, 9, 9), target=(9, 9), max_pixels=2**64)[0].shape == (9, 9, 3)
    other = io.BytesIO()
    Image.new("RGB", (93, 61)).save(other, "JPEG2000")
    with pytest.raises(ImageError, match="93 x 61 pixels, more than the limit of 10"):
        decode(other.getvalue(), path="x", max_pixels=10)


def test_words_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="'grey'"):
        decode(encoded("png"), mode="grey")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'Apply'"):
        decode(encoded("png"), orientation="Apply")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="inf"):
        decode_region(encoded("jpeg"), (0, 0, float("inf"), 9), target=(9, 9))
