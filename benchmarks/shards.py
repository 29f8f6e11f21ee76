"""Tar shards beside webdataset: raw iteration, decoded batches, the index, random access.

CIFAR-10 and ImageNet JPEGs of the folder named by --data (``cifar10-jpg.tar.xz``, ``imagenet-sample/``), or without it
the small images of examples/data, over and over, and large ones made of them; packed by webdataset's own writer (whose
members have a PAX header each) and by ours. Everything is in the page cache, one process unless said.
"""

from __future__ import annotations

import itertools
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import webdataset as wds

from _common import arguments, folder, interleave, parse, spread, table
from penstock import DataLoader, ImageDataset
from penstock.datasets.shards import ShardDataset
from penstock.shards import ShardSet, ShardWriter, StreamShards

_BATCH = 64
_EXAMPLES = Path(__file__).parents[1] / "examples" / "data" / "cifar10-small.tar.xz"


def main() -> None:
    parser = arguments(__doc__, lines=20_000, repeat=5)
    parser.add_argument("--data", type=Path, help="folder of the images")
    options = parse(parser, {"lines": 500, "repeat": 1})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with folder(options.dir) as where:
        count = options.lines
        images = imagenet(options.data) if options.data else large()
        sets = {
            "CIFAR-10, webdataset's writer": make(
                where / "cifar-wds", cifar(options.data, count), wds.TarWriter, count
            ),
            "CIFAR-10, our writer": make(where / "cifar", cifar(options.data, count), None, count),
            f"{'ImageNet' if options.data else 'large'}, our writer": make(where / "imagenet", images, None, 500),
        }
        raw(sets, options.repeat)
        index(sets, options.repeat)
        access(sets, options.repeat)
        decoded(sets, max(3, options.repeat // 2))


def cifar(data: Path | None, count: int) -> Iterator[dict[str, Any]]:
    """So many CIFAR-10 images."""
    images = small(_EXAMPLES if data is None else data / "cifar10-jpg.tar.xz")
    if data is None:
        images = itertools.cycle(images)
    for number, image in enumerate(itertools.islice(images, count)):
        yield {"__key__": f"{number:06d}", "jpg": image, "cls": number % 10}


def small(archive: Path) -> Iterator[bytes]:
    """The JPEGs of an archive."""
    with tarfile.open(archive) as opened:
        for info in opened:
            if info.name.endswith(".jpg"):
                file = opened.extractfile(info)
                assert file is not None
                yield file.read()


def large() -> Iterator[dict[str, Any]]:
    """Mosaics of small images, 512 x 384, of about 110 kB."""
    tiles = [cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR) for image in small(_EXAMPLES)]
    for number in range(500):
        chosen = np.random.default_rng(number).choice(len(tiles), (12, 16))
        mosaic = np.concatenate([np.concatenate([tiles[k] for k in row], 1) for row in chosen])
        encoded = cv2.imencode(".jpg", mosaic, [cv2.IMWRITE_JPEG_QUALITY, 90])[1]
        yield {"__key__": f"{number:06d}", "jpg": encoded.tobytes(), "cls": number}


def imagenet(data: Path) -> Iterator[dict[str, Any]]:
    """All images of the sample."""
    for number, path in enumerate(sorted((data / "imagenet-sample").glob("*.JPEG"))):
        yield {"__key__": f"{number:06d}", "jpg": path.read_bytes(), "cls": number}


def make(where: Path, samples: Iterator[dict[str, Any]], writer: Any, total: int) -> list[str]:
    """Two shards, since webdataset's workers need one each."""
    where.mkdir()
    pattern, count = str(where / "s-%04d.tar"), -(-total // 2)
    if writer is None:
        with ShardWriter(pattern, maxcount=count) as sink:
            for sample in samples:
                sink.write(sample)
    else:
        with wds.ShardWriter(pattern, maxcount=count, verbose=0) as sink:
            for sample in samples:
                sink.write(sample)
    return sorted(str(path) for path in where.glob("*.tar"))


def drain(source: Any) -> int:
    """Iterate and count."""
    count = 0
    for _ in source:
        count += 1
    return count


def theirs(paths: list[str]) -> Any:
    return wds.WebDataset(paths, shardshuffle=False, workersplitter=wds.split_by_worker)


def rates(count: int, samples: Any, base: str) -> list[tuple[str, ...]]:
    """Rows of a table."""
    slow = samples[base].median
    return [
        (
            name,
            *spread([count / s for s in one.wall]),
            f"{slow / one.median:.3g}x",
            f"{count * len(one.cpu) / sum(one.cpu):.3g}" if sum(one.cpu) else "-",
        )
        for name, one in samples.items()
    ]


COLUMNS = ["what", "samples/s min", "median", "max", "of webdataset", "samples per CPU s"]


def raw(sets: dict[str, list[str]], repeat: int) -> None:
    """Bytes of every sample, in order."""
    for name, paths in sets.items():
        count = len(ShardSet(paths, progress=False))
        peers: dict[str, Callable[[], Any]] = {
            "webdataset": lambda p=paths: drain(theirs(p)),
            "StreamShards": lambda p=paths: drain(StreamShards(p, shuffle="none")),
            "ShardSet, in order": lambda p=paths: drain(ShardSet(p, progress=False)),
        }
        samples = interleave(peers, repeat)
        bar = 15 if name.startswith("CIFAR") else 5
        table(
            f"Raw iteration: {name}, {count:,} samples; bar: {bar}x",
            COLUMNS,
            rates(count, samples, "webdataset"),
            peer="webdataset",
        )


def index(sets: dict[str, list[str]], repeat: int) -> None:
    """The index, written and synced."""
    rows = []
    for name, paths in sets.items():
        size = sum(Path(path).stat().st_size for path in paths)
        one = interleave({name: lambda p=paths: build(p)}, repeat)[name]  # several shards at a time
        rows.append((name, f"{size / 1e6:,.0f} MB", *spread([size / 1e9 / s for s in one.wall])))
    table("Index build, synced to disk; bar: 1 GB/s", ["what", "size", "GB/s min", "median", "max"], rows)


def build(paths: list[str]) -> None:
    for path in paths:
        Path(path + ".pidx").unlink(missing_ok=True)
    ShardSet(paths, progress=False)


def access(sets: dict[str, list[str]], repeat: int) -> None:
    """Samples at random, singly and in batches."""
    rows = []
    for name, paths in sets.items():
        shards = ShardSet(paths, progress=False)
        order = np.random.default_rng(0).permutation(len(shards))
        numbers = order.tolist()
        batches = [order[i : i + _BATCH] for i in range(0, len(order), _BATCH)]
        peers: dict[str, Callable[[], Any]] = {
            "shards[i]": lambda s=shards, o=numbers: [None for i in o if s[i] is None],
            f"shards.records, {_BATCH} at a time": lambda s=shards, b=batches: [
                None for i in b if s.records(i) is None
            ],
        }
        for what, one in interleave(peers, repeat).items():
            rows.append((name, what, *spread([len(order) / s for s in one.wall])))
    table("Random access; bar: 50 k samples/s", ["shards", "what", "samples/s min", "median", "max"], rows)


def decoded(sets: dict[str, list[str]], repeat: int) -> None:
    """Images decoded to RGB, 224 x 224 if they are large, in stacked batches, with two workers."""
    for name, paths in list(sets.items())[1:]:
        paths = paths * (1 if name.startswith("CIFAR") else 4)  # else starting workers is a good part of it
        count = len(ShardSet(paths, progress=False))
        size = None if name.startswith("CIFAR") else 224
        peers: dict[str, Callable[[], Any]] = {
            "webdataset": lambda p=paths, s=size: drain(
                wds.WebLoader(
                    theirs(p).decode("pil").to_tuple("jpg", "cls").map_tuple(Resize(s), None).batched(_BATCH),
                    batch_size=None,
                    num_workers=2,
                )
            ),
            "ShardDataset, auto": lambda p=paths, s=size: drain(loader(p, s)),
            "ShardDataset, processes": lambda p=paths, s=size: drain(loader(p, s, executor="process")),
        }
        samples = interleave(peers, repeat)
        what = f"RGB{' 224 x 224' if size else ''}, batches of {_BATCH}, 2 workers: {name}; bar: 1.5x"
        table(what, COLUMNS, rates(count, samples, "webdataset"), peer="webdataset")


def loader(paths: list[str], size: int | None, **options: Any) -> DataLoader[Any]:
    """Batches of images and labels."""
    images = ImageDataset(ShardDataset(paths, progress=False), size=size)
    return DataLoader(images, batch_size=_BATCH, num_workers=2, **options)


class Resize:
    """A PIL image to an array, resized if asked."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        return np.asarray(image if self.size is None else image.resize((self.size, self.size)))


if __name__ == "__main__":
    main()
