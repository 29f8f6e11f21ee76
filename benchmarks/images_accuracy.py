"""What the fast path of images costs in accuracy: pixels beside Pillow's, and a network trained on either.

``--part psnr``: one random-resized-crop box for each JPEG, resized to each target size. The reference is Pillow's
antialiased resize of that box of the whole image; beside our region decode and resize stand the same without the C
extension, and what other programs do. In dB, more is better; 40 dB is a typical error of 2.5 grey levels of 255.

``--part cifar``: a small network on real CIFAR-10 JPEGs, once on `ImageDataset` with everything fused, and once on
Pillow's decode, crop and resize, normalised with NumPy and collated by torch. Crops, flips, order and initial weights
of a seed are the same in both, so only pixels differ. Each is tested on its own path's images and on the other's.
With ``--side 128`` the images are enlarged first, so that crops are decoded at a half or a quarter.

    python benchmarks/images_accuracy.py --data ~/imagenet-sample --cifar ~/cifar10-jpg.tar.xz
    python benchmarks/images_accuracy.py --part psnr --data ~/imagenet-sample --kind "2.4 megapixels"
    python benchmarks/images_accuracy.py --part cifar --cifar ~/cifar10-jpg.tar.xz --side 128
"""

from __future__ import annotations

import io
import json
import math
import random
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy

import penstock as ps
from _common import arguments, folder, parse, table
from _image_files import CIFAR, MOSAICS, write_listing
from penstock.images import native
from penstock.images.region import Box, decode_region
from penstock.images.transforms import HorizontalFlip, Normalize, RandomResizedCrop, Resize, ToTensor
from penstock.images.transforms.view import View, render
from penstock.random import generator

Array = np.ndarray[Any, Any]

TARGETS = (112, 160, 224, 448)
SAME = 99.0
"""dB that images count as which do not differ at all."""

SIDE, BATCH = 32, 256
SCALE, RATIO = (0.5, 1.0), (3 / 4, 4 / 3)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


def random_box(width: int, height: int, scale: Sequence[float], draw: Callable[[], float]) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) as RandomResizedCrop draws it, number by number."""
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(10):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * draw())
        shape = math.exp(low + (high - low) * draw())
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(draw() * (height - h + 1)), int(draw() * (width - w + 1))
            return left, top, left + w, top + h
    shape = min(max(width / height, RATIO[0]), RATIO[1])
    w, h = min(width, max(1, round(height * shape))), min(height, max(1, round(width / shape)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# Pixels: ways from the bytes of a file to the pixels of a box at a size.


def ours(data: bytes, box: Box, size: int) -> Array:
    """What a chain of RandomResizedCrop does: decode the region, shrunk if that is enough, and resize once."""
    pixels, inner = decode_region(data, box, target=(size, size))
    return render(pixels, inner, View(box, (size, size), resized=True))


def opencv(data: bytes, box: Box, size: int, area: bool = True) -> Array:
    """Everything decoded; areas averaged where the crop shrinks in both directions, else interpolated."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    left, top, right, bottom = map(int, box)
    area = area and right - left >= size and bottom - top >= size
    method = cv2.INTER_AREA if area else cv2.INTER_LINEAR
    image = cv2.resize(image[top:bottom, left:right], (size, size), interpolation=method)
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def opencv_linear(data: bytes, box: Box, size: int) -> Array:
    """As albumentations unless told otherwise: of whatever shrinks, the nearest four pixels count."""
    return opencv(data, box, size, area=False)


def pillow_crop(data: bytes, box: Box, size: int) -> Array:
    """As torchvision: cropped first, so that pixels beside the crop never count."""
    left, top, right, bottom = map(int, box)
    image = Image.open(io.BytesIO(data)).convert("RGB").crop((left, top, right, bottom))
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


def pillow_fast(data: bytes, box: Box, size: int, gap: float = 1.0) -> Array:
    """Shrunk while it is decoded (draft), then by whole factors (reduce), then resized."""
    image = Image.open(io.BytesIO(data))
    (width, height), (left, top, right, bottom) = image.size, box
    image.draft("RGB", (math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))))
    x, y = image.size[0] / width, image.size[1] / height
    inner = (left * x, top * y, min(right * x, image.size[0]), min(bottom * y, image.size[1]))
    found = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=inner, reducing_gap=gap)
    return np.asarray(found)


def pillow_thumbnail(data: bytes, box: Box, size: int) -> Array:
    """The same as Pillow's `thumbnail` sets it: whole factors only down to twice the size."""
    return pillow_fast(data, box, size, 2.0)


WAYS: dict[str, Callable[[bytes, Box, int], Array]] = {
    "Pillow, crop and resize": pillow_crop,
    "Pillow, draft and reduce, gap 2": pillow_thumbnail,
    "Pillow, draft and reduce, gap 1": pillow_fast,
    "OpenCV, area or linear": opencv,
    "OpenCV, linear": opencv_linear,
    "penstock": ours,
}
_ALONE = "penstock, no extension"


