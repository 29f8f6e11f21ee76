"""Acceptance: what programs see of workers is torch's: who makes which batch, seeds, worker info, copies, epochs."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from full_run import full_only
from interpreter_support import FULL
from pairwise import each_value, pairwise
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes.map import SequenceWrapper
from torch_suite_support import (
    BOTH,
    FAST,
    OURS,
    WORKERS,
    Affinity,
    Again,
    Draws,
    Info,
    Lies,
    Maker,
    Nested,
    Own,
    Parts,
    Range,
    Stuck,
    Threads,
    end,
    note_info,
    on_one_core,
    outcomes,
    shape,
)

import penstock as ps
from penstock.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:Length of IterableDataset")

SPAWN = pytest.param("spawn", marks=pytest.mark.slow)
SPAWN_IN_FULL = pytest.param("spawn", marks=pytest.mark.skipif(not FULL, reason="as forkserver; PENSTOCK_TEST_FULL=1"))
SPAWN_TWO = pytest.param("spawn", 2, marks=[*SPAWN_IN_FULL.marks, pytest.mark.slow])
ALL = ("inline", "thread", "threads persist", "fork", "forkserver", SPAWN_IN_FULL, "persistent")


def both(make: Any, how: dict[str, Any]) -> list[Any]:
    """What a function of a loader class finds with each class, of ours in the process executor. What torch finds does
    not depend on the start method, so there the fastest will do.
    """
    fast = {**how, "multiprocessing_context": "fork"}
    return [make(TorchDataLoader, **fast), make(ps.DataLoader, **how, executor="process")]


# 9. Order.


@pytest.mark.parametrize(("method", "workers"), [("fork", 1), ("fork", 3), ("forkserver", 3), SPAWN_TWO])
def test_batch_k_is_made_by_worker_k_mod_n(method: str, workers: int) -> None:
    def found(kind: Any, **how: Any) -> Any:
        return [shape(batch) for batch in kind(Maker(23), batch_size=2, **how)]

    torchs, ours = both(found, {"multiprocessing_context": method, "num_workers": workers})
    assert ours == torchs


@full_only("workers for each", but=["fork"])
@pytest.mark.parametrize("how", ["fork", "forkserver", SPAWN_IN_FULL, "persistent"])
def test_without_batching_and_with_a_batch_sampler_too(how: str) -> None:
    for options in ({"batch_size": None}, {"batch_sampler": [[3], [1, 2], [], [5, 6, 7], [0]], "collate_fn": list}):

        def found(kind: Any, options: dict[str, Any] = options, **how: Any) -> Any:
            return [[shape(batch) for batch in loader] for loader in [kind(Maker(9), **options, **how)] for _ in "ab"]

        torchs, ours = both(found, WORKERS[how])
        assert ours == torchs


COUNTS = [[5, 5], [0, 4], [7, 0], [1, 6], [3, 2, 0, 5]]


@full_only("workers for each", but=["[3, 2, 0, 5]", "[0, 4]"])
@pytest.mark.parametrize(
    ("counts", "options"),
    each_value(COUNTS, [{"batch_size": 2}, {"batch_size": 2, "drop_last": True}, {"batch_size": None}]),
    ids=str,
)
def test_streams_take_turns_and_those_that_end_are_skipped(counts: list[int], options: dict[str, Any]) -> None:
    def found(kind: Any, **how: Any) -> Any:
        return [shape(batch) for batch in kind(Parts(counts), num_workers=len(counts), **options, **how)]

    torchs, ours = both(found, {})
    assert ours == torchs
    assert found(ps.DataLoader, executor="thread") == torchs


@pytest.mark.parametrize("how", ["forkserver", SPAWN_IN_FULL, "persistent"])
def test_streams_under_every_start_method(how: str) -> None:
    def found(kind: Any, **how: Any) -> Any:
        loader = kind(Parts([5, 2]), batch_size=2, **how)
        return [[shape(batch) for batch in loader] for _ in range(2)]

    torchs, ours = both(found, WORKERS[how])
    assert ours == torchs


@pytest.mark.parametrize("how", ["thread", "fork"])
def test_a_stuck_worker_holds_no_more_than_its_prefetch(tmp_path: Path, how: str) -> None:
    """10. The others do the rest."""
    loader: Any = ps.DataLoader(Stuck(12, tmp_path / "go"), **OURS[how], prefetch_factor=2, in_order=False)
    iterator = iter(loader)
    first = [int(next(iterator)) for _ in range(10)]
    assert 0 not in first
    assert len(set(first)) == 10
    (tmp_path / "go").touch()
    rest = [int(batch) for batch in iterator]
    assert sorted(first + rest) == list(range(12))
    end(iterator)


# 11. Seeds.


@full_only("workers for each", but=["False-forkserver", "True-fork", "True-persistent"])
@pytest.mark.parametrize("how", ["fork", "forkserver", SPAWN, "persistent"])
@pytest.mark.parametrize("generator", [False, True])
def test_seeds_and_draws_in_workers_are_torchs(how: str, generator: bool) -> None:
    if how == "spawn" and not FULL:
        pytest.skip("`test_one_truth` spawns workers, too; PENSTOCK_TEST_FULL=1")

    def found(kind: Any, **how: Any) -> Any:
        torch.manual_seed(11)
        own = torch.Generator().manual_seed(5) if generator else None
        loader = kind(Draws(6), generator=own, shuffle=True, batch_size=2, **how)
        epochs = [[shape(batch) for batch in loader] for _ in range(2)]
        return epochs, torch.get_rng_state().tolist(), own and own.get_state().tolist()

    torchs, ours = both(found, WORKERS[how])
    assert ours == torchs


@pytest.mark.parametrize("how", ["inline", "thread", "fork", "forkserver"])
def test_the_same_generator_gives_the_same_order_whoever_works(how: str) -> None:
    orders = []
    for kind, options in ((TorchDataLoader, {}), (ps.DataLoader, OURS[how])):
        generator = torch.Generator().manual_seed(9)
        loader = kind(Range(30), batch_size=4, shuffle=True, generator=generator, **options)
        orders.append([[batch.tolist() for batch in loader] for _ in range(2)])
    assert orders[0] == orders[1]


def test_threads_have_torchs_seeds_in_their_info() -> None:
    class Seeds(Range):
        def __getitem__(self, index: Any) -> Any:
            info: Any = get_worker_info()
            return info.seed - info.id

    for generator in (None, torch.Generator().manual_seed(3)):
        torch.manual_seed(2)
        twin = None if generator is None else generator.clone_state()
        base = int(torch.empty((), dtype=torch.int64).random_(generator=twin).item())
        torch.manual_seed(2)
        loader = ps.DataLoader(Seeds(6), num_workers=2, executor="thread", generator=generator)
        assert {int(batch) for batch in loader} == {base}


# 12. Worker info.


@pytest.mark.parametrize("how", ALL)
def test_worker_info(how: str) -> None:
    assert get_worker_info() is None
    options = OURS[how]
    init = None if how == "inline" else note_info
    data = Info(8)
    made = list(ps.DataLoader(data, batch_size=None, worker_init_fn=init, **options))
    assert get_worker_info() is None
    if how == "inline":
        assert made == [None] * 8
    elif options["executor"] == "thread":  # one data set for all
        assert {(info[0], info[1], info[3]) for info in made} <= {(0, 2, True), (1, 2, True)}
        assert data.noted in (0, 1)
    else:
        assert [tuple(info) for info in made] == [(k % 2, 2, True, True, k % 2) for k in range(8)]
        assert data.noted is None


@pytest.mark.parametrize("how", ["fork", "persistent"])
def test_worker_info_with_a_seed_has_the_users_data_set(how: str) -> None:
    data = Info(8)
    made = list(ps.DataLoader(data, batch_size=None, worker_init_fn=note_with_seed, seed=3, **OURS[how]))
    assert {tuple(info[:2]) for info in made} == {(0, 2), (1, 2)}
    assert all(info[3] for info in made)


def note_with_seed(worker: int) -> None:
    info: Any = get_worker_info()
    assert isinstance(info.dataset, Info)


# 13. Copies.


@pytest.mark.parametrize("how", ["fork", "forkserver", SPAWN_IN_FULL, "persistent"])
def test_every_worker_works_on_its_own_copy(how: str) -> None:
    def found(kind: Any, **how: Any) -> Any:
        data = Own(6)
        loader = kind(data, **how)
        epochs = [[shape(batch) for batch in loader]]
        data.word = "after the first epoch"
        epochs.append([shape(batch) for batch in loader])
        return epochs, data.made

    torchs, ours = both(found, WORKERS[how])
    assert ours == torchs
    assert ours[1] == 0


def test_threads_share_one_data_set() -> None:
    """Our decision, which the documentation names."""
    data = Own(6)
    loader: Any = ps.DataLoader(data, num_workers=2, executor="thread", persistent_workers=True)
    list(loader)
    data.word = "new"
    assert [word for _, _, (word,) in loader] == ["new"] * 6
    assert data.made == 12


# 14. Persistent workers.


@pytest.mark.parametrize(
    "options", [{"batch_size": 2}, {"batch_size": None}, {"batch_size": 3, "drop_last": True}], ids=str
)
def test_persistent_workers_begin_streams_again(options: dict[str, Any]) -> None:
    def found(kind: Any, **how: Any) -> Any:
        loader = kind(Again(5), num_workers=2, persistent_workers=True, **options, **how)
        epochs = [[shape(batch) for batch in loader]]
        for _ in range(3):
            next(iter(loader))
        pids = []
        for _ in range(3):
            iterator = iter(loader)
            pids.append([worker.pid for worker in iterator._workers])
            epochs.append([shape(batch) for batch in iterator])
        assert pids[0] == pids[1] == pids[2]
        return epochs

    torchs, ours = both(found, {})
    assert ours == torchs


@pytest.mark.parametrize(
    ("data", "how", "taken"),
    pairwise([Range(12), Lies(12, 12)], ["threads persist", "fork", "persistent"], [0, 1, 4]),
    ids=lambda value: value if isinstance(value, str | int) else type(value).__name__,
)
def test_break_and_a_new_epoch_is_a_whole_one(data: Any, how: str, taken: int) -> None:
    loader: Any = ps.DataLoader(data, batch_size=1, prefetch_factor=3, **OURS[how])
    for _ in range(3 if loader.persistent_workers else 1):
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        del iterator
        assert sorted(int(batch) for batch in loader) == list(range(12))


def test_iterator_of_persistent_workers_is_kept_and_readable() -> None:
    found = []
    for kind in BOTH:
        loader = kind(Range(6), num_workers=2, persistent_workers=True)
        seen = [loader._iterator is None]
        iterator = iter(loader)
        next(iterator)
        workers = list(iterator._workers)
        seen += [len(workers), [worker.pid for worker in loader._iterator._workers] == [w.pid for w in workers]]
        seen += [[worker.is_alive() for worker in workers], all(isinstance(worker.pid, int) for worker in workers)]
        loader._iterator._shutdown_workers()
        for worker in workers:
            worker.join(10)
        seen += [[worker.is_alive() for worker in workers], [worker.exitcode for worker in workers]]
        found.append(seen)
    assert found[0] == found[1]


# 15. Surroundings.


def test_works_under_fork_after_torch_used_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        Threads(1)[0]
        expected = [
            shape(batch) for batch in TorchDataLoader(Threads(4), num_workers=1, multiprocessing_context="fork")
        ]
        assert [shape(batch) for batch in ps.DataLoader(Threads(4), **OURS["fork"])] == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities here")
@pytest.mark.parametrize("how", ["fork", "persistent"])
def test_affinity_set_in_worker_init_stays(how: str) -> None:
    before = os.sched_getaffinity(0)
    for batch in ps.DataLoader(Affinity(6), worker_init_fn=on_one_core, batch_size=None, **OURS[how]):
        assert batch == [max(before)]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("how", ALL)
def test_loader_inside_a_loader(how: str) -> None:
    expected = [shape(batch) for batch in TorchDataLoader(Nested(4, TorchDataLoader))]
    assert [shape(batch) for batch in ps.DataLoader(Nested(4, ps.DataLoader), **OURS[how])] == expected


@pytest.mark.parametrize("how", ["inline", "thread", "fork", "persistent"])
def test_loader_inside_a_thread_and_two_at_once(how: str) -> None:
    found: list[Any] = [None, None]

    def run(place: int) -> None:
        loader: Any = ps.DataLoader(Range(40), batch_size=3, **OURS[how])
        found[place] = [[batch.tolist() for batch in loader] for _ in range(2)]

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = [batch.tolist() for batch in TorchDataLoader(Range(40), batch_size=3)]
    assert found == [[expected, expected]] * 2


@pytest.mark.parametrize("how", ["inline", "thread", "fork"])
def test_two_iterators_of_one_loader_do_not_disturb_each_other(how: str) -> None:
    loader: Any = ps.DataLoader(Range(10), batch_size=2, **OURS[how])
    expected = [batch.tolist() for batch in TorchDataLoader(Range(10), batch_size=2)]
    pairs = list(zip(loader, loader, strict=True))
    assert [left.tolist() for left, _ in pairs] == [right.tolist() for _, right in pairs] == expected


def test_default_start_method_is_that_of_the_program() -> None:
    method = multiprocessing.get_start_method()
    iterator = iter(ps.DataLoader(Range(4), num_workers=1))
    kind = type(iterator._workers[0]).__name__.lower()  # type: ignore[attr-defined]
    end(iterator)
    assert kind in ("process", f"{method}process")


def test_class_is_generic_for_annotations() -> None:
    def make() -> ps.DataLoader[list[torch.Tensor]]:
        return ps.DataLoader(Range(3))

    assert isinstance(make(), TorchDataLoader)


class Pipe(IterDataPipe[int]):
    """A user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize("how", FAST)
