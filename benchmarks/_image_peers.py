"""The peers of ``images.py``: each in a process of its own, which makes a pass over the images whenever it is told to.

Run by ``images.py``: ``python _image_peers.py NAME LISTING WORK KIND``. It prints a line of JSON when it is ready, and
one for each line that it reads: how many images the pass had, and how long it took. All do the same work: read a file,
decode it, take a random crop of 8 to 100 % of the area and 3/4 to 4/3 of the shape to 224 x 224, mirror half of them,
and deliver uint8 batches of 64 with labels. Small images are padded by 4 pixels and cut to their own size instead;
"small arrays" are their pixels, decoded before. A peer whose package is not installed says so.

A new row is a line in `ROWS`.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import os
import random
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from _image_files import KINDS, read_listing

SIZE, PADDING, BATCH, WORKERS = 224, 4, 64, 2
Pass = Callable[[], Iterable[Any]]
"""Makes the batches of one pass: arrays or tensors whose first dimension is the batch."""


@dataclass(frozen=True)
class Task:
    """What a peer has to do."""

    listing: Path
    work: Path
    """A folder of its own."""
    kind: str = "as they are"

    @property
    def small(self) -> bool:
        """Whether images are of 32 x 32, which are padded and shifted instead of cropped and resized."""
        return self.kind.startswith("small")

    def files(self) -> tuple[list[str], list[int]]:
        """Paths and labels."""
        return read_listing(self.listing)

    def shards(self) -> list[str]:
        """Eight tar files, which all that read such files share."""
        folder = self.listing.parent / "shards"
        if not folder.exists():
            folder.mkdir()
            paths, labels = self.files()
            each = -(-len(paths) // 8)
            for first in range(0, len(paths), each):
                write_tar(folder / f"{first // each:03d}.tar", paths[first : first + each], labels[first:], first)
            os.sync()
        return sorted(map(str, folder.glob("*.tar")))

    def arrays(self) -> tuple[str, str]:
        """One file of all pixels (images, height, width, RGB) and one of the labels, which all that read such share."""
        pixels, labels = (self.listing.with_name(name) for name in ("images.npy", "labels.npy"))
        if not labels.exists():
            import cv2

            paths, numbers = self.files()
            np.save(pixels, [cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB) for path in paths])
            np.save(labels, numbers)
            os.sync()
        return str(pixels), str(labels)


def write_tar(path: Path, files: list[str], labels: list[int], first: int) -> None:
    """Samples as WebDataset has them: KEY.jpg and KEY.cls."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (file, label) in enumerate(zip(files, labels, strict=False), first):
            for extension, data in (("jpg", Path(file).read_bytes()), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"{number:08d}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def crop_box(width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of torchvision's RandomResizedCrop."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


@dataclass(frozen=True)
class OpenCV:
    """The work by OpenCV: an encoded image in, uint8 RGB out; or only what comes after decoding."""

    small: bool
    shrink: str = "areas"
    """How pixels become fewer: by "areas" (where both sides do), by Pillow's "filter", or "linear", as if they grew."""

    def __call__(self, data: bytes) -> np.ndarray[Any, Any]:
        import cv2

        image = self.augmented(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR))
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)

    def augmented(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        import cv2

        image = self.shifted(image) if self.small else self.cropped(image)
        return cv2.flip(image, 1) if random.random() < 0.5 else np.ascontiguousarray(image)

    def shifted(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """RandomCrop(32, padding=4)."""
        import cv2

        top, left = random.randint(0, 2 * PADDING), random.randint(0, 2 * PADDING)
        padded = cv2.copyMakeBorder(image, *[PADDING] * 4, cv2.BORDER_CONSTANT)
        return padded[top : top + image.shape[0], left : left + image.shape[1]]

    def cropped(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """RandomResizedCrop(224)."""
        import cv2

        left, top, w, h = crop_box(image.shape[1], image.shape[0])
        part = image[top : top + h, left : left + w]
        if self.shrink == "filter":
            from PIL import Image

            return np.asarray(Image.fromarray(part).resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        smaller = self.shrink == "areas" and w >= SIZE and h >= SIZE
        return cv2.resize(part, (SIZE, SIZE), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_LINEAR)

    def file(self, path: str) -> np.ndarray[Any, Any]:
        with open(path, "rb") as file:
            return self(file.read())


def ours(
    source: str = "files", *, extension: bool = True, index: bool = False, packed: str = "", **options: Any
) -> Callable[[Task], Pass]:
    """Penstock, with arguments for the loader: two worker processes, unless these say else. `source` is what it reads,
    as the peers do: "files", "shards", "MDS" or "arrays"; or shards `packed` by ourselves with this option.
    """
    options = {"num_workers": WORKERS, **options}
    if options["num_workers"] and options.get("executor") != "thread":
        options["persistent_workers"] = True

    def prepare(task: Task) -> Pass:
        if not extension:  # as where there was no compiler: whole images are decoded
            sys.modules["penstock.images._jpeg"] = None  # type: ignore[assignment]  # an ImportError from now on
        import penstock as ps
        from penstock.images import native
        from penstock.images.transforms import HorizontalFlip, RandomCrop, RandomResizedCrop

        assert native.is_available() == extension, "the extension is not built"
        entries = None
        if source == "shards":
            records: Any = ps.ShardDataset(task.shards(), seed=0)
        elif source == "MDS":
            records = ps.MDSDataset(task.listing.with_name("mds"), images="bytes", seed=0)
        elif source == "arrays":
            pixels, labels = task.arrays()
            records = ps.ArrayDataset(pixels, labels=labels, seed=0)
        elif packed:
            from penstock.shards.pack import pack

            manifest = ps.Manifest.open(task.listing, cache_dir=task.work)
            count = -(-len(manifest) // 8)
            pack(manifest, task.work / "packed", max_count=count, progress=False, **{packed: True})
            records = ps.ShardDataset(str(task.work / "packed" / "train-*.tar"), seed=0)
        else:
            manifest = ps.Manifest.open(task.listing, cache_dir=task.work)
            records = ps.RankDataset(manifest, seed=0)
            if index:
                from penstock.images.entries import write_index

                entries = write_index(manifest, path=Path(task.work, "train.entries")).path
        crop = RandomCrop(32, padding=PADDING) if task.small else RandomResizedCrop(SIZE)
        dataset = ps.ImageDataset(records, transform=[crop, HorizontalFlip()], index=entries)
        loader: Any = ps.DataLoader(dataset, BATCH, **options)
        return lambda: (batch for batch, _ in loader)

    return prepare


def decode_alone(task: Task) -> Pass:
    """What nobody who decodes whole images can be faster than: reading and decoding, nothing else."""
    import simplejpeg

    def decode(path: str) -> int:
        with open(path, "rb") as file:
            return len(simplejpeg.decode_jpeg(file.read(), "RGB")) > 0

    paths, _ = task.files()
    pool = ThreadPoolExecutor(WORKERS)

    def batches() -> Iterator[list[int]]:
        parts = [paths[begin::WORKERS] for begin in range(WORKERS)]  # one job a thread, so that nothing is handed over
        yield from pool.map(lambda part: [decode(path) for path in part], parts)

    return batches


def torch_loader(task: Task, pillow: bool = False, arrays: bool = False) -> Pass:
    import torch
    from torch.utils.data import DataLoader, Dataset

    paths, labels = task.files()  # type: tuple[Any, Any]

    def by_pillow() -> Callable[[str], Any]:
        from PIL import Image
        from torchvision.transforms import v2

        crop = v2.RandomCrop(32, padding=PADDING) if task.small else v2.RandomResizedCrop(SIZE)
        chain = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
        return lambda path: chain(Image.open(path).convert("RGB"))

    def by_opencv(image: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda source: torch.from_numpy(image(source)).permute(2, 0, 1)

    opencv, sources = OpenCV(task.small), paths
    if arrays:
        sources, labels = (np.load(path, mmap_mode="r") for path in task.arrays())
    make = by_pillow() if pillow else by_opencv(opencv.augmented if arrays else opencv.file)

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            return make(sources[index]), labels[index]

    loader = DataLoader(Images(), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4)
    return lambda: (images for images, _ in loader)


def webdataset(task: Task) -> Pass:
    import webdataset as wds

    shards = task.shards()
    dataset = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(256).to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(OpenCV(task.small), int).batched(BATCH)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4)
    return lambda: (batch[0] for batch in loader)


def litdata(task: Task) -> Pass:
    import litdata as ld

    folder = task.work / "litdata"
    if not folder.exists():
        pairs = list(zip(*task.files(), strict=True))
        ld.optimize(read_pair, pairs, str(folder), chunk_bytes="16MB", num_workers=1, verbose=False)

    dataset = ld.StreamingDataset(str(folder), shuffle=True)
    more: dict[str, Any] = {"num_workers": WORKERS, "prefetch_factor": 4, "persistent_workers": True}
    collate = partial(decode_pairs, OpenCV(task.small))
    loader = ld.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=collate, **more)
    return lambda: (images for images, _ in loader)


def read_pair(pair: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(pair[0]).read_bytes(), "label": pair[1]}


def decode_pairs(decode: OpenCV, items: list[dict[str, Any]]) -> Any:
    """A batch, made in a worker."""
    return np.stack([decode(item["image"]) for item in items]), [item["label"] for item in items]


def mosaic(task: Task) -> Pass:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    folder = task.listing.with_name("mds")  # which ours reads, too
    with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}, size_limit="16MB") as sink:
        for pair in zip(*task.files(), strict=True):
            sink.write(read_pair(pair))
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    more: dict[str, Any] = {"num_workers": WORKERS, "prefetch_factor": 4, "persistent_workers": True}
    loader = DataLoader(dataset, BATCH, collate_fn=partial(decode_pairs, OpenCV(task.small)), **more)
    return lambda: (images for images, _ in loader)


def grain(task: Task, shrink: str = "areas") -> Pass:
    import grain

    decode = OpenCV(task.small, shrink)
    source = grain.MapDataset.source(list(zip(*task.files(), strict=True))).seed(0).shuffle()
    mapped = source.map(lambda pair: (decode.file(pair[0]), pair[1])).batch(BATCH)
    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=8)
    return lambda: (images for images, _ in mapped.to_iter_dataset(options))


def spdl(task: Task) -> Pass:
    from spdl.pipeline import PipelineBuilder

    paths, _ = task.files()
    decode = OpenCV(task.small)

    def shuffled() -> Iterator[str]:
        yield from random.sample(paths, len(paths))

    def batches() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(shuffled()).pipe(decode.file, concurrency=WORKERS)
        pipeline = builder.aggregate(BATCH).pipe(np.stack).add_sink(4).build(num_threads=WORKERS)
        with pipeline.auto_stop():
            yield from pipeline

    return batches


def dali(task: Task, shards: bool = False) -> Pass:
    from nvidia.dali import fn, pipeline_def, types

    paths, labels = task.files()

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=2)
    def pipe() -> Any:
        if shards:
            data, label = fn.readers.webdataset(paths=task.shards(), ext=["jpg", "cls"], random_shuffle=True)
        else:
            cold = task.kind == "cold"  # what it has mapped would stay in the page cache, for all peers
            data, label = fn.readers.file(files=paths, labels=labels, random_shuffle=True, dont_use_mmap=cold)
        if task.small:
            shift = fn.cast(fn.random.uniform(values=list(range(-PADDING, PADDING + 1)), shape=[2]), dtype=types.INT32)
            part: dict[str, Any] = {"start": shift, "shape": [32, 32], "axes": [0, 1], "out_of_bounds_policy": "pad"}
            images = fn.slice(fn.decoders.image(data), **part)
        else:
            images = fn.decoders.image_random_crop(data, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3])
            images = fn.resize(images, resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), label

    pipeline = pipe()
    pipeline.build()

    def batches() -> Iterator[Any]:
        """By hand: `run` goes on with two batches of the next pass, which would then be had for nothing."""
        count = len(paths) // BATCH
        for _ in range(min(2, count)):
            pipeline.schedule_run()
        for number in range(count):
            yield pipeline.share_outputs()[0].as_array()
            pipeline.release_outputs()
            if number + 2 < count:
                pipeline.schedule_run()

    return batches


