"""Errors of user code that are hard to carry: each in the place of its batch, and the pass goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from entries_support import opened
from faults_support import (
    LocalNameError,
    NoText,
    OneWays,
    OneWayTexts,
    Raises,
    Range,
    Unpicklable,
    first,
    holding_a_lock,
    init_raises,
    last_exits,
    odd,
    over,
    within,
)
from full_run import full_only
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader
from penstock.errors import WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PROCESSES: dict[str, dict[str, Any]] = {
    "fork": {"num_workers": 2},
    "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver"},
    "threads": {"num_workers": 2, "threads_per_worker": 2},
}
ALL: dict[str, dict[str, Any]] = {"inline": {}, "thread": {"num_workers": 2, "executor": "thread"}, **PROCESSES}


def one_pass(loader: Any, limit: int = 30) -> list[Any]:
    """Batches, and errors in their places."""
    got: list[Any] = []
    with within(60), over(loader) as iterator:
        while len(got) < limit:
            try:
                got.append(int(next(iterator)))
            except StopIteration:
                return got
            except Exception as error:
                got.append(error)
    raise AssertionError(f"no end: {got[-3:]}")


ERRORS: dict[str, tuple[Any, type[BaseException], str]] = {
    "BrokenPipeError": (BrokenPipeError, BrokenPipeError, ""),
    "ConnectionResetError": (ConnectionResetError, ConnectionResetError, ""),
    "EOFError": (EOFError, EOFError, ""),
    "TimeoutError": (TimeoutError, TimeoutError, ""),
    "MemoryError": (MemoryError, MemoryError, ""),
    "odd constructor": (odd, RuntimeError, "5: oddly"),
    "unknown module": (LocalNameError, RuntimeError, "LocalNameError"),
    "no text": (NoText, Exception, "NoText"),
    "unpicklable": (holding_a_lock, RuntimeError, "locked"),
}


@full_only(
    "workers for each",
    but=[
        "TimeoutError-fork",
        "unpicklable-fork",
        "no text-threads",
        "unknown module-threads",
        "odd constructor-threads",
        "BrokenPipeError-fork",
        "EOFError-threads",
    ],
)
@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("kind", ERRORS)
def test_errors_arrive_and_the_pass_goes_on(kind: str, how: str, request: pytest.FixtureRequest) -> None:
    if kind == "no text" and how in PROCESSES:
        reason = "an error whose __str__ raises hides the worker's traceback"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    if how == "forkserver" and kind not in ("BrokenPipeError", "unpicklable"):
        pytest.skip("two are enough there")
    error, expected, text = ERRORS[kind]
    got = one_pass(DataLoader(Raises(8, error), **ALL[how]))
    assert got[:3] + got[4:] == [0, 1, 2, 4, 5, 6, 7]
    assert not isinstance(got[3], WorkerError), "no worker died"
    if how in PROCESSES:
        assert isinstance(got[3], expected)
        assert text in str(got[3])
        assert "in DataLoader worker process" in str(got[3])
    else:
        assert type(got[3]) is type(error())
    if kind == "unpicklable":
        assert "a note that should arrive" in getattr(got[3], "__notes__", [])


def stop(*_: Any) -> Any:
    raise StopIteration


class Stops(torch.utils.data.IterableDataset[int]):
    """Yields 8 items; ``where`` names the place that raises StopIteration."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __iter__(self) -> Iterator[int]:
        return stop() if self.where == "iter" else iter(range(8))


class StopsInState(Stops):
    """Raises StopIteration when its state after a batch is taken."""

    taken = 0

    def state_dict(self) -> dict[str, int]:
        self.taken += 1
        return stop() if self.taken > 3 else {"taken": self.taken}

    def load_state_dict(self, state: Any) -> None:
        self.taken = 0


def stop_at_three(samples: list[int]) -> int:
    return stop() if samples == [3] else samples[0]


@pytest.mark.parametrize(
    ("how", "where"), [*((how, "getitem") for how in ALL), ("inline", "collate"), ("fork", "collate")]
)
def test_stop_iteration_is_an_error_of_its_batch(how: str, where: str) -> None:
    """In torch it ends the epoch like a complete one."""
    data: Any = Raises(8, StopIteration) if where == "getitem" else range(8)
    collate = stop_at_three if where == "collate" else None
    assert one_pass(TorchDataLoader(data, collate_fn=collate)) == [0, 1, 2]
    got = one_pass(DataLoader(data, collate_fn=collate, **ALL[how]))
    assert got[:3] + got[4:] == [0, 1, 2, 4, 5, 6, 7]
    assert type(got[3]) is RuntimeError
    assert "StopIteration was raised, but not by an iterator at its end" in str(got[3])