def psnr(one: Array, other: Array) -> float:
    """Of two uint8 images, in dB."""
    error = float(np.mean((one.astype(np.float32) - other.astype(np.float32)) ** 2))
    return SAME if error == 0 else min(SAME, 10 * math.log10(255**2 / error))


def distances(paths: Sequence[str], names: Sequence[str]) -> dict[str, list[list[float]]]:
    """Of each way and target, the PSNR of every image."""
    found: dict[str, list[list[float]]] = {name: [[] for _ in TARGETS] for name in names}
    for number, path in enumerate(paths):
        data = Path(path).read_bytes()
        image = Image.open(io.BytesIO(data)).convert("RGB")
        box = random_box(*image.size, (0.08, 1.0), random.Random(number).random)
        for k, size in enumerate(TARGETS):
            wanted = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
            for name in names:
                found[name][k].append(psnr(WAYS[name](data, box, size), wanted))
    return found


def report_psnr(listing: Path, kind: str) -> None:
    """The tables, one for each target size."""
    paths = [line.rpartition(" ")[0] for line in listing.read_text().splitlines()]
    found = distances(paths, list(WAYS))
    if native.is_available():
        # In a process that never sees the extension, as if it had not been built.
        code = "import sys; sys.modules['penstock.images._jpeg'] = None; import images_accuracy as a; a.alone()"
        given = json.dumps(paths)
        ran = subprocess.run([sys.executable, "-c", code], input=given, cwd=Path(__file__).parent, text=True, stdout=-1)
        ran.check_returncode()
        found[_ALONE] = json.loads(ran.stdout)
    else:
        found = {_ALONE if name == "penstock" else name: values for name, values in found.items()}
    for k, size in enumerate(TARGETS):
        shrinks, shrunk = shrinking(paths, size)
        title = f"PSNR in dB of {len(paths)} crops ({kind}) to {size} x {size};\n{shrinks:.0%} of them are larger than "
        title += f"that, {shrunk:.0%} twice as large or more"
        rows = []
        for name, values in sorted(found.items(), key=lambda item: -statistics.mean(item[1][k])):
            low = np.percentile(values[k], 5)
            same = f"{sum(value == SAME for value in values[k]) / len(paths):.0%}"
            rows.append((name, f"{statistics.mean(values[k]):.1f}", f"{low:.1f}", f"{min(values[k]):.1f}", same))
        table(title, ("against Pillow's resize of the box", "mean", "5th percentile", "min", "identical"), rows)


def shrinking(paths: Sequence[str], size: int) -> tuple[float, float]:
    """Shares of crops that are larger than the target, and twice as large, in both directions."""
    sides = []
    for number, path in enumerate(paths):
        left, top, right, bottom = random_box(*Image.open(path).size, (0.08, 1.0), random.Random(number).random)
        sides.append(min(right - left, bottom - top))
    return sum(side > size for side in sides) / len(sides), sum(side >= 2 * size for side in sides) / len(sides)


def alone() -> None:
    """Of the paths on standard input, our distances, to standard output."""
    assert not native.is_available()
    json.dump(distances(json.load(sys.stdin), ["penstock"])["penstock"], sys.stdout)


# Training.


