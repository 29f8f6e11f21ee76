"""States of `RankDataset`: every count resumes, on as many ranks or others, and what does not fit is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from entries_support import closed, opened
from hypothesis import example, given
from hypothesis import strategies as st
from loader_conformance import travelled

from penstock import DataLoader, Manifest, RankDataset
from penstock.errors import StateError


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Sixty rows; slices of it are the smaller manifests."""
    path = tmp_path_factory.mktemp("rows") / "meta.txt"
    path.write_text("".join(f"class {i // 10}/img {i}.jpg {i // 10}\n" for i in range(60)))
    return Manifest.open(path)


def had(dataset: RankDataset) -> list[int]:
    return [row for _, _, row in dataset.__getitems__(range(len(dataset)))]


def make(rows: Manifest, rank: int = 0, world: int = 2, **options: Any) -> RankDataset:
    return RankDataset(rows, rank=rank, world_size=world, mini_epochs=3, seed=1, **options)


def test_every_count_resumes(rows: Manifest) -> None:
    dataset = make(rows[:57])
    dataset.set_epoch(2)
    dataset.set_mini_epoch(1)
    whole = had(dataset)
    for count in range(len(whole) + 1):
        other = make(rows[:57])
        other.load_state_dict(travelled(dataset.state_dict(count)))
        assert (other.epoch, other.mini_epoch) == (2, 1)
        assert had(other) == whole[count:]
        assert travelled(other.state_dict()) == dataset.state_dict(count)
        other.set_epoch(2)  # what was loaded keeps its position
        other.set_mini_epoch(1)
        assert had(other) == whole[count:]
        dataset_after = make(rows[:57])
        dataset_after.set_epoch(2)
        dataset_after.set_mini_epoch(2)
        other.next_mini_epoch()
        assert had(other) == had(dataset_after)
        other.set_mini_epoch(1)
        assert had(other) == whole


@pytest.mark.parametrize(("epochs", "keeps"), [((2,), True), ((2, 2), True), ((0, 2), False), ((2, 0, 2), False)])
def test_another_epoch_drops_the_position_of_a_loaded_state(
    rows: Manifest, epochs: tuple[int, ...], keeps: bool
) -> None:
    loader = DataLoader(make(rows, 0, 1), 5)
    loader.set_epoch(2)
    whole = [batch[2].tolist() for batch in loader]
    loader.set_epoch(2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    dataset = make(rows, 0, 1)
    other = DataLoader(dataset, 5)
    other.load_state_dict(travelled(state))
    for epoch in epochs:
        dataset.set_epoch(epoch)
    assert [batch[2].tolist() for batch in other] == whole[keeps:]
    other.load_state_dict(travelled(state))
    dataset.set_mini_epoch(2)
    dataset.set_epoch(2)
    assert [batch[2].tolist() for batch in other] == whole


def test_states_of_all_ranks_are_the_same(rows: Manifest) -> None:
    states = [make(rows[:57], rank, 4).state_dict(3) for rank in range(4)]
    assert all(state == states[0] for state in states)


@given(
    n=st.integers(0, 40),
    world=st.integers(1, 5),
    stops=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=4),
    mini_epochs=st.integers(1, 4),
    remainder=st.sampled_from(["pad", "uneven"]),
)
@example(n=5, world=2, stops=[(2, 2), (1, 0)], mini_epochs=2, remainder="pad")  # saved again before it went on
def test_elastic(
    rows: Manifest,
    n: int,
    world: int,
    stops: list[tuple[int, int]],
    mini_epochs: int,
    remainder: str,
) -> None:
    """Interrupted at any counts, with other ranks each time: every row once, and at most one round of padding."""
    found: Counter[int] = Counter()
    state: Any = None
    for number, (ranks, count) in enumerate([*stops, (world, -1)]):
        datasets = [
            RankDataset(rows[:n], rank=rank, world_size=ranks, mini_epochs=mini_epochs, seed=1, remainder=remainder)
            for rank in range(ranks)
        ]
        for dataset in datasets:
            if state is not None:
                dataset.load_state_dict(state)
        while datasets[0].epoch == 0:
            size = len(datasets[0])
            take = size if number == len(stops) else min(count, size)
            for dataset in datasets:
                found.update(had(dataset)[:take])
            state = travelled(datasets[0].state_dict(take))
            count -= take
            if number < len(stops) and count <= 0:
                break
            for dataset in datasets:
                dataset.next_mini_epoch()
            state = travelled(datasets[0].state_dict())
    assert sorted(found) == list(range(n))
    most = max([world, *(ranks for ranks, _ in stops)]) * mini_epochs
    assert sum(found.values()) - n <= (0 if remainder == "uneven" else most - 1)


