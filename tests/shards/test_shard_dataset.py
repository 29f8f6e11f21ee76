"""`ShardDataset` and `StreamShards`: every sample once, the same everywhere, exact resume."""

from __future__ import annotations

import gzip
import io
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entries_support import closed, opened
from full_run import full_only
from pairwise import each_value, pairwise
from PIL import Image
from shard_support import make_tar, write_shards

import penstock as ps
from penstock.datasets.shards import ShardDataset
from penstock.errors import ConfigError, PartitionError, ShardError, StateError, TruncatedShardError
from penstock.shards import Decode, ShardSet, StreamShards

COUNTS = {1: [50], 3: [20, 1, 29], 8: [6, 7, 6, 7, 6, 6, 6, 6]}


def numbers(batch: Any) -> list[int]:
    return [int(text) for text in batch["cls"]]


def label(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def as_text(samples: list[Any]) -> list[str]:
    return [str(sample) for sample in samples]


def drawn(sample: dict[str, Any]) -> tuple[int, int]:
    return int(sample["cls"]), int(ps.generator().integers(1 << 30))


drawn.pure = True  # type: ignore[attr-defined]


@full_only("workers for each", but=["8-1-4-process", "3-3-1-process"])
@pytest.mark.parametrize(
    ("shards", "ranks", "workers", "executor"),
    pairwise(
        *(COUNTS, [1, 2, 3], [0, 1, 4], ["auto", "process", "thread"]),
        allowed=lambda shards, ranks, workers, executor: (workers == 0) == (executor == "auto"),
    ),
)
def test_every_sample_once(tmp_path: Path, shards: int, ranks: int, workers: int, executor: str) -> None:
    paths = write_shards(tmp_path, COUNTS[shards])
    seen: Counter[int] = Counter()
    batches = []
    for rank in range(ranks):
        dataset = ShardDataset(paths, rank=rank, world_size=ranks, seed=1)
        options = {} if executor == "auto" else {"executor": executor}
        loader = ps.DataLoader(dataset, batch_size=4, num_workers=workers, **options)
        mine = [numbers(batch) for batch in loader]
        batches.append(len(mine))
        seen.update(number for batch in mine for number in batch)
        if rank == 0:
            first = mine
    assert len(set(batches)) == 1
    padding = -50 % ranks
    assert set(seen) == set(range(50))
    assert seen.total() == 50 + padding
    reference = ShardDataset(paths, rank=0, world_size=ranks, seed=1)
    assert [n for batch in first for n in batch] == [label(reference[i]) for i in range(len(reference))]


def test_orders_differ_and_repeat(tmp_path: Path) -> None:
    dataset = ShardDataset(write_shards(tmp_path, [30, 30]), load=label, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append([dataset[i] for i in range(60)])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == list(range(60))


def test_state_is_elastic(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [31, 9])
    two = [ShardDataset(paths, load=label, rank=r, world_size=2, seed=5) for r in range(2)]
    loaders = [ps.DataLoader(dataset, batch_size=4) for dataset in two]
    had, state = [], {}
    for loader in loaders:
        batches = iter(loader)
        for _ in range(3):
            had += next(batches).tolist()
        state = loader.state_dict()
    assert len(str(state)) < 1500
    rest = []
    for rank in range(3):
        loader = ps.DataLoader(ShardDataset(paths, load=label, rank=rank, world_size=3, seed=5), batch_size=4)
        loader.load_state_dict(state)
        rest += [n for batch in loader for n in batch.tolist()]
    assert len(rest) == 18  # 16 are left; two more, so that the ranks have equally many
    assert len(set(had) & set(rest)) <= 2
    assert set(had) | set(rest) == set(range(40))
    other = ps.DataLoader(ShardDataset(write_shards(tmp_path, [30, 10]), load=label, seed=5), batch_size=4)
    with pytest.raises(StateError, match="fingerprint"):
        other.load_state_dict(state)
        iter(other)


def test_generators_do_not_depend_on_the_executor(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [20, 13])
    results = []
    for options in ({}, {"num_workers": 2, "executor": "process"}, {"num_workers": 2, "executor": "thread"}):
        loader = ps.DataLoader(ShardDataset(paths, load=drawn, seed=2), batch_size=5, **options)
        results.append([tuple(map(tuple, np.stack([b.numpy() for b in batch]).T)) for batch in loader])
    assert results[0] == results[1] == results[2]


def jpeg(value: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 6), (value, value, value)).save(out, "JPEG")
    return out.getvalue()


def test_decode(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3))
    members = [("a.jpg", jpeg(200)), ("a.cls", b"7\n"), ("a.json", b'{"x": 1}'), ("a.txt", "é".encode())]
    members += [("a.npy", array.getvalue()), ("a.pyd", b"\x80"), ("a.seg.png", b"raw")]
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar(members))
    item = ShardDataset(path, decode={"seg.png": None})[0]
    assert item["jpg"].shape == (3, 6, 8)
    assert item["jpg"].dtype == torch.uint8
    assert abs(int(item["jpg"][0, 0, 0]) - 200) < 3
    assert (item["cls"], item["json"], item["txt"]) == (7, {"x": 1}, "é")
    assert item["npy"].tolist() == [0, 1, 2]
    assert (item["pyd"], item["seg.png"]) == (b"\x80", b"raw")
    with pytest.raises(ps.errors.ImageError if hasattr(ps, "errors") else ValueError, match=r"a\.tar: sample 'a': seg"):
        ShardDataset(path, decode=True)[0]
    assert pickle.loads(pickle.dumps(Decode()))({"cls": b"3"}) == {"cls": 3}
    path.write_bytes(make_tar([("b.cls", b"seven")]))
    with pytest.raises(ShardError, match=r"a\.tar: sample 'b': cls"):
        ShardDataset(path, decode=True)[0]
    with pytest.raises(ConfigError):
        ShardDataset(path, decode=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="already open"):
        ShardDataset(ShardSet(path), progress=False)


