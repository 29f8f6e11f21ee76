"""Decoding: every kind of file becomes RGB, and nothing that is broken becomes an image."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import ImageError
from penstock.images.decode import decode, image_size, read_bytes, read_image


def picture(height: int = 40, width: int = 64) -> np.ndarray:
    """A smooth RGB picture whose channels differ, so that swapped channels or axes show."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 99 // (height + width)], axis=-1).astype(np.uint8)


def jpeg(image: np.ndarray, **options: object) -> bytes:
    return simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=95, **options)


def encoded(extension: str, image: np.ndarray) -> bytes:
    ok, data = cv2.imencode(extension, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    assert ok
    return data.tobytes()


def with_segments(data: bytes, *segments: bytes) -> bytes:
    """`data` (JPEG) with APP1 segments after its first marker."""
    body = b"".join(b"\xff\xe1" + struct.pack(">H", len(s) + 2) + s for s in segments)
    return data[:2] + body + data[2:]


def exif(orientation: int) -> bytes:
    return b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">HHI", orientation, 0, 0)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


def test_bytes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg(picture()))
    assert read_bytes(path) == path.read_bytes()
    assert read_bytes(path, 11) == path.read_bytes()[:11]
    assert read_bytes(path, data=lambda: b"of somebody else") == b"of somebody else"
    with pytest.raises(ImageError, match=r"image '.*no\.jpg': cannot be read"):
        read_bytes(tmp_path / "no.jpg")


def test_a_relative_path_that_is_not_there_leads_to_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that was forgotten is the first mistake of anybody who has a list of files."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImageError, match=r"No such file or directory, relative to the working folder; pass root="):
        read_bytes("a/no.jpg")
    with pytest.raises(ImageError) as caught:
        read_bytes(tmp_path / "no.jpg")
    assert "root=" not in str(caught.value)


