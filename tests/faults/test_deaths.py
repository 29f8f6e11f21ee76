"""Workers that die: noticed at once, named, and with on_worker_death='restart' made good."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faults_support import (
    WAYS,
    Big,
    Dies,
    Draws,
    PureDraws,
    Range,
    Slow,
    WithGrandchild,
    first,
    init_exits,
    over,
    within,
)
from full_run import full_only
from pairwise import each_value
from torch.utils.data import IterableDataset, get_worker_info

from penstock import DataLoader
from penstock.errors import WorkerError
from penstock.loader.config import LoaderConfig
from penstock.loader.executors.base import Event, Executor, Lost, Start
from penstock.loader.flow import Flow
from penstock.loader.messages import BatchRequest
from penstock.loader.window import DispatchPolicy, Window

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*does not declare itself pure")


def same(one: list[Any], two: list[Any]) -> bool:
    """Whether batches of tensors are equal bit for bit."""
    return len(one) == len(two) and all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize(("way", "threads"), each_value(WAYS, [1, 2]))
def test_a_death_is_an_error_that_names_worker_and_cause(way: str, threads: int) -> None:
    loader = DataLoader(Dies(Range(40), {21}, way), batch_size=2, num_workers=2, threads_per_worker=threads)
    with within(60), over(loader) as iterator, pytest.raises(WorkerError, match=r"pid \d+") as caught:
        pids = [worker.pid for worker in iterator._workers]
        for _ in iterator:
            pass
    text = str(caught.value)
    assert any(f"(pid {pid})" in text for pid in pids)
    assert WAYS[way][1] in text
    assert "MiB" in text, "its memory"
    assert "sample 21" in text or threads == 2, "where it was"


def test_a_death_is_told_again_and_the_loader_goes_on_anew() -> None:
    data = Dies(Range(12), {5}, "SIGKILL")
    loader = DataLoader(data, num_workers=2, persistent_workers=True)
    with within(60):
        iterator = iter(loader)
        with pytest.raises(WorkerError) as one:
            list(iterator)
        with pytest.raises(WorkerError) as two:
            next(iterator)
        assert str(one.value) == str(two.value)
        assert one.value is not two.value
        data.at = set()
        for _ in range(2):
            assert [int(batch) for batch in loader] == list(range(12))


def test_a_death_is_noticed_while_the_consumer_waits() -> None:
    """And though the other worker is busy for five minutes."""
    loader = DataLoader(Slow(4, stuck=frozenset({0, 1})), num_workers=2)
    with within(60), over(loader) as iterator:
        threading.Timer(0.5, os.kill, [iterator._workers[1].pid, signal.SIGKILL]).start()
        with pytest.raises(WorkerError, match="killed by signal: Killed"):
            next(iterator)


@full_only("a forkserver of its own", but=["fork"])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_death_is_noticed_though_a_grandchild_holds_its_pipes(method: str, tmp_path: Path) -> None:
    loader = DataLoader(WithGrandchild(20, tmp_path), num_workers=1, multiprocessing_context=method)
    with within(60), over(loader) as iterator:
        try:
            with pytest.raises(WorkerError, match="killed by signal"):
                list(iterator)
        finally:
            [grandchild] = tmp_path.iterdir()
            os.kill(int(grandchild.name), signal.SIGKILL)  # it is still there


def test_a_death_in_worker_init_is_an_error() -> None:
    loader = DataLoader(Range(9), num_workers=2, worker_init_fn=init_exits)
    with within(60), over(loader) as iterator, pytest.raises(WorkerError, match="exit code 9"):
        next(iterator)


class Texts(Range):
    """32 MB of text a sample."""

    def __getitem__(self, index: int) -> Any:
        return f"{index}" * 32_000_000


def blocks_in_a_pipe(pid: int) -> bool:
    """Return whether a process waits until somebody reads from a pipe that is full. What tells it differs by kernel."""
    call = Path(f"/proc/{pid}/syscall").read_text().split()[0]
    return call == "1" or Path(f"/proc/{pid}/wchan").read_text().endswith("pipe_write")


@full_only("large batches, again and again until it happens")
def test_a_death_while_a_large_batch_is_half_in_the_pipe() -> None:
    """Text travels in the message: the consumer has read the beginning of it when the worker dies."""
    for restart in ("raise", "restart"):
        loader = DataLoader(Texts(3), collate_fn=first, num_workers=1, on_worker_death=restart)
        with within(60), over(loader) as iterator:
            worker = iterator._workers[0]
            while not blocks_in_a_pipe(worker.pid):
                time.sleep(0.02)
            os.kill(worker.pid, signal.SIGKILL)
            if restart == "raise":
                with pytest.raises(WorkerError):
                    next(iterator)
            else:
                got = list(iterator)
                assert got == [Texts(3)[index] for index in range(3)]


# Restart.


@pytest.fixture(scope="module")
def truth(request: Any) -> tuple[Any, list[Any]]:
    data = request.param(36)
    return data, list(DataLoader(data, 3, shuffle=True, seed=5))


RESTARTED: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": True},
    {"num_workers": 1, "threads_per_worker": 2},
]


@pytest.mark.parametrize(
    ("truth", "at", "how"),
    each_value(
        *([Draws, PureDraws], [{0}, {17}, {35}, {3, 4, 20, 30}], RESTARTED),
        allowed=lambda data, at, how: data is PureDraws or "threads_per_worker" not in how,  # which draw from their own
    ),
    indirect=["truth"],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_restart_gives_the_same_data(
    truth: tuple[Any, list[Any]], at: set[int], how: dict[str, Any], tmp_path: Path
) -> None:
    data, expected = truth
    loader = DataLoader(Dies(data, at, "SIGKILL", tmp_path), 3, shuffle=True, seed=5, on_worker_death="restart", **how)
    with within(60):
        assert same(list(loader), expected)
    assert loader.stats()["restarts"] >= 1
    loader.close()


@full_only("workers for each", but=["2"])
@pytest.mark.parametrize("prefetch", [1, 2, 6])
def test_every_sample_may_kill_its_worker_once(tmp_path: Path, prefetch: int) -> None:
    """Batches that only stood in the queue of workers that died are not blamed."""
    samples = 14 if prefetch == 6 else 8
    data = Dies(Range(samples), set(range(samples)), "SIGKILL", tmp_path)
    loader = DataLoader(data, num_workers=2, prefetch_factor=prefetch, on_worker_death="restart")
    with within(60):
        assert [int(batch) for batch in loader] == list(range(samples))
    assert loader.stats()["restarts"] == samples


@full_only("random moments for seconds", but=["False"])
@pytest.mark.parametrize("persistent", [False, True])
def test_killed_from_outside_at_any_time(persistent: bool) -> None:
    """By a thread that kills a worker every few milliseconds, over several epochs."""
    data = Draws(120)
    expected = DataLoader(data, 4, shuffle=True, seed=5)
    loader = DataLoader(
        data,
        4,
        shuffle=True,
        seed=5,
        num_workers=2,
        prefetch_factor=2,  # else all batches are made by the time that a few workers have died
        on_worker_death="restart",
        persistent_workers=persistent,
    )
    rng = random.Random(3)
    kills = 0
    with within(60):
        for _ in range(3):
            iterator = iter(loader)
            got = []
            for count, batch in enumerate(iterator):
                got.append([part.clone() for part in batch])
                if count % 6 == 2:
                    victims = [worker for worker in iterator._workers if worker.exitcode is None]
                    if victims:
                        time.sleep(rng.random() * 0.003)
                        os.kill(rng.choice(victims).pid, signal.SIGKILL)
                        kills += 1
            assert same(got, list(expected))
    assert loader.stats()["restarts"] >= kills // 2
    loader.close()


@pytest.mark.parametrize("policy", ["raise", "restart"])
def test_killed_between_epochs(policy: str) -> None:
    """No pass is the worse for it."""
    loader = DataLoader(Range(9), num_workers=2, on_worker_death=policy, persistent_workers=True)
    with within(60), loader:
        for _ in range(3):
            iterator = iter(loader)
            assert [int(batch) for batch in iterator] == list(range(9))
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
            iterator._workers[0].join()


class SlowFirst(Range):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.02 if index else 1.0)
        return index


def test_a_sample_is_not_blamed_for_its_neighbours(tmp_path: Path) -> None:
    """Sample 0 takes long, and while it does, the samples of the other thread kill the worker three times."""
    data = Dies(SlowFirst(6), {3, 4, 5}, "SIGKILL", tmp_path)
    data.pure = True
    how: dict[str, Any] = {"num_workers": 1, "threads_per_worker": 2}
    loader = DataLoader(data, 6, on_worker_death="restart", **how)
    with within(60):
        assert [batch.tolist() for batch in loader] == [list(range(6))]
    assert loader.stats()["restarts"] == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sample_that_always_kills_ends_after_three_tries(threads: int) -> None:
    data = Dies(Range(40), {21}, "SIGKILL")
    how: dict[str, Any] = {"threads_per_worker": threads, "on_worker_death": "restart"}
    loader = DataLoader(data, 2, num_workers=2, prefetch_factor=3, **how)
    got = []
    with within(60), over(loader) as iterator:
        with pytest.raises(WorkerError, match=r"sample 21|samples \[20, 21\]|at batch 10") as caught:
            for batch in iterator:
                got.append(batch.tolist())
        assert 2 <= loader.stats()["restarts"] <= 3 * threads - 1, "three tries, if no other thread was at a sample"
    assert got == [[2 * k, 2 * k + 1] for k in range(len(got))]
    assert len(got) >= 4
    assert "killed by signal" in str(caught.value)


def test_workers_that_die_before_any_sample_end_the_pass_after_three_tries(tmp_path: Path) -> None:
    def init(worker: int) -> None:
        if len(list(tmp_path.iterdir())) < 12:  # else nobody would ever end this
            (tmp_path / str(os.getpid())).touch()
            os._exit(9)

    loader = DataLoader(Range(9), num_workers=2, worker_init_fn=init, on_worker_death="restart")
    with within(60), over(loader) as iterator, pytest.raises(WorkerError, match="at no sample, as were workers before"):
        next(iterator)


def test_a_new_worker_is_not_where_the_one_before_it_died(tmp_path: Path) -> None:
    def init(worker: int) -> None:
        if any(tmp_path.iterdir()):
            os._exit(9)

    loader = DataLoader(
        Dies(Range(9), {5}, "SIGKILL", tmp_path), num_workers=1, worker_init_fn=init, on_worker_death="restart"
    )
    with within(60), over(loader) as iterator, pytest.raises(WorkerError, match=r"exit code 9\. It was at no sample"):
        list(iterator)


class Uneven(IterableDataset[int]):
    """Two items of worker 0, and twenty of the other one."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(20 if info.id else 2)


