"""The same batches from a cluster as from anywhere else: truth, resumption, streams, workers, two loaders at once."""

from __future__ import annotations

import json
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from interpreter_support import FULL
from matrix_support import DATA, bits
from odd_batch_support import OddBatches, assert_alike, identity, last_column
from own_threads_support import Forgetful, OwnThreads, raise_warnings
from ray_support import (
    STARTS,
    Counter,
    Infos,
    Lazy,
    Numbers,
    OverManifest,
    Shares,
    alive,
    all_joined,
    eventually,
    init,
    refuse,
    rows,
    workers_of,
)

import penstock as ps
from penstock import DataLoader, RayOptions
from penstock.errors import ClusterError, ConfigError, StateError

pytestmark = pytest.mark.usefixtures("cluster")

N, SIZE, PER_EPOCH = 26, 4, 7
HOW: dict[str, dict[str, Any]] = {
    "one": {"num_workers": 1},
    "two, persistent": {"num_workers": 2, "persistent_workers": True},
    "two with threads": {"num_workers": 2, "threads_per_worker": 3, "prefetch_factor": 1},
}


def make(kind: str, **how: Any) -> DataLoader[Any]:
    return DataLoader(DATA[kind](N), SIZE, shuffle=True, seed=11, **how)


@full_only("more workers to start for the same batches", but=["two, persistent"])
@pytest.mark.parametrize("name", HOW if FULL else ["two, persistent", "two with threads"])
def test_a_cluster_makes_the_same_batches(name: str) -> None:
    for kind in DATA:
        if kind == "impure" and "threads_per_worker" in HOW[name]:
            continue  # threads promise penstock.generator only
        inline, there = make(kind), make(kind, executor="ray", **HOW[name])
        random.seed(1)
        np.random.seed(2)
        before = random.getstate(), str(np.random.get_state())
        with there:
            epochs, joined = 0, 0
            while epochs < 2 or joined < HOW[name]["num_workers"]:  # the last one by all of them
                joined = workers_of(there)
                expected = [bits(batch) for batch in inline]
                assert [bits(batch) for batch in there] == expected
                epochs += 1
        assert (random.getstate(), str(np.random.get_state())) == before


@full_only("150 odd batches; tests/loader/test_odd_batches.py has them in processes")
def test_odd_batches_arrive_as_they_are_inline() -> None:
    dataset = OddBatches(150)
    with DataLoader(dataset, batch_size=None, collate_fn=identity, executor="ray", num_workers=1) as loader:
        count = 0
        for index, batch in enumerate(loader):
            assert_alike(batch, dataset[index])
            count += 1
        assert count == len(dataset)
    rows = list(torch.arange(7 * 5.0).view(7, 5))
    with DataLoader(rows, 3, collate_fn=last_column, executor="ray", num_workers=1) as loader:  # 3 + 3 + 1
        assert [batch.tolist() for batch in loader] == [[4, 9, 14], [19, 24, 29], [34]]


def test_torchs_order_and_draws_that_do_not_depend_on_the_workers() -> None:
    """Without a seed the order is torch's, and draws follow from ``torch.manual_seed``, not from the worker."""

    def run(**how: Any) -> Any:
        torch.manual_seed(5)
        with DataLoader(DATA["impure"](N), SIZE, shuffle=True, executor="ray", **how) as loader:
            return [[bits(batch) for batch in loader] for _ in range(2)]

    first = run(num_workers=1)
    assert first == run(num_workers=2)
    torch.manual_seed(5)
    theirs = torch.utils.data.DataLoader(DATA["pure"](N), SIZE, shuffle=True, num_workers=1)
    assert [batch["index"] for batch in first[0]] == [bits(batch["index"]) for batch in theirs]
    drawn = {str(batch["drawn"]) for epoch in first for batch in epoch}
    assert len(drawn) == 2 * PER_EPOCH


