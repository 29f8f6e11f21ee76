"""Images straight into the batch: the same pixels everywhere, and no copy where none is needed."""

from __future__ import annotations

import os
import pickle
import queue
import random
import signal
import threading
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from full_run import full_only
from interpreter_support import METHODS
from PIL import Image

import penstock
from penstock import DataLoader, ImageDataset, LoadImage, Manifest, MPDataset, RankDataset
from penstock.datasets.image_batches import draws_of
from penstock.errors import ConfigError, ImageError
from penstock.images import native
from penstock.images.decode import read_image
from penstock.images.sample_record import SampleRecord
from penstock.images.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    SquarePad,
    ToTensor,
    VerticalFlip,
)
from penstock.loader.collate import Collate, SharedRows, batch_rows, thread
from penstock.loader.executors.process.ring import SharedFile, Slot
from penstock.loader.executors.threads import ThreadPool
from penstock.loader.make import Fetch, Maker
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.manifest import Record
from penstock.random import sample_scope

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHAINS: dict[str, list[Any]] = {
    "bytes": [RandomResizedCrop(48), HorizontalFlip()],
    "half": [RandomResizedCrop(48), HorizontalFlip(), ToTensor(torch.bfloat16), Normalize(MEAN, STD)],
    "planes": [Resize(56), CenterCrop(48), ToTensor(channels_last=False), RandomErasing(value="random")],
}
N = 24
BUILT = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")


@pytest.fixture(scope="module")
def manifest(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    files = sorted((data_dir / "imagenet-sample").glob("*.JPEG"))[:N]
    path = tmp_path_factory.mktemp("batches") / "meta.txt"
    path.write_text("".join(f"{file.name} {number}\n" for number, file in enumerate(files)))
    return Manifest.open(path, root=files[0].parent)


def epoch(dataset: Any, **how: Any) -> tuple[torch.Tensor, list[int]]:
    batches = list(DataLoader(dataset, seed=5, shuffle=True, **how))
    return torch.cat([images for images, _ in batches]), [int(n) for _, labels in batches for n in labels]


@full_only("workers for each", but=["planes"])
@pytest.mark.parametrize("chain", CHAINS)
def test_the_same_pixels_whichever_executor_and_batch_size(manifest: Manifest, chain: str) -> None:
    dataset = ImageDataset(manifest, transform=CHAINS[chain])
    expected, order = epoch(dataset, batch_size=1)
    assert sorted(order) == list(range(N))
    last = chain != "planes"
    for how in (
        {"batch_size": 8},
        {"batch_size": 7, "executor": "thread", "num_workers": 2},
        {"batch_size": 8, "num_workers": 2},
        {"batch_size": 5, "executor": "process", "num_workers": 2},
    ):
        found, labels = epoch(dataset, **how)
        assert labels == order
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected), how
        batch = next(iter(DataLoader(dataset, **how)))[0]
        assert batch.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@pytest.mark.parametrize("chain", CHAINS)
def test_items_by_hand_are_those_of_the_batch(manifest: Manifest, chain: str) -> None:
    dataset = ImageDataset(manifest, transform=CHAINS[chain])
    keys = [11 * number for number in range(N)]
    batch = dataset.load_samples(range(N), keys, into=lambda shape, dtype: torch.empty(shape, dtype=dtype))
    for number, key in enumerate(keys):
        with sample_scope(key):
            image, label = dataset[number]
        assert torch.equal(image, batch[number][0])
        assert label == batch[number][1]


def test_decoding_the_crop_gives_what_cropping_the_image_gives(manifest: Manifest) -> None:
    chain = Compose([RandomResizedCrop(224), HorizontalFlip(), ToTensor()])
    dataset = ImageDataset(manifest, transform=chain)
    compared = 0
    for number in range(N):
        pixels = read_image(manifest[number].path)
        if max(pixels.shape) >= 2 * 224 + 56:  # it may be decoded at half the resolution
            continue
        with sample_scope(number):
            image, _ = dataset[number]
        with sample_scope(number):
            assert torch.equal(image, chain(pixels))
        compared += 1
    assert compared > 5


