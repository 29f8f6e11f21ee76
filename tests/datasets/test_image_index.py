"""Images by an index of entries: the same pixels as without one, and never those of other entries."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from jpeg_support import USUAL, jpeg, noise

import penstock as ps
from penstock import DataLoader, ImageDataset, LoadImage, Manifest, MPDataset, RankDataset, ShardDataset
from penstock.errors import ConfigError, ManifestError, ManifestIOError, StateError
from penstock.images import native
from penstock.images.entries import ImageIndex, write_index
from penstock.images.region import decode_region
from penstock.images.transforms import CenterCrop, HorizontalFlip, RandomCrop, RandomResizedCrop, Resize, ToTensor
from penstock.shards import TarWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
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
def generated(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """JPEGs of the usual samplings and several sizes, and one that has no entries."""
    folder = tmp_path_factory.mktemp("generated")
    for number in range(N - 1):
        image = noise(90 + 17 * number, 250 - 7 * number, number)
        (folder / f"{number}.jpg").write_bytes(jpeg(image, USUAL[number % len(USUAL)]))
    (folder / f"{N - 1}.jpg").write_bytes(jpeg(noise(50, 60))[:-2] + b"\0\xff\xd9")
    return listed(folder / "train.txt", [folder / f"{number}.jpg" for number in range(N)])


@pytest.fixture(scope="module")
def real(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return listed(tmp_path_factory.mktemp("real") / "train.txt", sorted((data_dir / "imagenet-sample").iterdir())[:N])


def listed(path: Path, files: list[Path]) -> Manifest:
    path.write_text("".join(f"{file.name} {number}\n" for number, file in enumerate(files)))
    manifest = Manifest.open(path, root=files[0].parent)
    write_index(manifest, step=4)
    return manifest


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


def epoch(dataset: Any, **how: Any) -> tuple[torch.Tensor, list[int]]:
    batches = list(DataLoader(dataset, seed=5, **how))
    return torch.cat([images for images, _ in batches]), [int(n) for _, labels in batches for n in labels]


@full_only("workers for each", but=["real-large crops", "generated-resized crops"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("files", ["real", "generated"])
def test_the_same_pixels_with_and_without(
    files: str, chain: str, request: pytest.FixtureRequest, used: list[bool]
) -> None:
    manifest = request.getfixturevalue(files)
    expected, order = epoch(ImageDataset(manifest, transform=CHAINS[chain]), batch_size=4, shuffle=True)
    assert not any(used)
    dataset = ImageDataset(manifest, transform=CHAINS[chain], index=True)
    for how in (
        {"batch_size": 7},
        {"batch_size": 8, "executor": "thread", "num_workers": 2},
        {"batch_size": 8, "executor": "process", "num_workers": 2},
    ):
        found, labels = epoch(dataset, shuffle=True, **how)
        assert labels == order
        assert torch.equal(found, expected), how
    assert sum(used) >= 2 * (N - 1)


@pytest.mark.parametrize("source", ["manifest", "view", "rank", "stream"])
def test_every_source_with_rows(source: str, generated: Manifest, used: list[bool]) -> None:
    share: dict[str, Any] = {"rank": 1, "world_size": 2, "seed": 5}
    made: Any = {
        "manifest": generated,
        "view": generated[20:2:-3],
        "rank": RankDataset(generated, **share),
        "stream": MPDataset(generated, batch_size=4, **share),
    }[source]
    with_index = ImageDataset(copy.copy(made), transform=CHAINS["crops"], index=True)
    found = epoch(with_index, batch_size=4)
    assert sum(used) >= len(found[1]) - 1 > 4
    expected = epoch(ImageDataset(made, transform=CHAINS["crops"]), batch_size=4)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_another_place(generated: Manifest, tmp_path: Path, used: list[bool]) -> None:
    path = write_index(generated, path=tmp_path / "index").path
    for index in (path, str(path)):
        ImageDataset(generated, transform=CHAINS["crops"], index=index)[0]
    assert used == [True, True]
    with pytest.raises(ManifestIOError, match="build one with: penstock images index FILE"):
        ImageDataset(generated, transform=CHAINS["crops"], index=tmp_path / "none")
    for no in (False, None):
        assert ImageDataset(generated, transform=CHAINS["crops"], index=no).load.index is no


def test_penstock_open_takes_it(generated: Manifest, used: list[bool]) -> None:
    options: dict[str, Any] = {"root": generated.root, "transform": CHAINS["crops"], "seed": 3}
    for index in (True, Path(f"{generated.sources[0]}.entries")):
        images = ps.open(generated.sources[0], **options, index=index)
        assert torch.equal(images[0][0], ps.open(generated.sources[0], **options)[0][0])
    assert used.count(True) == 2
    with pytest.raises(ConfigError, match=r"index= takes the path of an index .*, True, False or 'learn', got 3"):
        ps.open(generated.sources[0], **options, index=3)  # type: ignore[arg-type]


def test_it_travels_as_a_path(generated: Manifest) -> None:
    dataset = ImageDataset(generated, transform=CHAINS["centers"], index=True)
    plain = ImageDataset(generated, transform=CHAINS["centers"])
    assert len(pickle.dumps(dataset)) < len(pickle.dumps(plain)) + 500
    other = pickle.loads(pickle.dumps(dataset))
    assert other.load.index.path == dataset.load.index.path  # type: ignore[union-attr]
    assert torch.equal(other[3][0], dataset[3][0])


def test_without_the_extension_it_does_nothing(generated: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_jpeg", None)
    dataset = ImageDataset(generated, transform=CHAINS["centers"], index=True)
    assert torch.equal(dataset[3][0], ImageDataset(generated, transform=CHAINS["centers"])[3][0])


class TestOtherImages:
    def test_a_file_that_changed_is_decoded_without_and_noticed(self, tmp_path: Path, used: list[bool]) -> None:
        """The new file is as long as the old one, and with its entries would give the old one's level."""
        files = [tmp_path / f"{number}.jpg" for number in range(2)]
        for number, file in enumerate(files):
            file.write_bytes(jpeg(np.full((90, 120, 3), 100 + 8 * number, np.uint8)))
        manifest = listed(tmp_path / "train.txt", files)
        old = native.entries_of(files[0].read_bytes(), step=4)
        files[0].write_bytes(jpeg(np.full((90, 120, 3), 104, np.uint8)))
        data, box = files[0].read_bytes(), (60.0, 50.0, 100.0, 80.0)
        assert (decode_region(data, box, target=(80, 80))[0] == 104).all()
        assert (decode_region(data, box, target=(80, 80), entries=old)[0] == 100).all()
        dataset = ImageDataset(manifest, transform=[CenterCrop(40)], index=True)
        used.clear()
        with pytest.warns(UserWarning, match="row 0, .* build the index again"):
            found = dataset[0][0]
        assert torch.equal(found, ImageDataset(manifest, transform=[CenterCrop(40)])[0][0])
        dataset[1]
        assert used == [False, False, True]

    def test_an_index_of_another_manifest(self, generated: Manifest, real: Manifest) -> None:
        with pytest.raises(StateError, match="another manifest"):
            ImageDataset(real, transform=CHAINS["crops"], index=f"{generated.sources[0]}.entries")
        with pytest.raises(ManifestError, match="not an index of entries"):
            ImageDataset(real, transform=CHAINS["crops"], index=real[0].path)


