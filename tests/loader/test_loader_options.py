"""Nothing is accepted and ignored, and what other people's classes are called is no promise."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from busy_support import HANG
from entries_support import opened
from full_run import full_only
from interpreter_support import FULL, run
from state_support import CountingMap

import penstock as ps
from penstock.errors import ConfigError, PartitionError, StateError
from penstock.loader.config import LoaderConfig


class Stream(torch.utils.data.IterableDataset[int]):
    """Its attributes are named like those of our streams."""

    samples = list(range(3))
    batch_size = 4
    drop_last = False

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Loads(torch.utils.data.Dataset[int]):
    """It has a method that is named like one of ours."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index * 10

    def load_samples(self) -> None:
        raise AssertionError("not for us")


def test_foreign_stream_is_iterated_whatever_its_attributes_are_called() -> None:
    assert [batch.tolist() for batch in ps.DataLoader(Stream(), batch_size=4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "executor": "thread"}])
def test_foreign_method_of_our_name_is_left_alone(options: dict[str, Any]) -> None:
    assert [batch.tolist() for batch in ps.DataLoader(Loads(), batch_size=3, **options)] == [[0, 10, 20], [30, 40, 50]]


class Workers(torch.utils.data.Dataset[tuple[int, int]]):
    """The thread that makes a sample, and how many workers it knows of."""

    pure = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = torch.utils.data.get_worker_info()
        return threading.get_ident(), -1 if info is None else info.num_workers


@pytest.mark.parametrize("options", [{}, {"num_workers": 0}])
def test_threads_without_a_number_are_one_thread(options: dict[str, Any]) -> None:
    """With everything that torch takes with workers alone; and so if the number is assigned."""
    more: dict[str, Any] = {"prefetch_factor": 3, "persistent_workers": True, "timeout": 30, "max_bytes_in_flight": 99}
    collect: Any = {"collate_fn": list}
    with ps.DataLoader(Workers(), 2, executor="thread", **options, **more, **collect) as loader:
        threads = {sample for batch in loader for sample in batch}
        assert [workers for _, workers in threads] == [1]
        assert threads != {(threading.get_ident(), 1)}
        assert loader.num_workers == 1
        assert (loader.stats()["executor"], loader.stats()["workers"]) == ("thread", 1)
    with ps.DataLoader(Workers(), 2, executor="thread", num_workers=2, **collect) as loader:
        loader.num_workers = 0
        assert [workers for _, workers in {sample for batch in loader for sample in batch}] == [1]
        assert loader.num_workers == 1


def test_the_signature_has_the_settings_of_the_config() -> None:
    arguments = {name: each.default for name, each in inspect.signature(ps.DataLoader).parameters.items()}
    fields = {each.name: each.default for each in dataclasses.fields(LoaderConfig)}
    assert fields.keys() - arguments.keys() == {"pure", "releases_gil", "exact_depth"}
    assert all(arguments[name] == fields[name] for name in arguments.keys() & fields.keys())


def test_an_unknown_argument_names_the_class_that_was_called() -> None:
    with pytest.raises(TypeError, match=r"^DataLoader\.__init__\(\) got an unexpected keyword argument 'nworkers'"):
        ps.DataLoader(Loads(), 1, nworkers=2)  # type: ignore[call-arg]


def test_several_processes_for_one_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads_per_worker"):
        ps.DataLoader(Loads(), num_workers=2, dispatch="chunk")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("hedge", False, "deadline"),
        ("min_workers", 1, "num_workers"),
        ("max_workers", 4, "num_workers"),
        ("threads_per_worker", 2, "threads_per_worker"),
    ],
)
def test_a_dropped_option_of_ray_names_what_replaces_it(name: str, value: Any, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"takes no {name}=: .*pass {instead}="):
        ps.RayOptions(**{name: value})


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("cluster", "executor"):
        monkeypatch.delitem(sys.modules, f"penstock.loader.executors.ray.{name}", raising=False)
    with pytest.raises(ConfigError, match=r"needs Ray 2\.60 or newer: pip install 'penstock\[ray\]'"):
        iter(ps.DataLoader(Loads(), num_workers=1, executor="ray"))


