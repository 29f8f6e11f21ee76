"""Each sample that draws from a global generator finds it seeded from its key, though most are not seeded at all."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from loader_support import plain
from torch.utils.data import Dataset

import penstock as ps
from penstock import DataLoader, generator
from penstock.hashing import sample_keys
from penstock.loader.collate import Collate
from penstock.loader.make import Fetch
from penstock.loader.messages import BatchMetrics, BatchRequest

N, BATCH, SEED = 240, 8, 11

DRAWS: dict[str, Callable[[], Any]] = {
    "python": lambda: random.getrandbits(50),
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.randint(1 << 50),
    "normal": lambda: float(np.random.normal()),
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
    "randn": lambda: torch.randn((), dtype=torch.float64).item(),
}


class Drawing(Dataset[Any]):
    """Draws in certain ways from the sample ``begin`` on, in one sample of ``every``."""

    def __init__(self, ways: list[str], begin: int = 0, every: int = 1) -> None:
        self.ways, self.begin, self.every = ways, begin, every
        self.asked: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        draws = index >= self.begin and index % self.every == 0
        return [index, *(DRAWS[way]() if draws else 0 for way in self.ways)]


def seeded(key: int) -> None:
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def truth(data: Drawing) -> list[Any]:
    """Make the batches with every generator seeded for every sample."""
    samples = []
    for index, key in enumerate(sample_keys(SEED, 0, np.arange(N)).tolist()):
        seeded(key)
        samples.append(data[index])
    data.asked.clear()
    return [samples[begin : begin + BATCH] for begin in range(0, N, BATCH)]


def states() -> list[int]:
    """Of the three generators, as short numbers."""
    numpy: Any = np.random.get_state(legacy=False)
    words = numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]
    return [hash(random.getstate()), hash(words), hash(torch.get_rng_state().numpy().tobytes())]


WAYS = [[], ["python"], ["gauss"], ["numpy"], ["normal"], ["torch"], ["randn"], list(DRAWS)]


@full_only(
    "workers for each",
    but=["inline", "-0-97-process", "normal-0-97-process", "numpy-41-7-process", "torch-41-7-process"],
)
@pytest.mark.parametrize("how", [{}, {"num_workers": 2}], ids=["inline", "process"])
@pytest.mark.parametrize(("begin", "every"), [(0, 1), (100, 1), (0, 97), (41, 7)])
@pytest.mark.parametrize("ways", WAYS, ids="-".join)
def test_who_draws_finds_a_generator_of_its_own(ways: list[str], begin: int, every: int, how: dict[str, Any]) -> None:
    if how and (begin, every) not in [(0, 97), (41, 7)]:
        pytest.skip("in processes, those that draw late")
    data = Drawing(ways, begin, every)
    expected = truth(data)
    seeded(3)
    with DataLoader(data, BATCH, seed=SEED, collate_fn=list, **how) as loader:
        iterator, before = iter(loader), states()
        assert list(iterator) == expected
        assert loader.stats()["samples"] == N, "a batch that was made twice counts once"
    assert states() == before, "they are the trainer's"


@pytest.mark.parametrize("advance", [[], ["gauss"], ["normal"], ["randn"], list(DRAWS)], ids="-".join)
def test_the_trainers_generators_stay_where_they_are(advance: list[str]) -> None:
    """Normal numbers that it drew in advance stay its own, too."""
    data = Drawing(["gauss", "normal", "randn"], begin=50)
    expected = truth(data)
    seeded(4)
    for way in advance:
        DRAWS[way]()
    iterator = iter(DataLoader(data, BATCH, seed=SEED, collate_fn=list))
    found, before = [], states()
    for batch in iterator:
        assert states() == before
        found.append(batch)
        for way in advance:
            DRAWS[way]()
        before = states()
    assert found == expected


@pytest.mark.parametrize("count", [1, 623, 624, 1248])
def test_a_trainer_that_draws_all_words_of_torchs_generator_comes_to_others(count: int) -> None:
    torch.manual_seed(5)
    expected = [torch.rand(count) for _ in range(4)]
    batches = iter(DataLoader(Drawing(["torch"], begin=3), BATCH, seed=SEED))
    torch.manual_seed(5)
    for numbers in expected:
        next(batches)
        assert torch.equal(torch.rand(count), numbers)


def test_a_normal_number_that_a_trainers_state_brings_back_is_its_own() -> None:
    batches = iter(DataLoader(Drawing(["torch"]), BATCH, seed=SEED))
    next(batches)
    torch.manual_seed(1)
    torch.randn(1)
    state = torch.get_rng_state()
    expected = torch.randn(1)
    next(batches)
    torch.set_rng_state(state)
    next(batches)
    assert torch.equal(torch.randn(1), expected)


def test_a_sample_is_made_once_if_nobody_draws_and_twice_at_most() -> None:
    data = Drawing(["numpy"], begin=N)
    assert len(list(DataLoader(data, BATCH, seed=SEED, collate_fn=list))) == N // BATCH
    assert data.asked == list(range(N))
    for begin, twice in ((0, []), (100, [96, 97, 98, 99, 100, 101, 102, 103])):
        data = Drawing(["python", "numpy", "torch"], begin=begin)
        for _ in DataLoader(data, BATCH, seed=SEED, collate_fn=list):
            pass
        assert sorted(data.asked) == sorted([*range(N), *twice])


class Counting(Drawing):
    def state_dict(self) -> dict[str, Any]:
        return {"asked": len(self.asked)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_an_object_with_a_state_is_never_asked_twice() -> None:
    data = Counting(list(DRAWS), begin=100)
    expected = truth(data)
    assert list(DataLoader(data, BATCH, seed=SEED, collate_fn=list)) == expected
    assert data.asked == list(range(N))


def noisy(samples: list[Any]) -> Any:
    """A collate function that draws in late batches."""
    return samples, [draw() for draw in DRAWS.values()] if samples[0][0] >= 100 else None


def test_a_collate_function_draws_from_the_batchs_own_generators() -> None:
    def batches(**how: Any) -> list[Any]:
        with DataLoader(Drawing(["torch"], begin=60), BATCH, seed=SEED, collate_fn=noisy, **how) as loader:
            return list(loader)

    found = batches()
    assert len({repr(drawn) for _, drawn in found}) == 1 + sum(samples[0][0] >= 100 for samples, _ in found)
    assert batches(num_workers=3) == found
    with DataLoader(Drawing(["torch"], begin=60), BATCH, seed=SEED, collate_fn=noisy) as loader:
        iterator = iter(loader)
        had = [next(iterator) for _ in range(14)]
        state = loader.state_dict()
    with DataLoader(Drawing(["torch"], begin=60), BATCH, seed=SEED, collate_fn=noisy) as loader:
        loader.load_state_dict(state)
        assert had + list(loader) == found


class Failing(Drawing):
    """Fails after it has drawn an odd number, in late samples."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        if item[1] % 2:
            raise ValueError(f"{item[1]} is odd")
        return item