def test_generators_stand_where_torchs_would() -> None:
    """As many batches are planned as torch plans, before any worker has started, too."""

    def trace(kind: Any, **how: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        loader = kind(range(60), 4, sampler=Lazy(60, generator), num_workers=2, prefetch_factor=3, **how)
        found: list[Any] = []
        iterator = iter(loader)
        while True:
            found.append(torch.rand((), generator=generator.clone_state()).item())
            if (batch := next(iterator, None)) is None:
                return found
            found.append(batch.tolist())

    assert trace(DataLoader, executor="ray") == trace(torch.utils.data.DataLoader)


def test_states_go_on_in_any_executor() -> None:
    expected = [bits(batch) for batch in make("images")]
    with make("images", executor="ray", num_workers=2) as loader:
        iterator = iter(loader)
        head = [bits(next(iterator)) for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        inline = make("images")
        inline.load_state_dict(state)
        assert head + [bits(batch) for batch in inline] == expected
        loader.load_state_dict(state)
        assert head + [bits(batch) for batch in loader] == expected
        loader.set_epoch(0)
        had, states = [], [loader.state_dict()]
        for batch in loader:
            had.append(bits(batch))
            states.append(loader.state_dict())
        assert had == expected
        end = loader.state_dict()
    inline = make("images")
    two_epochs = [bits(batch) for _ in range(2) for batch in inline]
    for count, state in (1, states[1]), (4, states[4]), (PER_EPOCH, states[-1]), (PER_EPOCH, end):
        inline = make("images")
        inline.load_state_dict(json.loads(json.dumps(state)))
        assert inline.epoch == (state is end)
        assert [bits(batch) for _ in range(inline.epoch, 2) for batch in inline] == two_epochs[count:]


def test_two_loaders_at_once_and_an_early_break() -> None:
    train, val = Numbers(40), Numbers(24)
    with (
        DataLoader(train, 4, shuffle=True, seed=1, executor="ray", num_workers=2) as one,
        DataLoader(val, 4, executor="ray", num_workers=1, seed=2) as other,
    ):
        expected = rows(DataLoader(train, 4, shuffle=True, seed=1))
        pairs = list(zip(one, other, strict=False))
        assert rows(batch for batch, _ in pairs) == expected[:24]
        assert rows(batch for _, batch in pairs) == rows(DataLoader(val, 4, seed=2))
        before = alive()
        assert len(before) == 3
        for _ in range(3):
            for _ in one:
                break  # stops the pass, and no worker
        one.set_epoch(0)
        assert rows(one) == expected
        assert alive() == before
    assert eventually(lambda: not alive())


def test_workers_are_not_started_again() -> None:
    with DataLoader(Numbers(64, seconds=0.005), 4, seed=1, executor="ray", num_workers=2) as loader:
        pids: set[int] = set()
        passes = 0
        while len(pids) < 2 or passes < 2:  # until both have started
            pids.update(pid for batch in loader for pid in batch["pid"].tolist())
            passes += 1
        assert {pid for batch in loader for pid in batch["pid"].tolist()} <= pids
        assert len(pids) == 2
        assert loader.stats()["ways"].keys() == {"message"}
        nodes = loader.stats()["nodes"]
        assert sum(node["batches"] for node in nodes.values()) == 16 * (passes + 1)
        assert sum(node["samples"] for node in nodes.values()) == 64 * (passes + 1)
        assert workers_of(loader) == 2
        assert loader.stats()["lost_workers"] == 0


def test_workers_that_are_dropped_end() -> None:
    iterator = iter(DataLoader(Numbers(40), 4, executor="ray", num_workers=1))
    next(iterator)
    assert alive()
    del iterator
    assert eventually(lambda: not alive())


def test_a_changed_data_set_is_seen_by_the_next_pass() -> None:
    """As torch's fresh workers see it; persistent ones keep their copies."""
    for persistent in (False, True):
        data = Numbers(8)
        with DataLoader(data, 4, executor="ray", num_workers=1, persistent_workers=persistent) as loader:
            assert all("data" not in batch for batch in loader)
            data.size = 3
            assert all(("data" in batch) is not persistent for batch in loader)


def test_threads_of_a_data_set_draw_the_same_or_are_warned() -> None:
    how: dict[str, Any] = {"executor": "ray", "num_workers": 1, "threads_per_worker": 2}
    inline = [bits(batch) for batch in DataLoader(OwnThreads(8), 4, shuffle=True, seed=5)]
    with DataLoader(OwnThreads(8), 4, shuffle=True, seed=5, **how) as loader:
        assert [bits(batch) for batch in loader] == inline
    with DataLoader(Forgetful(8), 4, worker_init_fn=raise_warnings, **how) as loader:
        texts = [text for batch in loader for text in batch]
    assert len(texts) == 8
    assert all("penstock.generator().spawn(n)" in text for text in texts)


def test_worker_info_init_and_seeds() -> None:
    seen: set[Any] = set()
    end = time.monotonic() + STARTS
    with DataLoader(Infos(), 4, executor="ray", num_workers=2, worker_init_fn=init) as loader:
        for batch in loader:
            seen.update(zip(*(column.tolist() for column in batch), strict=True))
            if len({row[0] for row in seen}) == 2 or time.monotonic() > end:
                break
    assert {row[0] for row in seen} == {0, 1}
    assert {row[1] for row in seen} == {2}
    assert all(row[3] == row[0] for row in seen)
    assert len({row[2] - row[0] for row in seen}) == 1
    with (
        DataLoader(Infos(), 4, executor="ray", num_workers=1, worker_init_fn=refuse) as loader,
        pytest.raises(RuntimeError, match="does not like it here"),
    ):
        next(iter(loader))


def test_streams_are_dealt_as_in_torch() -> None:
    expected = [batch.tolist() for batch in torch.utils.data.DataLoader(Shares(22), 4, num_workers=2)]
    with DataLoader(Shares(22), 4, executor="ray", num_workers=2) as loader:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == expected
    with DataLoader(Shares(22), 4, executor="ray", num_workers=2, in_order=False) as loader:
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(22))


def test_streams_with_a_state_go_on() -> None:
    with DataLoader(Counter(40), 3, executor="ray", num_workers=2) as loader:
        expected = [batch.tolist() for batch in loader]
        iterator = iter(loader)
        head = [next(iterator).tolist() for _ in range(5)]
        state = loader.state_dict()
        del iterator
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert head + [batch.tolist() for batch in loader] == expected
    with DataLoader(Counter(40), 3, executor="ray", num_workers=1) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)