class Plain:
    """A record to normalised pixels, by Pillow and NumPy; with `augment` from a random crop, mirrored or not."""

    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __call__(self, record: Any) -> tuple[torch.Tensor, int]:
        image = Image.open(record.path).convert("RGB")
        box, flip = (0, 0, *image.size), False
        if self.augment:
            draw = generator().random
            box, flip = random_box(*image.size, SCALE, draw), draw() < 0.5
        image = image.crop(box).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        if flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = (np.asarray(image, np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), record.label


def batches(path: str, listing: Path, seed: int | None) -> Any:
    """A loader: for training if there is a seed, else of the test images in their order."""
    train = seed is not None
    share: dict[str, Any] = {"rank": 0, "world_size": 1, "seed": seed or 0, "shuffle": "global" if train else "none"}
    how: dict[str, Any] = {"num_workers": 1, "drop_last": train}
    if path == "plain":
        return ps.DataLoader(ps.RankDataset(str(listing), load=Plain(train), **share), BATCH, **how)
    chain = [RandomResizedCrop(SIDE, SCALE, RATIO), HorizontalFlip()] if train else [Resize((SIDE, SIDE))]
    records = ps.RankDataset(str(listing), **share)
    return ps.DataLoader(ps.ImageDataset(records, transform=[*chain, ToTensor(), Normalize(MEAN, STD)]), BATCH, **how)


def network(seed: int) -> nn.Module:
    """Some 160,000 parameters, the same for the same seed."""
    torch.manual_seed(seed)

    def block(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*block(3, 24, 4, 2), *block(24, 48), nn.MaxPool2d(2), *block(48, 96), nn.MaxPool2d(2), *block(96, 128)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return net.to(memory_format=torch.channels_last)


def forward(net: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        scores: torch.Tensor = net(images.contiguous(memory_format=torch.channels_last))
    return scores.float()


def train(path: str, listing: Path, seed: int, epochs: int) -> nn.Module:
    """A network, trained on one of the paths."""
    net = network(seed)
    loader = batches(path, listing, seed)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=epochs * len(loader))
    with loader:
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for images, labels in loader:
                loss = cross_entropy(forward(net, images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return net.eval()


@torch.no_grad()
def accuracy(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """In percent."""
    scores = torch.cat([forward(net, part) for part in images.split(500)])
    return 100 * float((scores.argmax(1) == labels).float().mean())


def unpack(archive: Path, to: Path, side: int) -> None:
    """train/CLASS/*.jpg and test/CLASS/*.jpg, enlarged if they are smaller than `side`, and a manifest of each."""
    with tarfile.open(archive) as tar:
        tar.extractall(to, filter="data")
    for split in ("train", "test"):
        paths = sorted((to / split).glob("*/*.jpg"))
        labels = {name: label for label, name in enumerate(sorted({path.parent.name for path in paths}))}
        (to / f"{split}.txt").write_text("".join(f"{path} {labels[path.parent.name]}\n" for path in paths))
        for path in paths if side > SIDE else []:
            image = cv2.resize(cv2.imread(str(path)), (side, side), interpolation=cv2.INTER_CUBIC)
            cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 90])


def same_crops(listing: Path) -> float:
    """How many grey levels the first training batches of the paths are apart; crops that differ are tens apart."""
    found = [next(iter(batches(path, listing, 0)))[0] for path in ("fast", "plain")]
    levels = float(((found[0] - found[1]).abs() * torch.tensor(STD)[:, None, None]).mean()) * 255
    if levels > 6:
        raise SystemExit(f"the paths do not see the same crops: {levels:.1f} grey levels apart")
    return levels


def report_cifar(archive: Path, work: Path, side: int, seeds: int, epochs: int) -> None:
    """The table of accuracies."""
    unpack(archive, work, side)
    tests: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for path in ("fast", "plain"):
        with batches(path, work / "test.txt", None) as loader:
            images, labels = zip(*((x.clone(), y.clone()) for x, y in loader), strict=True)
        tests[path] = torch.cat(images), torch.cat(labels)
    levels = same_crops(work / "train.txt")
    rows, columns = [], ("fast", "plain", "difference", "fast on plain's images", "plain on fast's images")
    for seed in range(seeds):
        nets = {path: train(path, work / "train.txt", seed, epochs) for path in ("fast", "plain")}
        fast, plain = (accuracy(nets[path], *tests[path]) for path in ("fast", "plain"))
        crossed = accuracy(nets["fast"], *tests["plain"]), accuracy(nets["plain"], *tests["fast"])
        rows.append((fast, plain, fast - plain, *crossed))
        print(f"seed {seed}: fast {fast:.2f} %, plain {plain:.2f} %", flush=True)
    cells = [(str(seed), *(f"{value:.2f}" for value in row)) for seed, row in enumerate(rows)]
    cells.append(("mean", *(f"{statistics.mean(column):.2f}" for column in zip(*rows, strict=True))))
    if seeds > 1:
        cells.append(("standard deviation", *(f"{statistics.stdev(column):.2f}" for column in zip(*rows, strict=True))))
    title = f"CIFAR-10, {side} x {side} JPEGs, test accuracy in percent after {epochs} epochs; "
    title += f"the paths' pixels are {levels:.2f} grey levels apart"
    table(title, ("seed", *columns), cells)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=["psnr", "cifar", "both"], default="both", help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder of JPEG files (default: mosaics of examples/data)")
    parser.add_argument("--kind", choices=["as they are", "web", *MOSAICS], default="as they are")
    parser.add_argument("--count", type=int, default=100, help="mosaics to be made (default: %(default)s)")
    parser.add_argument("--cifar", type=Path, default=CIFAR, help="archive of train/CLASS/*.jpg, test/...")
    parser.add_argument("--side", type=int, default=SIDE, help="enlarge its images to this (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="(default: %(default)s)")
    options = parse(parser, {"part": "psnr"})
    torch.set_num_threads(1)  # sums in one order, so that a seed repeats
    torch.use_deterministic_algorithms(True)
    with folder(options.dir) as where:
        if options.part != "cifar":
            listing = where / "files.txt"
            write_listing(options.data, listing, options.kind, options.count, 1)
            if options.quick:
                listing.write_text("".join(listing.read_text().splitlines(keepends=True)[:20]))
            report_psnr(listing, options.kind)
        if options.part != "psnr":
            report_cifar(options.cifar, where / "cifar", options.side, options.seeds, options.epochs)


if __name__ == "__main__":
    main()