def test_a_mini_epoch_that_all_have_had_is_over_on_other_ranks(rows: Manifest) -> None:
    dataset = make(rows)
    state = travelled(dataset.state_dict(len(dataset)))
    assert opened(state)["finished"] is True
    assert opened(dataset.state_dict(len(dataset) - 1))["finished"] is False
    others = [make(rows, number, 5) for number in range(5)]
    for other in others:
        other.load_state_dict(state)
        assert len(other) == 0
        other.next_mini_epoch()
    # Two mini-epochs have the other forty rows, not three.
    assert [len(other) for other in others] == [4] * 5


def test_refusals(rows: Manifest) -> None:
    state = make(rows).state_dict(5)
    for other, words in (
        (make(rows[:59]), ["fingerprint", "samples is 60 in the state and 59 here"]),
        (make(rows, shuffle="none"), ["shuffle is 'global'"]),
        (make(rows, group=3), ["shuffle is 'global'", "block_size is missing"]),
        (make(rows, remainder="drop"), ["remainder is 'pad'"]),
        (RankDataset(rows, seed=2, mini_epochs=3), ["seed is 1 in the state and 2 here"]),
        (RankDataset(rows, seed=1), ["mini_epochs is 3 in the state and 1 here"]),
    ):
        with pytest.raises(StateError) as caught:
            other.load_state_dict(state)
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "\n\n"])
def test_growth_of_an_append_only_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "growing.txt"
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(20)) + text)
    before = RankDataset(path, rank=0, world_size=2, seed=1)
    whole, state = had(before), before.state_dict(4)
    with path.open("a") as file:
        file.write("".join(f"{i}.jpg {i}\n" for i in range(20, 30)))
    for world in (2, 1):
        grown = RankDataset(path, rank=0, world_size=world, seed=1)
        with pytest.raises(StateError, match="samples is 20 in the state and 30 here"):
            grown.load_state_dict(state)
        grown.load_state_dict(state, allow_growth=True)
        rest = had(grown)
        assert rest == whole[4:] if world == 2 else len(rest) == 12
        assert max(rest) < 20, "the epoch ends on the rows it began with"
        loader = DataLoader(grown, batch_size=3)
        assert [row for batch in loader for row in batch[2].tolist()] == rest
        assert len(loader) == -(-30 // world // 3)
        assert len([row for batch in loader for row in batch[2].tolist()]) == 30 // world


def test_growth_is_no_excuse_for_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "changing.txt"
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(20)))
    state = RankDataset(path).state_dict(4)
    path.write_text("".join(f"{i}.png {i}\n" for i in range(30)))
    with pytest.raises(StateError, match="fingerprint"):
        RankDataset(path).load_state_dict(state, allow_growth=True)
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(10)))
    with pytest.raises(StateError, match="fingerprint"):
        RankDataset(path).load_state_dict(state, allow_growth=True)


@pytest.mark.parametrize("dealt", [[4, 0, 0], [0, 61, 0], [0, 0, 61], [0, 0], [0, 0, -1]])
def test_a_place_that_there_is_not_is_refused(rows: Manifest, dealt: list[int]) -> None:
    dataset = make(rows)
    with pytest.raises(StateError, match=r"is damaged.*dealt"):
        dataset.load_state_dict(closed({**opened(dataset.state_dict(3)), "dealt": dealt}))
    assert dataset.state_dict(3) == make(rows).state_dict(3)