def test_an_older_iterator_takes_no_answers_of_a_newer_one() -> None:
    import ray

    data = Numbers(48, seconds=0.005)
    with DataLoader(data, 4, seed=1, executor="ray", num_workers=2) as loader:
        older = iter(loader)
        next(older)
        newer, found = iter(loader), []
        for batch in newer:
            found.append(batch)
            if calls := list(loader._workers.executor._pending):  # type: ignore[union-attr]
                ray.wait(calls)
            with pytest.raises(RuntimeError, match="a newer iterator of this DataLoader has taken over its workers"):
                next(older)
        assert [index for index, _ in rows(found)] == list(range(48))


class Overtaken(Numbers):
    """Sample 9 takes as long as a file is not there."""

    def __init__(self, n: int, file: Path) -> None:
        super().__init__(n, seconds=0.01)  # batches are not so quick that several go together
        self.file = file

    def __getitem__(self, index: int) -> Any:
        end = time.monotonic() + STARTS
        while index == 9 and not self.file.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return super().__getitem__(index)


def test_out_of_order_batches_are_the_same_ones(tmp_path: Path) -> None:
    data = Overtaken(96, tmp_path / "go on")
    data.file.touch()
    expected = [rows([batch]) for batch in DataLoader(data, 4, seed=1)]
    how: dict[str, Any] = {"num_workers": 3, "persistent_workers": True, "in_order": False}
    with DataLoader(data, 4, seed=1, executor="ray", **how) as loader:
        assert all_joined(loader, 3)
        assert len(list(loader)) == 24  # of each worker it is known now how quick it is, and all get their share
        loader.set_epoch(0)
        data.file.unlink()
        found = []
        for batch in loader:
            found.append(rows([batch]))
            if len(found) == 5:
                data.file.touch()
    assert sorted(found) == sorted(expected)
    assert found.index(expected[2]) >= 5


