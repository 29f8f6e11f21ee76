"""Formats and libraries: processor time to decode an image as JPEG, PNG or WebP, whole or a random crop.

All libraries decode the same images to RGB arrays from memory, in one thread, taking turns: libraries within a format,
round by round. Files are made of the photographs: PNG at Pillow's level, WebP at quality 85 and lossless. "crop" is the
box of a RandomResizedCrop of 8 to 100 % of the area, cut out of the whole image, or by `decode_region`, which decodes
no more than it needs of a JPEG. No kept library for Python decodes a part of a PNG or of a WebP.

    python benchmarks/image_formats.py --data ~/imagenet-sample
    python benchmarks/image_formats.py --data ~/my-images --own    # as they are, of any format

`--own` measures the files of the most frequent format. Those that some library cannot decode are left out for all.
"""

from __future__ import annotations

import io
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import cv2
from PIL import Image

from _common import arguments, folder, parse, spread, table
from _image_files import read_listing, write_listing
from images_decode import Sample, random_box
from penstock.errors import ImageError
from penstock.images.backends import BACKENDS, installed
from penstock.images.decode import decode
from penstock.images.headers import kind as kind_of
from penstock.images.headers import size_of_file
from penstock.images.region import decode_region
from penstock.images.sample_record import is_image

_PEER = "opencv"
_FORMATS: dict[str, tuple[str, dict[str, int | bool]]] = {
    "JPEG": ("jpeg", {}),
    "PNG": ("png", {}),
    "WebP, quality 85": ("webp", {"quality": 85}),
    "WebP, lossless": ("webp", {"lossless": True, "method": 2}),
}
"""By title: `headers.kind`, and how Pillow writes it."""


def encoded(path: str, kind: str, how: dict[str, int | bool]) -> bytes:
    """A photograph in a format; JPEG as it is."""
    data = Path(path).read_bytes()
    if kind == "jpeg":
        return data
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").save(file, kind, icc_profile=None, **how)
    return file.getvalue()


def own_files(where: Path, count: int) -> tuple[str, list[bytes]]:
    """The files of the most frequent format below a folder, `count` at most, spread evenly over its sorted paths."""
    paths = sorted(path for path in where.rglob("*") if is_image(path.name) and path.is_file())
    chosen = [path.read_bytes() for path in paths[:: max(1, len(paths) // count)][:count]]
    kinds = Counter(kind for data in chosen if (kind := kind_of(data)) != "other")
    kind = kinds.most_common(1)[0][0] if kinds else ""
    good = [data for data in chosen if kind_of(data) == kind and works(data, kind)]
    if not good:
        raise SystemExit(f"{where}: no images that all libraries decode")
    print(f"{len(paths)} images, of which {len(good)} are measured, and {len(chosen) - len(good)} are left out")
    return kind, good


def works(data: bytes, kind: str) -> bool:
    """Whether every installed backend of this format decodes the file."""
    try:
        for name in installed():
            if BACKENDS[name].reads(kind):
                decode(data, backend=name)
    except ImageError:
        return False
    return True


def with_boxes(files: Iterable[bytes]) -> list[Sample]:
    """Encoded images, each with a box."""
    rng = random.Random(0)
    return [(data, random_box(size_of_file(data) or (1, 1), rng)) for data in files]


def variants(kind: str) -> dict[str, Callable[[Sample], object]]:
    """What decodes this format: the whole image by each backend, and a crop."""

    def whole(name: str) -> Callable[[Sample], object]:
        return lambda sample: decode(sample[0], backend=name)

    found = {name: whole(name) for name in installed() if BACKENDS[name].reads(kind)}
    found["crop"] = lambda sample: decode_region(sample[0], sample[1], target=(224, 224))
    return found


def measure(title: str, kind: str, samples: Sequence[Sample], repeat: int) -> None:
    """One table."""
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
    parser.add_argument("--own", action="store_true", help="measure the files of --data as they are, of any format")
    options = parse(parser, {"images": 10, "repeat": 1}, ["simplejpeg"])
    cv2.setNumThreads(0)
    if options.own:
        if options.data is None:
            parser.error("--own needs --data")
        kind, files = own_files(options.data, options.images)
        measure(f"{options.data}, {kind}", kind, with_boxes(files), options.repeat)
        return
    with folder(options.dir) as where:
        write_listing(options.data, where / "files.txt", "as they are", 0, 1)
        paths = read_listing(where / "files.txt")[0][: options.images]
        for title, (kind, how) in _FORMATS.items():
            measure(title, kind, with_boxes(encoded(path, kind, how) for path in paths), options.repeat)


if __name__ == "__main__":
    main()