def test_a_failing_load_names_the_sample_and_not_its_bytes(tmp_path: Path) -> None:
    def fail(sample: Any) -> None:
        raise KeyError("x")

    dataset = ShardDataset(write_shards(tmp_path, [3]), load=fail)
    with pytest.raises(KeyError) as caught:
        dataset.__getitems__([0])
    assert "d/k00000" in caught.value.__notes__[0]
    assert len(caught.value.__notes__[0]) < 300


# Streams.


def stream(paths: Any, **options: Any) -> list[int]:
    return [label(sample) for sample in StreamShards(paths, **options)]


def test_stream_order_and_epochs(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5, 5, 5])
    assert stream(paths, shuffle="none") == list(range(20))
    dataset = StreamShards(paths, seed=1)
    orders = [[label(s) for s in dataset] for _ in range(4)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len(set(map(tuple, orders))) > 1
    dataset.set_epoch(0)
    assert [label(s) for s in dataset] == orders[0]
    assert dataset.epoch == 0
    shuffled = stream(paths, seed=1, buffer_bytes=1500)
    assert sorted(shuffled) == list(range(20))
    assert shuffled != orders[0]
    assert shuffled == stream(paths, seed=1, buffer_bytes=1500)


def test_ranks_see_other_shards_each_epoch(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [1] * 8)
    datasets = [StreamShards(paths, seed=0, rank=r, world_size=2) for r in range(2)]
    seen = []
    for epoch in range(4):
        both = [dataset.shards_of(epoch) for dataset in datasets]
        assert sorted(both[0] + both[1]) == list(range(8))
        seen.append(tuple(sorted(both[0])))
    assert len(set(seen)) > 1
    with pytest.raises(PartitionError, match="ShardDataset"):
        stream(paths, rank=0, world_size=9)


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
@pytest.mark.parametrize("buffer_bytes", [0, 1200])
def test_stream_state(tmp_path: Path, kind: str, buffer_bytes: int) -> None:
    paths = write_shards(tmp_path, [7, 1, 0, 9], mtime=1.5)
    if kind == "tar.gz":
        for path in paths:
            Path(path + ".gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        paths = [path + ".gz" for path in paths]
    whole = stream(paths, seed=4, buffer_bytes=buffer_bytes)
    assert sorted(whole) == list(range(17))
    for had in range(18):
        dataset = StreamShards(paths, seed=4, buffer_bytes=buffer_bytes)
        items = iter(dataset)
        for _ in range(had):
            next(items)
        state = dataset.state_dict()
        again = StreamShards(paths, seed=4, buffer_bytes=buffer_bytes)
        again.load_state_dict(state)
        assert again.state_dict() == state
        again.set_epoch(0)
        assert [label(s) for s in again] == whole[had:]
        assert sorted(label(s) for s in again) == list(range(17))
        assert again.epoch == 1


@full_only("workers for each", but=["0", "2"])
@pytest.mark.parametrize("workers", [0, 2, 5])
def test_stream_in_a_loader(tmp_path: Path, workers: int) -> None:
    paths = write_shards(tmp_path, [7, 5, 3, 9])
    make = lambda: ps.DataLoader(StreamShards(paths, load=label, seed=1), batch_size=2, num_workers=workers)  # noqa: E731
    whole = [batch.tolist() for batch in make()]
    assert sorted(n for batch in whole for n in batch) == list(range(24))
    loader = make()
    batches = iter(loader)
    had = [next(batches).tolist() for _ in range(5)]
    state = loader.state_dict()
    del batches
    again = make()
    again.load_state_dict(state)
    assert had + [batch.tolist() for batch in again] == whole


def test_stop_iteration_of_load_does_not_end_the_stream(tmp_path: Path) -> None:
    def load(sample: Any) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(StreamShards(write_shards(tmp_path, [2]), load=load))


def test_stream_errors_and_handlers(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5, 5])
    data = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(data[:6000])
    with pytest.raises(TruncatedShardError, match=r"s-0001\.tar: ends at byte 6000"):
        stream(paths, shuffle="none")
    errors: list[Exception] = []
    got = stream(paths, shuffle="none", handler=lambda error: errors.append(error) is None)
    assert len(errors) == 1
    assert got[:5] == list(range(5))
    assert got[-5:] == list(range(10, 15))
    assert 5 < len(got) < 15
    with pytest.raises(ShardError, match="none"):
        stream([str(tmp_path / "none.tar")])


def test_stream_state_of_others_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5])
    state = StreamShards(paths, seed=1).state_dict()
    for other in (
        StreamShards(paths, seed=2),
        StreamShards(paths[:1], seed=1),
        StreamShards(paths, seed=1, rank=0, world_size=2),
    ):
        with pytest.raises(StateError):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="damaged"):
        StreamShards(paths, seed=1).load_state_dict(closed({**opened(state), "at": [1]}))
    for options in ({"shuffle": "global"}, {"buffer_bytes": -1}):
        with pytest.raises(ConfigError):
            StreamShards(paths, **options)  # type: ignore[arg-type]


