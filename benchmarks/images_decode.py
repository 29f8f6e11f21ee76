"""Region and shrunken decode of JPEG beside a plain full decode, interleaved in one run.

Every variant reads the same files from memory with the same boxes of RandomResizedCrop (area 0.08 to 1, target 224),
in threads; all take turns in each round. Sets: ImageNet files as they are, the same at quality 60, mosaics of them of
2.4 and 11 megapixels. Variants:

    full            plain decode of the whole image (simplejpeg), nothing else: the bar
    full, native    the same by the C extension
    entropy         one pixel at the box's lower edge: reading down to there, which no decoder of JPEG can leave out
    region 1:1      the box only, never shrunk
    region          the box only, shrunk by 2, 4 or 8 where that is enough (decode_region)
    crop, plain     full, then the box resized to 224 x 224 as `ImageDataset` does it: without the extension
    crop, region    decode_region, then the same resize

    python benchmarks/images_decode.py --data ~/imagenet-sample --images 5000 --repeat 5
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

from _common import folder, interleave, parse, spread, table
from _image_files import write_listing
from penstock.images import native
from penstock.images.decode import decode
from penstock.images.headers import size_from_header
from penstock.images.region import Box, decode_region
from penstock.images.transforms.view import View, render

TARGET = (224, 224)
FAR = (1 << 20, 1 << 20)
Sample = tuple[bytes, Box]


def random_box(size: tuple[int, int], rng: random.Random) -> Box:
    """A box as RandomResizedCrop draws it."""
    width, height = size
    for _ in range(10):
        area = rng.uniform(0.08, 1.0) * width * height
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def recoded(files: Sequence[bytes], quality: int) -> list[bytes]:
    return [simplejpeg.encode_jpeg(decode(data), quality, colorsubsampling="420") for data in files]


def mosaics(files: Sequence[bytes], size: tuple[int, int], count: int, quality: int) -> list[bytes]:
    """Pictures of `size` (width, height), put together from tiles of 400 x 300 at the files' own resolution."""
    rng, result = random.Random(0), []
    for _ in range(count):
        image = np.zeros((size[1] + 300, size[0] + 400, 3), np.uint8)
        for y in range(0, size[1], 300):
            for x in range(0, size[0], 400):
                tile = decode(rng.choice(files))[:300, :400]
                image[y : y + 300, x : x + 400] = cv2.resize(tile, (400, 300))
        picture = np.ascontiguousarray(image[: size[1], : size[0]])
        result.append(simplejpeg.encode_jpeg(picture, quality, colorsubsampling="420"))
    return result


def resized(array: np.ndarray, box: Box, sample: Sample) -> np.ndarray:
    """The box at the target's size, as `ImageDataset` makes it."""
    return render(array, box, View(sample[1], TARGET))


def last_row(sample: Sample) -> object:
    """One pixel at the lower edge of the box: what it takes to get there, whatever is decoded."""
    left, _, _, bottom = sample[1]
    x, y = int(left), -int(-bottom // 1)
    return decode_region(sample[0], (x, y - 1, x + 1, y), target=FAR)


def variants() -> dict[str, Callable[[Sample], object]]:
    found: dict[str, Callable[[Sample], object]] = {"full": lambda sample: decode(sample[0], backend="simplejpeg")}
    if native.is_available():
        found["full, native"] = lambda sample: decode(sample[0], backend="native")
        found["entropy"] = last_row
        found["region 1:1"] = lambda sample: decode_region(sample[0], sample[1], target=FAR)
        found["region"] = lambda sample: decode_region(sample[0], sample[1], target=TARGET)
    found["crop, plain"] = lambda sample: resized(decode(sample[0]), sample[1], sample)
    found["crop, region"] = lambda sample: resized(*decode_region(sample[0], sample[1], target=TARGET), sample)
    return found


def measure(title: str, files: Sequence[bytes], options: argparse.Namespace, images: int) -> None:
    rng = random.Random(1)
    samples = [(data, random_box(size_from_header(data) or (1, 1), rng)) for data in files * -(-images // len(files))]
    samples = samples[:images]
    with ThreadPoolExecutor(options.threads) as pool:

        def run(function: Callable[[Sample], object]) -> None:
            def part(k: int) -> None:
                for sample in samples[k :: options.threads]:
                    function(sample)

            list(pool.map(part, range(options.threads)))

        tasks = {name: (lambda f=function: run(f)) for name, function in variants().items()}
        for task in tasks.values():
            task()
        times = interleave(tasks, options.repeat)
    rows = []
    for name, found in times.items():
        ratios = sorted(full / mine for full, mine in zip(times["full"].wall, found.wall, strict=True))
        rows.append(
            (
                name,
                *spread([images / seconds for seconds in found.wall], 4),
                f"{ratios[len(ratios) // 2]:.2f}x",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                f"{1000 * sorted(found.cpu)[len(found.cpu) // 2] / images:.2f}",
            )
        )
    megapixels = sum(np.prod(size_from_header(data) or (1, 1)) for data in files) / len(files) / 1e6
    head = (
        f"{title}: {images} images per round, {megapixels:.2f} MP, {options.threads} threads, {options.repeat} rounds"
    )
    columns = ("", "images/s: min", "median", "max", "of full", "spread", "CPU ms/image")
    table(head, columns, rows, peer="full")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of JPEG files (default: mosaics of examples/data)")
    parser.add_argument("--images", type=int, default=5000, help="a round (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--sets", nargs="*", default=["imagenet", "q60", "2.4MP", "11MP"], help="which of the sets")
    options = parse(parser, {"images": 100, "repeat": 2, "sets": ["imagenet"]})
    with folder(None) as where:
        write_listing(options.data, where / "files.txt", "as they are", 0, 1)
        paths = [line.rpartition(" ")[0] for line in (where / "files.txt").read_text().splitlines()]
        files = [Path(path).read_bytes() for path in paths]
    sets: dict[str, tuple[Callable[[], list[bytes]], int]] = {
        "imagenet": (lambda: files, options.images),
        "q60": (lambda: recoded(files, 60), options.images),
        "2.4MP": (lambda: mosaics(files, (1792, 1344), 40, 85), options.images // 10),
        "11MP": (lambda: mosaics(files, (3840, 2880), 10, 90), options.images // 50),
    }
    for name in options.sets:
        make, images = sets[name]
        measure(name, make(), options, max(images, 1))


if __name__ == "__main__":
    main()