def test_errors_of_samples_that_draw_late_depend_on_their_own_draws() -> None:
    def outcome(**how: Any) -> Any:
        with DataLoader(Failing(["numpy"], begin=120), BATCH, seed=SEED, collate_fn=plain, **how) as loader:
            return list(loader), loader.stats()["errors"]

    data = Failing(["numpy"], begin=120)
    expected = []
    for index, key in enumerate(sample_keys(SEED, 0, np.arange(N)).tolist()):
        seeded(key)
        try:
            expected.append(data[index])
        except ValueError:
            continue
    batches, failures = outcome(on_error="skip")
    assert [item for batch in batches for item in batch] == expected
    assert outcome(on_error="skip", num_workers=2) == (batches, failures)


def test_an_error_of_a_late_sample_is_raised_once_it_was_seeded() -> None:
    loader = DataLoader(Failing(["numpy"], begin=120), 1, seed=SEED, collate_fn=plain)
    iterator, failed = iter(loader), []
    for index in range(N):
        try:
            next(iterator)
        except ValueError:
            failed.append(index)
    odd = []
    for index, key in enumerate(sample_keys(SEED, 0, np.arange(N)).tolist()):
        seeded(key)
        if index >= 120 and np.random.randint(1 << 50) % 2:
            odd.append(index)
    assert failed == odd


def test_interrupts_leave_the_trainers_generators_where_they_were() -> None:
    class Stops(Drawing):
        def __getitem__(self, index: int) -> Any:
            item = super().__getitem__(index)
            if index == 100:
                raise KeyboardInterrupt
            return item

    seeded(5)
    iterator = iter(DataLoader(Stops(list(DRAWS), begin=100), BATCH, seed=SEED, collate_fn=list))
    before = states()
    with pytest.raises(KeyboardInterrupt):
        list(iterator)
    assert states() == before


def test_another_generator_behind_numpys_functions() -> None:
    """A program may set any bit generator, at any time."""
    twister, data = np.random.get_bit_generator(), Drawing(["normal"], begin=130)  # type: ignore[attr-defined]
    try:
        expected, found = [], []
        for batch in DataLoader(data, BATCH, seed=SEED, collate_fn=list):
            found.append(batch)
            if len(found) == 10:
                np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined]
        for index, key in enumerate(sample_keys(SEED, 0, np.arange(N)).tolist()):
            np.random.seed(key & 0xFFFFFFFF)
            expected.append(data[index])
        assert [item for batch in found for item in batch] == expected
    finally:
        np.random.set_bit_generator(twister)  # type: ignore[attr-defined]


