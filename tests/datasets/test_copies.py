"""Copies of data sets: they begin where the original is, and neither moves with the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot_support import write_lerobot
from PIL import Image
from video_support import write_video

import penstock as ps
from penstock.server import Server


def of_tokens(folder: Path, manifest: Path) -> Any:
    np.save(folder / "tokens.npy", np.arange(400, dtype=np.uint16))
    return ps.TokenDataset(folder / "tokens.npy", sequence_length=4, mini_epochs=2)


def of_images(folder: Path, manifest: Path) -> Any:
    for number in range(8):
        (folder / "images" / "ant").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number,) * 3).save(folder / "images" / "ant" / f"{number}.png")
    return ps.open(folder / "images", size=4, mini_epochs=2)


def of_videos(folder: Path, manifest: Path) -> Any:
    for number in range(8):
        (folder / "videos" / "ant").mkdir(parents=True, exist_ok=True)
        write_video(folder / "videos" / "ant" / f"{number}.mp4", 4)
    return ps.VideoDataset(folder / "videos", frames=2, mini_epochs=2)


def of_robots(folder: Path, manifest: Path) -> Any:
    write_lerobot(folder / "robots", [8, 8], cameras=())
    return ps.LeRobotDataset(folder / "robots", mini_epochs=2)


MAKERS: dict[str, Callable[[Path, Path], Any]] = {
    "rows": lambda folder, manifest: ps.RankDataset(manifest, mini_epochs=2),
    "tokens": of_tokens,
    "mixture": lambda folder, manifest: ps.Mixture([(range(16), 1), (range(16, 32), 1)], mini_epochs=2),
    "packs": lambda folder, manifest: ps.PackedDataset(
        [[n] * 3 for n in range(40)], 8, lengths=[3] * 40, mini_epochs=2
    ),
    "images": of_images,
    "videos": of_videos,
    "robots": of_robots,
}


def items(dataset: Any) -> list[Any]:
    """Return the items of the present mini-epoch, as something to compare."""
    return [str(dataset[index]) for index in range(len(dataset))]


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_goes_its_own_way(
    name: str, way: Callable[[Any], Any], tmp_path: Path, write_manifest: Callable[..., Path]
) -> None:
    dataset = MAKERS[name](tmp_path, write_manifest(40))
    dataset.set_epoch(1)
    dataset.set_mini_epoch(1)
    before = items(dataset)
    made = way(dataset)
    assert type(made) is type(dataset)
    assert (made.epoch, made.mini_epoch, items(made)) == (1, 1, before)
    made.set_epoch(3)
    assert (dataset.epoch, dataset.mini_epoch, items(dataset)) == (1, 1, before)
    third = items(made)
    assert third != before
    dataset.set_epoch(3)
    assert items(dataset) == third
    made.set_epoch(1)
    for batch in ps.DataLoader(dataset, 4, collate_fn=list):  # which shows its epoch on its own data set alone
        assert batch
        assert (dataset.epoch, made.epoch) == (3, 1)


def test_a_shallow_copy_has_the_same_source(write_manifest: Callable[..., Path]) -> None:
    dataset = ps.RankDataset(write_manifest(8), load=len)
    dataset.mine = [3]  # type: ignore[attr-defined]
    made: Any = copy.copy(dataset)
    assert made.manifest is dataset.manifest
    assert made.load is len
    assert made.mine is dataset.mine  # type: ignore[attr-defined]


def test_a_copy_settles_no_rank(write_manifest: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ps.RankDataset(write_manifest(8))
    copies = [dataset, copy.copy(dataset), copy.deepcopy(dataset)]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [(made.rank, made.world_size) for made in copies] == [(1, 2)] * 3


def test_a_copy_of_a_stream_goes_its_own_way(write_manifest: Callable[..., Path]) -> None:
    path = write_manifest(8)
    for stream in (ps.MPDataset(path, batch_size=2), ps.ImageDataset(ps.MPDataset(path, batch_size=2), size=4)):
        made: Any = copy.copy(stream)
        made.set_epoch(2)
        assert (stream.epoch, made.epoch) == (0, 2)


def test_a_copy_of_a_served_data_set_reads_for_itself(write_manifest: Callable[..., Path]) -> None:
    manifest = ps.Manifest.open(write_manifest(40))
    with Server({"rows": manifest}) as server:
        dataset = ps.RankServerDataset(server.address, "rows", rank=0, world_size=1)
        made = copy.copy(dataset)
        made.set_epoch(2)
        assert dataset.epoch == 0
        local = ps.RankDataset(manifest, rank=0, world_size=1)
        assert list(dataset) == list(local)
        local.set_epoch(2)
        assert list(made) == list(local)
        for each in (dataset, made):
            each.close()
