"""Formats and libraries: processor time to decode a photograph as JPEG, PNG or WebP, whole or a random crop.

All libraries decode the same images to RGB arrays from memory, in one thread, taking turns: libraries within a format,
round by round. Files are made of the photographs: PNG at Pillow's level, WebP at quality 85 and lossless. "crop" is the
box of a RandomResizedCrop of 8 to 100 % of the area, cut out of the whole image, or by `decode_region`, which decodes
no more than it needs of a JPEG. No kept library for Python decodes a part of a PNG or of a WebP.

    python benchmarks/image_formats.py --data ~/imagenet-sample
"""

from __future__ import annotations

import io
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import cv2
from PIL import Image

from _common import arguments, folder, parse, spread, table
from _image_files import read_listing, write_listing
from images_decode import Sample, random_box
from penstock.images.backends import BACKENDS, installed
from penstock.images.decode import decode
from penstock.images.headers import size_from_header
from penstock.images.region import decode_region

_PEER = "opencv"
_FORMATS: dict[str, tuple[str, dict[str, int | bool]]] = {
    "JPEG": ("jpeg", {}),
    "PNG": ("png", {}),
    "WebP, quality 85": ("webp", {"quality": 85}),
    "WebP, lossless": ("webp", {"lossless": True, "method": 2}),
}
"""By title: `exif.kind`, and how Pillow writes it."""


def encoded(path: str, kind: str, how: dict[str, int | bool]) -> bytes:
    """A photograph in a format; JPEG as it is."""
    data = Path(path).read_bytes()
    if kind == "jpeg":
        return data
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").save(file, kind, icc_profile=None, **how)
    return file.getvalue()


def samples_of(paths: Iterable[str], kind: str, how: dict[str, int | bool]) -> list[Sample]:
    """Encoded images, each with a box."""
    rng, found = random.Random(0), []
    for path in paths:
        data = encoded(path, kind, how)
        found.append((data, random_box(size_from_header(data) or (1, 1), rng)))
    return found


def variants(kind: str) -> dict[str, Callable[[Sample], object]]:
    """What decodes this format: the whole image by each backend, and a crop."""

    def whole(name: str) -> Callable[[Sample], object]:
        return lambda sample: decode(sample[0], backend=name)

    found = {name: whole(name) for name in installed() if BACKENDS[name].reads(kind)}
    found["crop"] = lambda sample: decode_region(sample[0], sample[1], target=(224, 224))
    return found


def measure(title: str, paths: list[str], repeat: int) -> None:
    """One table."""
    kind, how = _FORMATS[title]
    samples = samples_of(paths, kind, how)
    functions = variants(kind)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeat + 1):  # the first one does not count
        for name, function in functions.items():
            before = time.process_time()
            for sample in samples:
                function(sample)
            if turn:
                times[name].append(1e3 * (time.process_time() - before) / len(samples))
    rows = []
    for name in sorted(times, key=lambda one: statistics.median(times[one])):
        ratios = [other / own for other, own in zip(times[_PEER], times[name], strict=True)]
        text = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((name, *spread(times[name], 3), text))
    size = sum(len(data) for data, _ in samples) / len(samples) / 1000
    head = f"{title}: {len(samples)} images of {size:.0f} kB, {repeat} rounds, one thread"
    table(head, ("", "CPU ms/image: min", "median", "max", "speed beside OpenCV"), rows, peer=_PEER)


def main() -> None:
    parser = arguments(__doc__, repeat=5)
    parser.add_argument("--data", type=Path, help="folder of JPEG files (default: mosaics of examples/data)")
    parser.add_argument("--images", type=int, default=500, help="at most (default: %(default)s)")
    options = parse(parser, {"images": 10, "repeat": 1}, ["simplejpeg"])
    cv2.setNumThreads(0)
    with folder(options.dir) as where:
        write_listing(options.data, where / "files.txt", "as they are", 0, 1)
        paths = read_listing(where / "files.txt")[0][: options.images]
        for title in _FORMATS:
            measure(title, paths, options.repeat)


if __name__ == "__main__":
    main()
