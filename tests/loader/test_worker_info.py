"""``get_worker_info()`` in our workers. Where a new torch fails here, `penstock.loader.workerinfo` has to follow."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import interpreter_support
import numpy as np
import pytest
import torch
import torch.utils.data
from busy_support import HANG
from full_run import full_only
from loader_support import Squares, worker_scope
from torch.utils.data import default_collate, get_worker_info  # by name, before anything is installed

from penstock import distributed
from penstock.loader.workerinfo import enter, process_worker, seed_worker, thread_worker

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def in_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a new thread."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join(20)
    return result[0]


def in_process(work: Callable[[Any], None]) -> Any:
    """What ``work`` sends from a forked process."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    process.start()
    assert ours.poll(HANG), "the process said nothing"
    said = ours.recv()
    process.join(HANG)
    return said


def run(program: str, *, alone: bool = False) -> str:
    done = interpreter_support.run(["-c", program], timeout=HANG, alone=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_internals_of_torch_are_those_that_the_module_knows() -> None:
    """torch.utils.data.get_worker_info() returns one global of its module; default_collate asks by the public name."""
    program = """
import inspect, torch.utils.data
from torch.utils.data._utils import collate, worker
from penstock.loader import workerinfo
public = torch.utils.data.get_worker_info is worker.get_worker_info
asks = "torch.utils.data.get_worker_info()" in inspect.getsource(collate.collate_tensor_fn)
print(public, asks, workerinfo.expected(), worker.get_worker_info.__code__.co_names, worker._worker_info)
"""
    assert run(program) == "True True True ('_worker_info',) None", (
        f"torch {torch.__version__} keeps its worker info in another way: penstock/loader/workerinfo.py has to follow"
    )


@full_only("an interpreter of its own")
def test_internals_that_nobody_knows_are_left_alone() -> None:
    program = """
import warnings
from torch.utils.data._utils import worker
other = {"info": None}
worker.get_worker_info = lambda: other["info"]
from penstock.loader import workerinfo
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        workerinfo.enter(workerinfo.thread_worker(0, 1, 5, None))
        print(worker.get_worker_info())
print(len(caught), "executor='process'" in str(caught[0].message))
"""
    assert run(program, alone=True) == "None\nNone\n1 True"


def test_nothing_is_touched_before_it_is_needed() -> None:
    program = """
import os
from torch.utils.data._utils import worker
import penstock.loader.executors.threads, penstock.loader.executors.inline, penstock.loader.workerinfo as w
print(w.expected())
del os.register_at_fork  # there is none on Windows, where threads are workers, too
import penstock.server.connections
w.enter(None)
print(w.expected())
"""
    assert run(program) == "True\nFalse"


def test_a_thread_is_a_worker_for_names_imported_earlier() -> None:
    data = Squares(3)
    info = thread_worker(1, 4, 77, data)

    def work() -> Any:
        with worker_scope(info):
            return get_worker_info(), torch.utils.data.get_worker_info(), distributed.worker()

    one, two, worker = in_thread(work)
    assert one is two is info
    assert (one.id, one.num_workers, one.seed) == (1, 4, 77)
    assert one.dataset is data
    assert worker == (1, 4)
    assert get_worker_info() is None
    for word in ("id=1", "num_workers=4", "seed=77", "dataset="):
        assert word in repr(one)
    with pytest.raises(Exception, match=r"read-only|cannot assign"):
        one.id = 3
    if "worker_method" in getattr(type(one), "__dataclass_fields__", {}):
        assert one.worker_method == "thread"


def test_scopes_nest_and_end() -> None:
    outer, inner = thread_worker(0, 1, 0, None), thread_worker(5, 6, 0, None)
    with worker_scope(outer):
        with pytest.raises(KeyError), worker_scope(inner):
            assert get_worker_info() is inner
            raise KeyError
        assert get_worker_info() is outer
        assert in_thread(get_worker_info) is None
    assert get_worker_info() is None
    enter(inner)
    assert get_worker_info() is inner
    enter(None)
    assert get_worker_info() is None


def test_every_thread_has_its_own_at_the_same_time() -> None:
    start = threading.Barrier(8)
    wrong: list[int] = []

    def work(number: int) -> None:
        start.wait(10)
        for _ in range(200):
            with worker_scope(thread_worker(number, 8, number, None)):
                info = get_worker_info()
                if info is None or info.id != number:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert get_worker_info() is None


def test_a_fork_in_a_worker_thread_is_no_worker() -> None:
    def fork() -> bytes:
        read, write = os.pipe()
        with worker_scope(thread_worker(0, 1, 0, None)):
            pid = os.fork()
            if pid == 0:
                os.write(write, repr(get_worker_info()).encode())
                os._exit(0)
            os.waitpid(pid, 0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            return pipe.read()

    assert in_thread(fork) == b"None"


class Infos(Squares):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return None if info is None else (info.id, info.num_workers, type(info.dataset).__name__)


def first(samples: list[Any]) -> Any:
    return samples[0]


def test_torchs_own_workers_see_their_own_also_inside_a_thread_of_ours() -> None:
    def work() -> list[Any]:
        with worker_scope(thread_worker(6, 7, 0, None)):
            loader = torch.utils.data.DataLoader(
                Infos(2), num_workers=2, collate_fn=first, multiprocessing_context="fork"
            )
            return [*loader, get_worker_info().id]  # type: ignore[union-attr]

    assert in_thread(work) == [(0, 2, "Infos"), (1, 2, "Infos"), 6]


def test_torchs_own_workers_collate_into_shared_memory_as_before() -> None:
    enter(None)
    (batch,) = torch.utils.data.DataLoader(Shared(1), num_workers=1, collate_fn=told, multiprocessing_context="fork")
    assert batch is True


class Shared(Squares):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3)


def told(samples: list[Any]) -> bool:
    return bool(default_collate(samples).is_shared())


def test_threads_do_not_collate_into_shared_memory() -> None:
    """It would cost each tensor a file descriptor, and nobody maps it."""
    with worker_scope(thread_worker(0, 1, 0, None)):
        batch = default_collate([{"x": torch.zeros(3)}, {"x": torch.ones(3)}])
        assert get_worker_info() is not None
    assert not batch["x"].is_shared()


def _be_a_process_worker(pipe: Any) -> None:
    data = Squares(4)
    process_worker(2, 3, 102, data)
    infos = [get_worker_info(), in_thread(get_worker_info), in_thread(torch.utils.data.get_worker_info)]
    shared = default_collate([torch.zeros(3)]).is_shared()
    same = all(info is not None and info.dataset is data for info in infos)
    pipe.send(([(info.id, info.num_workers, info.seed) for info in infos], same, shared))


def test_a_process_is_a_worker_in_all_its_threads() -> None:
    assert in_process(_be_a_process_worker) == ([(2, 3, 102)] * 3, True, False)


def _be_a_process_worker_forked_from_a_thread(pipe: Any) -> None:
    process_worker(2, 3, 102, None)
    pipe.send(get_worker_info().id)  # type: ignore[union-attr]


def test_a_process_worker_started_inside_a_worker_thread() -> None:
    def start() -> Any:
        with worker_scope(thread_worker(0, 1, 0, None)):
            return in_process(_be_a_process_worker_forked_from_a_thread)

    assert in_thread(start) == 2


class States(Squares):
    """What the global generators of a worker hold at its start."""

    def __getitem__(self, index: int) -> Any:
        return states()


def states() -> Any:
    legacy: Any = np.random.get_state()
    return (
        random.getstate(),
        (legacy[0], legacy[1].tolist(), *legacy[2:]),
        torch.initial_seed(),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("seed", [0, 3, 2**40 + 5])
def test_seeds_are_those_of_torchs_workers(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = int(torch.empty((), dtype=torch.int64).random_(generator=generator.clone_state()).item())
    loader = torch.utils.data.DataLoader(
        States(3), num_workers=3, collate_fn=first, generator=generator, multiprocessing_context="fork"
    )
    theirs = list(loader)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        for number in range(3):
            seed_worker(base, number)
            assert states() == theirs[number]
            assert torch.initial_seed() == base + number
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@pytest.mark.parametrize("base", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
def test_numpys_words_are_torchs(base: int) -> None:
    from torch.utils.data._utils.worker import _generate_state

    drawn: list[Any] = []
    original = np.random.seed
    before = random.getstate(), torch.get_rng_state()
    try:
        np.random.seed = lambda words: drawn.append(list(map(int, words)))
        seed_worker(base, 5)
    finally:
        np.random.seed = original
        random.setstate(before[0])
        torch.set_rng_state(before[1])
    assert drawn == [_generate_state(base, 5)]
