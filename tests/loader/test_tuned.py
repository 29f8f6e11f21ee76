"""A pass whose number of workers changes: the same batches and states, whatever goes wrong, and nothing is left."""

from __future__ import annotations

import json
import operator
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full_run import full_only
from leak_support import assert_nothing_more, left
from loader_conformance import check_close, travelled
from loader_support import Draws, Faulty, Stream, draw_load, outcomes, plain
from matrix_support import Impure, Pure, bits
from torch.utils.data import Dataset, Subset
from tuned_support import Script, scripted

import penstock as ps
from penstock import DataLoader
from penstock.errors import ConfigError, WorkerError
from penstock.loader import autotune

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*are being kept")

GENERATOR = torch.Generator()


def same(one: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Without the long story of what differs."""
    return [bits(batch) for batch in one] == [bits(batch) for batch in other]


def pure(**how: Any) -> DataLoader[Any]:
    return DataLoader(Pure(42), 4, shuffle=True, seed=11, **how)


def unseeded(**how: Any) -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(Pure(42), 4, shuffle=True, **how)


def impure(**how: Any) -> DataLoader[Any]:
    return DataLoader(Impure(42), 4, shuffle=True, seed=11, **how)


def ranked(manifest: ps.Manifest) -> Callable[..., DataLoader[Any]]:
    def make(**how: Any) -> DataLoader[Any]:
        data = ps.RankDataset(manifest, rank=1, world_size=2, mini_epochs=2, seed=1, load=draw_load)
        return DataLoader(data, batch_size=3, **how)

    return make


def streamed(manifest: ps.Manifest) -> Callable[..., DataLoader[Any]]:
    def make(**how: Any) -> DataLoader[Any]:
        data = ps.MPDataset(manifest, batch_size=4, rank=0, world_size=2, seed=1, load=draw_load)
        return DataLoader(data, batch_size=4, **how)

    return make


def grouped(**how: Any) -> DataLoader[Any]:
    order = ps.RandomSampler(range(42), shuffle="global", seed=3)
    sampler = ps.GroupedBatchSampler(order, [k % 3 for k in range(42)], 4)
    return DataLoader(Draws(42), batch_sampler=sampler, **how)


def out_of_order(**how: Any) -> DataLoader[Any]:
    return DataLoader(Pure(42), 4, shuffle=True, seed=11, in_order=False, **how)


@full_only("every way for each", but=["impure", "streamed"])
@pytest.mark.parametrize("kind", ["pure", "unseeded", "impure", "ranked", "streamed", "grouped"])
def test_every_way_through_the_numbers_gives_the_same_batches_and_states(
    write_manifest: Callable[..., Path], kind: str
) -> None:
    """Bit for bit, over some passes; and the state after any batch goes on anywhere."""
    manifest = ps.Manifest.open(write_manifest(61))
    made = {"ranked": ranked(manifest), "streamed": streamed(manifest)}
    make: Any = made.get(kind) or {one.__name__: one for one in (pure, unseeded, impure, grouped)}[kind]
    truth: list[tuple[Any, Any]] = []
    inline, passes = make(), 4 if kind in made else 2
    for _ in range(passes):
        truth += [(bits(batch), travelled(inline.state_dict())) for batch in inline]
    # As in torch, persistent workers draw fewer seeds from the global generator.
    kept = {} if kind == "unseeded" else {"persistent_workers": True}
    ways: list[tuple[list[int], dict[str, Any]]] = [([2, 4, 1], {}), ([1, 2, 0], kept), ([1, 3, 2], kept)]
    # Threads promise penstock.generator only.
    ways += [] if kind == "impure" else [([2, 3, 1], {"executor": "thread"})]
    for number, (counts, how) in enumerate(ways):
        each = [1 + (number + k) % 3 for k in range(3)]
        loader = scripted(make(num_workers="auto", **how), counts, each)
        begun = loader.state_dict()
        assert begun == make().state_dict()
        found: list[tuple[Any, Any]] = []
        with loader:
            for _ in range(passes):
                found += [(bits(batch), travelled(loader.state_dict())) for batch in loader]
        assert len(found) == len(truth)
        wrong = [k for k, (one, other) in enumerate(zip(found, truth, strict=True)) if one != other]
        assert not wrong
        assert (type(loader.num_workers), loader.num_workers) == (int, counts[-1])
        assert loader.stats()["workers"] == counts[-1]
        assert loader.stats()["executor"] == (how.get("executor", "process") if counts[-1] else "inline")
        at = 2 + number % 3
        resumed = scripted(make(num_workers="auto", **how), counts, [1, 1, 1])
        resumed.load_state_dict(truth[at][1])
        other = make()
        other.load_state_dict(found[at][1])
        for one in (resumed, other):
            with one:
                rest = [bits(batch) for batch in one]
                expected = [batch for batch, _ in truth[at + 1 : at + 1 + len(rest)]]
                assert len(rest) == len(expected) > 0
                assert all(map(operator.eq, rest, expected))


def test_out_of_order_every_batch_comes_once_and_states_know_which() -> None:
    expected = sorted(str(bits(batch)) for batch in out_of_order())
    loader = scripted(out_of_order(num_workers="auto"), [2, 4, 1, 3], [2, 3, 1])
    found = [str(bits(batch)) for batch in loader]
    assert sorted(found) == expected
    loader = scripted(out_of_order(num_workers="auto"), [2, 4, 1, 3], [2, 3, 1])
    iterator = iter(loader)
    head = [str(bits(next(iterator))) for _ in range(6)]
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    rest = out_of_order()
    rest.load_state_dict(state)
    assert sorted(head + [str(bits(batch)) for batch in rest]) == expected


def test_an_error_of_a_new_worker_is_the_samples_alone() -> None:
    data = Faulty(40, {39})
    data.pure = True  # type: ignore[attr-defined]
    loader = DataLoader(data, 2, seed=0, num_workers="auto")
    with pytest.raises(KeyError, match="sample 39 is bad") as raised:
        list(scripted(loader, [1, 2], [2]))
    assert "StopIteration" not in str(raised.value)


class PickledOnce(Faulty):
    """Cannot be sent to a second worker."""

    pure = True

    def __init__(self) -> None:
        super().__init__(400, set())
        self.times = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.times += 1
        if self.times > 1:
            raise StopIteration
        return super().__reduce_ex__(protocol)


def test_workers_that_cannot_be_started_do_not_end_the_epoch() -> None:
    loader = scripted(DataLoader(PickledOnce(), 2, num_workers="auto", multiprocessing_context="spawn"), [1, 2], [2])
    with loader:
        assert len(list(loader)) == 200
        assert isinstance(loader._tuner, Script)
        assert [type(error) for error in loader._tuner.failed] == [StopIteration]
        assert loader.num_workers == loader.stats()["workers"] == 1


@pytest.mark.parametrize("executor", ["auto", "process", "thread"])
def test_errors_come_in_their_places(executor: str) -> None:
    data = Faulty(20, {0, 5, 9, 19})
    data.pure = True  # type: ignore[attr-defined]
    expected = outcomes(DataLoader(data, 2))
    counts = [1, 2, 4, 0] if executor == "auto" else [2, 1, 3, 2]
    loader = scripted(DataLoader(data, 2, num_workers="auto", executor=executor), counts, [1, 2, 1])
    with loader:
        assert outcomes(loader) == expected
        assert loader.stats()["failed_batches"] == 4


class Kills(Pure):
    """Ends its worker at a sample."""

    def __init__(self, n: int, at: int, here: int) -> None:
        super().__init__(n)
        self.at = at
        self.here = here

    def __getitem__(self, index: int) -> Any:
        if index == self.at and os.getpid() != self.here:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@full_only("every segment for each", but=["9"])
@pytest.mark.parametrize("at", [1, 9, 25])
def test_a_worker_that_is_killed_in_any_segment_is_said_and_nothing_is_left(at: int) -> None:
    before = left()
    loader = DataLoader(Kills(40, at, os.getpid()), 2, num_workers="auto")
    scripted(loader, [2, 1, 3], [3, 3])
    iterator = iter(loader)
    had = 0
    with pytest.raises(WorkerError, match="killed by signal"):
        while True:
            next(iterator)
            had += 1
    assert had <= at // 2
    with pytest.raises(WorkerError):
        next(iterator)
    del iterator
    loader.close()
    del loader
    assert_nothing_more(before)


@full_only("every segment for each", but=["True-drop"])
@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("persistent", [False, True])
def test_nothing_is_left_of_a_pass_that_is_given_up_anywhere(how: str, persistent: bool) -> None:
    before = left()
    for had in (0, 1, 2, 3, 6, 9):  # behind the second one workers wait for their turn
        loader = pure(num_workers="auto", persistent_workers=persistent)
        iterator = iter(scripted(loader, [2, 1, 3, 0], [2, 2, 2]))
        for _ in range(had):
            next(iterator)
        if how == "close":
            loader.close()
            with pytest.raises(WorkerError, match="its DataLoader was closed"):
                next(iterator)
            assert len(list(loader)) == 11, "it goes on anew"
        del iterator
        if not persistent:
            assert_nothing_more((before[0], left()[1], *before[2:]))  # the loader keeps the ring
        del loader
    assert_nothing_more(before)


def test_close_while_settings_are_tried() -> None:
    check_close(lambda: pure(num_workers="auto"))


LET_GO = threading.Event()


class Halts(Pure):
    """Waits at the samples of a batch, to be let go."""

    def __init__(self, n: int, at: int) -> None:
        super().__init__(n)
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index // 2 == self.at:
            LET_GO.wait(300)
        return super().__getitem__(index)


@full_only("waits for seconds for each", but=["3", "9"])
@pytest.mark.parametrize("at", [1, 3, 6, 9])
def test_close_while_another_thread_waits_in_any_segment(at: int) -> None:
    others = set(threading.enumerate())
    # In a group of small batches, the one that halts would keep back those before it.
    loader = scripted(DataLoader(Halts(42, at), 2, num_workers="auto", prefetch_factor=2), [2, 3, 1], [2, 2, 2])
    had: list[Any] = []
    more, ends = threading.Semaphore(0), []

    def consume(iterator: Any) -> None:
        try:
            for batch in iterator:
                had.append(batch)
                more.release()
            ends.append(None)
        except Exception as error:
            ends.append(error)

    consumer = threading.Thread(target=consume, args=(iter(loader),), daemon=True)
    consumer.start()
    for _ in range(at):
        assert more.acquire(timeout=40)
    loader.close()
    consumer.join(40)
    LET_GO.set()  # threads end in their own time
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("penstock-worker"):
            thread.join(40)
    LET_GO.clear()
    assert len(had) == at
    assert isinstance(ends[0], WorkerError)
    assert "its DataLoader was closed" in str(ends[0])
    resumed = DataLoader(Halts(42, -1), 2)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 21 - at


# What is chosen, and what it says.


class Here(Dataset[Any]):
    """Says which process loads a sample."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, os.getpid()])


class PureHere(Here):
    pure = True


class Sleepy(Dataset[int]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


class Releases(Sleepy):
    pure = releases_gil = True


@pytest.mark.clock
def test_a_run_that_waits_for_storage_gets_more_workers_and_keeps_them(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "_SECONDS", 0.15)
    loader = DataLoader(Sleepy(), 2, seed=0, num_workers="auto", persistent_workers=True, executor="process")
    assert isinstance(loader.num_workers, int)
    assert repr(loader.num_workers) == "'auto'"
    iterator = iter(loader)
    assert loader._tuner is not None
    loader._tuner.length = 4  # more workers than batches in a pass are not tried
    had = []
    while loader.stats()["tuning"]["chosen"] is None:
        had += plain(next(iterator))
    assert had == list(range(len(had)))
    tuning = loader.stats()["tuning"]
    workers = loader.num_workers
    assert type(workers) is int
    assert workers in (2, 4)
    assert tuning["chosen"] == {"executor": "process", "workers": workers}
    assert [one["workers"] for one in tuning["tried"]][:2] == [1, 2]
    loader.report()
    said = " ".join(capsys.readouterr().out.split())
    assert f'Workers chosen: executor="process", num_workers={workers}, ' in said
    assert "Tried: 1 process: " in said
    assert "Memory limits" not in said
    iterator = None
    loader.close()


@pytest.mark.clock
def test_threads_of_one_process_become_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_SECONDS", 0.15)
    with DataLoader(Releases(), 2, num_workers="auto") as loader:
        iterator = iter(loader)
        while loader.stats()["tuning"]["chosen"] is None:
            next(iterator)
        assert loader.stats()["processes"] == 1
        assert loader.num_workers >= 2
        assert loader.stats()["tuning"]["chosen"] == {"executor": "auto", "workers": loader.num_workers}


@pytest.mark.clock
def test_a_training_that_takes_its_time_needs_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_SECONDS", 0.1)
    with pure(num_workers="auto", persistent_workers=True) as loader:
        while loader.stats()["tuning"]["chosen"] is None:
            for _ in loader:
                time.sleep(0.03)
        assert (loader.executor, loader.num_workers) == ("auto", 1)
        assert len(list(loader)) == 11


@pytest.mark.clock
@pytest.mark.parametrize("seeded", [False, True])
def test_samples_that_take_no_work_are_made_inline(monkeypatch: pytest.MonkeyPatch, seeded: bool) -> None:
    """Also in the rest of the epoch; a dataset that is not pure opens nothing here before."""
    monkeypatch.setattr(autotune, "_SECONDS", 0.05)
    # The estimate wins, however busy the machine is.
    monkeypatch.setattr(autotune, "_UNSURE", 1e-6)
    data: Any = Here() if seeded else PureHere()
    with DataLoader(data, 2, seed=0, num_workers="auto") as loader:
        pids: list[int] = []
        for batch in loader:
            pids += batch[:, 1].tolist()
        tuning, here = loader.stats()["tuning"], os.getpid()
        assert tuning["chosen"] == {"executor": "inline", "workers": 0}
        assert (loader.num_workers, loader.stats()["executor"]) == (0, "inline")
        assert pids[-1] == here
        assert here not in pids[: pids.index(here)]
        assert set(pids[pids.index(here) :]) == {here}


class Unhurried(Pure):
    """Its batches are too much work to be handed over in groups, so the next number has its turn in time."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0005)
        return super().__getitem__(index)


class DiesOnce(Unhurried):
    """The first worker that comes to a sample dies."""

    def __init__(self, size: int, file: Path, at: int = 2) -> None:
        super().__init__(size)
        self.file = file
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index == self.at and not self.file.exists():
            self.file.touch()
            os._exit(1)
        return super().__getitem__(index)


def test_workers_that_were_replaced_while_numbers_are_tried_are_counted(tmp_path: Path) -> None:
    data = DiesOnce(42, tmp_path / "died")
    loader = scripted(DataLoader(data, 4, seed=3, num_workers="auto", on_worker_death="restart"), [1, 2], [4])
    with loader:
        assert same(loader, DataLoader(Pure(42), 4, seed=3))
        assert loader.stats()["workers"] == 2
        assert loader.stats()["restarts"] == 1


def test_a_worker_that_dies_while_it_ends_is_replaced(tmp_path: Path) -> None:
    data = DiesOnce(42, tmp_path / "died", at=12)
    loader = DataLoader(data, 4, seed=3, num_workers="auto", on_worker_death="restart")
    with scripted(loader, [2, 1], [1]):
        assert same(loader, DataLoader(Pure(42), 4, seed=3))
        assert loader.stats()["workers"] == 1
        assert loader.stats()["restarts"] == 1


class Threaded(Pure):
    releases_gil = True


def test_threads_of_one_process_become_more_and_fewer() -> None:
    loader = scripted(DataLoader(Threaded(200), 4, seed=3, num_workers="auto"), [2, 5, 1, 3], [3, 9, 9])
    with loader:
        assert same(loader, DataLoader(Pure(200), 4, seed=3))
        assert (loader.stats()["workers"], loader.stats()["processes"]) == (3, 1)


def test_what_is_assigned_ends_the_tuning() -> None:
    loader = scripted(pure(num_workers="auto"), [1, 2], [2])
    with loader:
        assert same(loader, pure())
        loader.set_epoch(0)
        assert same(
            loader, pure()
        )  # where one worker was so quick that no other was worth it, the choice is taken here
        assert (type(loader.num_workers), loader.num_workers) == (int, 2)
        loader.executor = "thread"
        loader.set_epoch(0)
        assert same(loader, pure())
        assert loader.stats()["executor"] == "thread"
        assert "tuning" not in loader.stats()


def test_loaders_made_of_it_are_tuned_too() -> None:
    import copy
    import pickle

    loader = pure(num_workers="auto")
    again = DataLoader(loader.dataset, 4, shuffle=True, seed=11, num_workers=loader.num_workers)
    for one in (again, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        with one:
            assert one.stats()["tuning"]["chosen"] is None
            one.set_epoch(0)
            assert same(one, pure())
    loader.num_workers = 2
    with loader:
        loader.set_epoch(0)
        assert same(loader, pure())
        assert loader.stats()["workers"] == 2
        assert "tuning" not in loader.stats()
        loader.num_workers = "auto"
        loader.set_epoch(0)
        assert same(loader, pure())
        assert loader.stats()["tuning"]["chosen"] is None


class Counting(Pure):
    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class StatefulOrder(list[int]):
    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class StatefulCollate:
    def __call__(self, samples: list[Any]) -> Any:
        return samples

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dataset": Impure(8)}, "needs seed="),
        ({"dataset": Stream(8)}, "map-style"),
        ({"dataset": Counting(8), "seed": 1}, "the dataset Counting has a state"),
        ({"dataset": Subset(Counting(8), [1, 2]), "seed": 1}, "the dataset Counting has a state"),
        ({"dataset": Pure(8), "sampler": StatefulOrder()}, "the sampler StatefulOrder has a state"),
        ({"dataset": Pure(8), "collate_fn": StatefulCollate()}, "the collate function StatefulCollate has a state"),
        (
            {"dataset": Pure(8), "sampler": torch.utils.data.RandomSampler(range(8), generator=GENERATOR)},
            "sampler",
        ),
        ({"dataset": Pure(8), "executor": "ray"}, "pass a number"),
        ({"dataset": Pure(8), "executor": "inline"}, "no workers"),
        ({"dataset": Pure(8), "num_workers": "many"}, "neither a number nor 'auto'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_tuned_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        DataLoader(**{"num_workers": "auto", **options})


def test_ranks_of_a_machine_share_the_memory_that_workers_may_have() -> None:
    def more(ranks: int) -> int:
        loader = scripted(DataLoader(Unhurried(200), 4, num_workers="auto"), [1, 2], [3])
        assert loader._tuner is not None
        loader._tuner._ranks = ranks
        with loader:
            assert len(list(loader)) == 50
        assert loader._tuner.memory_for is not None
        return loader._tuner.memory_for - 1

    alone, shared = more(1), more(4)
    assert 2 * shared < alone < 8 * shared