def test_batches_are_writable_and_stay_as_they_are() -> None:
    """Nothing of the object store is handed out, and nothing is written over what is held."""
    data = Numbers(80, size=40_000)
    with DataLoader(data, 4, executor="ray", num_workers=2) as loader:
        kept = []
        for batch in loader:
            batch["data"] += 1
            kept.append(batch)
        for number, batch in enumerate(kept):
            expected = torch.tensor([(4 * number + k) % 251 + 1 for k in range(4)], dtype=torch.uint8)
            assert torch.equal(batch["data"], expected[:, None].expand(4, 40_000))
        assert loader.stats()["ways"] == {"message": 20}
    assert torch.equal(kept[3]["data"][:, 7], torch.arange(13, 17, dtype=torch.uint8))


@full_only("much memory to fill")
def test_large_batches_fit_into_a_small_store() -> None:
    """320 MB of batches through a store of 150 MB, as many begun as fit: nothing goes to disk."""
    from ray._private.internal_api import memory_summary

    data = Numbers(64, size=5_000_000)
    with DataLoader(data, 4, executor="ray", num_workers=3, prefetch_factor=8, seed=1) as loader:
        total = sum(batch["data"].nbytes for batch in loader)
        depth = loader.stats()["queue"]["depth"]
    assert total == 320_000_000
    assert 1 <= depth <= 2.5
    assert "Spilled" not in memory_summary(stats_only=True)


