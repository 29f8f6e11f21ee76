"""The files that ``images.py`` and its like measure: photographs, others made of them, small ones."""

from __future__ import annotations

import os
import random
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np

__all__ = ["CIFAR", "KINDS", "MOSAICS", "drop", "read_listing", "write_listing"]

CIFAR = Path(__file__).parent.parent / "examples" / "data" / "cifar10-small.tar.xz"
MOSAICS = {"2.4 megapixels": (1272, 1888), "11 megapixels": (2704, 4064)}
KINDS = {
    "as they are": "unmodified",
    "web": "recompressed at quality 60 to 75",
    **{size: f"mosaics of {size}" for size in MOSAICS},
    "small": "32 x 32 pixels",
    "small shards": "32 x 32 pixels, in tar shards, MDS shards or LitData's chunks",
    "small arrays": "32 x 32 pixels, decoded before",
    "cold": "copies that are read once and not in the page cache",
    "shards": "in tar shards",
}
"""The kinds of files, and how the titles of tables describe them."""


def write_listing(data: Path | None, where: Path, kind: str, count: int, least: int) -> tuple[int, int]:
    """Absolute paths of the JPEGs in a folder or tar archive, or of others that are made of them, each with a label,
    over and over until there are `least` lines; the number of files, and of lines.

    `count` is the number of mosaics. Of small files there are no more than `least`.
    """
    made = where.parent / "made"
    if kind.startswith("small") or (data is not None and data.is_file()):
        files = jpegs(unpacked(CIFAR if data is None else data, where.parent / "unpacked"))[:least]
    else:
        files = jpegs(examples(where.parent / "examples") if data is None else data)
    if kind in MOSAICS:
        files = list(mosaics(files, folder(made), kind, count))
    elif kind == "web":
        files = list(recoded(files, folder(made)))
    elif kind == "cold":
        files = list(copies(files, folder(made), least))
    times = -(-least // len(files))
    where.write_text("".join(f"{path.absolute()} {number}\n" for number, path in enumerate(files)) * times)
    return len(files), len(files) * times


def read_listing(path: Path) -> tuple[list[str], list[int]]:
    """Paths and labels."""
    pairs = [line.rsplit(" ", 1) for line in path.read_text().splitlines()]
    return [name for name, _ in pairs], [int(label) for _, label in pairs]


def jpegs(data: Path) -> list[Path]:
    """The JPEG files below a folder, sorted."""
    files = sorted(path for path in data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{data}: no JPEG files")
    return files


def folder(path: Path) -> Path:
    """A new folder."""
    path.mkdir()
    return path


def unpacked(archive: Path, to: Path) -> Path:
    """The files of an archive."""
    with tarfile.open(archive) as opened:
        opened.extractall(to, filter="data")
    return to


def examples(to: Path) -> Path:
    """Mosaics of the small images of examples/data, 512 x 384, for want of photographs."""
    with tarfile.open(CIFAR) as archive:
        members = [archive.extractfile(info) for info in archive if info.name.endswith(".jpg")]
        data = [np.frombuffer(member.read(), np.uint8) for member in members if member is not None]
    tiles = [cv2.imdecode(one, cv2.IMREAD_COLOR) for one in data]
    to.mkdir()
    for number in range(500):
        chosen = np.random.default_rng(number).choice(len(tiles), (12, 16))
        mosaic = np.concatenate([np.concatenate([tiles[k] for k in row], 1) for row in chosen])
        cv2.imwrite(str(to / f"{number:03d}.jpg"), mosaic, [cv2.IMWRITE_JPEG_QUALITY, 90])
    return to


def recoded(files: list[Path], to: Path) -> Iterator[Path]:
    """The same images at quality 60 to 75."""
    chosen = random.Random(0)
    for number, file in enumerate(files):
        path = to / f"{number:05d}.jpg"
        cv2.imwrite(str(path), cv2.imread(str(file)), [cv2.IMWRITE_JPEG_QUALITY, chosen.randint(60, 75)])
        yield path


def mosaics(files: list[Path], to: Path, kind: str, count: int) -> Iterator[Path]:
    """Sixteen images in one, at quality 90."""
    chosen = random.Random(0)
    height, width = MOSAICS[kind]
    for number in range(count):
        tiles = [cv2.resize(cv2.imread(str(chosen.choice(files))), (width // 4, height // 4)) for _ in range(16)]
        image = np.concatenate([np.concatenate(tiles[row : row + 4], axis=1) for row in range(0, 16, 4)])
        path = to / f"{number:05d}.jpg"
        cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
        yield path


def copies(files: list[Path], to: Path, count: int) -> Iterator[Path]:
    """So many files that none is read twice in a round. They are on the disk: what is not yet is not dropped."""
    for number in range(count):
        yield Path(shutil.copyfile(files[number % len(files)], to / f"{number:05d}.jpg"))
    os.sync()


def drop(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Files leave the page cache, but for what somebody has mapped."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