def ffcv(task: Task, arrays: bool = False) -> Pass:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, RandomTranslate
    from ffcv.writer import DatasetWriter

    paths, labels = task.files()
    where = task.work / "images.beton"
    pixels = np.load(task.arrays()[0], mmap_mode="r") if arrays else None

    class Images:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            return Path(paths[index]).read_bytes() if pixels is None else pixels[index], labels[index]

    def as_it_is(destination: Any, data: bytes, malloc: Callable[[int], Any]) -> None:
        """A field of FFCV encodes pixels anew; the file is kept here."""
        import cv2

        encoded = np.frombuffer(data, np.uint8)
        destination["mode"] = 0  # JPEG
        destination["height"], destination["width"] = cv2.imdecode(encoded, cv2.IMREAD_COLOR).shape[:2]
        destination["data_ptr"], memory = malloc(len(encoded))
        memory[:] = encoded

    if not where.exists():
        image = RGBImageField(write_mode="raw" if arrays else "jpg")
        if not arrays:
            image.encode = as_it_is
        DatasetWriter(str(where), {"image": image, "label": IntField()}, num_workers=1).from_indexed_dataset(Images())
    chain: list[Any] = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
    if task.small:
        chain = [SimpleRGBImageDecoder(), RandomHorizontalFlip(), RandomTranslate(padding=PADDING)]
    loader = Loader(str(where), BATCH, WORKERS, order=OrderOption.RANDOM, os_cache=True, pipelines={"image": chain})
    return lambda: (images for images, _ in loader)


