"""The statistics of a DataLoader, whatever executor makes its batches."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import pytest
import torch
from loader_support import EXECUTORS, Squares

import penstock as ps
from penstock.stages import collect, stage

pytestmark = pytest.mark.clock


class Staged(Squares):
    """Names its stages; a sample is 400 bytes and an index."""

    pure = True

    def __getitem__(self, index: int) -> Any:
        with stage("read"):
            time.sleep(0.0005)
        with stage("decode"):
            return torch.full((100,), float(index)), index


class Broken(Staged):
    def __getitem__(self, index: int) -> Any:
        if index % 10 == 3:
            raise OSError(f"sample {index}")
        return super().__getitem__(index)


def make(executor: str, dataset: Any, **options: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(dataset, batch_size=10, num_workers=EXECUTORS[executor], executor=executor, **options)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_was_had_is_counted(executor: str) -> None:
    with make(executor, Staged(95), persistent_workers=executor != "inline") as loader:
        assert len(list(loader)) == 10  # starting workers is not what is measured here
        loader.reset_stats()
        begin = time.perf_counter()
        for _ in range(2):
            for _batch in loader:
                time.sleep(0.002)
        elapsed = time.perf_counter() - begin
        stats = loader.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert (stats["executor"], stats["workers"], stats["passes"]) == (executor, EXECUTORS[executor], 2)
    assert (stats["batches"], stats["samples"]) == (20, 190)
    assert stats["bytes"] == 190 * 408
    assert sum(stats["ways"].values()) == 20
    assert stats["train_seconds"] >= 20 * 0.002
    assert elapsed * 0.5 < stats["seconds"] <= elapsed
    assert list(stats["stages"]) == ["fetch", "read", "decode", "collate", "hand-over"]
    assert 190 * 0.0005 <= stats["stages"]["read"] < 2 * elapsed
    assert stats["stages"]["decode"] < stats["stages"]["read"]
    assert 0 < stats["cpu_seconds"] < 2 * elapsed


class Slow(torch.utils.data.Dataset[int]):
    """Three milliseconds of CPU time for a sample."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        until = time.thread_time() + 0.003
        while time.thread_time() < until:
            pass
        return index


def test_a_few_slow_batches_have_their_own_cpu_time() -> None:
    loader = ps.DataLoader(Slow())
    assert len(list(loader)) == 6
    assert 6 * 0.003 <= loader.stats()["cpu_seconds"] < 9 * 0.003


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_pass_left_early_and_the_next_one(executor: str) -> None:
    with make(executor, Staged(95)) as loader:
        for number, _batch in enumerate(loader):
            if number == 2:
                break
        time.sleep(0.3)
        assert len(list(loader)) == 10
        stats = loader.stats()
        assert (stats["passes"], stats["batches"]) == (2, 13)
        assert stats["train_seconds"] < 0.3
        loader.reset_stats()
        assert loader.stats()["batches"] == 0


def test_an_epoch_set_after_iter_is_one_pass() -> None:
    loader = make("inline", Staged(20), seed=1, shuffle=True)
    iterator = iter(loader)
    loader.set_epoch(3)
    assert len(list(iterator)) == 2
    assert (loader.stats()["passes"], loader.epoch) == (1, 4)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_stages_outside_of_the_loader_are_not_its(executor: str) -> None:
    collect()
    with stage("elsewhere"):
        time.sleep(0.001)
    with make(executor, Staged(20)) as loader:
        assert len(list(loader)) == 2
        assert "elsewhere" not in loader.stats()["stages"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_errors(executor: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that samples are replaced is said once
        with make(executor, Broken(40), on_error="replace") as loader:
            assert len(list(loader)) == 4
            errors = loader.stats()["errors"]
    assert (errors["samples"], errors["failed"], errors["replaced"]) == (40, 4, 4)
    assert errors["types"]["OSError"] >= 4
    with make(executor, Broken(40)) as loader:
        with pytest.raises(OSError, match="sample 3"):
            next(iter(loader))
        assert loader.stats()["failed_batches"] == 1


@pytest.mark.clock
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_the_queue_is_full_while_training_is_slow(executor: str) -> None:
    with make(executor, Staged(200), prefetch_factor=3) as loader:
        for _batch in loader:
            time.sleep(0.02)
        queue = loader.stats()["queue"]
    assert queue["prefetch"] == 6
    assert queue["depth"] == 6
    assert queue["occupancy"] > 0.6


def test_a_bound_on_memory_shows_in_the_queue() -> None:
    with make("thread", Staged(100), prefetch_factor=3, max_bytes_in_flight=9000) as loader:
        assert len(list(loader)) == 10
        queue = loader.stats()["queue"]
    assert queue["prefetch"] == 6
    assert queue["depth"] <= 3


class Texts(Squares):
    def __getitem__(self, index: int) -> Any:
        return str(index % 10) * 100_000


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_objects_count_for_the_bound_on_memory(executor: str) -> None:
    with make(executor, Texts(200), prefetch_factor=3, collate_fn=list, max_bytes_in_flight=2_100_000) as loader:
        assert len(list(loader)) == 20
        assert loader.stats()["queue"]["depth"] <= 3


def test_threads_in_one_child_count_as_the_workers_that_were_asked_for() -> None:
    class Releases(Staged):
        releases_gil = True

    with ps.DataLoader(Releases(40), batch_size=10, num_workers=3) as loader:
        assert len(list(loader)) == 4
        stats = loader.stats()
    assert (stats["executor"], stats["processes"]) == ("process", 1)
    assert stats["workers"] * stats["threads_per_worker"] == stats["workers"] == 3


def test_report_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with make("thread", Staged(95), progress=True) as loader:
        assert len(list(loader)) == 10
        loader.report()
    out, err = capsys.readouterr()
    assert "DataLoader: thread, 2 workers" in out
    assert "Too early to say" in out
    assert "10/10" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("sampler", [None, list(range(95))], ids=["ours", "foreign"])
def test_the_bar_of_a_resumed_pass_begins_where_it_resumes(
    sampler: list[int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with make("inline", Staged(95), sampler=sampler) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
    with make("inline", Staged(95), sampler=sampler, progress=True) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        del batches
        assert "7/10" in capsys.readouterr().err
        assert len(list(loader)) == 10
        assert "10/10" in capsys.readouterr().err


def test_statistics_travel_with_the_loader() -> None:
    import pickle

    loader = make("inline", Squares(20))
    assert len(list(loader)) == 2
    assert pickle.loads(pickle.dumps(loader)).stats()["batches"] in (0, 2)