def test_iterable_data_pipes_are_refused(how: str) -> None:
    """torch's loader shards and seeds them; made by workers that do not, every item would come twice."""
    wrapped = torch.utils.data.datapipes.iter.IterableWrapper(list(range(20)))
    for pipe in (Pipe(), wrapped, wrapped.shuffle().sharding_filter(), SequenceWrapper(range(4)).shuffle()):
        with pytest.raises(ConfigError, match=r"DataPipe.*use torch\.utils\.data\.DataLoader") as caught:
            ps.DataLoader(pipe, **OURS[how])
        assert type(pipe).__name__ in str(caught.value)
        assert isinstance(caught.value, ValueError)


@pytest.mark.filterwarnings("ignore:.*does not declare itself pure")
@pytest.mark.parametrize("how", FAST)
def test_map_data_pipes_are_map_style_data_sets(how: str) -> None:
    """They neither shard nor draw: each index has its item, whoever asks. `shuffle` makes an iterable one of them."""
    pipe = SequenceWrapper(range(11)).map(str).zip(SequenceWrapper(range(11)))
    expected = [shape(batch) for batch in TorchDataLoader(pipe, 3)]
    assert outcomes(ps.DataLoader(pipe, 3, **OURS[how])) == expected
    shuffled = outcomes(ps.DataLoader(pipe, 3, shuffle=True, seed=5, **OURS[how]))
    assert shuffled == outcomes(ps.DataLoader([(str(k), k) for k in range(11)], 3, shuffle=True, seed=5)) != expected
