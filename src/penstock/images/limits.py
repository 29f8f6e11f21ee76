"""Checks an image's size before it is decoded, as read by the parser that the decoder itself uses.

With another parser `max_pixels` could be bypassed: a crafted file of some hundred bytes can be 16 x 16 pixels for one
parser and 30,000 x 30,000 for another. So the size is read in this way:

    decoder                     source of the size
    C extension                 libjpeg's header, within the decoding call
    other JPEG decoders         simplejpeg's header call, which is libjpeg's (`check_jpeg`)
    Pillow                      the open image (`open_pillow`); for JPEG libjpeg, too
    OpenCV, other formats       it has no header call, so `penstock.images.headers` parses them strictly, and images
                                that it cannot parse are refused (`check_opencv`)

An image is also refused if the decoder reads another size than the caller got, because crops are drawn from that size.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple, TypeAlias

import simplejpeg

from penstock.images import headers, jpeg

__all__ = ["Limit", "TooManyPixels", "check_jpeg", "check_opencv", "open_pillow"]

Data: TypeAlias = bytes | bytearray | memoryview

_POSTSCRIPT = (b"%!PS", b"\xc5\xd0\xd3\xc6")
_NESTED = frozenset({"BLP", "CUR", "FPX", "ICNS", "ICO", "IPTC", "MIC"})
_AVIF_PIXELS = 1 << 28
"""libavif's own limit for the decoded size. Pillow and OpenCV keep it; the size that they report may differ from the
size of the frames."""


class TooManyPixels(ValueError):
    """The image is larger than the limit. The message contains its size and the limit."""


class Limit(NamedTuple):
    """The limit that a backend checks the size in the image's header against, before it decodes."""

    max_pixels: int
    size: tuple[int, int] | None
    """The (width, height) that callers use; None if Penstock's parsers do not find it."""

    def check(self, width: int, height: int) -> None:
        """Check a size that a decoder has read.

        Raises `TooManyPixels`, or ValueError if it differs from `size`: a crop would be wrong, and such a file is
        probably malicious.
        """
        if min(width, height) < 1:
            raise ValueError(f"{width} x {height} pixels")
        if width * height > self.max_pixels:
            raise TooManyPixels(f"{width} x {height} pixels, more than the limit of {self.max_pixels}")
        if self.size is not None and self.size != (width, height):
            first, second = f"{self.size[0]} x {self.size[1]}", f"{width} x {height}"
            raise ValueError(f"ambiguous header: {first} pixels for one reader, {second} for another")

    def check_avif(self) -> None:
        """Refuse an AVIF unless libavif's limit is enough."""
        if self.max_pixels < _AVIF_PIXELS:
            raise ValueError(
                f"the size of an AVIF is not known before it is decoded: pass max_pixels={_AVIF_PIXELS} or more, or "
                "convert it"
            )

    def check_tiff(self, data: Data) -> None:
        """Refuse a TIFF with too large tiles or strips, which may be larger than the image."""
        block = headers.tiff_block(data)
        if block is not None:
            Limit(self.max_pixels, None).check(*block)


def check_jpeg(data: Data, limit: Limit) -> None:
    """Check the size that libjpeg reads, as in `Limit.check`. Raises ValueError for too many scans, too."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # a rare subsampling or colour space that TurboJPEG does not support
        try:
            size = jpeg.frame_size(data)
        except jpeg.TruncatedHeader:
            raise ValueError(f"truncated: no image size in {len(data)} bytes") from None
        if size is None:
            raise ValueError("no image size in its header") from None
        width, height = size
    limit.check(width, height)
    if jpeg.scans(data) > jpeg.MAX_SCANS:
        raise ValueError(f"more than {jpeg.MAX_SCANS} scans")


def check_opencv(data: Data, form: str, limit: Limit) -> None:
    """Check the size for OpenCV. Refuse images without an unambiguous size."""
    if form == "jpeg":
        check_jpeg(data, limit)
    elif limit.size is not None:
        limit.check(*limit.size)
        if form == "png" and not headers.png_is_whole(data):
            raise ValueError("truncated: a chunk extends beyond the end")
        if form == "tiff":
            limit.check_tiff(data)
    elif data[:3] == b"\0\0\0" and data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis"):  # as OpenCV recognises it
        limit.check_avif()
    else:
        raise ValueError(
            f"damaged, not an image, or a format whose size Penstock cannot read, starting with {bytes(data[:12])!r}; "
            "backend='pillow' supports more formats"
        )


def open_pillow(data: Data, limit: Limit | None = None) -> Any:
    """Open an image with Pillow and return it. Its pixels are not decoded yet.

    Raises ValueError for PostScript, which Pillow would run with Ghostscript, and for a JPEG whose header libjpeg and
    Pillow read differently, since libjpeg decodes it. With `limit`, also for sizes that it refuses, and for formats
    that contain images of other sizes than the header states. Without it, Pillow's own limit applies to all of them.
    Raises Pillow's errors for other problems.
    """
    from PIL import Image

    if bytes(data[:4]) in _POSTSCRIPT:
        raise ValueError("PostScript (EPS) is a program, which is not run; convert it to an image beforehand")
    image = Image.open(io.BytesIO(data))
    if headers.kind(data) == "jpeg":
        check_jpeg(data, Limit(image.width * image.height, image.size))
    if limit is None:
        return image
    if image.format in _NESTED:
        raise ValueError(f"{image.format} may contain images of other sizes than it states; convert it beforehand")
    size = image.size
    if image.format == "AVIF":
        limit.check_avif()
    if image.format == "TIFF" and limit.size == size[::-1]:
        size = size[::-1]  # Pillow applies the orientation of a TIFF
    limit.check(*size)
    if image.format == "TIFF":
        limit.check_tiff(data)
    return image
