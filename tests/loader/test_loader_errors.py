"""Errors of user code: their own type, in the place of their batch, and the pass goes on. And refusals of our own."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from entries_support import closed, opened
from full_run import full_only
from interpreter_support import METHODS
from loader_support import (
    EXECUTORS,
    Draws,
    FailingStream,
    Faulty,
    Slow,
    Squares,
    Stream,
    bad_collate,
    batches,
    ended,
    outcomes,
)
from state_support import CountingCollate
from torch.utils.data._utils.pin_memory import pin_memory

import penstock as ps
from penstock import DataLoader, DistributedSampler, Manifest, MPDataset, RankDataset
from penstock.errors import ConfigError, PartitionError, PenstockError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*does not declare itself pure")

HOW = [{"executor": name, "num_workers": workers} for name, workers in EXECUTORS.items()]
SEEDS = [None, 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", HOW, ids=EXECUTORS)
def test_errors_come_in_the_place_of_their_batch(how: dict[str, Any], seed: int | None) -> None:
    loader = DataLoader(Faulty(12, {0, 5, 11}), batch_size=2, seed=seed, **how)
    assert outcomes(loader) == ["KeyError", [4, 9], "KeyError", [36, 49], [64, 81], "KeyError"]
    assert outcomes(loader) == ["KeyError", [4, 9], "KeyError", [36, 49], [64, 81], "KeyError"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", HOW, ids=EXECUTORS)
def test_errors_of_collate_functions(how: dict[str, Any], seed: int | None) -> None:
    loader = DataLoader(Squares(8), batch_size=2, collate_fn=bad_collate, seed=seed, **how)
    assert outcomes(loader) == [1, "ArithmeticError", 41, 85]


@pytest.mark.parametrize("how", HOW, ids=EXECUTORS)
def test_errors_keep_type_and_text_and_name_the_sample(how: dict[str, Any]) -> None:
    with (
        ended(iter(DataLoader(Faulty(4, {1}, FileNotFoundError), seed=1, **how))) as iterator,
        pytest.raises(FileNotFoundError, match="sample 1 is bad") as caught,
    ):
        next(iterator)
        next(iterator)
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "while loading sample 1 of Faulty" in said or "Traceback" in said


@pytest.mark.parametrize("how", HOW, ids=EXECUTORS)
def test_a_batch_that_failed_counts_as_had(how: dict[str, Any]) -> None:
    make = lambda: DataLoader(Faulty(8, {1}), **how)  # noqa: E731
    loader = make()
    with ended(iter(loader)) as iterator:
        next(iterator)
        with pytest.raises(KeyError):
            next(iterator)
        state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    assert batches(again) == [[n * n] for n in range(2, 8)]


@pytest.mark.parametrize("how", HOW, ids=EXECUTORS)
def test_errors_of_a_stream_end_it(how: dict[str, Any]) -> None:
    loader = DataLoader(FailingStream(9), batch_size=2, **how)
    iterator = iter(loader)
    with ended(iterator):
        assert next(iterator).tolist() == [0, 1] if how["executor"] != "process" else True
        with pytest.raises(LookupError, match="the stream broke"):
            for _ in range(5):
                next(iterator)


@pytest.mark.clock
@pytest.mark.parametrize("how", HOW[1:], ids=list(EXECUTORS)[1:])
def test_timeout(how: dict[str, Any]) -> None:
    """In torch's words; the next call waits for the same batch, which is not counted as had."""
    loader = DataLoader(Slow(5, {1: 1.0}), timeout=0.2, **{**how, "num_workers": 1})
    with ended(iter(loader)) as iterator:
        while not opened(loader.state_dict())["sampler"]["consumed"]:
            with suppress(RuntimeError):  # on a busy machine the worker may start late
                next(iterator)
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds"):
            next(iterator)
        assert opened(loader.state_dict())["sampler"]["consumed"] == 1
        got: list[int] = []
        while len(got) < 4:
            try:
                got.append(int(next(iterator)))
            except RuntimeError:
                continue
    assert got == [1, 4, 9, 16]


@full_only("waits for seconds")
def test_no_timeout_while_batches_come() -> None:
    loader = DataLoader(Slow(8, dict.fromkeys(range(8), 0.3)), num_workers=1, executor="thread", timeout=2)
    assert len(batches(loader)) == 8


def test_in_order_false_lets_the_fast_overtake() -> None:
    go = threading.Event()

    class Overtaken(Squares):
        def __getitem__(self, index: int) -> int:
            assert index or go.wait(40), "by nobody"
            return super().__getitem__(index)

    loader = DataLoader(Overtaken(6), num_workers=2, executor="thread", in_order=False, prefetch_factor=4)
    seen: list[int] = []
    for batch in loader:
        seen.append(int(batch))
        if len(seen) == 5:
            go.set()
    assert sorted(seen) == [n * n for n in range(6)]
    assert seen[-1] == 0
    assert [batch[0] for batch in batches(DataLoader(Slow(6, {0: 0.1}), num_workers=2, executor="thread"))] == sorted(
        seen
    )


