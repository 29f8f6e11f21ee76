"""How large an image is, asked before any pixel is made, of the parser that its decoder goes by.

A size from another parser is a way past `max_pixels`: a file of some hundred bytes can be 16 x 16 pixels for one and
30,000 x 30,000 for the other. So each decoder is asked itself:

    decoder                         is asked by
    our C extension                 libjpeg's header, within the call that decodes
    others of JPEG                  simplejpeg's header call, which is libjpeg's (`check_jpeg`)
    Pillow                          its open image (`open_pillow`); for JPEG libjpeg, too
    OpenCV, torchvision,            nothing: they have no such call, so `penstock.images.headers` reads the header of
    imagecodecs                     other formats, strictly, and what it does not read is refused (`check_without_call`)

A decoder that finds another size than callers were told is refused as well: crops are drawn from that one.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple, TypeAlias

import simplejpeg

from penstock.images import exif, headers, jpeg

__all__ = ["Limit", "TooManyPixels", "check_jpeg", "check_without_call", "open_pillow"]

Data: TypeAlias = bytes | bytearray | memoryview

_POSTSCRIPT = (b"%!PS", b"\xc5\xd0\xd3\xc6")
_NESTED = frozenset({"BLP", "CUR", "FPX", "ICNS", "ICO", "IPTC", "MIC"})
_AVIF_PIXELS = 1 << 28
"""libavif's own limit, by the sizes that it and the decoder of AV1 read. Pillow and OpenCV leave it as it is, and what
they say of a file is not what its frames hold."""
_NO_SIZE = f"an AVIF says nothing sure of its size: give max_pixels={_AVIF_PIXELS} or more, or convert it"


class TooManyPixels(ValueError):
    """The image is larger than the limit; the text is its size and the limit."""


class Limit(NamedTuple):
    """What a back end checks the size against that its library reads, before it decodes."""

    max_pixels: int
    size: tuple[int, int] | None
    """(width, height) that callers take the image for; None where our own parsers find none."""

    def check(self, width: int, height: int) -> None:
        """Refuse an image of this size.

        Raises `TooManyPixels`, or ValueError where another size was read before: whoever relies on that one would crop
        wrongly, and a file that has two sizes was made to have them.
        """
        if min(width, height) < 1:
            raise ValueError(f"{width} x {height} pixels")
        if width * height > self.max_pixels:
            raise TooManyPixels(f"{width} x {height} pixels, more than the limit of {self.max_pixels}")
        if self.size is not None and self.size != (width, height):
            first, second = f"{self.size[0]} x {self.size[1]}", f"{width} x {height}"
            raise ValueError(f"ambiguous header: {first} pixels for one reader, {second} for another")


def check_jpeg(data: Data, limit: Limit) -> None:
    """Refuse a JPEG by the size that libjpeg reads, as `Limit.check` does, and ValueError for too many scans."""
    limit.check(*_jpeg_size(data))
    if jpeg.scans(data) > jpeg.MAX_SCANS:
        raise ValueError(f"more than {jpeg.MAX_SCANS} scans")


def _jpeg_size(data: Data) -> tuple[int, int]:
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
        return width, height
    except (ValueError, KeyError):  # a rare subsampling or colour space, which TurboJPEG does not name
        pass
    try:
        size = jpeg.frame_size(data)
    except jpeg.TruncatedHeader:
        raise ValueError(f"truncated: no image size in {len(data)} bytes") from None
    if size is None:
        raise ValueError("no image size in its header")
    return size


def check_without_call(data: Data, form: str, limit: Limit) -> None:
    """Refuse what is too large for a library that cannot be asked for a size, and what has none beyond doubt."""
    if form == "jpeg":
        check_jpeg(data, limit)
    elif limit.size is not None:
        limit.check(*limit.size)
        if form == "png" and not headers.png_is_whole(data):
            raise ValueError("truncated: a chunk goes beyond the end")
        if form == "tiff":
            _check_blocks(data, limit)
    elif _is_avif(data):
        if limit.max_pixels < _AVIF_PIXELS:
            raise ValueError(_NO_SIZE)
    else:
        raise ValueError(
            f"damaged, not an image, or no header with a size that Penstock reads, starting with {bytes(data[:12])!r}; "
            "backend='pillow' knows more formats"
        )


def _check_blocks(data: Data, limit: Limit) -> None:
    """Refuse a TIFF whose tiles or strips are too large, as the picture itself need not be."""
    block = headers.tiff_block(data)
    if block is not None:
        Limit(limit.max_pixels, None).check(*block)


def _is_avif(data: Data) -> bool:
    """Whether OpenCV's reader for AVIF takes it, and none of its others."""
    return data[:3] == b"\0\0\0" and data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis")


def open_pillow(data: Data, limit: Limit | None = None) -> Any:
    """Return an image of Pillow whose pixels are still to be decoded.

    Refused are PostScript, which Pillow would have Ghostscript run, whatever the file is called, and a JPEG whose
    header libjpeg and Pillow read differently, as libjpeg decodes it. With `limit`, what that refuses, and files that
    hold images of other sizes than they say; without, Pillow's own limit holds, which it checks for these, too.

    Raises ValueError for these, and what Pillow raises for others.
    """
    from PIL import Image

    if bytes(data[:4]) in _POSTSCRIPT:
        raise ValueError("PostScript (EPS), which is a program, and is not run; convert it to an image beforehand")
    image = Image.open(io.BytesIO(data))
    if limit is not None and image.format == "AVIF" and limit.max_pixels < _AVIF_PIXELS:
        raise ValueError(_NO_SIZE)
    if limit is not None and image.format in _NESTED:
        raise ValueError(f"{image.format}, which holds images of other sizes than it says; convert it beforehand")
    if exif.kind(data) == "jpeg":
        check_jpeg(data, Limit(image.width * image.height, image.size))
    if limit is not None:
        stored = limit.size is not None and image.format == "TIFF" and image.size == limit.size[::-1]
        limit.check(*(image.size[::-1] if stored else image.size))  # it turns TIFF, and says so at once
        if image.format == "TIFF":
            _check_blocks(data, limit)
    return image
