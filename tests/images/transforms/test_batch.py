"""Images drawn together: each has the pixels that its own call would have given, bit for bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock import DataLoader, ImageDataset, LoadImage, Manifest, RankDataset
from penstock.datasets.image_batches import draws_of, load_batch
from penstock.datasets.pixel_rows import PixelRecord
from penstock.errors import ImageError
from penstock.images import native
from penstock.images.sample_record import SampleRecord
from penstock.images.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToTensor,
    VerticalFlip,
)
from penstock.images.transforms.canvas import Canvas
from penstock.random import generator_from_key, sample_scope
from penstock.stages import collect

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

SIZES = [(32, 32), (20, 45), (41, 17), (9, 9), (64, 80), (33, 31)]


@cache
def files() -> list[bytes]:
    """JPEGs of several sizes and samplings, and files that our decoder leaves to others."""
    found = []
    for number, (height, width) in enumerate(SIZES * 2):
        noise = np.random.default_rng(number).integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), np.uint8)
        image = cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
        sampling = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444][number % 2]
        options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling, cv2.IMWRITE_JPEG_PROGRESSIVE, int(number == 5)]
        form = ".png" if number == 8 else ".jpg"
        found.append(cv2.imencode(form, image[:, :, :1] if number == 3 else image, options)[1].tobytes())
    return found


def record(data: bytes, label: int) -> SampleRecord:
    return SampleRecord({"__key__": str(label), "__url__": "a.tar", "jpg": data, "cls": label})


sides = st.integers(1, 40)
two = st.tuples(sides, sides)
probability = st.sampled_from([0.0, 0.4, 1.0])
fills = st.sampled_from([0, 200, (1, 2, 3), 127.5])
filters = st.sampled_from(["bilinear", "bicubic", "nearest"])
crops = st.builds(
    RandomCrop,
    two,
    padding=st.sampled_from([None, 4, (1, 9), (3, 0, 20, 7)]),
    pad_if_needed=st.just(True),
    fill=fills,
    padding_mode=st.sampled_from(["constant", "constant", "reflect"]),
    p=probability,
)
resized = st.builds(
    RandomResizedCrop,
    two,
    scale=st.sampled_from([(0.08, 1.0), (0.9, 3.0)]),
    interpolation=filters,
    antialias=st.booleans(),
)
resizes = st.builds(Resize, st.one_of(sides, two), interpolation=filters, antialias=st.booleans())
steps = st.one_of(
    crops,
    resized,
    resizes,
    st.builds(Resize, st.integers(1, 30), max_size=st.integers(31, 40)),
    st.builds(CenterCrop, two, p=probability),
    st.builds(HorizontalFlip, probability),
    st.builds(VerticalFlip, probability),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
normalized = st.builds(
    lambda dtype, last, means: [ToTensor(dtype, last), *(Normalize([0.4] * 3, [0.2, 0.3, 0.4]) for _ in range(means))],
    dtypes,
    st.booleans(),
    st.integers(0, 2),
)
chains = st.builds(
    lambda before, last, conversion, after: [*before, last, *conversion, *after],
    st.lists(steps, max_size=3),
    st.builds(lambda size: RandomResizedCrop(size), two) | st.builds(RandomCrop, two, st.just(6), st.just(True)),
    st.one_of(st.just([]), normalized),
    st.lists(st.builds(HorizontalFlip), max_size=1),
)


def into(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@given(
    chain=chains, base=st.integers(0, 2**64 - 100), of=st.sampled_from(["files", "pixels"]), given_memory=st.booleans()
)
def test_a_batch_is_its_images_one_by_one(chain: list[Any], base: int, of: str, given_memory: bool) -> None:
    load = LoadImage(transform=chain)
    assert draws_of(load) is not None
    records: list[Any] = [record(data, number) for number, data in enumerate(files())]
    if of == "pixels":
        pixels = np.random.default_rng(0).integers(0, 256, (8, 34, 29, 3), np.uint8)
        records = [PixelRecord("a.npy", number, number, image) for number, image in enumerate(pixels)]
    keys = [base + 7 * number for number in range(len(records))]
    items = load_batch(load, records, keys, into if given_memory else None)
    for one, key, (image, label) in zip(records, keys, items, strict=True):
        with sample_scope(key):
            expected = load(one)
        assert torch.equal(image, expected[0])
        assert (image.dtype, image.stride(), label) == (expected[0].dtype, expected[0].stride(), expected[1])


CHAINS: dict[str, list[Any]] = {
    "crop": [RandomCrop(32, padding=4), HorizontalFlip()],
    "resized crop": [RandomResizedCrop(32, scale=(0.2, 1.0)), VerticalFlip(), HorizontalFlip(0.2)],
    "resize": [Resize((24, 40), interpolation="bicubic"), ToTensor(torch.float16), Normalize([0.5], [0.3])],
    "shorter side": [Resize(24), CenterCrop(24), ToTensor(channels_last=False)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_small_images_of_one_size_need_no_canvas(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadImage(transform=CHAINS[chain])
    records = [record(files()[0], number) for number in range(300)]
    expected = load_batch(load, records, list(range(300)))
    monkeypatch.setattr(Canvas, "__init__", None)
    assert all(
        torch.equal(a[0], b[0]) for a, b in zip(expected, load_batch(load, records, list(range(300))), strict=True)
    )


def test_random_numbers_are_those_of_the_generators() -> None:
    keys = np.array([0, 1, 2**64 - 1, 12345678901234567890], np.uint64)
    found = native.uniform(keys, 40)
    for key, row in zip(keys.tolist(), found, strict=True):
        assert (generator_from_key(key).random(40) == row).all()
        one_by_one = generator_from_key(key)
        assert [one_by_one.random() for _ in range(40)] == row.tolist()


class Inverted(RandomCrop):
    def apply(self, canvas: Canvas) -> None:
        super().apply(canvas)
        canvas.pixels = 255 - canvas.pixels


class Second(Compose):
    def apply(self, canvas: Canvas) -> None:
        HorizontalFlip(1).apply(canvas)
        super().apply(canvas)


def test_what_cannot_be_planned() -> None:
    crop = RandomCrop(32, padding=4)
    assert draws_of(LoadImage(transform=[crop, Compose([HorizontalFlip()])])) == 4
    assert draws_of(LoadImage(transform=[crop, ColorJitter(0.1)])) is None
    assert draws_of(LoadImage(transform=[Inverted(32)])) is None
    assert draws_of(LoadImage(transform=Second([crop]))) is None
    assert draws_of(LoadImage(transform=[HorizontalFlip()])) is None, "images of several sizes"
    assert draws_of(LoadImage(size=32)) == 0
    assert draws_of(LoadImage(transform=[crop], target=lambda record: {"label": 1})) is None


def listing(folder: Path, contents: list[bytes]) -> Manifest:
    for number, data in enumerate(contents):
        (folder / f"{number}.jpg").write_bytes(data)
    (folder / "list.txt").write_text("".join(f"{number}.jpg {number}\n" for number in range(len(contents))))
    return Manifest.open(folder / "list.txt", root=folder)


def test_files_in_a_loader(tmp_path: Path) -> None:
    """Small, large, and in other formats."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    large = cv2.imencode(".jpg", noise, [cv2.IMWRITE_JPEG_QUALITY, 100])[1].tobytes()
    assert len(large) > 1 << 15
    Image.fromarray(noise[:50, :50]).convert("CMYK").save(tmp_path / "cmyk.jpg")
    contents = [*files(), large, (tmp_path / "cmyk.jpg").read_bytes()]
    dataset = ImageDataset(listing(tmp_path, contents), transform=CHAINS["resized crop"], row=True)
    for batch_size in (1, 5, 14):
        loader = DataLoader(dataset, batch_size, seed=3)
        images, labels, rows = (torch.cat(parts) for parts in zip(*loader, strict=True))
        if batch_size == 1:
            expected = images
        assert torch.equal(images, expected)
        assert labels.tolist() == rows.tolist() == list(range(len(contents)))
    items = next(iter(DataLoader(dataset, 14, seed=3, collate_fn=list)))
    assert all(torch.equal(item[0], image) for item, image in zip(items, expected, strict=True))
    assert {item[0].untyped_storage().nbytes() for item in items} == {32 * 32 * 3}, "an item does not keep the others"