class TestRefused:
    @pytest.mark.parametrize("index", [1, 0.5, b"x", "", "folder"])
    def test_what_is_no_index(self, generated: Manifest, index: Any) -> None:
        with pytest.raises((ConfigError, ManifestError), match=r"index= takes the path|folder"):
            ImageDataset(generated, transform=CHAINS["crops"], index=index)

    def test_without_a_transform(self, generated: Manifest) -> None:
        with pytest.raises(ConfigError, match="index= needs transform="):
            ImageDataset(generated, size=8, index=True)

    def test_sources_without_a_manifest(self, tmp_path: Path, generated: Manifest) -> None:
        with TarWriter(tmp_path / "a.tar") as shard:
            shard.write({"__key__": "1", "jpg": jpeg(noise(30, 30)), "cls": b"3"})
        shards = ShardDataset(str(tmp_path / "a.tar"))
        with pytest.raises(ConfigError, match="index= is for images of a manifest, and a ShardDataset has no manifest"):
            ImageDataset(shards, transform=CHAINS["crops"], index=True)
        index = ImageIndex.open(f"{generated.sources[0]}.entries", generated)
        load = LoadImage(transform=CHAINS["crops"], index=index)
        assert load(generated[0])[1] == 0
        with pytest.raises(ConfigError, match=r"a\.tar/1\.jpg.*samples of shards have no row"):
            load(shards[0])

    def test_several_files_and_servers_need_a_path(self, generated: Manifest) -> None:
        both = Manifest.open([generated.sources[0]] * 2, root=generated.root)
        with pytest.raises(ConfigError, match="index= of ImageDataset"):
            ImageDataset(both, transform=CHAINS["crops"], index=True)