@full_only("a large data set that is sent")
def test_large_data_sets_are_said() -> None:
    class Heavy(Numbers):
        def __init__(self) -> None:
            super().__init__(8)
            self.table = np.zeros(12_000_000, np.uint8)

    with (
        DataLoader(Heavy(), 4, executor="ray", num_workers=1) as loader,
        pytest.warns(UserWarning, match="Heavy pickles to 12 MB"),
    ):
        assert len(list(loader)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with DataLoader(Numbers(8), 4, executor="ray", num_workers=1) as loader:
            assert len(list(loader)) == 2


def test_a_manifest_is_opened_on_each_node(tmp_path: Path) -> None:
    """Each iterator of the loader sends the data set again, with another manifest."""
    from far_support import OverFarManifest

    data: Any = torch.utils.data.Subset(None, range(19, 3, -1))  # type: ignore[arg-type]
    with DataLoader(data, 4, seed=1, executor="ray", num_workers=2) as loader:
        for name in ("one", "two", "one"):
            path = tmp_path / f"{name}.txt"
            path.write_text("".join(f"{name}{number}.jpg {number}\n" for number in range(20)))
            data.dataset = OverManifest(ps.Manifest.open(path, cache_dir=tmp_path / "cache"))
            here = [bits(batch) for batch in DataLoader(data, 4, seed=1)]
            loader.set_epoch(0)
            assert [bits(batch[:3]) for batch in loader] == [batch[:3] for batch in here]
    far = OverFarManifest(data.dataset.manifest)
    with (
        DataLoader(far, 4, executor="ray", num_workers=1) as loader,
        pytest.raises(ClusterError, match=r"(?s)3 workers in a row could not be started .* no such file on this node"),
    ):
        list(loader)


@full_only("thousands of batches")
def test_quick_batches_go_together() -> None:
    with DataLoader(Numbers(2000), 4, seed=1, executor="ray", num_workers=2) as loader:
        assert rows(loader) == rows(DataLoader(Numbers(2000), 4, seed=1))
        assert loader.stats()["queue"]["depth"] > 8
    with DataLoader(Numbers(200), 4, seed=1, executor="ray", num_workers=1, prefetch_factor=3) as loader:
        assert rows(loader) == rows(DataLoader(Numbers(200), 4, seed=1))
        assert loader.stats()["queue"]["depth"] <= 3  # as the user said


def test_batches_of_classes_that_only_this_program_has() -> None:
    class Pair(tuple):  # type: ignore[type-arg]
        __slots__ = ()

    def collate(samples: list[Any]) -> Any:
        return Pair(samples)

    with DataLoader(Numbers(8), 4, executor="ray", num_workers=1, collate_fn=collate) as loader:
        batches = list(loader)
    assert [type(batch).__name__ for batch in batches] == ["Pair", "Pair"]
    assert [sample["index"] for batch in batches for sample in batch] == list(range(8))


def test_what_makes_no_sense_is_refused() -> None:
    def refused(match: str, data: Any = None, **how: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            next(iter(DataLoader(data or Numbers(8), 4, executor="ray", **{"num_workers": 1, **how})))

    refused("needs num_workers", num_workers=0)
    refused("multiprocessing_context", multiprocessing_context="fork")
    refused("always replaces lost workers", on_worker_death="restart")
    refused("cannot be pickled", Numbers(8), collate_fn=threading.Lock().acquire)
    with pytest.raises(ConfigError, match="ray_options is for"):
        DataLoader(Numbers(8), ray_options=RayOptions())
    with pytest.raises(ConfigError, match="ray_options must be a RayOptions"):
        DataLoader(Numbers(8), num_workers=1, executor="ray", ray_options={"num_cpus": 1})  # type: ignore[arg-type]
    wrong: list[dict[str, Any]] = [
        *({"num_cpus": -1}, {"num_cpus": "1"}, {"num_cpus": None}, {"num_cpus": float("nan")}),
        *({"deadline": 0}, {"deadline": "3"}, {"start_timeout": None}),
        *({"address": ""}, {"address": "10.0.0.1"}, {"address": 6379}, {"scheduling": "spread"}),
        *({"resources": 3}, {"resources": {"loader": "1"}}, {"label_selector": "loader"}, {"label_selector": {"a": 1}}),
        *({"runtime_env": "pip"}, {"name": 3}),
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError, match=" ".join(arguments) if len(arguments) == 1 else None):
            RayOptions(**arguments)


def test_dpex() -> None:
    """``distribute_mode=True`` is the Ray executor, False processes; positions are those of Dpex."""
    data = Numbers(16)
    expected = [batch["index"].tolist() for batch in torch.utils.data.DataLoader(data, 4)]
    for distribute_mode, name in ((True, "ray"), (False, "process")):
        with ps.DpexDataLoader(data, distribute_mode, "auto", 4, num_workers=2) as loader:
            assert [batch["index"].tolist() for batch in loader] == expected
            assert loader.stats()["executor"] == name
            assert loader.persistent_workers
    assert len(list(ps.DpexDataLoader(data))) == 16
    theirs = {"persistent_workers": False, "pin_memory_device": "", "in_order": False}  # torch's, which Dpex lacked
    with ps.DpexDataLoader(data, True, num_workers=1, **theirs) as loader:
        assert (loader.persistent_workers, loader.in_order) == (False, False)
    with pytest.raises(ConfigError, match="needs num_workers"):
        ps.DpexDataLoader(data, True)
    with pytest.raises(ConfigError, match="is for distribute_mode=True"):
        ps.DpexDataLoader(data, False, "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="Pass arguments by name"):
        ps.DpexDataLoader(data, 8, True)  # type: ignore[arg-type]


def test_arrays_come_from_a_cluster_as_tensors_do() -> None:
    with make("pure", output="numpy", executor="ray", num_workers=1) as loader:
        arrays = list(loader)
    tensors = list(make("pure"))
    assert len(arrays) == len(tensors) == PER_EPOCH
    for mine, yours in zip(arrays, tensors, strict=True):
        assert {type(part) for part in mine.values()} == {np.ndarray}
        assert {name: part.tobytes() for name, part in mine.items()} == {
            name: part.numpy().tobytes() for name, part in yours.items()
        }


def test_batches_of_a_cluster_go_on_to_a_device() -> None:
    with make("pure", device="meta", executor="ray", num_workers=1) as loader:
        assert {batch["large"].device.type for batch in loader} == {"meta"}
    assert loader.stats()["copies"]["batches"] == PER_EPOCH