def test_streams_close_their_files(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3] * 40)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert len(stream(paths)) == 120
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@full_only("workers for each", but=["ShardDataset-True", "StreamShards-True"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [ShardDataset, StreamShards])
def test_every_pass_has_another_order(tmp_path: Path, kind: Any, persistent: bool) -> None:
    """Without `set_epoch` too, and the orders are those of a loader without workers."""
    passes = []
    for options in ({}, {"num_workers": 2, "executor": "process", "persistent_workers": persistent}):
        dataset = kind(write_shards(tmp_path, COUNTS[8]), seed=4)
        loader = ps.DataLoader(dataset, batch_size=5, **options)
        passes.append([[n for batch in loader for n in numbers(batch)] for _ in range(3)])
    for orders in passes:
        assert all(sorted(order) == list(range(50)) for order in orders)
        assert len(set(map(tuple, orders))) == 3
    assert kind is StreamShards or passes[0] == passes[1]  # streams are dealt to workers


def mixed(paths: list[str], *, seed: int) -> ps.Mixture:
    parts = [StreamShards(some, seed=seed, load=label) for some in (paths[:4], paths[4:])]
    return ps.Mixture([(parts[0], 0.75), (parts[1], 0.25)], stop=48)


@full_only("workers for each", but=["True-mixed"])
@pytest.mark.parametrize(("persistent", "kind"), each_value([False, True], [StreamShards, mixed]))
def test_a_stream_goes_on_in_a_later_pass(tmp_path: Path, kind: Any, persistent: bool) -> None:
    """Also with workers of which nothing has been delivered in it."""
    paths = write_shards(tmp_path, COUNTS[8])

    def make() -> ps.DataLoader[Any]:
        options = {"num_workers": 2, "executor": "process", "persistent_workers": persistent}
        return ps.DataLoader(kind(paths, seed=4), batch_size=5, collate_fn=as_text, **options)

    loader = make()
    first, second = list(loader), list(loader)
    assert first != second
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = list(batches)
    assert rest not in (first[1:], second[1:])
    again = make()
    again.load_state_dict(state)
    assert list(again) == rest
    assert list(again) == list(loader)


@full_only("workers for each", but=["0", "StreamShards-2"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [StreamShards, mixed])
def test_the_epoch_of_a_loader_over_a_stream(tmp_path: Path, kind: Any, workers: int) -> None:
    paths = write_shards(tmp_path, COUNTS[8])
    make = lambda: ps.DataLoader(kind(paths, seed=4), batch_size=5, collate_fn=as_text, num_workers=workers)  # noqa: E731
    loader, passes = make(), []
    for epoch in range(2):
        batches = iter(loader)
        passes.append([next(batches)])
        assert loader.epoch == epoch
        passes[-1] += batches
    told = make()
    told.set_epoch(0)
    assert [list(told), list(told)] == passes  # told once, it goes on from there
    ended = make()
    ended.load_state_dict(told.state_dict())
    assert ended.epoch == told.epoch == 2
    ended.set_epoch(1)
    assert list(ended) == passes[1]
