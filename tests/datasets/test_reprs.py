"""What a data set says of itself: its source, its order and its share; nothing is settled or read by asking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.shards import StreamShards


@pytest.fixture
def manifest(tmp_path: Path) -> ps.Manifest:
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{row}.jpg {row}\n" for row in range(1000)))
    return ps.Manifest.open(path)


def test_a_share_names_its_rows_order_and_rank(manifest: ps.Manifest, tmp_path: Path) -> None:
    dataset = ps.RankDataset(manifest, rank=1, world_size=8, mini_epochs=4, shuffle="block", block_size=64, window=2)
    dataset.set_epoch(3)
    assert repr(dataset).splitlines() == [
        f"RankDataset of <Manifest of 1,000 rows: path, label; {tmp_path}/train.txt>",
        "  order: block, block_size 64, window 2, seed 0, epoch 3, mini-epoch 0 of 4",
        "  share: rank 1 of 8, 32 samples",
    ]


def test_asking_settles_no_rank(manifest: ps.Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ps.RankDataset(manifest)
    assert "rank 0 of 1, 1,000 samples" in repr(dataset)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "rank 3 of 4, 250 samples" in repr(dataset)
    assert len(dataset) == 250


def test_a_resumed_share_names_what_is_left(manifest: ps.Manifest) -> None:
    dataset = ps.RankDataset(manifest)
    dataset.load_state_dict(dataset.state_dict(count=990))
    assert repr(dataset).endswith("share: rank 0 of 1, 10 samples")


def test_files_of_numbers_and_mixtures_name_what_they_hold(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((10, 2)))
    np.save(tmp_path / "tokens.npy", np.zeros(100, np.uint16))
    arrays = ps.ArrayDataset(str(tmp_path / "rows.npy"), rank=0, world_size=1)
    assert repr(arrays).startswith(f"ArrayDataset of <ArrayFiles of 10 rows: {tmp_path}/rows.npy>\n")
    tokens = ps.TokenDataset(str(tmp_path / "tokens.npy"), 4)
    assert repr(tokens).startswith(f"TokenDataset of <TokenFiles of 25 sequences of 4: {tmp_path}/tokens.npy>\n")
    mixture = ps.Mixture([(arrays, 1), (range(5), 2)], names=["arrays", "numbers"])
    assert repr(mixture).splitlines()[:2] == [
        "Mixture of <2 sources: arrays, numbers>",
        "  order: mixture, each source global, seed 0, epoch 0",
    ]


def test_images_name_their_source(manifest: ps.Manifest) -> None:
    assert repr(ps.ImageDataset(manifest, size=8)) == f"ImageDataset of {manifest!r}"


def test_streams_name_what_they_read(manifest: ps.Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = ps.MPDataset(manifest, batch_size=4, rank=1, world_size=8)
    assert repr(stream).splitlines() == [
        f"MPDataset of {manifest!r}",
        "  order: global, seed 0, epoch 0",
        "  share: rank 1 of 8, 125 samples",
    ]
    shards = StreamShards(["a.tar.gz", "b.tar.gz"], buffer_bytes=1 << 20, seed=3)
    shards.set_epoch(2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert repr(shards).splitlines() == [
        "StreamShards of <2 shards: a.tar.gz and 1 more>",
        "  order: shards, buffer_bytes 1,048,576, seed 3, epoch 2",
        "  share: rank 1 of 2",
    ]
    mixture = ps.Mixture([(stream, 1), (shards, 1)], names=["lists", "shards"])
    assert repr(mixture).splitlines() == [
        "MixtureStream of <2 sources: lists, shards>",
        "  order: mixture in each worker, epoch 0",
    ]


def test_signatures_of_addresses_are_not_shown() -> None:
    stream = StreamShards("https://me:word@store/a.tar.gz?signature=secret", rank=0, world_size=1)
    assert "<1 shard: https://store/a.tar.gz?...>" in repr(stream)
