"""`MPDataset`: a stream whose batches do not depend on the number of workers, under torch's loader and ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries_support import closed, opened
from full_run import full_only
from hypothesis import given
from hypothesis import strategies as st
from interpreter_support import METHODS
from loader_conformance import travelled
from loader_support import draw_load, plain
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader, Manifest, MPDataset
from penstock.errors import ConfigError, ManifestError, PartitionError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:Length of IterableDataset")

N = 47


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    path = tmp_path_factory.mktemp("rows") / "meta.txt"
    path.write_text("".join(f"{i}.jpg {i // 10}\n" for i in range(N)))
    return Manifest.open(path)


def of(loader: Any) -> list[list[int]]:
    return [batch[2].tolist() for batch in loader]


@full_only("every number for each", but=["{'drop_last': True}"])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": "none"}, {"group": 3}], ids=str)
def test_batches_are_the_same_for_every_number_of_workers(rows: Manifest, options: dict[str, Any]) -> None:
    expected = None
    for kind, workers, how in [
        (TorchDataLoader, 0, {}),
        (TorchDataLoader, 1, {}),
        (TorchDataLoader, 2, {"persistent_workers": True}),
        (TorchDataLoader, 5, {"persistent_workers": True}),
        (DataLoader, 0, {}),
        (DataLoader, 2, {}),
        (DataLoader, 3, {"executor": "thread"}),
    ]:
        dataset = MPDataset(rows, batch_size=4, rank=1, world_size=2, seed=3, **options)
        loader: Any = kind(dataset, batch_size=4, num_workers=workers, **how)
        seen = []
        for epoch in (0, 1, 5):
            dataset.set_epoch(epoch)
            assert len(loader) == len(dataset) // 4 + bool(len(dataset) % 4)
            seen.append(of(loader))
            assert sum(map(len, seen[-1])) == len(dataset)
        expected = expected or seen
        assert seen == expected, (kind, workers)
    assert expected is not None
    assert (expected[0] == expected[1]) == (options.get("shuffle") == "none")


def test_augmentation_is_the_same_too(rows: Manifest) -> None:
    found = []
    for kind, workers in ((TorchDataLoader, 0), (TorchDataLoader, 2), (DataLoader, 0), (DataLoader, 2)):
        dataset = MPDataset(rows, batch_size=4, seed=3, load=draw_load)
        found.append([plain(batch) for batch in kind(dataset, batch_size=4, num_workers=workers)])  # type: ignore[operator]
    assert all(batches == found[0] for batches in found)
    assert len({value for _, values in found[0] for value in values}) == N


@pytest.mark.parametrize("method", METHODS[1:])
def test_other_start_methods(rows: Manifest, method: str) -> None:
    dataset = MPDataset(rows, batch_size=4, rank=1, world_size=2, seed=3)
    loader = TorchDataLoader(dataset, 4, num_workers=1, persistent_workers=True, multiprocessing_context=method)
    for epoch in (0, 2):
        dataset.set_epoch(epoch)
        alone = MPDataset(rows, batch_size=4, rank=1, world_size=2, seed=3)
        alone.set_epoch(epoch)
        assert of(loader) == of(TorchDataLoader(alone, 4))


@given(
    n=st.integers(0, N),
    world=st.integers(1, 6),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
)
def test_who_gets_what(rows: Manifest, n: int, world: int, batch_size: int, drop_last: bool, remainder: str) -> None:
    found: Counter[int] = Counter()
    lengths = []
    for rank in range(world):
        dataset = MPDataset(
            rows[:n], batch_size=batch_size, drop_last=drop_last, rank=rank, world_size=world, remainder=remainder
        )
        items = list(dataset)
        assert len(dataset) == len(items), "len is exact"
        assert len(DataLoader(dataset, batch_size=batch_size)) == math.ceil(len(items) / batch_size)
        full = len(dataset.samples)
        assert len(items) == (full - full % batch_size if drop_last else full), "less than one batch a rank is lost"
        lengths.append(len(items))
        found.update(row for _, _, row in items)
    if remainder != "uneven":
        assert len(set(lengths)) == 1
    if not drop_last and remainder == "pad":
        assert set(found) == set(range(n))
        assert sum(found.values()) - n < world
    if not drop_last and remainder == "uneven":
        assert found == Counter(range(n))


def test_one_by_one_iteration_and_reiteration(rows: Manifest) -> None:
    dataset = MPDataset(rows, batch_size=4, shuffle="none")
    assert [row for _, _, row in dataset] == list(range(N))
    assert [row for _, _, row in dataset] == list(range(N))
    one, two = iter(dataset), iter(dataset)
    assert [next(one), next(two), next(one)] == [("0.jpg", 0, 0), ("0.jpg", 0, 0), ("1.jpg", 0, 1)]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_set_in_mid_pass_is_for_the_next_pass(rows: Manifest, workers: int) -> None:
    dataset = MPDataset(rows, batch_size=4, seed=1)
    whole = of(TorchDataLoader(dataset, 4))
    loader = TorchDataLoader(dataset, 4, num_workers=workers, persistent_workers=workers > 0)
    iterator = iter(loader)
    seen = [next(iterator)[2].tolist()]
    dataset.set_epoch(1)
    assert seen + of(iterator) == whole
    assert of(loader) != whole


class TestState:
    """Under other people's loaders: the user says how many batches there were."""

    def make(self, rows: Manifest, rank: int = 0, world: int = 2) -> MPDataset:
        return MPDataset(rows, batch_size=4, rank=rank, world_size=world, seed=1)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches_resume(self, rows: Manifest, workers: int) -> None:
        dataset = self.make(rows)
        dataset.set_epoch(3)
        whole = of(TorchDataLoader(dataset, 4))
        for batches in range(len(whole) + 1) if workers == 0 else [0, 3]:
            state = travelled(dataset.state_dict(batches=batches))
            other = self.make(rows)
            other.load_state_dict(state)
            assert travelled(other.state_dict(batches=0)) == state
            loader = TorchDataLoader(other, 4, num_workers=workers)
            other.set_epoch(3)
            assert len(loader) == len(whole) - batches
            assert of(loader) == whole[batches:]
            other.set_epoch(4)
            dataset.set_epoch(4)
            assert of(loader) == of(TorchDataLoader(dataset, 4))
            dataset.set_epoch(3)

    def test_batches_resume_on_other_ranks(self, rows: Manifest) -> None:
        first = [row for rank in (0, 1, 2) for row in [r for _, _, r in self.make(rows, rank, 3)][:8]]
        state = self.make(rows, 1, 3).state_dict(batches=2)
        rest = []
        for rank in (0, 1):
            other = self.make(rows, rank, 2)
            other.load_state_dict(state)
            rest += [row for _, _, row in other]
        assert set(first) | set(rest) == set(range(N))
        assert len(first) + len(rest) - N <= 1

    def test_batches_resume_under_our_loader_and_back(self, rows: Manifest) -> None:
        dataset = self.make(rows)
        whole = of(DataLoader(dataset, batch_size=4))
        dataset = self.make(rows)
        loader = DataLoader(dataset, batch_size=4, num_workers=2, executor="thread")
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        ours = closed(opened(loader.state_dict())["sampler"])
        assert opened(ours) == opened(self.make(rows).state_dict(batches=2))
        other = self.make(rows)
        other.load_state_dict(ours)
        assert of(TorchDataLoader(other, 4)) == whole[2:]
        again = DataLoader(self.make(rows), batch_size=4)
        again.dataset.load_state_dict(ours)  # type: ignore[attr-defined]
        assert of(again) == whole[2:]

    def test_what_this_object_yielded_itself(self, rows: Manifest) -> None:
        """torchdata's StatefulDataLoader without workers asks like this."""
        dataset = self.make(rows)
        whole = list(dataset)
        for count in (0, 1, 4, 7, len(whole)):
            fresh = self.make(rows)
            iterator = iter(fresh)
            for _ in range(count):
                next(iterator)
            other = self.make(rows)
            other.load_state_dict(travelled(fresh.state_dict()))
            assert list(other) == whole[count:]

    def test_each_worker_by_itself(self, rows: Manifest) -> None:
        """And with workers it asks each one, after any batch."""
        whole = of(TorchDataLoader(self.make(rows), 4, num_workers=2))
        loader = TorchDataLoader(Stateful(self.make(rows)), None, num_workers=2)
        states = {}
        seen = []
        for number, (worker, batch, state) in zip(range(3), loader, strict=False):
            assert worker == number % 2
            states[worker] = state
            seen.append(batch)
        assert seen == whole[:3]
        resumed = TorchDataLoader(Stateful(self.make(rows), states), None, num_workers=2)
        rest = [(worker, batch) for worker, batch, _ in resumed]
        assert {worker: [batch for w, batch in rest if w == worker] for worker in (0, 1)} == {
            0: whole[4::2],
            1: whole[3::2],
        }
        with pytest.raises(StateError, match="worker 0 of 2, and this is worker 0 of 1"):
            list(TorchDataLoader(Stateful(self.make(rows), states), None))

    def test_refusals(self, rows: Manifest) -> None:
        state = self.make(rows).state_dict(batches=2)
        with pytest.raises(StateError, match="seed is 1 in the state and 2 here"):
            MPDataset(rows, batch_size=4, rank=0, world_size=2, seed=2).load_state_dict(state)
        with pytest.raises(StateError, match="fingerprint"):
            MPDataset(rows[:46], batch_size=4, rank=0, world_size=2, seed=1).load_state_dict(state)


