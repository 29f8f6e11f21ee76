"""Several iterators, loaders in threads, loaders in loaders, data sets that cannot be forked."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

import pytest
import torch
from faults_support import Big, Draws, NoFork, Range, Slow, Started, within
from full_run import full_only
from torch.utils.data import ConcatDataset, StackDataset, Subset, get_worker_info

from penstock import DataLoader
from penstock.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def values(loader: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in loader]


def test_iterators_at_once_with_shared_slots() -> None:
    """Each has a ring of its own, or what it lends is its own."""
    loader = DataLoader(Big(40, 20_000), 2, num_workers=2)
    with within(60):
        list(loader)  # there is a ring now
        iterators = [iter(loader) for _ in range(3)]
        for k in range(20):
            held = [next(iterator) for iterator in iterators]
            for batch in held:
                assert batch[:, 0].tolist() == [2.0 * k, 2.0 * k + 1]
                assert bool((batch == batch[:, :1]).all())
                batch.fill_(-1)


def test_nested_loops_over_one_loader() -> None:
    loader = DataLoader(Draws(6), 2, shuffle=True, seed=3, num_workers=1)
    alone = [values(DataLoader(Draws(6), 2, shuffle=True, seed=3)) for _ in range(1)]
    with within(60):
        outer = []
        for batch in loader:
            outer.append([part.tolist() for part in batch])
            assert len(values(loader)) == 3
    assert outer == alone[0]


@full_only("workers for each", but=["True"])
@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_in_threads_at_the_same_time(persistent: bool) -> None:
    """They start and end workers at once; each gets its own batches."""
    expected = [values(DataLoader(Draws(40), 4, shuffle=True, seed=seed)) for seed in range(4)]
    found: dict[int, Any] = {}

    def run(seed: int) -> None:
        loader = DataLoader(Draws(40), 4, shuffle=True, seed=seed, num_workers=2, persistent_workers=persistent)
        found[seed] = values(loader)
        loader.close()

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert [found.get(seed) for seed in range(4)] == expected


def test_a_persistent_iterator_is_taken_over() -> None:
    loader = DataLoader(Slow(30, 0.005), num_workers=2, persistent_workers=True)
    with within(60), loader:
        for _ in range(4):
            old = iter(loader)
            assert [int(next(old)) for _ in range(3)] == [0, 1, 2]
            new = iter(loader)
            with pytest.raises(RuntimeError, match="newer iterator"):
                next(old)
            del old
            assert [int(batch) for batch in new] == list(range(30))


def test_a_pass_that_is_left_gives_its_slots_back() -> None:
    loader = DataLoader(Big(24), 2, num_workers=2, persistent_workers=True)
    with within(60), loader:
        for batch in loader:
            del batch
        for _ in range(6):
            left: Any = iter(loader)
            next(left)
            time.sleep(0.03)  # until others are made
            next(left)
            del left
        iterator: Any = iter(loader)
        executor = iterator._batches.executor
        for batch in iterator:
            del batch
        assert not executor._lent


def test_passes_that_are_left_lose_no_slots_for_later_workers() -> None:
    loader = DataLoader(Big(24), 2, num_workers=2, prefetch_factor=2)
    with within(60):
        for _ in range(6):
            left: Any = iter(loader)
            ring = left._batches.executor.ring
            for _ in range(2):
                next(left)
            del left
        assert ring.lend()[0] <= 6, "four in flight, and two that the consumer has"


def test_data_sets_that_cannot_be_forked_are_not() -> None:
    assert multiprocessing.get_start_method() == "fork"
    with within(60):
        assert {name for batch in DataLoader(Started(2), num_workers=1) for name in batch} == {"ForkProcess"}
        names = {name for batch in DataLoader(NoFork(2), num_workers=1) for name in batch}
        assert names == {"ForkServerProcess"}
        wrapped = [
            Subset(NoFork(2), [0, 1]),
            ConcatDataset([Started(1), NoFork(1)]),
            Subset(StackDataset(NoFork(2)), [0]),
        ]
        for dataset in [NoFork(2), *wrapped]:
            with pytest.raises(ConfigError, match="forkserver"):
                iter(DataLoader(dataset, num_workers=1, multiprocessing_context="fork"))


class Whose(Range):
    """Which worker makes a sample; large enough for slots of shared memory."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        info = get_worker_info()
        assert info is not None
        return torch.full((4000,), index), info.id


def test_turns_are_kept_though_an_earlier_pass_has_the_slots() -> None:
    """Batch k is worker k mod n's in every pass, also behind one that was left in the middle with batches kept."""
    loader = DataLoader(Whose(24), 2, num_workers=2, persistent_workers=True)
    with within(60):
        list(loader)
        for _ in range(3):
            kept = [batch for batch, _ in zip(loader, range(3), strict=False)]
            assert [workers.tolist() for _, workers in loader] == [[k % 2] * 2 for k in range(12)]
            del kept