@BUILT
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["jpeg", "progressive", "png", "cmyk"])
def test_tensors_are_drawn_in_one_call(
    form: str, kind: torch.dtype, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of JPEGs; of what the extension leaves to others, the same values are made of pixels."""
    image = cv2.resize(np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8), (120, 90))
    path = tmp_path / f"image.{'png' if form == 'png' else 'jpg'}"
    if form == "cmyk":
        Image.fromarray(image).convert("CMYK").save(path)
    else:
        cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_PROGRESSIVE, int(form == "progressive")])
    drawn: list[bool] = []
    draw_box = native.draw_box

    def draw(*arguments: Any, **options: Any) -> Any:
        if "table" in options:  # not of `decode_region`, which decodes CMYK in vain
            drawn.append(options["table"] is not None)
        return draw_box(*arguments, **options)

    monkeypatch.setattr(native, "draw_box", draw)
    chain = Compose([RandomResizedCrop(48), HorizontalFlip(), ToTensor(kind, channels_last=last), Normalize(MEAN, STD)])
    for key in range(4):
        with sample_scope(key):
            found, _ = LoadImage(transform=chain)(Record(str(path), 1, 0, {}))
        with sample_scope(key):
            assert torch.equal(found, chain(read_image(path)))
    assert found.dtype is kind
    assert drawn == {"png": []}.get(form, [True] * 4)


@pytest.mark.parametrize("extension", [pytest.param(True, marks=BUILT), False])
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(
    "rest",
    [[], [ToTensor()], [ToTensor(torch.bfloat16, channels_last=False), Normalize(MEAN, STD)], [ColorJitter(0.5)]],
)
@pytest.mark.parametrize("fill", [0, 127.5, (300, 2.5, -7)])
def test_what_is_drawn_inside_of_its_border(
    fill: Any, rest: list[Any], channels: int, extension: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is what a chain makes that pads the pixels."""
    if not extension:
        monkeypatch.setattr(native, "_jpeg", None)
    image = np.random.default_rng(0).integers(0, 256, (21, 26, channels), np.uint8)
    cv2.imwrite(str(tmp_path / "image.jpg"), image)
    pixels = read_image(tmp_path / "image.jpg")
    load = LoadImage(transform=[RandomCrop(16, 9, fill=fill), HorizontalFlip(), VerticalFlip(), *rest])
    value = fill if isinstance(fill, tuple) else [fill] * 3
    padded = cv2.copyMakeBorder(pixels, 9, 9, 9, 9, cv2.BORDER_CONSTANT, value=value)
    plain = Compose([RandomCrop(16), HorizontalFlip(), VerticalFlip(), *rest])
    form = load.form
    assert form is not None
    for key in range(40):
        out = torch.empty(form[0], dtype=form[1])
        with sample_scope(key):
            found, _ = load(Record(str(tmp_path / "image.jpg"), 1, 0, {}), None, out)
        with sample_scope(key):
            expected = plain(padded)
        if isinstance(expected, np.ndarray):
            expected = torch.from_numpy(expected).permute(2, 0, 1)
        assert torch.equal(found, expected)
        assert found.data_ptr() == out.data_ptr()


@pytest.mark.parametrize(
    "chain",
    [
        [ColorJitter(0.2), RandomCrop(32, 4, fill=200)],
        [RandomErasing(1), RandomCrop(32, 4, fill=200)],
        [RandomCrop(32, 4), HorizontalFlip(), RandomCrop(32, 4, fill=9)],
        [Resize(32), RandomCrop(32, 4), ColorJitter(0.2), VerticalFlip(), RandomCrop(32, 4), ToTensor()],
        [ColorJitter(0.2), SquarePad(), CenterCrop(40), RandomCrop(32, 4), RandomErasing(1)],
    ],
    ids=str,
)
def test_pixels_that_lie_in_the_batch_may_get_a_border(chain: list[Any], tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "image.png"), image)
    load = LoadImage(transform=chain)
    form = load.form
    assert form is not None
    for key in range(30):
        with sample_scope(key):
            alone, _ = load(Record(str(tmp_path / "image.png"), 1, 0, {}))
        with sample_scope(key):
            into, _ = load(Record(str(tmp_path / "image.png"), 1, 0, {}), None, torch.empty(form[0], dtype=form[1]))
        assert torch.equal(alone, into)
        assert len(alone.unique()) > 50


