"""States know whose they are: the fingerprint of the data where there is one, and a place that exists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from entries_support import closed, opened

from penstock import DataLoader
from penstock.errors import StateError
from penstock.manifest import Manifest
from penstock.samplers import (
    BatchSampler,
    DistributedSampler,
    EpochSampler,
    GroupedBatchSampler,
    InfiniteSampler,
    IterationBasedBatchSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    aspect_ratio_groups,
)
from penstock.samplers.identity import fingerprint_of

MAKERS: dict[str, Any] = {
    "distributed": lambda data: DistributedSampler(data, 1, 0),
    "random": lambda data: RandomSampler(data),
    "random-global": lambda data: RandomSampler(data, shuffle="global"),
    "sequential": lambda data: SequentialSampler(data),
    "infinite": lambda data: InfiniteSampler(data, rank=0, world_size=1),
    "batch": lambda data: BatchSampler(SequentialSampler(data), 2, False),
    "grouped": lambda data: GroupedBatchSampler(DistributedSampler(data, 1, 0), [0, 1, 0], 2),
    "iterations": lambda data: IterationBasedBatchSampler(BatchSampler(SequentialSampler(data), 2, False), 5),
}


def manifest(folder: Path, name: str) -> Manifest:
    path = folder / f"{name}.txt"
    path.write_text("".join(f"{name}{i}.jpg {i}\n" for i in range(3)))
    return Manifest.open(path)


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_another_manifest_is_refused(tmp_path: Path, name: str) -> None:
    one, other = manifest(tmp_path, "one"), manifest(tmp_path, "other")
    state = MAKERS[name](one).state_dict()
    MAKERS[name](one).load_state_dict(state)
    with pytest.raises(StateError, match=f"fingerprint is '{one.fingerprint}' in the state and '{other.fingerprint}'"):
        MAKERS[name](other).load_state_dict(state)
    with pytest.raises(StateError, match="fingerprint is missing"):
        MAKERS[name](one).load_state_dict(MAKERS[name](range(3)).state_dict())
    assert "fingerprint" not in str(MAKERS[name](range(3)).state_dict())


def test_where_a_fingerprint_is_found() -> None:
    records = SimpleNamespace(fingerprint="f")
    owners = [records, SimpleNamespace(manifest=records), SimpleNamespace(source=records)]
    owners.append(SimpleNamespace(source=SimpleNamespace(manifest=records)))
    assert [fingerprint_of(owner) for owner in owners] == ["f"] * 4
    for nobody in (None, range(3), SimpleNamespace(source="a/path", manifest=None), SimpleNamespace(fingerprint=len)):
        assert fingerprint_of(nobody) is None


@pytest.mark.parametrize(
    ("sampler", "end"),
    [
        (DistributedSampler(range(10), 4, 0), 10),
        (RandomSampler(range(10)), 10),
        (RandomSampler(range(10), num_samples=25, shuffle="global"), 25),
        (SequentialSampler(range(10)), 10),
        (WeightedRandomSampler([1.0, 2.0], 10, seed=1), 10),
        (GroupedBatchSampler(DistributedSampler(range(10), 4, 0), [0, 1] * 5, 2), 6),
    ],
    ids=["distributed", "random", "random-25", "sequential", "weighted", "grouped"],
)
def test_a_place_beyond_the_end_is_refused(sampler: Any, end: int) -> None:
    state = sampler.state_dict()
    sampler.load_state_dict(closed({**opened(state), "consumed": end}))
    assert list(sampler) == []
    with pytest.raises(StateError, match=f"it has consumed {end + 1} of {end}"):
        sampler.load_state_dict(closed({**opened(state), "consumed": end + 1}))


def test_the_end_of_a_padded_epoch_is_no_place_beyond_it() -> None:
    sampler = GroupedBatchSampler(DistributedSampler(range(10), 4, 0), [0, 1] * 5, 2)
    assert len(list(sampler)) == 2
    assert opened(sampler.state_dict())["consumed"] == 6
    sampler.load_state_dict(sampler.state_dict())


def test_an_iteration_beyond_the_last_is_refused() -> None:
    sampler = IterationBasedBatchSampler(BatchSampler(range(5), 2, False), 5)
    with pytest.raises(StateError, match="it has consumed 6 of 5"):
        sampler.load_state_dict(closed({**opened(sampler.state_dict()), "consumed": 6}))


def test_sizes_of_another_manifest_are_refused(tmp_path: Path) -> None:
    from penstock.images.sizes import Sizes, write_sizes

    one, other = manifest(tmp_path, "one"), manifest(tmp_path, "other")
    path = write_sizes(one, np.array([1, 2, 9], np.int32), np.array([2, 1, 2], np.int32))
    for sizes in (path, Sizes.open(path, one)):
        assert GroupedBatchSampler(DistributedSampler(one, 1, 0), sizes, 2).group_ids.tolist() == [1, 0, 0]
        with pytest.raises(StateError, match="belong to another manifest"):
            GroupedBatchSampler(DistributedSampler(other, 1, 0), sizes, 2)
        with pytest.raises(StateError, match="belong to another manifest"):
            aspect_ratio_groups(other, sizes=sizes)
        assert aspect_ratio_groups(one, sizes=sizes).tolist() == [1, 0, 0]


def test_a_sampler_without_its_two_methods_cannot_be_made() -> None:
    class Half(EpochSampler):
        def _check(self, state: Any) -> Any:
            return state

    with pytest.raises(TypeError, match="abstract method"):
        Half()  # type: ignore[abstract]


CHANGES: dict[str, tuple[Callable[[list[int]], Any], Callable[[Any, list[int]], object]]] = {
    "seed": (
        lambda data: RandomSampler(data, shuffle="global", seed=1),
        lambda sampler, data: vars(sampler).update(seed=5),
    ),
    "replacement": (
        lambda data: RandomSampler(data, shuffle="global", seed=1),
        lambda sampler, data: vars(sampler).update(replacement=True),
    ),
    "more data": (lambda data: RandomSampler(data, shuffle="global", seed=1), lambda sampler, data: data.append(0)),
    "less data": (lambda data: SequentialSampler(data), lambda sampler, data: data.pop()),
    "torch's order": (lambda data: RandomSampler(data), lambda sampler, data: data.append(0)),
    "of a rank": (
        lambda data: DistributedSampler(data, 1, 0, shuffle="global", seed=1),
        lambda sampler, data: vars(sampler).update(seed=5),
    ),
}
"""A sampler over a list, and what a program changes in mid-epoch."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_names_the_order_that_was_read(name: str) -> None:
    """Also the first state of an epoch, which is asked for after the change."""
    make, change = CHANGES[name]
    data = list(range(10))
    sampler = make(data)
    loader: DataLoader[Any] = DataLoader(range(10), 3, sampler=sampler)
    iterator = iter(loader)
    had = next(iterator).tolist()
    change(sampler, data)
    state = loader.state_dict()
    again: DataLoader[Any] = DataLoader(range(10), 3, sampler=make(list(range(10))))
    again.load_state_dict(state)
    assert sorted(had + [index for batch in again for index in batch.tolist()]) == list(range(10))