def test_a_worker_that_died_behind_its_last_item_is_there_in_the_next_pass() -> None:
    loader = DataLoader(Uneven(), num_workers=2, persistent_workers=True)
    with within(60), loader:
        for _ in range(2):
            iterator: Any = iter(loader)
            found = [int(next(iterator)) for _ in range(8)]
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
            iterator._workers[0].join()  # else it dies in the next pass
            assert sorted([*found, *map(int, iterator)]) == sorted([0, 1, *range(20)])


def test_a_new_worker_is_asked_for_as_much_as_the_others(tmp_path: Path) -> None:
    data: Any = Dies(Big(60, 3000), {21}, "SIGKILL", tmp_path)
    data.pure = True
    loader = DataLoader(data, 3, num_workers=2, prefetch_factor=3, on_worker_death="restart")
    with within(60):
        iterator: Any = iter(loader)
        window = iterator._batches
        assert [int(batch[0, 0]) for batch in iterator] == list(range(0, 60, 3))
        assert loader.stats()["restarts"] == 1
        assert window._load == [0, 0]


def test_restart_keeps_what_the_consumer_holds(tmp_path: Path) -> None:
    """A new worker maps the same memory: batches that are held stay as they are."""
    loader = DataLoader(Dies(Big(24), {8, 15}, "SIGKILL", tmp_path), 2, num_workers=2, on_worker_death="restart")
    held: list[Any] = []
    with within(60):
        for batch in loader:
            held = [*held[-1:], batch]
            for kept in held:
                assert bool((kept == kept[:, :1]).all())
    assert held[-1][:, 0].tolist() == [22.0, 23.0]


class Dying(Executor):
    """Loses both workers at once, with a batch each; the first one with its sample on the board."""

    tells_begin = False

    def __init__(self) -> None:
        self.workers, self.lock, self.pid = 2, threading.RLock(), os.getpid()
        self.sizes: list[int] = []

    def submit(self, requests: Sequence[Start | BatchRequest], worker: int) -> None:
        pass

    def wait(self, run: int, deadline: float | None) -> list[Event]:
        return [] if deadline == 0 else [Lost(0, "dead"), Lost(1, "dead, too")]

    def resize(self, workers: int) -> None:
        self.sizes.append(workers)

    def close(self, patience: float) -> None:
        self.closed = True


def test_no_worker_is_started_after_one_that_ended_the_pass() -> None:
    executor = Dying()
    policy = DispatchPolicy(turns=False, stream=False)
    flow = Flow(LoaderConfig(num_workers=2), ahead=False)
    window = Window(iter([BatchRequest([0], [0]), BatchRequest([1], [1])]), executor, flow, policy)
    with pytest.raises(WorkerError, match=r"^dead\.$"):
        window.next()
    assert executor.closed
    assert executor.sizes == [2], "at the start"