class TestNoCopies:
    @pytest.mark.parametrize("chain", CHAINS)
    def test_whole_batches_are_made_in_the_slot(self, manifest: Manifest, chain: str) -> None:
        dataset = ImageDataset(manifest, transform=CHAINS[chain])
        fetch = Fetch(dataset, Collate(channels_last=True), batched=True, seed_globals=False)
        slot = Slot(SharedFile(), 1, 0)
        calls: list[int] = []
        stack = torch.stack
        torch.stack = lambda *a, **k: calls.append(1) or stack(*a, **k)  # type: ignore[func-returns-value, assignment]
        try:
            images, _ = Maker(fetch).make(BatchRequest(list(range(8)), list(range(8))), slot.empty).batch
        finally:
            torch.stack = stack  # type: ignore[assignment]
        assert slot.put(images.data_ptr(), images.nbytes, images.numpy) == 0
        assert not images.__dict__, "its pickle refers to the slot"
        assert not calls

    def test_a_divided_batch_is_made_in_the_slot(self, manifest: Manifest) -> None:
        dataset = ImageDataset(manifest, transform=CHAINS["bytes"])
        fetch = Fetch(dataset, Collate(channels_last=True), batched=True, seed_globals=False)
        request = BatchRequest(list(range(8)), list(range(8)))
        expected = fetch(request, BatchMetrics())
        slot = Slot(SharedFile(), 1, 0)
        pool = ThreadPool(3, boards=memoryview(array("Q", [0] * 6)))
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stack = torch.stack
        torch.stack = None  # type: ignore[assignment]
        try:
            pool.make(Maker(fetch), request, done.put, wanted=lambda _: True, arena=slot.empty)
            result = done.get(timeout=60)
        finally:
            torch.stack = stack
        assert result.error is None
        assert slot.put(result.batch[0].data_ptr(), 1, result.batch[0].numpy) == 0
        assert torch.equal(result.batch[0], expected[0])
        assert result.metrics.samples == 8

    def test_threads_fill_one_tensor(self, manifest: Manifest) -> None:
        shared = SharedRows(8)
        rows: list[torch.Tensor] = []
        for begin, end in ((0, 5), (5, 8)):
            thread.arena = partial(shared.part, begin, end)
            rows += batch_rows((end - begin, 2), torch.uint8).unbind()
        thread.arena = None
        batch = Collate()(rows)
        assert batch.data_ptr() == rows[0].data_ptr()
        assert batch.shape == (8, 2)
        assert shared.part(0, 5, (5, 3), torch.uint8) is None, "another shape than that of the others"

    def test_a_collate_function_of_the_users_gets_memory_of_its_own(self, manifest: Manifest) -> None:
        dataset = ImageDataset(manifest, transform=CHAINS["bytes"])
        loader = DataLoader(dataset, batch_size=6, seed=1, num_workers=1, executor="process", collate_fn=list)
        plain = DataLoader(dataset, batch_size=6, seed=1, collate_fn=list)
        for found, expected in zip(loader, plain, strict=True):
            assert all(torch.equal(a[0], b[0]) for a, b in zip(found, expected, strict=True))


class TestRowsInPlace:
    """Collation takes tensors for the batch only if they are all of it, in order."""

    def check(self, rows: list[torch.Tensor]) -> None:
        made = Collate()(rows)
        assert torch.equal(made, torch.stack(rows))
        assert made.data_ptr() != rows[0].data_ptr()

    def test_others(self) -> None:
        base = batch_rows((4, 6), torch.int64)
        base[:] = torch.arange(24).view(4, 6)
        rows = list(base.unbind())
        self.check(rows[:3])
        self.check(rows[1:])
        self.check([rows[0], rows[2], rows[1], rows[3]])
        self.check([rows[0], rows[1], rows[1], rows[3]])
        self.check([row.clone() for row in rows])
        self.check([base[:, 0], base[:, 1]])
        self.check(rows[::-1])
        assert Collate()(rows).data_ptr() == base.data_ptr()
        self.check(rows)

    def test_tensors_of_a_data_set_are_copied(self) -> None:
        """In place, a program may change its batches, and not the data set by that."""
        base = torch.arange(24).view(4, 6)
        self.check(list(base))
        self.check(list(base.clone()))
        (batch,) = DataLoader(torch.utils.data.TensorDataset(base), 4)
        batch[0].zero_()
        assert base.any()


