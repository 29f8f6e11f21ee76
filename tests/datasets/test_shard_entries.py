"""Images of shards by the indexes of entries beside them: the same pixels as without, and never those of others."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from full_run import full_only
from jpeg_support import USUAL, by_opencv, jpeg, noise

import penstock as ps
from penstock import DataLoader, ImageDataset, LoadImage, Mixture, ShardDataset, ShardSet, Subset
from penstock.errors import ConfigError
from penstock.images import native
from penstock.images.region import decode_region
from penstock.images.transforms import CenterCrop, HorizontalFlip, RandomCrop, RandomResizedCrop, Resize, ToTensor
from penstock.shards.entries import write_entries
from penstock.shards.pack import pack
from penstock.shards.writer import TarWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("error:.*entries"),
    pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built"),
]

CHAINS: dict[str, list[Any]] = {
    "resized crops": [RandomResizedCrop(32), HorizontalFlip()],
    "large crops": [RandomResizedCrop(160), ToTensor()],
    "crops": [RandomCrop(48, pad_if_needed=True)],
    "centers": [Resize(64), CenterCrop(40)],
}
N = 24


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of the usual samplings and several sizes, and one that has no entries."""
    folder = tmp_path_factory.mktemp("files") / "in"
    (folder / "a class").mkdir(parents=True)
    for number in range(N):
        data = jpeg(noise(150 + 17 * number, 250 - 7 * number, number), USUAL[number % len(USUAL)])
        if number == N - 1:
            data = by_opencv(noise(90, 110), cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
        (folder / "a class" / f"{number:02d}.jpg").write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def generated(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Their shards, with indexes of entries."""
    report = pack(files, tmp_path_factory.mktemp("shards"), max_count=7, index_images=True, progress=False)
    assert report.indexed == N - 1
    return report.shards


@pytest.fixture
def shards(generated: list[str], tmp_path: Path) -> list[str]:
    """Copies of these, to be changed."""
    for name in generated:
        for path in Path(name).parent.glob(f"{Path(name).name}*"):
            shutil.copy2(path, tmp_path)
    return [str(tmp_path / Path(name).name) for name in generated]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each box that was drawn had entries, in this process."""
    found: list[bool] = []
    draw_box = native.draw_box

    def draw(*arguments: Any, entries: Any = None, **options: Any) -> Any:
        found.append(entries is not None)
        return draw_box(*arguments, entries=entries, **options)

    monkeypatch.setattr(native, "draw_box", draw)
    return found


def images(shards: Any, chain: str = "crops", **options: Any) -> ImageDataset:
    return ImageDataset(shards, transform=CHAINS[chain], **options)


def epoch(dataset: Any, **how: Any) -> torch.Tensor:
    return torch.cat([batch for batch, _ in DataLoader(dataset, seed=5, **how)])


@full_only("workers for each", but=["large crops", "centers"])
@pytest.mark.parametrize("chain", CHAINS)
def test_the_same_pixels_with_and_without(chain: str, generated: list[str], used: list[bool]) -> None:
    share: dict[str, Any] = {"rank": 0, "world_size": 1, "seed": 5}
    expected = epoch(images(ShardDataset(generated, **share), chain, index=False), batch_size=4)
    assert len(expected) == N
    assert not any(used)
    for how in (
        {"batch_size": 7},
        {"batch_size": 8, "executor": "thread", "num_workers": 2},
        {"batch_size": 8, "executor": "process", "num_workers": 2},
    ):
        used.clear()
        assert torch.equal(epoch(images(ShardDataset(generated, **share), chain), **how), expected), how
        assert sum(used) == (0 if how.get("executor") == "process" else N - 1)


@full_only("workers for each")
def test_real_files(data_dir: Path, tmp_path: Path, used: list[bool]) -> None:
    names = sorted(path.name for path in (data_dir / "imagenet-sample").iterdir())[:60]
    (tmp_path / "train.txt").write_text("".join(f"{name} 0\n" for name in names))
    shards = pack(
        tmp_path / "train.txt", tmp_path / "out", root=data_dir / "imagenet-sample", index_images=True, progress=False
    ).shards
    chain = [RandomResizedCrop(224), HorizontalFlip(), ToTensor()]
    made = [
        epoch(ImageDataset(ShardSet(shards), transform=chain, index=index), batch_size=8) for index in (None, False)
    ]
    assert torch.equal(*made)
    assert used == [True] * 60 + [False] * 60


@pytest.mark.parametrize("source", ["set", "share", "filter", "subset", "mixture", "open", "pickled"])
def test_every_way_to_the_samples(source: str, generated: list[str], used: list[bool]) -> None:
    share: dict[str, Any] = {"rank": 1, "world_size": 2, "seed": 5}

    def made(index: bool | None) -> Any:
        if source == "set":
            return images(ShardSet(generated), index=index)
        if source == "share":
            return images(ShardDataset(generated, **share), index=index)
        if source == "filter":
            return images(Subset(ShardDataset(generated, **share), range(3, 20)), index=index)
        if source == "subset":
            return Subset(images(ShardSet(generated), index=index), [20, 3, 9, 11, 11])
        if source == "mixture":
            parts = [ShardDataset(generated[:2], seed=1), ShardDataset(generated[2:], seed=1)]
            return Mixture([(images(part, index=index), 1) for part in parts], seed=5)
        if source == "open":
            return ps.open(str(Path(generated[0]).parent), transform=CHAINS["crops"], index=index, **share)
        return pickle.loads(pickle.dumps(images(ShardDataset(generated, **share), index=index)))

    found = epoch(made(None), batch_size=4)
    assert sum(used) >= len(found) - 2 > 2
    used.clear()
    assert torch.equal(found, epoch(made(False), batch_size=4))
    assert not any(used)


def test_without_an_index_nothing_is_said(shards: list[str], used: list[bool]) -> None:
    expected = epoch(images(ShardSet(shards)), batch_size=4)
    assert sum(used) == N - 1
    for name in shards:
        Path(f"{name}.entries").unlink()
    used.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(epoch(images(ShardSet(shards)), batch_size=4), expected)
    assert not any(used)


def test_without_the_extension_it_does_nothing(generated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_jpeg", None)
    made = [images(ShardSet(generated), "centers", index=index)[3][0] for index in (None, False)]
    assert torch.equal(*made)


class TestOtherImages:
    def test_another_shard_of_this_name(self, tmp_path: Path, used: list[bool]) -> None:
        """Its image is as long as the old one, and with the old one's entries would have that one's level."""
        path = tmp_path / "a.tar"

        def write(level: int) -> bytes:
            data = jpeg(np.full((90, 120, 3), level, np.uint8))
            with TarWriter(path, mtime=0) as writer:
                writer.write({"__key__": "0", "jpg": data})
            return data

        old = native.entries_of(write(100))
        write_entries(str(path))
        content = Path(f"{path}.entries").read_bytes()
        data, box = write(104), (60.0, 50.0, 100.0, 80.0)
        assert (decode_region(data, box, target=(80, 80))[0] == 104).all()
        assert (decode_region(data, box, target=(80, 80), entries=old)[0] == 100).all()
        used.clear()
        with pytest.warns(UserWarning, match="belongs to another shard or an older version") as given:
            found = [ImageDataset(shards, transform=[CenterCrop(40)])[0][0] for shards in [ShardSet(path)] * 2]
        assert len(given) == 1
        assert all((image == 104).all() for image in found)
        # A forged fingerprint: the hash of each image is looked at, too.
        write_entries(str(path))
        Path(f"{path}.entries").write_bytes(Path(f"{path}.entries").read_bytes()[:64] + content[64:])
        with pytest.warns(UserWarning, match="entries of row 0.* penstock shards index --images"):
            assert (ImageDataset(ShardSet(path), transform=[CenterCrop(40)])[0][0] == 104).all()
        assert not any(used)

    def test_damaged_indexes_are_noticed_once(self, shards: list[str], used: list[bool]) -> None:
        expected = epoch(images(ShardSet(shards), index=False), batch_size=4)
        for name, at in zip(shards[:3], (5, 70, -1), strict=True):
            content = bytearray(Path(f"{name}.entries").read_bytes())
            content[at] ^= 4
            Path(f"{name}.entries").write_bytes(content)
        used.clear()
        with pytest.warns(UserWarning, match="entries") as given:
            assert torch.equal(epoch(images(ShardSet(shards)), batch_size=4), expected)
        assert len(given) == 1
        assert "Pixels are right without entries, but decoding takes longer" in str(given[0].message)
        assert sum(used) == N - 1 - 7 - 1 - 1  # none of the first shard, and of two others all but one

    def test_truncated_while_it_is_open(self, shards: list[str]) -> None:
        dataset, plain = images(ShardSet(shards), "centers"), images(ShardSet(shards), "centers", index=False)
        assert torch.equal(dataset[0][0], plain[0][0])
        with open(f"{shards[0]}.entries", "r+b") as file:
            file.truncate(70)
        with pytest.warns(UserWarning, match="truncated while it was open.* decoding takes longer"):
            assert torch.equal(dataset[1][0], plain[1][0])

    def test_a_folder_of_that_name(self, shards: list[str]) -> None:
        Path(f"{shards[0]}.entries").unlink()
        Path(f"{shards[0]}.entries").mkdir()
        with pytest.warns(UserWarning, match="folder"):
            images(ShardSet(shards))[0]

    def test_samples_that_a_subclass_changes(self, generated: list[str]) -> None:
        other = jpeg(noise(100, 100, 77))

        class Changed(ShardDataset):
            def records(self, indices: Any, place: Any = None) -> list[Any]:
                return [{**sample, "jpg": other} for sample in super().records(indices, place)]

        dataset = images(Changed(generated, seed=0), "centers")
        with pytest.warns(UserWarning, match="belong to another image file"):
            found = dataset[2][0]
        load = LoadImage(transform=CHAINS["centers"])
        assert torch.equal(found, load({"__key__": "0", "__url__": "a", "jpg": other, "cls": b"0"})[0])


class TestArguments:
    def test_an_index_of_a_manifest(self, generated: list[str]) -> None:
        for index in (True, f"{generated[0]}.entries"):
            with pytest.raises(ConfigError, match=r"a ShardSet has no manifest.*indexes beside shards"):
                images(ShardSet(generated), index=index)

    def test_rows_are_refused_as_ever(self, generated: list[str]) -> None:
        with pytest.raises(ConfigError, match="samples of shards have keys instead of rows"):
            images(ShardSet(generated), row=True)[0]

    def test_whole_images_need_none(self, generated: list[str], used: list[bool]) -> None:
        assert ImageDataset(ShardSet(generated), size=32)[0][0].shape == (3, 32, 32)
        assert ImageDataset(ShardSet(generated), size=32, index=False)[0][0].shape == (3, 32, 32)
        assert not any(used)