class TestFormats:
    @pytest.mark.parametrize("extension", [".png", ".bmp", ".tiff", ".ppm"])
    def test_lossless_formats_come_back_exactly(self, extension: str, tmp_path: Path) -> None:
        image = picture()
        path = tmp_path / f"image{extension}"
        path.write_bytes(encoded(extension, image))
        result = read_image(path)
        assert np.array_equal(result, image)
        assert result.dtype == np.uint8
        assert result.flags.c_contiguous
        assert image_size(path) == (64, 40)

    @pytest.mark.parametrize("extension", [".jpg", ".webp", ".gif"])
    def test_lossy_formats_come_back_nearly(self, extension: str, tmp_path: Path) -> None:
        path = tmp_path / f"image{extension}"
        path.write_bytes(encoded(extension, picture()))
        assert distance(read_image(path), picture()) < (20 if extension == ".gif" else 3)
        assert image_size(path) == (64, 40)

    def test_the_extension_does_not_matter(self, tmp_path: Path) -> None:
        """ImageNet has a PNG that is called .JPEG."""
        path = tmp_path / "n02105855_2933.JPEG"
        path.write_bytes(encoded(".png", picture()))
        assert np.array_equal(read_image(path), picture())

    @pytest.mark.parametrize("extension", [".jpg", ".png"])
    def test_grey_becomes_three_equal_channels(self, extension: str) -> None:
        ok, data = cv2.imencode(extension, picture()[..., 0])
        assert ok
        result = decode(data.tobytes())
        assert result.shape == (40, 64, 3)
        assert np.array_equal(result[..., 0], result[..., 1])
        assert np.array_equal(result[..., 0], result[..., 2])
        assert distance(result[..., 0], picture()[..., 0]) < 3

    def test_sixteen_bits_become_eight(self) -> None:
        ok, data = cv2.imencode(".png", cv2.cvtColor(picture(), cv2.COLOR_RGB2BGR).astype(np.uint16) * 257)
        assert ok
        assert np.array_equal(decode(data.tobytes()), picture())

    def test_alpha_is_dropped(self) -> None:
        bgra = np.dstack([cv2.cvtColor(picture(), cv2.COLOR_RGB2BGR), np.full((40, 64), 7, np.uint8)])
        ok, data = cv2.imencode(".png", bgra)
        assert ok
        assert np.array_equal(decode(data.tobytes()), picture())

    def test_cmyk_jpeg_is_converted(self) -> None:
        """CMYK in JPEG is stored inverted, as Adobe's programs do: red is c * k / 255."""
        black = np.full((40, 64, 1), 180, np.uint8)
        data = jpeg(np.dstack([picture(), black]), colorspace="CMYK")
        assert simplejpeg.decode_jpeg_header(data)[2] in ("YCCK", "CMYK")
        result = decode(data)
        assert result.shape == (40, 64, 3)
        assert distance(result, picture().astype(int) * 180 // 255) < 3

    def test_unusual_subsampling_goes_to_opencv(self) -> None:
        """TurboJPEG refuses luminance at 3 x 1. The picture is flat and its Huffman tables hold one code, so that the
        same bits decode under the changed frame header."""
        ok, data = cv2.imencode(".jpg", np.full((8, 24, 3), 128, np.uint8), [cv2.IMWRITE_JPEG_OPTIMIZE, 1])
        assert ok
        changed = bytearray(data.tobytes())
        changed[changed.index(b"\xff\xc0") + 11] = 0x31
        with pytest.raises(ValueError, match="subsampling"):
            simplejpeg.decode_jpeg(bytes(changed))
        assert np.array_equal(decode(changed), np.full((8, 24, 3), 128, np.uint8))
        with pytest.raises(ImageError, match="truncated"):
            decode(changed[:-2])

    @pytest.mark.parametrize("orientation", [3, 6])
    def test_exif_orientation_is_ignored(self, orientation: int, tmp_path: Path) -> None:
        plain = jpeg(picture())
        path = tmp_path / "turned.jpg"
        path.write_bytes(with_segments(plain, exif(orientation)))
        upright = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
        assert not np.array_equal(upright[..., ::-1], decode(plain)), "the file must carry an orientation"
        assert np.array_equal(read_image(path), decode(plain))
        assert image_size(path) == (64, 40)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_buffer(self, kind: type) -> None:
        for data in (jpeg(picture()), encoded(".png", picture())):
            assert np.array_equal(decode(kind(data)), decode(data))

    def test_threads_agree(self) -> None:
        datas = [jpeg(picture(40 + i, 64)) for i in range(8)] + [encoded(".png", picture(40, 64 + i)) for i in range(8)]
        expected = [decode(data) for data in datas]
        wrong: list[int] = []

        def work() -> None:
            for _ in range(5):
                wrong.extend(i for i, data in enumerate(datas) if not np.array_equal(decode(data), expected[i]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


class TestBroken:
    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_a_jpeg_that_ends_early_is_an_error(self, data: st.DataObject) -> None:
        whole = jpeg(picture())
        cut = data.draw(st.integers(0, len(whole) - 1))
        with pytest.raises(ImageError, match=r"empty" if cut == 0 else r"truncated|not an image"):
            decode(whole[:cut])

    @pytest.mark.parametrize("extension", [".png", ".webp", ".bmp", ".tiff", ".gif", ".ppm"])
    def test_other_formats_that_end_early_are_errors(self, extension: str) -> None:
        whole = encoded(extension, picture())
        for cut in (3, 20, len(whole) // 2, len(whole) - 20):
            with pytest.raises(ImageError, match=f"{cut} bytes"):
                decode(whole[:cut])

    def test_a_progressive_jpeg_that_ends_early_is_an_error(self) -> None:
        ok, data = cv2.imencode(".jpg", picture(), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
        assert ok
        whole = data.tobytes()
        assert decode(whole).shape == (40, 64, 3)
        for cut in (len(whole) // 2, len(whole) - 30, len(whole) - 2):
            with pytest.raises(ImageError, match="truncated"):
                decode(whole[:cut])

    def test_stray_bytes_before_the_end_marker_are_forgiven(self) -> None:
        whole = jpeg(picture())
        stray = whole[:-2] + b"\x12\x34\x56" + whole[-2:]
        with pytest.raises(ValueError, match="extraneous bytes"):
            simplejpeg.decode_jpeg(stray)
        assert np.array_equal(decode(stray), decode(whole))

    def test_stray_bytes_do_not_hide_a_truncation(self) -> None:
        """libjpeg reports its first warning only, here the stray bytes in front of the tables."""
        whole = jpeg(picture())
        stray = whole[:20] + b"\x12\x34\x56" + whole[20:]
        assert np.array_equal(decode(stray), decode(whole))
        with pytest.raises(ImageError, match="truncated"):
            decode(stray[: len(stray) - 200])

    def test_bytes_after_the_image_are_allowed(self) -> None:
        whole = jpeg(picture())
        assert np.array_equal(decode(whole + b"\0" * 5000), decode(whole))

    @pytest.mark.parametrize("junk", [b"\0" * 100, b"not an image at all" * 20, b"\xff\xd8", b"\xff\xd8" + b"x" * 99])
    def test_garbage(self, junk: bytes, tmp_path: Path) -> None:
        path = tmp_path / "junk.jpg"
        path.write_bytes(junk)
        with pytest.raises(ImageError, match=r"junk\.jpg"):
            read_image(path)
        with pytest.raises(ImageError, match=r"junk\.jpg"):
            image_size(path)

    @pytest.mark.parametrize("function", [read_image, image_size])
    def test_files_that_cannot_be_read(self, function, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        (tmp_path / "empty.jpg").touch()
        with pytest.raises(ImageError, match=r"empty\.jpg.* (empty|truncated)"):
            function(tmp_path / "empty.jpg")
        with pytest.raises(ImageError, match=r"missing\.jpg.*No such file"):
            function(tmp_path / "missing.jpg")
        with pytest.raises(ImageError, match="directory"):
            function(tmp_path)
        with pytest.raises(ImageError, match=r"null (byte|character)"):
            function("a\0b")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_no_permission(self, tmp_path: Path) -> None:
        path = tmp_path / "secret.jpg"
        path.write_bytes(jpeg(picture()))
        path.chmod(0)
        with pytest.raises(ImageError, match="Permission denied"):
            read_image(path)


class TestSizeOfFile:
    def test_only_the_header_is_read(self, tmp_path: Path) -> None:
        """A file cut in its pixels still has a size, so nothing was decoded."""
        for extension in (".jpg", ".png", ".webp", ".bmp", ".gif"):
            path = tmp_path / f"cut{extension}"
            whole = encoded(extension, picture(300, 200))
            path.write_bytes(whole[: len(whole) // 2])
            assert image_size(path) == (200, 300)

    def test_a_header_beyond_64_kib(self, tmp_path: Path) -> None:
        path = tmp_path / "long.jpg"
        path.write_bytes(with_segments(jpeg(picture()), *[b"x" * 60_000] * 3))
        assert image_size(path) == (64, 40)
        assert read_image(path).shape == (40, 64, 3)

    def test_a_long_header_that_ends_early(self, tmp_path: Path) -> None:
        path = tmp_path / "long.jpg"
        path.write_bytes(with_segments(jpeg(picture()), *[b"x" * 60_000] * 3)[:150_000])
        with pytest.raises(ImageError, match=r"long\.jpg.*truncated.*150000"):
            image_size(path)

    def test_a_size_of_zero_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "zero.png"
        path.write_bytes(encoded(".png", picture())[:16] + struct.pack(">II", 0, 40) + b"\0" * 30)
        with pytest.raises(ImageError, match=r"zero\.png.*0 x 40"):
            image_size(path)

    @pytest.mark.parametrize("extension", [".tiff", ".jp2"])
    def test_a_directory_behind_the_pixels(
        self, extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / f"image{extension}"
        noise = np.random.default_rng(0).integers(0, 256, (300, 500, 3), np.uint8)
        whole = encoded(extension, noise)
        path.write_bytes(whole)
        monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("it was decoded"))
        assert len(whole) > 65536
        assert image_size(path) == (500, 300)
        if extension == ".tiff":
            directory = struct.unpack_from("<I", whole, 4)[0]
            assert directory > 65536
            path.write_bytes(whole[: directory + 20])
            with pytest.raises(ImageError, match=r"image\.tiff.*truncated: no image size"):
                image_size(path)

    def test_avif_is_decoded_for_its_size(self, tmp_path: Path) -> None:
        path = tmp_path / "image.avif"
        Image.fromarray(picture(30, 50)).save(path)
        assert image_size(path) == (50, 30)


class TestReadBytes:
    @pytest.mark.parametrize("size", [0, 1, 3, 5000, 3 << 20])
    def test_as_much_as_is_wanted(self, size: int, tmp_path: Path) -> None:
        data = np.random.default_rng(0).bytes(size)
        (tmp_path / "file").write_bytes(data)
        for most in (-1, 0, 2, size, size + 1):
            assert read_bytes(tmp_path / "file", most) == (data if most < 0 else data[:most])

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
    @pytest.mark.parametrize("most", [-1, 100_000, 200_000, 400_000])
    def test_a_pipe_says_no_size(self, most: int, tmp_path: Path) -> None:
        data = np.random.default_rng(0).bytes(200_000)
        path = tmp_path / "pipe"
        os.mkfifo(path)

        def write() -> None:
            with contextlib.suppress(BrokenPipeError):  # nobody wants the rest
                path.write_bytes(data)

        writer = threading.Thread(target=write)
        writer.start()
        assert read_bytes(path, most) == (data if most < 0 else data[:most])
        writer.join()


class TestRealImages:
    def test_all_decode_as_opencv_does_and_sizes_agree(self, data_dir: Path) -> None:
        paths = sorted((data_dir / "imagenet-sample").glob("*.JPEG"))
        assert len(paths) == 500
        grey = 0
        for number, path in enumerate(paths):
            image = read_image(path)
            assert image.ndim == 3
            assert image_size(path) == (image.shape[1], image.shape[0])
            grey += simplejpeg.decode_jpeg_header(path.read_bytes())[2] == "Gray"
            if number % 10 == 0:
                reference = cv2.imread(str(path), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
                assert distance(image, reference[..., ::-1]) < 0.5
        assert grey == 14

    def test_a_real_file_cut_anywhere_is_an_error(self, data_dir: Path) -> None:
        for path in sorted((data_dir / "imagenet-sample").glob("*.JPEG"))[::50]:
            data = path.read_bytes()
            for cut in np.linspace(1, len(data) - 1, 12).astype(int):
                with pytest.raises(ImageError, match=r"truncated|not an image"):
                    decode(data[:cut], path=path)