@full_only("workers for each", but=["thread"])
@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_bad_images_are_skipped_and_the_others_right(manifest: Manifest, tmp_path: Path, executor: str) -> None:
    good = [manifest[number].path for number in range(6)]
    (tmp_path / "bad.jpg").write_bytes(Path(good[0]).read_bytes()[:2000])
    paths = [*good[:3], tmp_path / "bad.jpg", *good[3:]]
    (tmp_path / "meta.txt").write_text("".join(f"{path} {number}\n" for number, path in enumerate(paths)))
    broken = ImageDataset(Manifest.open(tmp_path / "meta.txt"), transform=CHAINS["bytes"])
    workers = 0 if executor == "inline" else 2
    how: Any = {"batch_size": 7, "seed": 2, "executor": executor, "num_workers": workers}
    for _ in range(2):
        with pytest.raises(ImageError, match=r"bad\.jpg"):
            next(iter(DataLoader(broken, **how)))
    images, labels = next(iter(DataLoader(broken, on_error="skip", **how)))
    assert labels.tolist() == [0, 1, 2, 4, 5, 6]
    keep = [0, 1, 2, 4, 5, 6]
    (tmp_path / "bad.jpg").write_bytes(Path(good[0]).read_bytes())
    whole, _ = next(iter(DataLoader(broken, **how)))
    assert torch.equal(images, whole[keep])


def test_images_of_other_sizes_and_sources(manifest: Manifest) -> None:
    whole = ImageDataset(manifest, transform=[HorizontalFlip(1)])
    image, _ = whole[0]
    assert np.array_equal(image.permute(1, 2, 0).numpy(), read_image(manifest[0].path)[:, ::-1])
    chain = CHAINS["bytes"]
    for source in (RankDataset(manifest, seed=1), MPDataset(manifest, batch_size=4, seed=1)):
        dataset = ImageDataset(source, transform=chain)
        copy = pickle.loads(pickle.dumps(dataset))
        one, two = (torch.cat([images for images, _ in DataLoader(d, batch_size=4)]) for d in (dataset, copy))
        assert torch.equal(one, two)
        assert one.shape == (N, 3, 48, 48)


@BUILT
def test_a_killed_worker_costs_no_image(tmp_path: Path) -> None:
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f"{number}.jpg"), pixels)
    (tmp_path / "meta.txt").write_text("".join(f"{number % 8}.jpg {number}\n" for number in range(2000)))
    records = RankDataset(Manifest.open(tmp_path / "meta.txt", root=tmp_path), seed=0)
    dataset = ImageDataset(records, transform=[RandomCrop(32, padding=4), HorizontalFlip()])
    assert draws_of(dataset.load) is not None
    expected = list(DataLoader(dataset, 4))
    options: dict[str, Any] = {"num_workers": 2, "executor": "process", "on_worker_death": "restart"}
    with DataLoader(dataset, 4, **options) as loader:
        iterator: Any = iter(loader)
        found = [next(iterator)]
        os.kill(iterator._workers[len(found) % 2].pid, signal.SIGKILL)
        found += iterator
        assert loader.stats()["restarts"] == 1
    for (images, labels), (others, same) in zip(found, expected, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, same)


