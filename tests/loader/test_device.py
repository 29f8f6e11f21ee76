"""``device=``: batches are copied to a device ahead of the consumer, and states know nothing of it.

There is no accelerator where these tests run: what copies is a small object that notes what it is asked for.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from busy_support import HANG
from loader_conformance import check_chain, check_close, check_end_of_pass, check_load_into_used, check_resume
from loader_support import EXECUTORS, Faulty, Stream, plain
from torch.utils.data import Dataset

import penstock as ps
from penstock.errors import ConfigError, WorkerError
from penstock.loader.batches import map_batch
from penstock.loader.device import StreamCopier

Pair = namedtuple("Pair", "left right")


class OnDevice:
    """A tensor that is on the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def tolist(self) -> Any:
        return self.tensor.tolist()


class Copier:
    """Copies at once; notes each copy, mark and wait, and whose batch it was."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.copies = 0
        self.batches: list[weakref.ref[OnDevice]] = []
        self.fails_at = -1
        self.failure: BaseException = LookupError("no room on the device")

    def copy(self, batch: Any) -> Any:
        self.said.append(("copy", self.copies))
        self.copies += 1
        if self.copies - 1 == self.fails_at:
            raise self.failure
        return map_batch(self._move, batch)

    def _move(self, part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        moved = OnDevice(part.clone())
        self.batches.append(weakref.ref(moved))
        return moved

    def record(self) -> int:
        return self.copies - 1

    def wait(self, mark: int, batch: Any) -> None:
        self.said.append(("wait", mark))


class Begun(Dataset[Any]):
    """Each item says when it was begun: with one thread those two before it are finished batches then."""

    def __init__(self, n: int) -> None:
        self.begun = [threading.Event() for _ in range(n)]

    def __len__(self) -> int:
        return len(self.begun)

    def __getitem__(self, index: int) -> int:
        self.begun[index].set()
        return index


def pure(executor: str, copier: Any, **options: Any) -> ps.DataLoader[Any]:
    how = {"shuffle": "global", "seed": 5, "executor": executor, "num_workers": EXECUTORS[executor]}
    return ps.DataLoader(Numbers(), batch_size=4, device=copier, **{**how, **options})


class Numbers(Dataset[Any]):
    pure = True

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "drawn": ps.generator().random(3), "name": str(index)}


def as_plain(batch: Any) -> Any:
    return plain(map_batch(lambda part: part.tensor if isinstance(part, OnDevice) else part, batch))


class Plain:
    """A loader whose batches are plain again, so that the suite of states can compare them."""

    def __init__(self, loader: ps.DataLoader[Any]) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        return PlainIterator(iter(self.loader))


class PlainIterator:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.iterator)
        assert isinstance(batch["index"], OnDevice)
        return as_plain(batch)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_batches_are_the_same_and_each_is_waited_for(executor: str) -> None:
    copier = Copier()
    with pure(executor, copier) as loader:
        for number, batch in enumerate(loader):
            assert ("wait", number) in copier.said
            assert as_plain(batch) == plain(list(pure("inline", None))[number])
    waits = [number for what, number in copier.said if what == "wait"]
    assert waits == [number for what, number in copier.said if what == "copy"] == list(range(7))
    assert all(copier.said.index(("copy", n)) < copier.said.index(("wait", n)) for n in waits)


def test_the_next_batch_is_copied_before_it_is_asked_for() -> None:
    """One, and not more."""
    copier, data = Copier(), Begun(12)
    loader: ps.DataLoader[Any] = ps.DataLoader(
        data, 1, executor="thread", num_workers=1, prefetch_factor=4, device=copier
    )
    iterator = iter(loader)
    for number in range(9):
        assert data.begun[number + 2].wait(HANG)
        assert next(iterator).tolist() == [number]
        assert copier.said[-1] == ("copy", number + 1)
    copies = loader.stats()["copies"]
    assert (copies["batches"], copies["ahead"]) == (9, 8)
    assert len(list(iterator)) == 3
    assert loader.stats()["queue"]["depth"] == 5


def test_a_batch_that_is_not_there_holds_nothing_up() -> None:
    """The one at hand comes, though the one behind it never does."""

    class Stuck(Dataset[int]):
        pure = True
        goes_on = threading.Event()

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            assert index == 0 or self.goes_on.wait(HANG)
            return index

    copier = Copier()
    with ps.DataLoader(Stuck(), 1, executor="thread", num_workers=1, device=copier) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0]
        assert copier.copies == 1
        Stuck.goes_on.set()
        assert next(iterator).tolist() == [1]
        assert next(iterator, None) is None


def test_inline_nothing_is_made_ahead() -> None:
    made: list[int] = []

    class Notes(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            made.append(index)
            return index

    iterator = iter(ps.DataLoader(Notes(), device=Copier()))
    next(iterator)
    assert made == [0]


# States.


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_state_counts_what_the_consumer_has(executor: str) -> None:
    def make() -> Any:
        return Plain(pure(executor, Copier()))

    positions = None if executor == "inline" else [0, 3, 7, 8, 13]
    check_resume(make, positions=positions)
    check_resume(make, positions=[4], other=lambda: Plain(pure("inline", Copier())))
    check_end_of_pass(make)
    check_load_into_used(make)
    check_chain(make, [2, 1, 4])
    check_close(make)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_states_of_users_objects_are_those_of_the_batches_had(executor: str) -> None:
    def make() -> ps.DataLoader[Any]:
        return ps.DataLoader(Counting(), 1, executor=executor, num_workers=1, device=Copier())

    whole = [batch.tolist() for batch in make()]
    for count in (1, 5):
        loader = make()
        iterator = iter(loader)
        had = [next(iterator).tolist() for _ in range(count)]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        again = make()
        again.load_state_dict(state)
        assert had + [batch.tolist() for batch in again] == whole


class Counting(Stream):
    """A stream with a state: what it yields depends on how much it has yielded."""

    def __init__(self) -> None:
        super().__init__(12)
        self.had = 0

    def __iter__(self) -> Iterator[int]:
        while self.had < 12:
            self.had += 1
            yield self.had * 10

    def state_dict(self) -> dict[str, int]:
        return {"had": self.had}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.had = state["had"]


# Errors, interrupts, and the end.


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_error_comes_in_its_place(executor: str) -> None:
    how: dict[str, Any] = {"executor": executor, "num_workers": EXECUTORS[executor], "device": Copier()}
    iterator = iter(ps.DataLoader(Faulty(6, {2}), 1, **how))
    assert [next(iterator).tolist() for _ in range(2)] == [[0], [1]]
    with pytest.raises(KeyError):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[9], [16], [25]]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_so_does_one_of_the_copy(executor: str) -> None:
    copier = Copier()
    copier.fails_at = 2
    loader = pure(executor, copier)
    iterator = iter(loader)
    had = [as_plain(next(iterator)) for _ in range(2)]
    with pytest.raises(LookupError, match="no room on the device"):
        next(iterator)
    rest = [as_plain(batch) for batch in iterator]
    expected = [plain(batch) for batch in pure("inline", None)]
    assert had + rest == expected[:2] + expected[3:]
    assert loader.stats()["failed_batches"] == 1
    assert loader.stats()["copies"]["batches"] == 6


def test_an_interrupt_while_a_batch_is_in_hand_ends_the_iterator() -> None:
    """The batch that was about to come is not lost: it is the first one of whoever goes on from the state."""
    copier, data = Copier(), Begun(12)
    copier.fails_at, copier.failure = 3, KeyboardInterrupt()
    how: dict[str, Any] = {"executor": "thread", "num_workers": 1, "prefetch_factor": 4}
    loader: ps.DataLoader[Any] = ps.DataLoader(data, 1, device=copier, **how)
    iterator = iter(loader)
    for number in range(2):
        assert data.begun[number + 2].wait(HANG)
        assert next(iterator).tolist() == [number]
    assert data.begun[5].wait(HANG)
    with pytest.raises(KeyboardInterrupt):  # batch 2 is in hand, and batch 3 is being copied
        next(iterator)
    with pytest.raises(WorkerError, match="was interrupted: start a new one"):
        next(iterator)
    again: ps.DataLoader[Any] = ps.DataLoader(data, 1, device=Copier(), **how)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch.tolist() for batch in again] == [[number] for number in range(2, 12)]


def test_an_early_break_lets_go_of_what_was_copied_ahead() -> None:
    copier, data = Copier(), Begun(12)
    loader: ps.DataLoader[Any] = ps.DataLoader(
        data, 1, executor="thread", num_workers=1, prefetch_factor=4, device=copier
    )
    for batch in loader:
        number = batch.tolist()[0]
        assert data.begun[number + 3].wait(HANG)
        if number == 3:
            break
    assert len(copier.batches) == 5
    del batch
    gc.collect()
    assert [ref() for ref in copier.batches] == [None] * 5


def test_a_closed_loader_lets_go_though_its_iterator_is_held() -> None:
    copier, data = Copier(), Begun(12)
    loader: ps.DataLoader[Any] = ps.DataLoader(
        data, 1, executor="thread", num_workers=1, prefetch_factor=4, device=copier
    )
    iterator = iter(loader)
    assert data.begun[3].wait(HANG)
    next(iterator)
    assert len(copier.batches) == 2
    loader.close()
    assert [ref() for ref in copier.batches] == [None] * 2
    with pytest.raises(WorkerError, match="its DataLoader was closed"):
        next(iterator)


# Structures and devices.


def test_parts_that_are_no_tensors_pass_through() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"pair": Pair(torch.tensor(samples), ["a", 2]), "none": None}

    (batch,) = ps.DataLoader(range(2), 2, collate_fn=collate, device=Copier())
    assert type(batch["pair"]) is Pair
    assert batch["pair"].left.tolist() == [0, 1]
    assert batch["pair"].right == ["a", 2]
    assert batch["none"] is None


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_on_the_cpu_batches_stay_as_they_are(device: Any) -> None:
    given = torch.arange(3)
    loader: ps.DataLoader[Any] = ps.DataLoader(range(3), 3, collate_fn=lambda samples: given, device=device)
    (batch,) = loader
    assert batch is given
    assert loader.stats()["copies"]["batches"] == 0
    assert loader.device == device


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_device_without_streams(executor: str) -> None:
    """ "meta" has no memory, but tensors can go there."""
    with pure(executor, "meta") as loader:
        batches = list(loader)
    assert {batch["drawn"].device.type for batch in batches} == {"meta"}
    assert [tuple(batch["drawn"].shape) for batch in batches] == [(4, 3)] * 6 + [(2, 3)]
    assert batches[0]["name"] == plain(next(iter(pure("inline", None))))["name"]
    assert loader.stats()["copies"]["batches"] == 7


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="device='gpu' is not a torch device"):
        ps.DataLoader(range(4), device="gpu")
    with pytest.raises(ConfigError, match="device='cpu' copies tensors, and output='numpy' returns arrays"):
        ps.DataLoader(range(4), device="cpu", output="numpy")
    with pytest.raises(ConfigError, match=r"device=1\.5 is not a torch device"):
        iter(ps.DataLoader(range(4), device=1.5))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
def test_a_device_that_is_not_here_is_refused_at_iter() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(range(4), device="cuda")
    with pytest.raises(ConfigError, match="device='cuda': torch finds no such device here"):
        iter(loader)
    loader.device = None
    assert len(list(loader)) == 4


class Streams:
    """Streams and events as ``torch.cuda`` has them, for parts of batches that note what is done with them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.at = "the consumer's"

    def Stream(self, device: torch.device) -> SideStream:
        return SideStream(self)

    @contextmanager
    def stream(self, stream: SideStream) -> Iterator[None]:
        self.at = "the side"
        yield
        self.at = "the consumer's"

    def current_stream(self, device: torch.device) -> ConsumersStream:
        return ConsumersStream(self)


