"""Batches lie in memory that is used again: never while anybody sees it, and never more of it than allowed."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from busy_support import slowness
from faults_support import Big, Range, Slow, over, within
from full_run import full_only
from leak_support import wait_gone

from penstock import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Twins(Range):
    """Two vectors a sample."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((20_000,), float(index)), torch.full((30_000,), float(index))


def right(batch: torch.Tensor, k: int, size: int = 2) -> bool:
    return batch[:, 0].tolist() == [float(size * k + j) for j in range(size)] and bool((batch == batch[:, :1]).all())


@pytest.mark.parametrize("how", [{"num_workers": 2}, {"num_workers": 1, "threads_per_worker": 2}], ids=str)
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_are_kept_are_right(how: dict[str, Any], persistent: bool) -> None:
    """None of them is copied, and nobody warns."""
    with within(60), warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(Big(60), 2, persistent_workers=persistent, **how)
        kept = [batch for _ in range(2) for batch in loader]
    assert loader.stats()["ways"] == {"ring": 60}
    loader.close()
    assert all(right(batch, k % 30) for k, batch in enumerate(kept))


@pytest.mark.parametrize(
    "part",
    [
        lambda batch: batch[1:, 7],
        lambda batch: batch.numpy(),
        lambda batch: memoryview(batch.numpy()),
        lambda batch: batch.untyped_storage(),
        lambda batch: batch.view(torch.int32).t(),
        lambda batch: torch.utils.dlpack.to_dlpack(batch),
        lambda batch: batch.data,
    ],
    ids=["slice", "array", "memoryview", "storage", "transposed", "dlpack", "data"],
)
def test_any_alias_keeps_the_memory(part: Any) -> None:
    """Also one that is no tensor: the slot is not used again while it is there."""

    def values(alias: Any) -> Any:
        if type(alias).__name__ == "PyCapsule":
            return None
        if isinstance(alias, torch.UntypedStorage):
            return bytes(alias[:4000])
        if isinstance(alias, memoryview):
            return bytes(alias[:1]) if alias.ndim == 1 else alias.tobytes()[:4000]
        return alias.tolist() if isinstance(alias, torch.Tensor) else alias.ravel()[:100].tolist()

    loader = DataLoader(Big(60), 2, num_workers=2)
    with within(60), over(loader) as iterator:
        for _ in range(4):
            next(iterator)
        alias = part(next(iterator))
        expected = values(alias)
        for batch in iterator:
            batch += 1  # they are writable, and nobody else's
            del batch
        if expected is None:
            assert right(torch.utils.dlpack.from_dlpack(alias), 4)
        else:
            assert values(alias) == expected


@pytest.mark.parametrize("which", [0, 1])
def test_one_tensor_of_a_batch_keeps_its_memory(which: int) -> None:
    """While the others of its batch are gone."""
    loader = DataLoader(Twins(80), 2, num_workers=2)
    held: list[tuple[int, torch.Tensor]] = []
    k = -1
    with within(60):
        for batch in loader:  # enumerate would hold on to the last one
            k += 1
            held = [*held[-1:], (k, batch[which])]
            batch[1 - which].fill_(-5.0)
            del batch
            assert all(right(tensor, number) for number, tensor in held)


def test_batches_outlive_loader_and_workers() -> None:
    loader: Any = DataLoader(Big(20), 2, num_workers=2)
    with within(60):
        iterator = iter(loader)
        held = [next(iterator) for _ in range(7)]
        pids = [worker.pid for worker in iterator._workers]
        del iterator, loader
        gc.collect()
        assert not wait_gone(pids, 5)
    for k, batch in enumerate(held):
        assert right(batch, k)
        batch.mul_(2).add_(1)
        assert batch[1, -1] == 2 * (2 * k + 1) + 1


def test_the_user_may_write_into_batches() -> None:
    loader = DataLoader(Big(60), 2, num_workers=2, persistent_workers=True)
    with within(60), loader:
        for _ in range(3):
            for k, batch in enumerate(loader):
                assert right(batch, k)
                batch.fill_(-1.0)


def test_batches_that_grow() -> None:
    """Slots are extended; who holds a batch still has it."""

    class Growing(Range):
        def __getitem__(self, index: int) -> Any:
            return torch.full((2_000 * (1 + index // 8),), float(index))

    loader = DataLoader(Growing(96), 2, num_workers=2)
    with within(60):
        kept = list(loader)
        assert all(right(batch, k) for k, batch in enumerate(kept))
        held: list[tuple[int, torch.Tensor]] = []
        for k, batch in enumerate(loader):
            held = [*held[-1:], (k, batch)]
            assert all(right(old, number) for number, old in held)


# How much.


def shared_bytes() -> int:
    """Of the anonymous memory files that this process has open."""
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:penstock" in os.readlink(link):
                found = link.stat()
                sizes[found.st_ino] = found.st_blocks * 512
        except OSError:
            continue
    return sum(sizes.values())


@pytest.mark.parametrize("batches", [1, 2, 6])
def test_max_bytes_in_flight(batches: int) -> None:
    before = shared_bytes()
    nbytes = 2 * 50_000 * 4
    limit = int(nbytes * 1.3) * batches
    loader = DataLoader(Big(60), 2, num_workers=2, prefetch_factor=8, max_bytes_in_flight=limit)
    most = 0
    with within(60), over(loader) as iterator:
        for k, batch in enumerate(iterator):
            assert right(batch, k)
            most = max(most, shared_bytes() - before)
            del batch
    assert most <= 1.3 * (limit + 2 * nbytes) + (1 << 20), "and two that the consumer has; the board"
    assert most >= nbytes


def test_a_limit_of_one_batch_blames_nobody() -> None:
    loader = DataLoader(Big(20), 2, num_workers=2, max_bytes_in_flight=1)
    with within(60), warnings.catch_warnings():
        warnings.simplefilter("error")
        for k, batch in enumerate(loader):
            assert right(batch, k)
            del batch


@full_only("workers for each", but=["thread"])
@pytest.mark.clock
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_generous_limit_does_not_take_the_workers_away(executor: str) -> None:
    loader = DataLoader(Slow(30, 0.1), num_workers=3, executor=executor, max_bytes_in_flight=1 << 30)
    begin = time.monotonic()
    with within(60):
        assert len(list(loader)) == 30
    assert time.monotonic() - begin < 2.2 * slowness(), "three seconds one after another"


def test_batches_are_read_in_another_thread_than_that_which_asks() -> None:
    """Leases come back from whichever thread drops the last tensor."""
    import queue

    loader = DataLoader(Big(120, 20_000), 2, num_workers=2)
    channel: queue.SimpleQueue[Any] = queue.SimpleQueue()
    wrong: list[int] = []

    def read() -> None:
        while (item := channel.get()) is not None:
            k, batch = item
            if not right(batch, k):
                wrong.append(k)
            del item, batch

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    with within(60):
        for thread in threads:
            thread.start()
        for k, batch in enumerate(loader):
            channel.put((k, batch))
            del batch
        for _ in threads:
            channel.put(None)
        for thread in threads:
            thread.join()
    assert wrong == []