def test_paths_that_are_no_text(tmp_path: Path) -> None:
    manifest = listing(tmp_path, files()[:2])
    load = LoadImage(transform=CHAINS["resized crop"])
    expected = load_batch(load, manifest.records([0, 1]), [5, 6])
    records: list[Any] = [one._replace(path=Path(one.path)) for one in manifest.records([0, 1])]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(expected, load_batch(load, records, [5, 6]), strict=True))


def test_stages(tmp_path: Path) -> None:
    dataset = ImageDataset(RankDataset(listing(tmp_path, files()[:3]), seed=1), transform=CHAINS["resized crop"])
    collect()
    dataset.__getitems__([0, 1, 2])
    assert collect().keys() == {"read", "augment", "decode", "resize"}


def test_one_bad_image_spoils_no_others(tmp_path: Path) -> None:
    contents = [*files()[:3], files()[0][:300], *files()[3:5]]
    dataset = ImageDataset(listing(tmp_path, contents), transform=CHAINS["resized crop"])
    (tmp_path / "4.jpg").unlink()
    with pytest.raises(ImageError, match=r"3\.jpg.*truncated") as caught:
        next(iter(DataLoader(dataset, 4, seed=2)))
    assert any("3.jpg" in note for note in caught.value.__notes__)
    images, labels = next(iter(DataLoader(dataset, 6, seed=2, on_error="skip")))
    assert labels.tolist() == [0, 1, 2, 5]
    alone = torch.cat([batch[0] for batch in DataLoader(dataset, 1, seed=2, on_error="skip")])
    assert torch.equal(images[:3], alone[:3])
    small = ImageDataset(listing(tmp_path, contents[:2]), transform=[RandomCrop(33)])
    with pytest.raises(ImageError, match=r"0\.jpg.*smaller than the crop"):
        next(iter(DataLoader(small, 2, seed=2)))
    limited = ImageDataset(listing(tmp_path, contents[:2]), transform=CHAINS["crop"], max_pixels=1000)
    with pytest.raises(ImageError, match="max_pixels="):
        next(iter(DataLoader(limited, 2, seed=2)))