@BUILT
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_loaded_alone_with_all_its_bytes(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    jpeg = cv2.imencode(".jpg", pixels)[1].tobytes()
    (tmp_path / "meta.txt").write_text("0.jpg 0\n1.jpg 1\n2.jpg 2\n")
    for name in ("0.jpg", "1.jpg", "2.jpg"):
        (tmp_path / name).write_bytes(jpeg)
    dataset = ImageDataset(Manifest.open(tmp_path / "meta.txt", root=tmp_path), transform=[RandomCrop(32, padding=4)])
    assert draws_of(dataset.load) is not None
    keys = [5, 6, 7]
    expected = dataset.load_samples(range(3), keys)
    (tmp_path / "1.jpg").unlink()
    os.mkfifo(tmp_path / "1.jpg")

    broken: list[OSError] = []
    found: list[Any] = []

    def write() -> None:
        # Its bytes are lost if a reader opens the pipe and closes it again.
        try:
            (tmp_path / "1.jpg").write_bytes(jpeg)
        except OSError as error:
            broken.append(error)

    threads = [
        threading.Thread(target=write, daemon=True),
        threading.Thread(target=lambda: found.extend(dataset.load_samples(range(3), keys)), daemon=True),
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert not any(each.is_alive() for each in threads), "it waits for bytes that were taken out of the pipe"
    assert not broken
    assert [label for _, label in found] == [0, 1, 2]
    for (image, _), (same, _) in zip(found, expected, strict=True):
        assert torch.equal(image, same)


def test_masks_come_along(manifest: Manifest) -> None:
    dataset = ImageDataset(manifest, transform=CHAINS["bytes"], target=size_mask)
    images, target = next(iter(DataLoader(dataset, batch_size=4, seed=1)))
    assert images.shape == (4, 3, 48, 48)
    assert target["masks"].shape == (4, 48, 48)
    assert target["label"].tolist() == [0, 1, 2, 3]


def half_mask(record: Any) -> dict[str, Any]:
    height, width = read_image(record.path).shape[:2]
    mask = np.zeros((height, width), np.uint8)
    mask[:, : width // 2] = 1
    return {"masks": mask}


@pytest.mark.parametrize("make", [ImageDataset, penstock.open])
def test_size_and_flip_apply_with_a_target(manifest: Manifest, tmp_path: Path, make: Any) -> None:
    paths = tmp_path / "meta.txt"
    paths.write_text("".join(f"{manifest[row].path} {row}\n" for row in range(8)))
    source = paths if make is penstock.open else Manifest.open(paths)
    given: dict[str, Any] = {"size": (20, 30), "flip": True, "target": half_mask}
    chain: dict[str, Any] = {"transform": [Resize((20, 30)), HorizontalFlip()], "target": half_mask}
    (images, targets), (same, masks) = (
        next(iter(DataLoader(make(source, **one), 8, seed=0))) for one in (given, chain)
    )
    assert torch.equal(images, same)
    assert torch.equal(targets["masks"], masks["masks"])
    assert images.shape == (8, 3, 20, 30)
    assert {0, 1} == set(targets["masks"][:, 0, 0].tolist()), "some images are mirrored, and their masks with them"


def size_mask(record: Any) -> dict[str, Any]:
    return {"masks": np.zeros(read_image(record.path).shape[:2], np.uint8), "label": record.label}


def test_arguments(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="without transform="):
        ImageDataset(manifest, size=8, transform=[HorizontalFlip()])
    with pytest.raises(ConfigError, match="without transform="):
        LoadImage(flip=True, transform=[HorizontalFlip()])
    assert ImageDataset(manifest, transform=HorizontalFlip(1))[0][0].dtype is torch.uint8
    assert ImageDataset(manifest, transform=[HorizontalFlip()]).pure
    assert not ImageDataset(manifest, transform=[lambda image: image]).pure


class Threads(torch.utils.data.Dataset[int]):
    """How many threads OpenCV has where the items are made."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return cv2.getNumThreads()


@pytest.mark.parametrize("start", METHODS)
def test_in_worker_processes_opencv_has_one_thread(start: str) -> None:
    before = cv2.getNumThreads()
    cv2.setNumThreads(2)
    try:
        cv2.GaussianBlur(np.zeros((4000, 4000, 3), np.uint8), (9, 9), 3)  # a fork from now on lacks OpenCV's thread
        loader = DataLoader(Threads(), num_workers=1, executor="process", multiprocessing_context=start)
        assert [int(n) for n in loader] == [1, 1]
        assert [int(n) for n in DataLoader(Threads())] == [2, 2], "the caller's own threads are the caller's business"
    finally:
        cv2.setNumThreads(before)


def test_a_target_says_itself_whether_it_is_pure(manifest: Manifest) -> None:
    def drawn(record: object) -> dict[str, float]:
        return {"x": random.random()}

    dataset = ImageDataset(manifest, transform=[RandomResizedCrop(8)], target=drawn)
    assert not dataset.pure
    passes = [[t["x"].tolist() for _, t in DataLoader(dataset, 4, seed=1, num_workers=n)] for n in (0, 2)]
    assert passes[0] == passes[1], "global generators are seeded for each sample"
    drawn.pure = True  # type: ignore[attr-defined]
    assert ImageDataset(manifest, target=drawn).pure


def test_more_pixels_than_allowed(manifest: Manifest) -> None:
    for chosen in ({"size": 8}, {"transform": [RandomResizedCrop(8)]}):
        with pytest.raises(ImageError, match="max_pixels="):
            ImageDataset(manifest, max_pixels=100, **chosen)[0]  # type: ignore[arg-type]
        assert ImageDataset(manifest, max_pixels=2**20, **chosen)[0][0].shape == (3, 8, 8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_pixels"):
        ImageDataset(manifest, max_pixels=0)
    assert repr(ImageDataset(manifest, size=8).load) == "LoadImage(size=(8, 8))"


def test_an_error_of_a_step_names_the_file(manifest: Manifest) -> None:
    with pytest.raises(ImageError, match=r"JPEG.*smaller"):
        ImageDataset(manifest, transform=[RandomCrop(9000)])[0]
    with pytest.raises(ConfigError, match="returned NoneType"):
        ImageDataset(manifest, transform=[Resize(8)], target=lambda record: None)[0]  # type: ignore[arg-type,return-value]
    broken = ImageDataset(RankDataset(manifest, seed=1), transform=[lambda image: 1 // 0])
    with pytest.raises(ZeroDivisionError) as noted:
        broken[2]
    assert str(manifest[broken.source.rows([2])[0]].path) in noted.value.__notes__[0]
    load = LoadImage(transform=[Resize(8)], target=lambda record: None)  # type: ignore[arg-type,return-value]
    signed = Record("https://host/a.jpg?sig=SECRET", 1, 0, {})
    with pytest.raises(ConfigError, match=r"https://host/a\.jpg") as caught:
        load(signed, data=Path(manifest[0].path).read_bytes)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "chain",
    [
        [RandomCrop(32, padding=4, fill=(1, 2))],
        [RandomCrop(32, padding=4), ToTensor(), Normalize([0.5, 0.5], [0.2, 0.2])],
    ],
)
def test_an_error_of_images_drawn_together_names_one(chain: list[Any], tmp_path: Path) -> None:
    for number in range(3):
        cv2.imwrite(str(tmp_path / f"{number}.jpg"), np.zeros((32, 32, 3), np.uint8))
    (tmp_path / "meta.txt").write_text("0.jpg 0\n1.jpg 1\n2.jpg 2\n")
    dataset = ImageDataset(Manifest.open(tmp_path / "meta.txt", root=tmp_path), transform=chain)
    with pytest.raises(ConfigError, match="pass one for each") as caught:
        next(iter(DataLoader(dataset, batch_size=3)))
    assert "0.jpg" in caught.value.__notes__[0]


def test_steps_may_change(tmp_path: Path) -> None:
    """As for training with images that grow from epoch to epoch."""
    for number in range(4):
        cv2.imwrite(str(tmp_path / f"{number}.jpg"), np.random.default_rng(number).integers(0, 256, (32, 32, 3)))
    (tmp_path / "meta.txt").write_text("".join(f"{number}.jpg {number}\n" for number in range(4)))
    crop, tensor = RandomCrop(16), ToTensor()
    dataset = ImageDataset(RankDataset(Manifest.open(tmp_path / "meta.txt", root=tmp_path)), transform=[crop, tensor])
    crop.size = 24, 24
    for dtype, last in ((torch.float32, True), (torch.float16, True), (torch.float16, False)):
        tensor.dtype, tensor.channels_last = dtype, last
        images, _ = next(iter(DataLoader(dataset, batch_size=4)))
        assert (images.shape, images.dtype) == ((4, 3, 24, 24), dtype)
        assert torch.equal(images, torch.stack([dataset[index][0] for index in range(4)]))
    crop.p = 0.5
    items = next(iter(DataLoader(dataset, batch_size=4, collate_fn=list)))
    assert [image.shape for image, _ in items] == [dataset[index][0].shape for index in range(4)]


def test_samples_of_shards_with_a_gif_and_a_negative_class() -> None:
    record = SampleRecord({"__key__": "a", "__url__": "b", "gif": b"GIF", "cls": b"-1\n"})
    assert (record.path, record.label) == ("b/a.gif", -1)
    assert SampleRecord({"gif": b"", "cls": b"x1"}).label == b"x1"