def test_killed_worker_is_named() -> None:
    loader = DataLoader(Slow(50, dict.fromkeys(range(50), 0.05)), num_workers=2, seed=1)
    with ended(iter(loader)) as iterator:
        next(iterator)
        # torch's handler of SIGCHLD raises wherever the main thread happens to be, so the kill is in the block as well.
        with pytest.raises(RuntimeError, match=r"is killed by signal|exited unexpectedly"):
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
            for _ in iterator:
                pass


def test_closed_loader_raises_instead_of_waiting_for_ever() -> None:
    loader = DataLoader(Squares(500), num_workers=2, executor="thread", persistent_workers=True)
    seen: list[Any] = []

    def go_on() -> None:
        try:
            seen.extend(batches(iterator))
        except RuntimeError as error:
            seen.append(str(error))

    with loader:
        iterator = iter(loader)
        next(iterator)
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    thread.join(40)
    assert not thread.is_alive()
    assert "its DataLoader was closed" in seen[-1]
    loader.close()
    assert len(batches(loader)) == 500, "a closed loader starts anew"


def test_threads_of_a_parent_are_not_waited_for_in_a_fork() -> None:
    loader = DataLoader(Squares(9), num_workers=2, executor="thread", persistent_workers=True)
    assert len(batches(loader)) == 9
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child: its copy of the loader has no threads
        signal.alarm(20)
        os.write(write, str(len(batches(loader))).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "9"
    assert os.waitpid(pid, 0)[1] == 0


class TestRefusals:
    """Arguments that make no sense are our errors, which are ValueErrors too, and say what to do."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"executor": "ray"}, "needs num_workers of 1 or more"),
            ({"executor": "quantum"}, "'inline', 'thread', 'process'"),
            ({"executor": "process"}, "needs num_workers of 1 or more"),
            ({"executor": "inline", "num_workers": 2}, "omit num_workers=2"),
            ({"executor": "thread", "num_workers": 1, "multiprocessing_context": "fork"}, "multiprocessing_context"),
            ({"shuffle": "everything"}, "'block'"),
            ({"seed": 1 << 64}, "64-bit"),
            ({"seed": 1 << 64, "shuffle": True}, "64-bit"),
        ],
        ids=str,
    )
    def test_options(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(PenstockError, match=words) as caught:
            DataLoader(Squares(4), **options)
        assert isinstance(caught.value, ValueError)

    def test_epochs(self) -> None:
        with pytest.raises(ValueError, match="epoch must be 0 or more"):
            DataLoader(Squares(4), seed=1).set_epoch(-1)
        with pytest.raises(ConfigError, match="Stream is iterable-style"):
            DataLoader(Stream(4)).set_epoch(1)

    def test_splitting_twice(self, write_manifest: Callable[..., Path]) -> None:
        manifest = Manifest.open(write_manifest(20))
        data = RankDataset(manifest, rank=0, world_size=2)
        torchs = torch.utils.data.DistributedSampler(data, 2, 0)
        for sampler in ({"sampler": torchs}, {"batch_sampler": torch.utils.data.BatchSampler(torchs, 2, False)}):
            with pytest.raises(PartitionError, match="would split it again"):
                DataLoader(data, **sampler)
        with pytest.raises(ValueError, match="already one rank's share"):
            DistributedSampler(data, 2, 0)
        rows = RankDataset(manifest, shuffle="none")
        DataLoader(rows, sampler=ps.SequentialSampler(rows))

    def test_shuffling_twice(self, write_manifest: Callable[..., Path]) -> None:
        data = RankDataset(write_manifest(20))
        for other in ("block", "none"):
            with pytest.raises(ConfigError, match=f"RankDataset determines its own order.* not shuffle='{other}'"):
                DataLoader(data, shuffle=other)
        for agreed in (True, "global", False, None):
            assert len(DataLoader(data, shuffle=agreed)) == 20

    @pytest.mark.parametrize("batch_size", [1, 5, None])
    def test_stream_with_another_batch_size(self, write_manifest: Callable[..., Path], batch_size: int | None) -> None:
        with pytest.raises(ConfigError, match="pass equal sizes"):
            DataLoader(MPDataset(write_manifest(20), batch_size=4), batch_size=batch_size)


class TestEpochs:
    def test_with_a_seed_epochs_advance_unless_they_are_set(self) -> None:
        loader = DataLoader(Draws(9), 3, shuffle=True, seed=1)
        by_epoch = {}
        for epoch in range(3):
            assert loader.epoch == epoch
            by_epoch[epoch] = batches(loader)
        assert len({str(epoch) for epoch in by_epoch.values()}) == 3
        for epoch in (2, 0, 0, 1):
            loader.set_epoch(epoch)
            assert loader.epoch == epoch
            assert batches(loader) == by_epoch[epoch]

    def test_early_break_then_a_new_epoch(self) -> None:
        for how in HOW:
            loader = DataLoader(Draws(20), 3, shuffle=True, seed=1, **how)
            whole = batches(DataLoader(Draws(20), 3, shuffle=True, seed=1))
            for batch in loader:
                assert batch["index"].tolist() == whole[0]["index"]
                break
            assert loader.epoch == 0
            second = batches(loader)
            assert loader.epoch == 2
            assert len(second) == 7
            assert sorted(index for batch in second for index in batch["index"]) == list(range(20))
            loader.set_epoch(0)
            assert batches(loader) == whole

    def test_seed_and_epoch_are_no_sum(self) -> None:
        one, two = (DataLoader(Draws(30), 30, shuffle=True, seed=seed) for seed in (0, 1))
        one.set_epoch(1)
        first, second = batches(one)[0], batches(two)[0]
        assert first["index"] != second["index"]
        assert not set(first["more"]) & set(second["more"])

    def test_the_seed_comes_from_the_sampler(self) -> None:
        sampler = DistributedSampler(Draws(9), 1, 0, shuffle="global", seed=3)
        loader = DataLoader(Draws(9), 3, sampler=sampler)
        assert batches(loader) == batches(DataLoader(Draws(9), 3, shuffle="global", seed=3))
        assert loader.epoch == 1
        theirs = torch.utils.data.DistributedSampler(Draws(9), 1, 0, seed=3)
        loader = DataLoader(Draws(9), 3, sampler=theirs)
        assert batches(loader) != batches(loader), "penstock.generator of a loader without a seed moves on"
        assert loader.epoch == 0

    @pytest.mark.parametrize(
        "how", [HOW[0], HOW[1], {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
    )
    def test_two_iterators_at_once(self, write_manifest: Callable[..., Path], how: dict[str, Any]) -> None:
        """The epoch travels with each task, so an older iterator goes on in its own epoch."""
        if how.get("persistent_workers"):
            pytest.skip("torch's persistent workers have one iterator: see test_loader_resume")
        manifest = Manifest.open(write_manifest(60))
        make = lambda: DataLoader(RankDataset(manifest, mini_epochs=2), batch_size=7)  # noqa: E731
        plain_loader = make()
        expected = [batches(plain_loader), batches(plain_loader)]
        loader = DataLoader(RankDataset(manifest, mini_epochs=2), batch_size=7, **how)
        first = iter(loader)
        got: list[list[Any]] = [[next(first)], []]
        second = iter(loader)
        for one, two in zip(first, second, strict=False):
            got[0].append(one)
            got[1].append(two)
        got[1] += list(second)
        assert [[batch[2].tolist() for batch in part] for part in got] == [
            [batch[2] for batch in part] for part in expected
        ]


@pytest.mark.parametrize("method", METHODS[1:])
def test_what_does_not_pickle_is_named_with_the_way_out(method: str) -> None:
    class Local(Squares):
        pass

    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        (r"the dataset \(.*<locals>\.Local\)", Local(8), {}),
        (r"the collate_fn \(.*<lambda>\)", Squares(8), {"collate_fn": lambda samples: samples}),
        (r"the worker_init_fn \(.*<lambda>\)", Squares(8), {"worker_init_fn": lambda number: None}),
        (r"the dataset \(Holds\)", Holds(), {}),
    ]
    for who, dataset, options in wrong:
        loader: Any = DataLoader(dataset, num_workers=1, multiprocessing_context=method, **options)
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)) as caught:
            list(loader)
        (note,) = caught.value.__notes__
        assert re.match(who + " cannot be pickled, .* a module, .*'fork'", note), note


class Holds(Squares):
    """A data set with a lock, as logs and connections have them."""

    def __init__(self) -> None:
        super().__init__(8)
        self.lock = threading.Lock()


class Kept(Exception):
    def __init__(self, errors: list[weakref.ref[Any]]) -> None:
        errors.append(weakref.ref(self))


class Unsendable:
    def __init__(self, errors: list[weakref.ref[Any]]) -> None:
        self.errors = errors

    def __reduce__(self) -> Any:
        raise Kept(self.errors)


class FailsAhead(Squares):
    def __init__(self, errors: list[weakref.ref[Any]]) -> None:
        super().__init__(6)
        self.errors, self.failed = errors, threading.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise Kept(self.errors)
        if index == 4:
            self.failed.set()
        return index


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
def test_an_error_that_nobody_had_is_not_kept() -> None:
    errors: list[weakref.ref[Any]] = []
    data = FailsAhead(errors)
    with DataLoader(data, 2, num_workers=1, executor="thread", prefetch_factor=3) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        assert data.failed.wait(60)
        del iterator
        assert [error() for error in errors] == [None]


@pytest.mark.usefixtures("without_gc")
def test_an_index_that_cannot_be_sent_is_not_kept() -> None:
    errors: list[weakref.ref[Any]] = []
    with DataLoader(Squares(6), sampler=[Unsendable(errors)], num_workers=1) as loader:
        with suppress(Kept):
            next(iter(loader))
        assert [error() for error in errors] == [None]


class Unpinnable:
    def pin_memory(self) -> None:
        raise LookupError("not this one")


def test_a_batch_that_cannot_be_pinned_is_an_error_in_its_place() -> None:
    loader = DataLoader(Squares(6), 2, collate_fn=lambda batch: batch[0] or Unpinnable())
    iterator: Any = iter(loader)
    iterator._finish = pin_memory  # there may be no accelerator here
    with pytest.raises(LookupError, match="not this one"):
        next(iterator)
    assert [next(iterator), next(iterator)] == [4, 16]
    assert loader.stats()["failed_batches"] == 1


class FailsOnce:
    """Fails when it is asked for its state, or given one, or iterated, once whenever it is armed."""

    armed = False

    def fail(self) -> None:
        if self.armed:
            self.armed = False
            raise ConnectionError("the network is down")


class CollateThatFails(FailsOnce, CountingCollate):
    def state_dict(self) -> dict[str, Any]:
        self.fail()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fail()
        super().load_state_dict(state)


class StreamThatFails(FailsOnce, Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.fail()
        return iter([self.epoch] * 6)


ITER_FAILS: dict[str, dict[str, Any]] = {
    "stream": {},
    "torch's order": {"shuffle": True},
    "seed": {"shuffle": True, "seed": 3},
    "threads": {"shuffle": "global", "executor": "thread", "num_workers": 1},
}


@pytest.mark.filterwarnings("ignore:.*has no state_dict")
@pytest.mark.parametrize("name", ITER_FAILS)
def test_an_iter_that_fails_changes_nothing(name: str) -> None:
    """The next one begins the same epoch, with the same draws, at the same loaded state."""

    def make() -> tuple[DataLoader[Any], FailsOnce]:
        torch.manual_seed(1)
        collate_fn = CollateThatFails()
        dataset = StreamThatFails(6) if name == "stream" else Squares(6)
        loader = DataLoader(dataset, 2, collate_fn=collate_fn, **ITER_FAILS[name])
        loader.set_epoch(0)
        return loader, dataset if isinstance(dataset, FailsOnce) else collate_fn

    loader, _ = make()
    first, second = list(loader), list(loader)
    loader, failing = make()
    for expected in (first, second):
        failing.armed = True
        with pytest.raises(ConnectionError):
            iter(loader)
        assert list(loader) == expected
    assert loader.stats()["passes"] == 2
    loader, _ = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader, failing = make()
    loader.load_state_dict(state)
    failing.armed = True
    with pytest.raises(ConnectionError):
        iter(loader)
    assert loader.state_dict() == state
    assert list(loader) == first[1:]


def test_a_loaded_sampler_state_outlives_an_iter_that_fails() -> None:
    """Whoever reads first has a state of the sampler's, and that is not a reader that could not begin."""
    collate_fn, sampler = CollateThatFails(), ps.RandomSampler(range(6), shuffle="global", seed=1)
    loader = DataLoader(Squares(6), 2, sampler=sampler, collate_fn=collate_fn)
    expected = [rows for _, rows in loader][1:]
    loader = DataLoader(Squares(6), 2, sampler=sampler, collate_fn=collate_fn)
    sampler.load_state_dict(closed({**opened(sampler.state_dict()), "epoch": 0, "consumed": 2}))
    collate_fn.armed = True
    with pytest.raises(ConnectionError):
        iter(loader)
    assert [rows for _, rows in loader] == expected


class NeverBegins(Stream):
    def __iter__(self) -> Iterator[int]:
        raise LookupError("no stream today")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_that_cannot_begin_is_an_error_of_each_worker_and_then_the_end(workers: int) -> None:
    with DataLoader(NeverBegins(9), 2, num_workers=workers) as loader:
        iterator = iter(loader)
        for _ in range(workers):
            with pytest.raises(LookupError, match="no stream today"):
                next(iterator)
        assert list(iterator) == []


class Lengths(Squares):
    def __getitem__(self, index: Any) -> int:
        return len(index)


def test_indices_that_no_pipe_takes_at_once_are_sent_while_waiting() -> None:
    sampler = ["x" * (number << 20) for number in range(1, 9)]
    with DataLoader(Lengths(9), 1, sampler=sampler, num_workers=1, collate_fn=list, timeout=60) as loader:
        assert list(loader) == [[number << 20] for number in range(1, 9)]