@pytest.mark.parametrize("how", ["inline", "thread", "threads"])
def test_stop_iteration_of_a_sample_is_skipped(how: str) -> None:
    loader = DataLoader(Raises(8, StopIteration), 2, on_error="skip", **ALL[how])
    assert [batch.tolist() for batch in loader] == [[0, 1], [2], [4, 5], [6, 7]]


@pytest.mark.parametrize("where", ["collate", "iter", "init", "state"])
@pytest.mark.parametrize("how", ["inline", "thread", "fork"])
def test_stop_iteration_around_a_stream_is_an_error(how: str, where: str) -> None:
    """Only the stream's own iterator ends it."""
    if how == "inline" and where == "init":
        pytest.skip("nothing calls worker_init_fn there")
    with within(60), pytest.raises(RuntimeError, match="StopIteration"):
        list(
            DataLoader(
                (StopsInState if where == "state" else Stops)(where),
                collate_fn=stop_at_three if where == "collate" else None,
                worker_init_fn=stop if where == "init" else None,
                **{**ALL[how], **({"num_workers": 1} if how == "thread" else {})},  # several threads refuse a state
            )
        )


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("how", ALL)
def test_interrupts_raised_by_user_code(how: str, kind: type[BaseException]) -> None:
    """In the consumer's own process they are what they are; a worker ends, and is reported, as in torch."""
    loader = DataLoader(Raises(8, kind), **ALL[how])
    got = []
    with within(60), over(loader) as iterator, pytest.raises(WorkerError if how in PROCESSES else kind) as caught:
        for batch in iterator:
            got.append(int(batch))
    assert got == list(range(len(got)))
    assert len(got) <= 3
    if how in PROCESSES:
        assert "exited unexpectedly" in str(caught.value)
    else:
        assert len(got) == 3


@pytest.mark.parametrize("how", ["inline", "thread"])
def test_after_an_interrupt_the_pass_goes_on_and_the_state_knows_what_is_missing(how: str) -> None:
    loader = DataLoader(Raises(8, KeyboardInterrupt), **ALL[how])
    got = []
    with within(60):
        iterator = iter(loader)
        while True:
            try:
                got.append(int(next(iterator)))
            except KeyboardInterrupt:
                got.append(-1)
            except StopIteration:
                break
            if len(got) == 6:
                state = loader.state_dict()
    assert got == [0, 1, 2, -1, 4, 5, 6, 7]
    again = DataLoader(Range(8))
    again.load_state_dict(state)
    assert [int(batch) for batch in again] == [3, 6, 7]


@pytest.mark.parametrize("how", PROCESSES)
def test_batches_that_do_not_pickle(how: str) -> None:
    got = one_pass(DataLoader(Unpicklable(8), collate_fn=first, **PROCESSES[how]))
    assert got[:3] + got[4:] == [0, 1, 2, 4, 5, 6, 7]
    assert isinstance(got[3], TypeError)
    assert "generator" in str(got[3])


@pytest.mark.parametrize("how", ["fork", "threads"])
def test_batches_that_cannot_be_made_from_their_pickle(how: str) -> None:
    got: list[Any] = []
    with within(60), over(DataLoader(OneWays(8), collate_fn=first, **PROCESSES[how])) as iterator:
        while len(got) < 20:
            try:
                got.append(next(iterator).index)
            except StopIteration:
                break
            except ValueError as error:
                got.append(str(error))
    assert got == [0, 1, 2, "object 3 cannot be made", 4, 5, 6, 7]