def test_another_generator_that_a_program_shares_with_numpys_functions() -> None:
    twister, source = np.random.get_bit_generator(), np.random.PCG64(5)  # type: ignore[attr-defined]
    shared = np.random.Generator(source)

    class Shared(Drawing):
        def __getitem__(self, index: int) -> Any:
            return index, shared.random() if index >= 100 else 0

    try:
        np.random.set_bit_generator(source)  # type: ignore[attr-defined]
        np.random.normal()
        before = repr(np.random.get_state(legacy=False))
        found = [item for batch in DataLoader(Shared([]), BATCH, seed=SEED, collate_fn=list) for item in batch]
        assert np.random.get_bit_generator() is source  # type: ignore[attr-defined]
        assert repr(np.random.get_state(legacy=False)) == before
        for index, key in enumerate(sample_keys(SEED, 0, np.arange(N)).tolist()):
            np.random.seed(key & 0xFFFFFFFF)
            assert found[index] == (index, shared.random() if index >= 100 else 0)
    finally:
        np.random.set_bit_generator(twister)  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", DRAWS)
def test_a_single_draw_in_the_middle_of_the_first_batch(way: str) -> None:
    data = Drawing([way], begin=20, every=20)
    expected = [item for batch in truth(data) for item in batch]
    assert [item for batch in DataLoader(data, 32, seed=SEED, collate_fn=list) for item in batch] == expected


class Reads(Drawing):
    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng():
            return index, torch.initial_seed(), torch.rand(2).tolist()


def test_what_is_read_of_torchs_generator_is_that_of_the_batch() -> None:
    def batches(**how: Any) -> list[Any]:
        with DataLoader(Reads([]), BATCH, seed=SEED, collate_fn=list, **how) as loader:
            return list(loader)[4:]

    found = batches()
    assert batches(num_workers=2) == found
    assert len({seed for batch in found for _, seed, _ in batch}) == len(found)


def test_a_fetcher_that_has_made_batches_can_be_pickled() -> None:
    fetch = Fetch(Drawing(["python"], begin=5), Collate(), batched=True, seed_globals=True)
    request = BatchRequest([0, 1, 7], [5, 6, 7])
    made = [fetch(request, BatchMetrics()) for _ in range(2)]
    again = pickle.loads(pickle.dumps(fetch))
    assert repr(again(request, BatchMetrics())) == repr(made[0]) == repr(made[1])


def test_pythons_generator_behind_functions_of_a_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = random.getstate
    monkeypatch.setattr(random, "getstate", lambda: own())
    data = Drawing(["gauss"], begin=60)
    expected = truth(data)
    iterator = iter(DataLoader(data, BATCH, seed=SEED, collate_fn=list))
    before = states()
    assert list(iterator) == expected
    assert states() == before


class Share(torch.utils.data.Sampler[int]):
    """A user's: every second index."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_replicas = rank, 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 12, 2))

    def __len__(self) -> int:
        return 6


class Pure(Dataset[Any]):
    """Draws from the sample's own generator; forks in some samples, if it is told to."""

    pure = True

    def __init__(self, *, forks: bool = False) -> None:
        self.forks = forks

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        if self.forks and index % 4 == 1 and (pid := os.fork()) == 0:
            next(iter(DataLoader(Ends(), seed=9)))
        elif self.forks and index % 4 == 1:
            os.waitpid(pid, 0)
        return float(generator().random())


class Ends(Dataset[Any]):
    """Ends its process within the first sample."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        os._exit(0)


def drawn(loader: DataLoader[Any]) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("batches", [torch.utils.data.BatchSampler, ps.BatchSampler])
def test_keys_are_those_of_the_rank_that_is_read_now(batches: Any, replaced: bool) -> None:
    """Of another sampler that was assigned, or of another rank of the same one."""
    sampler = batches(Share(0), 3, False)
    loader: DataLoader[Any] = DataLoader(Pure(), batch_sampler=sampler, seed=1)
    first = drawn(loader)
    if replaced:
        sampler.sampler = Share(1)
    else:
        sampler.sampler.rank = 1
    loader.set_epoch(0)
    expected: DataLoader[Any] = DataLoader(Pure(), batch_sampler=batches(Share(1), 3, False), seed=1)
    assert drawn(loader) == drawn(expected) != first


@pytest.mark.parametrize("how", [{"num_workers": 1}, {"num_workers": 1, "threads_per_worker": 2}])
def test_a_fork_that_ends_within_a_sample_moves_no_key_of_its_parent(how: dict[str, int]) -> None:
    expected = drawn(DataLoader(Pure(), 4, seed=1))
    assert drawn(DataLoader(Pure(forks=True), 4, seed=1, **how)) == expected  # type: ignore[arg-type]