@pytest.mark.parametrize("name", ["max_bytes_in_flight", "threads_per_worker"])
@pytest.mark.parametrize("value", ["2", 0, 1.5])
def test_counts_are_integers_of_one_or_more(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer of 1 or more, got {value!r}"):
        ps.DataLoader(Loads(), num_workers=1, **{name: value})


def test_batches_that_are_never_begun_are_refused_where_torch_does() -> None:
    loader = ps.DataLoader(Loads(), num_workers=1, prefetch_factor=0)
    with pytest.raises(AssertionError, match="prefetches no batch"):
        iter(loader)


def test_seed_over_a_foreign_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect on Stream"):
        ps.DataLoader(Stream(), batch_size=4, seed=1)


@pytest.mark.parametrize("options", [{"shuffle": "global"}, {"shuffle": True, "seed": 1}, {"seed": 1}])
def test_generator_beside_our_order_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="generator="):
        ps.DataLoader(Loads(), generator=torch.Generator(), **options)


def test_numpy_integers_are_integers(write_manifest: Callable[..., Path]) -> None:
    def rows(seed: Any, rank: Any, world_size: Any) -> list[list[int]]:
        dataset = ps.RankDataset(path, seed=seed, rank=rank, world_size=world_size)
        loader = ps.DataLoader(dataset, batch_size=4)
        return [rows.tolist() for _, _, rows in loader]

    path = write_manifest(20)
    assert rows(np.int64(3), np.int64(0), np.int64(2)) == rows(3, 0, 2)
    assert next(iter(ps.DataLoader(Loads(), batch_size=2, seed=np.int64(3)))).tolist() == [0, 10]  # type: ignore[arg-type]


def test_threads_are_not_warned_of_as_processes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.DataLoader(Loads(), num_workers=64, executor="thread")
    with pytest.warns(UserWarning, match="worker processes"):
        ps.DataLoader(Loads(), num_workers=4096)


def test_loader_in_mid_pass_can_be_pickled(write_manifest: Callable[..., Path]) -> None:
    manifest = ps.Manifest.open(write_manifest(20))
    dataset = ps.RankDataset(manifest, rank=0, world_size=1, seed=1)
    with ps.DataLoader(dataset, batch_size=4, num_workers=2, executor="thread", persistent_workers=True) as loader:
        it = iter(loader)
        next(it)
        copy = pickle.loads(pickle.dumps(loader))
        list(it)
    assert len(list(copy)) == 5


def test_set_epoch_on_the_sampler_itself_is_not_moved_on() -> None:
    """torch's loops call it there; after a break the loader must not take its own next epoch for the chosen one."""
    sampler = ps.DistributedSampler(range(40), 1, 0, shuffle="global", seed=0)
    loader = ps.DataLoader(list(range(40)), batch_size=8, sampler=sampler)
    heads = []
    for epoch in (3, 3, 4, 3):
        sampler.set_epoch(epoch)
        heads.append(next(iter(loader)).tolist())
        assert loader.epoch == epoch
    assert heads[0] == heads[1] == heads[3] != heads[2]


def test_own_sampler_over_a_share_moves_both_on(write_manifest: Callable[..., Path]) -> None:
    dataset = ps.RankDataset(write_manifest(40), rank=0, world_size=2, seed=0)
    loader = ps.DataLoader(dataset, batch_size=20, sampler=ps.RandomSampler(dataset, shuffle="global", seed=0))
    shares = [sorted(rows.tolist()) for _ in range(3) for _, _, rows in loader]
    assert shares[0] != shares[1] != shares[2]
    assert (loader.epoch, dataset.epoch) == (3, 3)