class SideStream:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def record_event(self) -> str:
        self.streams.said.append("record an event")
        return "event"


class ConsumersStream:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def wait_event(self, event: str) -> None:
        self.streams.said.append(f"wait for the {event}")


class Graph:
    """Moves as the graphs of PyTorch Geometric do."""

    def __init__(self, streams: Streams, place: str = "in memory") -> None:
        self.streams, self.place = streams, place

    def pin_memory(self) -> Graph:
        self.streams.said.append("pin")
        return Graph(self.streams, "pinned")

    def to(self, device: torch.device, non_blocking: bool) -> Graph:
        self.streams.said.append(f"copy what is {self.place} on {self.streams.at} stream, blocking: {not non_blocking}")
        return Graph(self.streams, str(device))

    def record_stream(self, stream: ConsumersStream) -> None:
        assert isinstance(stream, ConsumersStream)
        self.streams.said.append(f"{self.place} is used on the consumer's stream")


def test_streams_and_events_are_used_in_this_order() -> None:
    streams = Streams()
    copier = StreamCopier(torch.device("cuda", 1), streams)
    moved = copier.copy({"graph": Graph(streams), "name": "a", "size": 3})
    mark = copier.record()
    assert (moved["graph"].place, moved["name"], moved["size"]) == ("cuda:1", "a", 3)
    copier.wait(mark, moved)
    assert streams.said == [
        "pin",
        "copy what is pinned on the side stream, blocking: False",
        "record an event",
        "wait for the event",
        "cuda:1 is used on the consumer's stream",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_cuda(executor: str) -> None:
    """Many batches, while the consumer's stream is kept busy: memory that is used again too early would show."""
    expected = [plain(batch) for batch in pure("inline", None)]
    busy = torch.randn(2000, 2000, device="cuda")
    for _ in range(3):
        with pure(executor, "cuda") as loader:
            loader.set_epoch(0)
            held = []
            for batch in loader:
                assert batch["drawn"].device.type == "cuda"
                for _ in range(10):
                    busy = torch.nn.functional.normalize(busy @ busy)
                held.append(map_batch(lambda part: part + 0 if isinstance(part, torch.Tensor) else part, batch))
                del batch
        assert [plain(batch) for batch in held] == expected


def test_the_report_says_how_much_was_copied(capsys: pytest.CaptureFixture[str]) -> None:
    loader = pure("inline", Copier())
    list(loader)
    loader.report()
    assert "copied to device" in capsys.readouterr().out
    loader = pure("inline", None)
    list(loader)
    loader.report()
    assert "copied to device" not in capsys.readouterr().out


def test_workers_that_are_chosen_while_it_runs() -> None:
    copier = Copier()
    with ps.DataLoader(Numbers(), 1, seed=1, num_workers="auto", device=copier) as loader:
        assert [batch["index"].tolist() for batch in loader] == [[number] for number in range(26)]
    assert copier.copies == 26


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without one")
def test_a_device_that_is_missing_moves_nothing() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = ps.DataLoader(Numbers(), 2, shuffle=True, num_workers=1, persistent_workers=True, device="cuda")
    with pytest.raises(ConfigError):
        iter(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert loader._workers.executor is None