class Stateful(MPDataset):
    """Yields whole batches with the state of the worker after each, as StatefulDataLoader collects it."""

    def __init__(self, inner: MPDataset, states: dict[int, Any] | None = None) -> None:
        self.__dict__.update(inner.__dict__)
        self.states = states

    def __iter__(self) -> Any:
        from penstock import distributed

        worker = distributed.worker().id
        if self.states is not None:
            self.load_state_dict(self.states[worker])
        batch = []
        for _, _, row in super().__iter__():
            batch.append(row)
            if len(batch) == self.batch_size:
                yield worker, batch, self.state_dict()
                batch = []
        if batch:
            yield worker, batch, self.state_dict()


class TestBadInput:
    @pytest.mark.parametrize("batch_size", [0, -1, 2.5, "4", None, True])
    def test_batch_size(self, rows: Manifest, batch_size: Any) -> None:
        with pytest.raises(ConfigError, match="batch_size must be a positive integer"):
            MPDataset(rows, batch_size=batch_size)

    def test_ranks(self, rows: Manifest) -> None:
        with pytest.raises(PartitionError, match="rank 3 is outside the world of 3"):
            MPDataset(rows, batch_size=2, rank=3, world_size=3)

    def test_epoch(self, rows: Manifest) -> None:
        with pytest.raises(ConfigError, match="epoch must be 0 or more"):
            MPDataset(rows, batch_size=2).set_epoch(-1)

    def test_shuffle_in_the_loader(self, rows: Manifest) -> None:
        for kind in (DataLoader, TorchDataLoader):
            with pytest.raises(ValueError, match="expected unspecified shuffle option"):
                kind(MPDataset(rows, batch_size=2), batch_size=2, shuffle=True)

    def test_errors_cross_from_workers(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.txt"
        path.write_text("a.jpg 1\nb.jpg two\n")
        with pytest.raises(ManifestError, match=r"line 2"):
            list(TorchDataLoader(MPDataset(path, batch_size=1, shuffle="none"), 1, num_workers=1))


@full_only("a large file")
def test_memory_does_not_depend_on_the_file(write_manifest: Callable[..., Path]) -> None:
    import pickle

    sizes = [
        len(pickle.dumps(MPDataset(write_manifest(count, f"{count}.txt"), batch_size=4))) for count in (10, 10_000)
    ]
    assert sizes[1] - sizes[0] < 50