@full_only("workers for each", but=["threads-{13}", "fork-{23}"])
@pytest.mark.parametrize("at", [{1}, {2, 3}, {13}, {23}], ids=str)
@pytest.mark.parametrize("how", PROCESSES)
def test_texts_that_cannot_be_made_from_their_pickle(how: str, at: set[int]) -> None:
    """The error is that batch's alone; what is beside it arrives, also in the batches around it."""
    loader = DataLoader(OneWayTexts(24, at), 2, **PROCESSES[how])
    got: list[Any] = []
    with within(60), over(loader) as iterator:
        while len(got) < 20:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except ValueError as error:
                got.append(str(error))
                continue
            assert bool((batch["row"] == batch["row"][:, :1]).all())
            assert [str(int(row)) for row in batch["row"][:, 0]] == batch["text"]
            got.append(batch["text"])
        assert opened(loader.state_dict())["sampler"]["consumed"] in (0, 24), "all were had"
    expected = [[str(2 * k), str(2 * k + 1)] for k in range(12)]
    errors = {index // 2: f"text {index} cannot be made" for index in sorted(at, reverse=True)}
    assert got == [errors.get(k, batch) for k, batch in enumerate(expected)]


@pytest.mark.parametrize("at", [1, 9])
@pytest.mark.parametrize("how", ["fork", "threads"])
def test_indices_that_do_not_pickle(how: str, at: int) -> None:
    """An error in the place of their batch, or at iter(); and nobody waits for what was never asked for."""
    indices: list[Any] = list(range(12))
    indices[at] = lambda: 0
    got: list[Any] = []
    with within(60):
        iterator = None
        try:
            iterator = iter(DataLoader(Range(12), sampler=indices, **PROCESSES[how]))
            while len(got) < 20:
                try:
                    got.append(int(next(iterator)))
                except StopIteration:
                    break
                except Exception as error:
                    got.append(type(error).__name__)
        except Exception as error:
            got.append(type(error).__name__)
    errors = [n for n, value in enumerate(got) if isinstance(value, str)]
    assert len(errors) >= 1
    assert got[: errors[0]] == list(range(errors[0])), "what was finished before is not lost"
    if iterator is not None:
        assert errors[0] == at


@pytest.mark.parametrize("how", ALL)
def test_errors_of_collate_functions(how: str) -> None:
    got = one_pass(DataLoader(Range(8), collate_fn=last_exits, **ALL[how]))
    assert [value for value in got if not isinstance(value, Exception)] == [0, 1, 2, 4, 5, 6, 7]
    assert isinstance(got[3], BrokenPipeError)


@pytest.mark.parametrize("how", ["thread", "fork", "forkserver", "threads"])
def test_errors_of_worker_init(how: str) -> None:
    with (
        within(60),
        over(DataLoader(Range(8), worker_init_fn=init_raises, **ALL[how])) as iterator,
        pytest.raises(BrokenPipeError, match="finds no server"),
    ):
        next(iterator)


class Sampler:
    """Gives some indices, then raises."""

    def __init__(self, count: int, error: type[BaseException]) -> None:
        self.count = count
        self.error = error

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)
        raise self.error("the sampler broke")


@pytest.mark.parametrize("how", [name for name in ALL if name != "forkserver"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_errors_of_samplers_come_behind_what_was_planned(how: str, count: int) -> None:
    got: list[Any] = []
    with within(60), over(DataLoader(Range(20), sampler=Sampler(count, LookupError), **ALL[how])) as iterator:
        with pytest.raises(LookupError, match="the sampler broke"):
            for batch in iterator:
                got.append(int(batch))
        assert next(iterator, "end") == "end"
    assert got == list(range(count))


class NoState(Range):
    """A sample fails, and then the state behind it."""

    failed = False

    def __getitem__(self, index: int) -> int:
        if index == 1:
            self.failed = True
            raise LookupError("no such sample")
        return index

    def state_dict(self) -> dict[str, Any]:
        if self.failed:
            raise ValueError("no state behind it")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("how", ["inline", "thread", "fork"])
def test_an_error_of_the_state_behind_an_error_is_told(how: str) -> None:
    with over(DataLoader(NoState(4), **{**ALL[how], "num_workers": 0 if how == "inline" else 1})) as iterator:
        assert int(next(iterator)) == 0
        with pytest.raises(ValueError, match="no state behind it"):
            next(iterator)


class NoLength(Range):
    def __len__(self) -> int:
        raise OSError("the length is not known today")


@pytest.mark.parametrize("how", ["inline", "thread", "fork"])
def test_errors_of_len(how: str) -> None:
    def use(kind: Any, options: dict[str, Any]) -> None:
        for _ in kind(NoLength(5), **options):
            pass

    for kind, options in ((TorchDataLoader, {}), (DataLoader, ALL[how])):
        with within(60), pytest.raises(OSError, match="the length is not known today"):
            use(kind, options)


@pytest.mark.parametrize("how", ["inline", "thread", "fork", "threads"])
def test_errors_hold_no_memory(how: str) -> None:
    """An error that the user keeps does not keep the batches that came before it."""
    with within(60), over(DataLoader(Raises(8, LookupError), **ALL[how])) as iterator:
        held = []
        for _ in range(8):
            try:
                next(iterator)
            except LookupError as error:
                held.append(error)
        assert len(held) == 1
        assert not any(isinstance(value, torch.Tensor) for value in held[0].__dict__.values())
