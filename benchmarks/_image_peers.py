"""The peers of ``images.py``: each in a process of its own, which makes a pass over the images whenever it is told to.

Run by ``images.py``: ``python _image_peers.py NAME LISTING WORK``. It prints one line of JSON when it is ready, and one
for each line that it reads: how many images the pass had, and how long it took. All do the same work: read a file,
decode it, take a random crop of 8 to 100 % of the area and 3/4 to 4/3 of the shape to 224 x 224, mirror half of them,
and deliver uint8 batches of 64 with labels. A peer whose package is not installed says so instead.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

SIZE, BATCH, WORKERS = 224, 64, 2
Pass = Callable[[], Iterable[Any]]
"""Makes the batches of one pass: arrays or tensors whose first dimension is the batch."""


def read_listing(path: Path) -> tuple[list[str], list[int]]:
    """Paths and labels."""
    pairs = [line.rsplit(" ", 1) for line in path.read_text().splitlines()]
    return [name for name, _ in pairs], [int(label) for _, label in pairs]


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


def opencv(data: bytes) -> np.ndarray[Any, Any]:
    """(224, 224, 3) uint8 RGB of an encoded image. Pixel areas are averaged where the crop shrinks."""
    import cv2

    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    left, top, w, h = crop_box(image.shape[1], image.shape[0])
    method = cv2.INTER_AREA if w >= SIZE and h >= SIZE else cv2.INTER_LINEAR
    image = cv2.resize(image[top : top + h, left : left + w], (SIZE, SIZE), interpolation=method)
    image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return cv2.flip(image, 1) if random.random() < 0.5 else image


def opencv_file(path: str) -> np.ndarray[Any, Any]:
    with open(path, "rb") as file:
        return opencv(file.read())


def penstock(listing: Path, work: Path, executor: str = "auto", processes: int = WORKERS) -> Pass:
    import penstock as ps
    from penstock.images.transforms import HorizontalFlip, RandomResizedCrop

    manifest = ps.Manifest.open(listing, cache_dir=work)
    dataset = ps.ImageDataset(ps.RankDataset(manifest, seed=0), transform=[RandomResizedCrop(SIZE), HorizontalFlip()])
    more: dict[str, Any] = {} if executor == "auto" else {"executor": executor}
    if processes < WORKERS:
        more["threads_per_worker"] = WORKERS // processes
    if executor != "thread":
        more["persistent_workers"] = True
    loader: Any = ps.DataLoader(dataset, BATCH, num_workers=processes, **more)
    return lambda: (images for images, _ in loader)


def penstock_without_extension(listing: Path, work: Path) -> Pass:
    """As where there was no compiler: whole images are decoded."""
    sys.modules["penstock.images._jpeg"] = None  # type: ignore[assignment]  # an ImportError from now on
    batches = penstock(listing, work)
    from penstock.images import native

    assert not native.is_available()
    return batches


def decode_alone(listing: Path, work: Path) -> Pass:
    """What nobody who decodes whole images can be faster than: reading and decoding, nothing else."""
    import simplejpeg

    def decode(path: str) -> int:
        with open(path, "rb") as file:
            return len(simplejpeg.decode_jpeg(file.read(), "RGB")) > 0

    paths, _ = read_listing(listing)
    pool = ThreadPoolExecutor(WORKERS)

    def batches() -> Iterator[list[int]]:
        parts = [paths[begin::WORKERS] for begin in range(WORKERS)]  # one job a thread, so that nothing is handed over
        yield from pool.map(lambda part: [decode(path) for path in part], parts)

    return batches


def torch_loader(listing: Path, work: Path, kind: str) -> Pass:
    import torch
    from torch.utils.data import DataLoader, Dataset

    paths, labels = read_listing(listing)

    def pillow() -> Callable[[str], Any]:
        from PIL import Image
        from torchvision.transforms import v2

        chain = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        return lambda path: chain(Image.open(path).convert("RGB"))

    make = pillow() if kind == "pillow" else lambda path: torch.from_numpy(opencv_file(path)).permute(2, 0, 1)

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            return make(paths[index]), labels[index]

    loader = DataLoader(Images(), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4)
    return lambda: (images for images, _ in loader)


def webdataset(listing: Path, work: Path) -> Pass:
    import webdataset as wds

    paths, labels = read_listing(listing)
    if not list(work.glob("wds-*.tar")):
        with wds.ShardWriter(f"{work}/wds-%03d.tar", maxcount=max(1, len(paths) // 8), verbose=0) as writer:
            for number, (path, label) in enumerate(zip(paths, labels, strict=True)):
                writer.write({"__key__": f"{number:08d}", "jpg": Path(path).read_bytes(), "cls": label})
    shards = sorted(map(str, work.glob("wds-*.tar")))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(256).to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(opencv, int).batched(BATCH)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True, prefetch_factor=4)
    return lambda: (batch[0] for batch in loader)


def litdata(listing: Path, work: Path) -> Pass:
    import litdata as ld

    paths, labels = read_listing(listing)
    folder = work / "litdata"
    if not folder.exists():
        pairs = list(zip(paths, labels, strict=True))
        ld.optimize(read_pair, pairs, str(folder), chunk_bytes="16MB", num_workers=1, verbose=False)

    dataset = ld.StreamingDataset(str(folder), shuffle=True)
    more: dict[str, Any] = {"num_workers": WORKERS, "prefetch_factor": 4, "persistent_workers": True}
    loader = ld.StreamingDataLoader(dataset, batch_size=BATCH, collate_fn=decode_pairs, **more)
    return lambda: (images for images, _ in loader)


def read_pair(pair: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(pair[0]).read_bytes(), "label": pair[1]}


def decode_pairs(items: list[dict[str, Any]]) -> Any:
    """A batch, made in a worker."""
    return np.stack([opencv(item["image"]) for item in items]), [item["label"] for item in items]


def grain(listing: Path, work: Path) -> Pass:
    import grain

    paths, labels = read_listing(listing)
    source = grain.MapDataset.source(list(zip(paths, labels, strict=True))).seed(0).shuffle()
    mapped = source.map(lambda pair: (opencv_file(pair[0]), pair[1])).batch(BATCH)
    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=8)
    return lambda: (images for images, _ in mapped.to_iter_dataset(options))


def spdl(listing: Path, work: Path) -> Pass:
    from spdl.pipeline import PipelineBuilder

    paths, _ = read_listing(listing)

    def shuffled() -> Iterator[str]:
        yield from random.sample(paths, len(paths))

    def batches() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(shuffled()).pipe(opencv_file, concurrency=WORKERS)
        pipeline = builder.aggregate(BATCH).pipe(np.stack).add_sink(4).build(num_threads=WORKERS)
        with pipeline.auto_stop():
            yield from pipeline

    return batches


def dali(listing: Path, work: Path) -> Pass:
    from nvidia.dali import fn, pipeline_def, types

    paths, labels = read_listing(listing)

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None, prefetch_queue_depth=2)
    def pipe() -> Any:
        data, label = fn.readers.file(files=paths, labels=labels, random_shuffle=True, name="files")
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


def ffcv(listing: Path, work: Path) -> Pass:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip
    from ffcv.writer import DatasetWriter

    paths, labels = read_listing(listing)
    where = work / "images.beton"
    if not where.exists():
        import cv2

        class Images:
            def __len__(self) -> int:
                return len(paths)

            def __getitem__(self, index: int) -> Any:
                return cv2.cvtColor(cv2.imread(paths[index]), cv2.COLOR_BGR2RGB), labels[index]

        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=95), "label": IntField()}
        DatasetWriter(str(where), fields, num_workers=1).from_indexed_dataset(Images())
    chain = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
    loader = Loader(str(where), BATCH, WORKERS, order=OrderOption.RANDOM, os_cache=True, pipelines={"image": chain})
    return lambda: (images for images, _ in loader)


PEERS: dict[str, tuple[str, Callable[[Path, Path], Pass]]] = {
    "penstock": ("penstock", penstock),
    "penstock, one process": ("penstock", lambda listing, work: penstock(listing, work, "process", processes=1)),
    "penstock, thread": ("penstock", lambda listing, work: penstock(listing, work, "thread")),
    "penstock, no extension": ("penstock", penstock_without_extension),
    "decode alone": ("simplejpeg", decode_alone),
    "torch + Pillow": ("torch", lambda listing, work: torch_loader(listing, work, "pillow")),
    "torch + OpenCV": ("torch", lambda listing, work: torch_loader(listing, work, "opencv")),
    "WebDataset": ("webdataset", webdataset),
    "LitData": ("litdata", litdata),
    "Grain": ("grain", grain),
    "SPDL": ("spdl", spdl),
    "DALI, CPU": ("nvidia-dali-cuda120", dali),
    "FFCV": ("ffcv", ffcv),
}
"""By name: the package whose version is printed, and what prepares a peer."""


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
    name, listing, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    package, prepare = PEERS[name]
    try:
        import cv2

        cv2.setNumThreads(0)
        batches = prepare(listing, work)
        answer: dict[str, Any] = {"ready": importlib.metadata.version(package) if package != "penstock" else "here"}
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