_SHARDS, _MDS, _ARRAYS = frozenset({"shards", "small shards"}), frozenset({"small shards"}), frozenset({"small arrays"})
_FILES = frozenset(KINDS) - _SHARDS - _ARRAYS
_PHOTOS = _FILES - {"small", "cold"}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    package: str
    """Whose version is printed."""
    antialias: str
    """Whether crops that shrink are antialiased, and how."""
    prepare: Callable[[Task], Pass]
    kinds: frozenset[str] = _FILES
    """Which files it is measured with."""

    @property
    def here(self) -> bool:
        """Whether it runs in Penstock's environment."""
        return self.package in ("penstock", "simplejpeg")


ROWS: dict[str, Row] = {
    "penstock": Row("penstock", "yes", ours()),
    "penstock, index": Row("penstock", "yes", ours(index=True), _PHOTOS),
    "penstock, inline": Row("penstock", "yes", ours(num_workers=0), _PHOTOS | {"small"}),
    "penstock, one process": Row("penstock", "yes", ours(num_workers=1, threads_per_worker=WORKERS)),
    "penstock, thread": Row("penstock", "yes", ours(executor="thread")),
    "penstock, auto": Row("penstock", "yes", ours(num_workers="auto")),
    "penstock, no extension": Row("penstock", "yes", ours(extension=False)),
    "penstock, shards": Row("penstock", "yes", ours("shards"), _SHARDS),
    "penstock, shards, index": Row("penstock", "yes", ours(packed="index_images"), frozenset({"shards"})),
    "penstock, shards, markers": Row("penstock", "yes", ours(packed="restart_markers"), frozenset({"shards"})),
    "MosaicML Streaming": Row("mosaicml-streaming", "areas", mosaic, _MDS),
    "penstock, MDS": Row("penstock", "yes", ours("MDS"), _MDS),
    "penstock, arrays": Row("penstock", "yes", ours("arrays"), _ARRAYS),
    "penstock, arrays, inline": Row("penstock", "yes", ours("arrays", num_workers=0), _ARRAYS),
    "penstock, arrays, auto": Row("penstock", "yes", ours("arrays", num_workers="auto"), _ARRAYS),
    "decode alone": Row("simplejpeg", "", decode_alone, _FILES | _SHARDS),
    "torch + Pillow": Row("torch", "yes", partial(torch_loader, pillow=True)),
    "torch + OpenCV": Row("torch", "areas", torch_loader),
    "torch, arrays": Row("torch", "areas", partial(torch_loader, arrays=True), _ARRAYS),
    "WebDataset": Row("webdataset", "areas", webdataset, _FILES | _SHARDS),
    "LitData": Row("litdata", "areas", litdata, _PHOTOS | {"small"} | _MDS),
    "Grain": Row("grain", "areas", grain),
    "Grain, antialiased": Row("grain", "yes", partial(grain, shrink="filter"), _PHOTOS),
    "Grain, linear": Row("grain", "no", partial(grain, shrink="linear"), _PHOTOS),
    "SPDL": Row("spdl", "areas", spdl),
    "DALI, CPU": Row("nvidia-dali-cuda120", "yes", dali),
    "DALI, tar": Row("nvidia-dali-cuda120", "yes", partial(dali, shards=True), _SHARDS),
    "FFCV": Row("ffcv", "areas", ffcv, _PHOTOS | {"small"}),
    "FFCV, raw": Row("ffcv", "areas", partial(ffcv, arrays=True), _ARRAYS),
}
"""By name, in the order in which they take turns. The first of ours that is measured is what others are compared to."""