def test_double_split_is_found_however_deep(write_manifest: Callable[..., Path]) -> None:
    dataset = ps.RankDataset(write_manifest(20), rank=0, world_size=2)
    inner = torch.utils.data.DistributedSampler(range(10), num_replicas=2, rank=0)
    deep = ps.IterationBasedBatchSampler(ps.BatchSampler(inner, 2, False), 5)
    with pytest.raises(PartitionError, match="split it again"):
        ps.DataLoader(dataset, batch_sampler=deep)
    with pytest.raises(PartitionError, match="split it again"):
        ps.DataLoader(torch.utils.data.Subset(dataset, range(10)), sampler=inner)


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 1, "threads_per_worker": 4},
        {"num_workers": 2, "executor": "process", "threads_per_worker": 2},
        {"num_workers": 2, "executor": "thread"},
    ],
    ids=str,
)
def test_several_threads_over_a_data_set_with_a_state_are_refused(how: dict[str, Any]) -> None:
    """Its counter would run backwards from state to state."""
    with pytest.raises(ConfigError, match="CountingMap has a state, and several threads share one dataset"):
        ps.DataLoader(CountingMap(8), 2, **how)
    loader = ps.DataLoader(CountingMap(8), 2)
    for name, value in how.items():
        setattr(loader, name, value)
    with pytest.raises(ConfigError, match="CountingMap has a state"):
        iter(loader)
    loader.num_workers, loader.threads_per_worker, loader.executor = 1, 1, "thread"
    states = [opened(loader.state_dict())["workers"]["workers"]["0"]["snapshot"]["dataset"] for _ in loader]
    assert [state["served"] for state in states] == [2, 4, 6, 8]


def test_growth_is_accepted_when_asked_for(write_manifest: Callable[..., Path]) -> None:
    path = write_manifest(30)
    loader = ps.DataLoader(ps.RankDataset(path, rank=0, world_size=1, seed=1), batch_size=4)
    it = iter(loader)
    for _ in range(3):
        next(it)
    state, rest = loader.state_dict(), [rows.tolist() for _, _, rows in it]
    with open(path, "a") as file:
        file.write("class_99/new.jpg 99\n" * 10)
    grown = ps.DataLoader(ps.RankDataset(path, rank=0, world_size=1, seed=1), batch_size=4)
    with pytest.raises(StateError, match="fingerprint"):
        grown.load_state_dict(state)
    grown.load_state_dict(state, allow_growth=True)
    assert [rows.tolist() for _, _, rows in grown] == rest
    assert sum(len(rows) for _, _, rows in grown) == 40
    with pytest.raises(ConfigError, match="its own order"):
        ps.DataLoader(Loads()).load_state_dict(state, allow_growth=True)


def test_error_of_load_names_the_record(write_manifest: Callable[..., Path]) -> None:
    def fail(record: ps.Record) -> None:
        raise KeyError(record.label)

    loader = ps.DataLoader(ps.RankDataset(write_manifest(20), rank=0, world_size=1, load=fail), batch_size=4)
    with pytest.raises(KeyError) as caught:
        next(iter(loader))
    assert "img_" in caught.value.__notes__[0]


@full_only("a program for each", but=["loader.close()"])
@pytest.mark.parametrize("close", ["", "loader.close()"])
def test_interpreter_ends_in_order_with_threads_in_native_code(tmp_path: Path, close: str) -> None:
    """Daemon threads that are inside C++ when the interpreter goes away would abort it."""
    path = tmp_path / "many.txt"
    path.write_text("".join(f"p{i} {i}\n" for i in range(400_000)))
    script = f"""
        import penstock as ps
        dataset = ps.RankDataset({str(path)!r}, rank=0, world_size=1, seed=1)
        loader = ps.DataLoader(dataset, batch_size=4096, num_workers=3, executor="thread", prefetch_factor=4)
        it = iter(loader)
        for _ in range(3):
            next(it)
        {close}
    """
    for _ in range(6 if FULL else 1):
        done = run(["-c", textwrap.dedent(script)], timeout=HANG)
        assert (done.returncode, done.stderr) == (0, "")


class Stops(Loads):
    """A data set with a slip: ``next`` of something empty."""

    def __getitem__(self, index: int) -> int:
        return next(iter([index] if index < 4 else []))


@pytest.mark.filterwarnings("ignore:Stops does not declare itself pure")
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "executor": "thread"}])
def test_escaping_stop_iteration_is_not_taken_for_the_end_of_the_epoch(options: dict[str, Any]) -> None:
    loader = ps.DataLoader(Stops(), batch_size=2, seed=1, **options)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(batches)
    assert loader.epoch == 0
    assert opened(loader.state_dict())["sampler"]["consumed"] == 6