def one_round(batches: Pass, least: int) -> dict[str, Any]:
    """Passes over the files, until there were so many images."""
    images, start = 0, time.perf_counter()
    while images < least:
        before = images
        images += sum(len(batch) for batch in batches())
        assert images > before, "an empty pass"
    return {"images": images, "seconds": time.perf_counter() - start}


def training(batches: Pass, least: int) -> dict[str, Any]:
    """How many times longer a step of a small model takes while batches are made, ten steps to a batch."""
    weights = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    state = np.ones((64, 256), np.float32)

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            for _ in range(20):  # a little arithmetic, a little Python
                np.tanh(state @ weights)
            sum(number * number for number in range(10_000))
        return (time.perf_counter() - start) / count

    alone, times, images = steps(200), [], 0
    while images < least:
        for batch in batches():
            images += len(batch)
            times.append(steps(10))
    return {"slower": sum(times) / len(times) / alone}


def main() -> None:
    name, listing, work, kind = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    row = ROWS[name]
    try:
        import cv2

        cv2.setNumThreads(0)
        batches = row.prepare(Task(Path(listing), Path(work), kind))
        version = "here" if row.package == "penstock" else importlib.metadata.version(row.package)
        answer: dict[str, Any] = {"ready": version}
    except Exception as error:
        answer = {"missing": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)
    if "missing" in answer:
        return
    for line in sys.stdin:
        train, images = line.startswith("train"), int(line.split()[-1])
        print(json.dumps((training if train else one_round)(batches, images)), file=answers, flush=True)
    os._exit(0)  # packages whose threads and processes would keep this one


if __name__ == "__main__":
    main()
