"""`Mixture`: proportions, every sample of a source equally often, resume anywhere on any ranks."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from entries_support import closed, opened
from full_run import examples, full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_conformance import check_chain, check_elastic, check_end_of_pass, check_load_into_used, check_resume
from mixture_support import Drawing, Failing, Numbers

from penstock import DataLoader, Manifest, MDSFolder, Mixture, RankDataset, Subset
from penstock.errors import ConfigError, PartitionError, StateError

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)
WEIGHTS = st.sampled_from([1, 2, 3, 0.5, 0.1, 0.25, 7.5, 1.3])


def make(
    sizes: list[int], weights: list[Any], *, rank: int = 0, world: int = 1, kind: Any = Numbers, **options: Any
) -> Any:
    sources = [(kind(1000 * i, n), w) for i, (n, w) in enumerate(zip(sizes, weights, strict=True))]
    return Mixture(sources, rank=rank, world_size=world, **options)


def items(mixture: Any) -> list[Any]:
    return mixture.__getitems__(range(len(mixture)))


def source_of(item: int) -> int:
    return item // 1000


@given(st.data())
@settings(max_examples=examples(15, 60))
def test_every_prefix_has_the_proportions(data: Any) -> None:
    sizes = data.draw(SIZES)
    weights = data.draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    mixture = make(sizes, weights, stop=data.draw(st.integers(1, 300)), seed=data.draw(st.integers(0, 9)))
    shares = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    had = [0] * len(sizes)
    mixture.set_epoch(data.draw(st.integers(0, 3)))
    for count, item in enumerate(items(mixture), 1):
        had[source_of(item)] += 1
        assert all(abs(had[i] - count * share) < mixture.bound for i, share in enumerate(shares))
        assert list(mixture.counts(count).values()) == had
    assert all(abs(had[i] - len(mixture) * share) <= 1 for i, share in enumerate(shares))


@given(st.data())
@settings(max_examples=examples(15, 60))
def test_every_epoch_has_the_same_counts(data: Any) -> None:
    sizes = data.draw(SIZES)
    weights = data.draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    stop = data.draw(st.sampled_from([None, "first", "all", 30]))
    mixture = make(sizes, weights, stop=stop)
    patterns = []
    for epoch in range(4):
        mixture.set_epoch(epoch)
        patterns.append([source_of(item) for item in items(mixture)])
    assert len({tuple(sorted(pattern)) for pattern in patterns}) == 1


def test_every_epoch_has_another_order_of_sources() -> None:
    found = []
    for epoch, seed in ((0, 0), (1, 0), (0, 1)):
        mixture = make([100, 100], [1, 1], seed=seed)
        mixture.set_epoch(epoch)
        found.append(tuple(map(source_of, items(mixture))))
    assert len(set(found)) == 3


@given(st.data())
@settings(max_examples=examples(15, 60))
def test_stops_are_where_the_proportions_say(data: Any) -> None:
    """In "first" none comes twice, in "all" each comes. By the shares one more would, and one less would not do."""
    sizes = data.draw(SIZES)
    weights = data.draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    shares = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    first, everything = (
        make(sizes, weights, stop=stop, seed=data.draw(st.integers(0, 9))) for stop in ("first", "all")
    )
    assert len(set(items(first))) == len(first)
    assert any((len(first) + 1) * share > size for size, share in zip(sizes, shares, strict=True))
    assert len(set(items(everything))) == sum(sizes)
    assert any((len(everything) - 1) * share < size for size, share in zip(sizes, shares, strict=True))


def test_first_may_repeat_where_a_source_begins_anew() -> None:
    """Sources go on from epoch to epoch: 30 samples of it are had after three epochs of 20."""
    mixture = make([20, 30], [1, 1], stop="first")
    seen: Counter[int] = Counter()
    repeats = []
    for epoch in range(6):
        mixture.set_epoch(epoch)
        had = Counter(items(mixture))
        repeats.append(max(had.values()))
        seen += had
    assert repeats[0] == 1
    assert 2 in repeats
    assert {seen[1000 + k] for k in range(30)} == {4}


@full_only("many ranks for each", but=["[0.5, 0.5]-8", "[0.7, 0.2, 0.1]-8", "[0.9, 0.099, 0.001]-8"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.7, 0.2, 0.1], [0.9, 0.099, 0.001]], ids=str)
def test_ranks_have_every_source_by_its_weight(weights: list[float], ranks: int) -> None:
    counts = []
    for rank in range(ranks):
        mixture = Mixture(
            [(Numbers(10**6 * i, 1000), weight) for i, weight in enumerate(weights)],
            rank=rank,
            world_size=ranks,
            stop=2000 * ranks,
            tag=True,
            seed=5,
        )
        mine = Counter(source for _, source in items(mixture))
        counts.append([mine[i] for i in range(len(weights))])
        for i, weight in enumerate(weights):
            assert abs(mine[i] - 2000 * weight) < 4 * (2000 * weight * (1 - weight)) ** 0.5
    for i, weight in enumerate(weights):
        assert sum(count[i] for count in counts) == pytest.approx(2000 * ranks * weight, abs=1)


@given(st.data())
@settings(max_examples=examples(10, 40))
def test_samples_of_a_source_come_equally_often_over_epochs(data: Any) -> None:
    sizes = data.draw(SIZES)
    weights = data.draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    mixture = make(sizes, weights, stop=data.draw(st.sampled_from(["first", "all", 30])))
    seen: Counter[int] = Counter()
    for epoch in range(3):
        mixture.set_epoch(epoch)
        seen.update(items(mixture))
    for i, size in enumerate(sizes):
        counts = [seen[1000 * i + k] for k in range(size)]
        assert max(counts) - min(counts) <= 1
    had = {statistics.name: statistics.had for statistics in mixture.statistics(mixture.state_dict(len(mixture)))}
    assert list(had.values()) == [sum(seen[1000 * i + k] for k in range(size)) for i, size in enumerate(sizes)]


def test_stops() -> None:
    sizes = [10, 30]
    first = items(make(sizes, [1, 1], stop="first"))
    assert max(Counter(first).values()) == 1
    assert len(first) == 20
    everything = items(make(sizes, [1, 1]))
    assert len(everything) == 60
    assert len(set(everything)) == 40
    assert max(Counter(everything).values()) == 3
    assert len(items(make(sizes, [1, 1], stop=7))) == 7


def test_modes() -> None:
    sizes = [10, 40]
    counts = [
        Counter(map(source_of, items(make(sizes, weights, mode=mode, stop=stop))))
        for weights, mode, stop in [
            ([3, 1], "proportion", 100),
            ([2, 0.5], "repeat", None),
            ([7, 93], "choose", None),
        ]
    ]
    assert counts == [{0: 75, 1: 25}, {0: 20, 1: 20}, {0: 7, 1: 93}]
    repeated = Counter(items(make(sizes, [2, 0.5], mode="repeat")))
    assert [repeated[k] for k in range(10)] == [2] * 10
    assert max(repeated[1000 + k] for k in range(40)) == 1
    with pytest.raises(ConfigError, match="multiply each weight by its source's length"):
        make(sizes, [3, 1], mode="upsample")


def test_orders() -> None:
    sizes, weights = [9, 9], [1, 1]
    plain = make(sizes, weights, shuffle="none")
    assert [item for item in items(plain) if item < 1000] == list(range(9))
    shuffled = make(sizes, weights, seed=1)
    first = items(shuffled)
    shuffled.set_epoch(1)
    assert first != items(shuffled)
    assert [item % 1000 for item in first if item < 1000] != [item % 1000 for item in first if item >= 1000]
    assert first != items(make(sizes, weights, seed=2))
    assert first == items(make(sizes, weights, seed=1))
    block = items(make([40, 40], weights, shuffle="block", block_size=5, window=1))
    inside = [item for item in block if item < 1000]
    assert all(len({item // 5 for item in inside[k : k + 5]}) == 1 for k in range(0, 40, 5))


@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_take_turns(world: int, remainder: str) -> None:
    whole = items(make([11, 20, 5], [3, 2, 1], stop=50))
    ranks = [
        items(make([11, 20, 5], [3, 2, 1], rank=r, world=world, stop=50, remainder=remainder)) for r in range(world)
    ]
    together = [item for row in itertools.zip_longest(*ranks) for item in row if item is not None]
    short = len(whole) - len(whole) % world if remainder == "drop" else len(whole)
    assert together[:short] == whole[:short]
    assert together[short:] == whole[: len(together) - short]


def drain(loader: Any) -> list[Any]:
    return [[column.tolist() for column in batch] for batch in loader]


@full_only("workers for each", but=["{'num_workers': 3}"])
@pytest.mark.parametrize(
    "options", [{"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "executor": "thread"}], ids=str
)
def test_batches_do_not_depend_on_the_executor(options: dict[str, Any]) -> None:
    def loader(**more: Any) -> DataLoader:
        return DataLoader(make([11, 20, 5], [3, 2, 1], kind=Drawing, rank=1, world=2, stop=50), batch_size=4, **more)

    with loader() as plain, loader(**options) as other:
        for _ in range(2):
            assert drain(plain) == drain(other)


def test_resume_anywhere_and_on_other_ranks() -> None:
    def loader(rank: int = 0, world: int = 1, **more: Any) -> DataLoader:
        mixture = make([11, 20, 5], [3, 2, 1], kind=Drawing, rank=rank, world=world, stop=50, **more)
        return DataLoader(mixture, batch_size=4)

    plain = loader()
    states, batches = [json.loads(json.dumps(plain.state_dict()))], []
    for _ in range(2):
        for batch in plain:
            batches.append([column.tolist() for column in batch])
            states.append(json.loads(json.dumps(plain.state_dict())))
    assert len(json.dumps(states[3])) < 1000
    for k in (0, 1, 6, 12, 13, 14, 20):
        again = loader()
        again.load_state_dict(states[k])
        rest = drain(again)
        rest += drain(again) if len(rest) + k < len(batches) else []
        assert rest[: len(batches) - k] == batches[k:]
    ranks = [loader(rank, 3) for rank in range(3)]
    for again in ranks:
        again.load_state_dict(states[5])
    parts = [[pair for batch in drain(again) for pair in zip(*batch, strict=True)] for again in ranks]
    together = [pair for row in zip(*parts, strict=True) for pair in row]
    whole = [pair for batch in batches[5:13] for pair in zip(*batch, strict=True)]
    assert together[: len(whole)] == whole


def test_mini_epochs_go_through_the_epoch() -> None:
    whole = items(make([11, 20], [3, 2], stop=60))
    cut = make([11, 20], [3, 2], stop=60, mini_epochs=4)
    parts = []
    for number in range(4):
        cut.set_mini_epoch(number)
        parts += items(cut)
    assert parts == whole


def test_statistics_of_a_loader() -> None:
    mixture = make([10, 40], [1, 1], stop=20, names=["small", "large"])
    loader = DataLoader(mixture, batch_size=4)
    loader.set_epoch(2)
    for number, _ in enumerate(loader):
        if number == 2:
            break
    small, large = mixture.statistics(loader.state_dict())
    assert (small.name, small.samples, small.share, small.per_epoch) == ("small", 10, 0.5, 10)
    assert (small.had, small.passes, large.had) == (26, 2.6, 26)
    assert [statistics.had for statistics in mixture.statistics()] == [20, 20]
    assert loader.stats()["stages"].keys() >= {"small", "large"}
    with pytest.raises(StateError, match="not a state of this Mixture"):
        mixture.statistics({"epoch": 1, "consumed": 3})


def test_statistics_count_what_was_had_in_the_epoch_of_the_state() -> None:
    mixture = make([11, 20, 5], [3, 2, 1], stop=50)
    seen: Counter[int] = Counter()
    for epoch in range(3):
        mixture.set_epoch(epoch)
        whole = [source_of(item) for item in items(mixture)]
        for count in range(0, 51, 3):
            had = seen + Counter(whole[:count])
            assert [each.had for each in mixture.statistics(mixture.state_dict(count))] == [had[i] for i in range(3)]
        seen += Counter(whole)


def test_tags_and_sources() -> None:
    mixture = make([5, 5], [1, 1], tag=True)
    assert all(source_of(item) == number for item, number in items(mixture))
    assert [type(source) for source in mixture.sources] == [Numbers, Numbers]
    assert mixture.bound == 7
    assert make([10**6, 10**6], [1, 1]).bound == 15


def test_travels() -> None:
    mixture = make([11, 20], [3, 2], kind=Drawing, seed=4)
    mixture.set_epoch(2)
    again = pickle.loads(pickle.dumps(mixture))
    assert items(again) == items(mixture)
    assert again.fingerprint == mixture.fingerprint


def test_states_of_other_mixtures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make([11, 20], [3, 2]).state_dict(5)
    for other in (make([11, 21], [3, 2]), make([11, 20], [3, 3]), make([11, 20], [3, 2], stop="first")):
        with pytest.raises(StateError, match="fingerprint"):
            other.load_state_dict(state)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.datasets.mixed_rows.MIXTURE_ORDER", "of another version")
        other = make([11, 20], [3, 2])
    with pytest.raises(StateError, match="fingerprint"):
        other.load_state_dict(state)
    with pytest.raises(StateError, match="seed"):
        make([11, 20], [3, 2], seed=1).load_state_dict(state)
    with pytest.raises(StateError):
        make([11, 20], [3, 2]).load_state_dict(closed(opened(state) | {"samples": 4}), allow_growth=True)


def test_a_state_of_the_first_order_of_mixtures_is_refused() -> None:
    mixture = make([60, 30], [2, 1])
    with pytest.raises(StateError, match=r"version 1 of orders, .* reads version 2\. Resume with the older Penstock"):
        mixture.load_state_dict(closed({**opened(mixture.state_dict()), "order_version": 1}))


def test_errors_name_the_source() -> None:
    mixture = Mixture([(Numbers(0, 5), 1), (Failing(0, 5), 1)], rank=0, world_size=1, names=["good", "bad"])
    with pytest.raises(RuntimeError) as caught:
        items(mixture)
    assert any("of bad" in note for note in caught.value.__notes__)


def test_an_error_of_items_that_are_loaded_together_names_their_source() -> None:
    class Together(Numbers):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            raise ValueError("boom")

    mixture = Mixture([(Numbers(0, 4), 1), (Together(0, 4), 1)], names=["good", "bad"], rank=0, world_size=1)
    with pytest.raises(ValueError, match="boom") as caught:
        mixture.__getitems__(list(range(8)))
    assert caught.value.__notes__ == ["while loading 4 rows of bad"]


def test_items_that_are_loaded_together_are_one_for_each_row() -> None:
    class Short(Numbers):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            return [self[row] for row in rows[1:]]

    mixture = Mixture([(Numbers(0, 4), 1), (Short(0, 4), 1)], names=["good", "bad"], rank=0, world_size=1)
    with pytest.raises(ConfigError, match="of Short returned 3 items for 4 rows: return one for each") as caught:
        mixture.__getitems__(list(range(8)))
    assert caught.value.__notes__ == ["while loading 4 rows of bad"]


def test_sources_of_ours(write_manifest: Any) -> None:
    manifest = Manifest.open(write_manifest(30), progress=False)
    whole = RankDataset(manifest, rank=0, world_size=1, shuffle="none")
    mixture = Mixture([(whole, 1), (Numbers(0, 10), 1)], rank=0, world_size=1)
    assert len([item for item in items(mixture) if isinstance(item, tuple)]) == 30
    assert MDSFolder.pure
    with pytest.raises(PartitionError, match="one rank's share of a RankDataset"):
        Mixture([(RankDataset(manifest, rank=0, world_size=2), 1)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "pairs"),
        (([Numbers(0, 3)],), "pairs"),
        (([(Numbers(0, 3), 0)],), "positive number, got 0"),
        (([(Numbers(0, 3), float("nan"))],), "positive number, got nan"),
        (([(Numbers(0, 3), "x")],), "positive number, got 'x'"),
        (([(Numbers(0, 0), 1)],), "source 0 is empty"),
        (([(iter([1]), 1)],), "with __len__ and __getitem__"),
        (([(Numbers(0, 3), 1)], {"mode": "mix"}), "unknown mode 'mix'"),
        (([(Numbers(0, 3), 1)], {"stop": "last"}), "unknown stop 'last'"),
        (([(Numbers(0, 3), 1)], {"stop": 0}), "positive number of samples"),
        (([(Numbers(0, 3), 1)], {"stop": True}), "positive number of samples"),
        (([(Numbers(0, 3), 1)], {"stop": 2.5}), "positive number of samples"),
        (([(Numbers(0, 3), 1)], {"mode": "repeat", "stop": 5}), "with mode='repeat' the weights define"),
        (([(Numbers(0, 3), 1.5)], {"mode": "choose"}), "numbers of samples"),
        (([(Numbers(0, 3), 0.1)], {"mode": "repeat"}), "no samples in an epoch"),
        (([(Numbers(0, 3), 1)], {"names": ["a", "b"]}), "different names"),
        (([(Numbers(0, 3), 1)], {"shuffle": "some"}), "unknown shuffle 'some'"),
    ],
)
def test_arguments_that_make_no_sense(arguments: Any, message: str) -> None:
    sources, *options = arguments
    with pytest.raises(ConfigError, match=message):
        Mixture(sources, **(options[0] if options else {}))


def _loader(rank: int = 0, world: int = 1, **options: Any) -> DataLoader:
    """Every sample of three sources once an epoch."""
    mixture = make([11, 20, 5], [1, 1, 1], rank=rank, world=world, mode="repeat", seed=3)
    return DataLoader(mixture, batch_size=4, **options)


def _rows(batch: Any) -> list[int]:
    return [item % 1000 + (0, 11, 31)[item // 1000] for item in batch.tolist()]


@full_only("a start of workers for each check", but=["{}"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=str)
def test_conformance(options: dict[str, Any]) -> None:
    """What every loader with a place promises."""
    opened: list[DataLoader] = []

    def fresh() -> DataLoader:
        opened.append(_loader(**options))
        return opened[-1]

    positions = None if not options else (0, 3, 9, 14)
    check_resume(fresh, passes=2, positions=positions)
    check_end_of_pass(fresh)
    check_load_into_used(fresh)
    check_chain(fresh, [1, 4, 6, 2])
    for loader in opened:
        loader.close()


@pytest.mark.parametrize("stages", [[(1, 0)], [(2, 2), (3, 1), (1, 0)], [(4, 1), (1, 2), (2, 0)]], ids=str)
def test_every_sample_once_over_changing_ranks(stages: list[tuple[int, int]]) -> None:
    check_elastic(_loader, _rows, 36, stages)


def test_pairs_come_in_a_list() -> None:
    """An iterator is refused in words: who decides between map-style and iterable-style would leave it at its end."""
    with pytest.raises(ConfigError, match=r"takes a list of pairs \(dataset, weight\), got a zip"):
        Mixture(zip([Numbers(0, 3), Numbers(9, 3)], [1, 2], strict=True))  # type: ignore[arg-type]


def test_subclasses_have_constructors_of_their_own() -> None:
    class Twice(Mixture):
        def __init__(self, size: int, *, seed: int) -> None:
            super().__init__([(Numbers(0, size), 1), (Numbers(1000, size), 1)], seed=seed, rank=0, world_size=1)

    mixture = Twice(4, seed=3)
    assert items(mixture) == items(make([4, 4], [1, 1], seed=3))
    assert items(pickle.loads(pickle.dumps(make([4, 4], [1, 1], seed=3)))) == items(mixture)


@pytest.mark.parametrize("options", [{"stop": 2**62 + 1}, {"stop": 2**70}, {"mode": "choose"}], ids=str)
def test_epochs_without_end_are_refused(options: dict[str, Any]) -> None:
    weights = [2**70, 1] if "mode" in options else [1, 1]
    with pytest.raises(ConfigError, match=r"samples, which is more than 2\*\*62"):
        make([3, 3], weights, **options)


@pytest.mark.parametrize("epoch", [0, 1, 2**61, 2**62 - 1])
def test_epochs_of_any_number(epoch: int) -> None:
    """Sources go on where they stopped, also where what they had does not fit 64 bits."""
    mixture = make([7, 11], [5, 3], stop=16, shuffle="none")
    mixture.set_epoch(epoch)
    for start, size, share in ((0, 7, 10), (1000, 11, 6)):
        mine = [item - start for item in items(mixture) if item // 1000 == start // 1000]
        assert mine == [(epoch * share + had) % size for had in range(share)]
    with pytest.raises(ConfigError, match=r"epoch must be below 2\*\*62"):
        mixture.set_epoch(2**62)


# Weights that change.


def _staged(rank: int = 0, world: int = 1, **options: Any) -> Mixture:
    sources = [Numbers(0, 5000), Numbers(10_000, 4000), Numbers(20_000, 300)]
    given = {"stop": 20_000, "names": ["web", "books", "code"], "seed": 5, **options}
    return Mixture(list(zip(sources, (2, 1, 1), strict=True)), rank=rank, world_size=world, **given)


def _sources(mixture: Mixture, begin: int = 0, end: int | None = None) -> list[int]:
    return [item // 10_000 for item in mixture.__getitems__(range(begin, len(mixture) if end is None else end))]


def test_a_schedule_counts_samples_of_the_job() -> None:
    schedule = [(9_000, [1, 1, 0]), (30_000, {"code": 1})]
    mixture = _staged(schedule=schedule)
    first = Counter(_sources(mixture, 0, 9_000))
    assert first == {0: 4500, 1: 2250, 2: 2250}
    assert Counter(_sources(mixture, 9_000)) == {0: 5500, 1: 5500}
    assert _sources(mixture, 0, 4096) == _sources(_staged(), 0, 4096)
    mixture.set_epoch(1)
    assert set(_sources(mixture, 10_000)) == {2}
    had = {found.name: (found.had, found.per_epoch) for found in mixture.statistics()}
    assert had == {"web": (10_000, 5000), "books": (7_750, 5000), "code": (2250, 10_000)}
    state = mixture.state_dict(12_000)
    assert [found.share for found in mixture.statistics(state)] == [0, 0, 1]


def test_a_schedule_from_the_beginning_needs_no_weights() -> None:
    sources = [Numbers(0, 50), Numbers(10_000, 50)]
    mixture = Mixture(sources, schedule=[(0, [3, 1]), (40, [0, 1])], stop=80, rank=0, world_size=1)
    assert Counter(_sources(mixture)) == {0: 30, 1: 50}


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "executor": "thread"}], ids=str)
def test_weights_that_change_while_a_loader_runs(options: dict[str, Any]) -> None:
    """What comes before stays as it is, and every executor and resume sees what comes after."""
    batch_size = 16
    mixture = _staged()
    plain_run = [batch.tolist() for batch in DataLoader(_staged(), batch_size=batch_size)]
    loader = DataLoader(mixture, batch_size=batch_size, **options)
    got, state, begin = [], None, 0
    for number, batch in enumerate(loader):
        got.append(batch.tolist())
        if number == 10:
            begin = mixture.set_weights([0, 0, 1], at=5_000)
        if number == 600:
            state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    assert begin == 8192
    had = [item for batch in got for item in batch]
    assert had[:begin] == [item for batch in plain_run for item in batch][:begin]
    assert {item // 10_000 for item in had[begin:]} == {2}
    again = DataLoader(_staged(), batch_size=batch_size, **options)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == got[601:]
    assert {item // 10_000 for batch in again for item in batch.tolist()} == {2}, "and the next epoch"
    again.close()


def test_a_change_at_a_position_that_is_planned_is_an_error() -> None:
    mixture = _staged()
    iterator = iter(DataLoader(mixture, batch_size=16))
    for _ in range(300):
        next(iterator)
    with pytest.raises(ConfigError, match=r"first possible position is 8192"):
        mixture.set_weights([1, 1, 1], at=4_000)
    assert mixture.set_weights([1, 1, 1], at=8_000) == 8192
    assert len(json.dumps(mixture.state_dict())) < 600


def test_a_source_may_be_added() -> None:
    old = Mixture([(Numbers(0, 500), 2), (Numbers(10_000, 500), 1)], stop=20_000, rank=0, world_size=1)
    state = old.state_dict(4096)
    sources = [(Numbers(0, 500), 2), (Numbers(10_000, 500), 1), (Numbers(20_000, 500), 0)]
    new = Mixture(sources, stop=20_000, rank=0, world_size=1)
    new.load_state_dict(state)
    assert new.set_weights([1, 1, 2], at=4000) == 4096
    assert Counter(_sources(new)) == {0: 3976, 1: 3976, 2: 7952}
    with pytest.raises(StateError, match="weights for 3 sources"):
        old.load_state_dict(new.state_dict(10))
    assert new.fingerprint == old.fingerprint


def test_every_document_once_through_filters_of_filters_mixed() -> None:
    web, books = Subset(Numbers(0, 40), range(0, 40, 2)), Numbers(1000, 30)
    mixed = Mixture([(web, 1), (books, 1)], mode="repeat", rank=0, world_size=1, seed=2)
    mask = [number % 3 > 0 for number in range(50)]
    kept = Subset(mixed, mask)
    assert isinstance(kept, Mixture)
    rows = [*range(0, 40, 2), *range(1000, 1030)]
    assert sorted(items(kept)) == [row for row, keep in zip(rows, mask, strict=True) if keep]
    again = Subset(mixed, [49, 0, 1])
    assert sorted(items(again)) == [0, 2, 1029]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": [(5, [1, 1])]}, "each of the 3 sources"),
        ({"schedule": [(5, [1, 1, 1]), (5, [1, 1, 2])]}, "ascend"),
        ({"schedule": [(5, {"other": 1})]}, "no source 'other'"),
        ({"schedule": [(5, [0, 0, 0])]}, "not all 0"),
        ({"schedule": [(5, [1, 1, 1])], "stop": None}, "and stop= as the number"),
        ({"schedule": [(5, [1, 1, 1])], "mode": "choose", "stop": None}, "mode='proportion'"),
        ({"schedule": [(0, [1, 1, 1])]}, "without weights"),
        ({"schedule": [5]}, "pairs"),
    ],
)
def test_schedules_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _staged(**options)


def test_counts_cannot_change() -> None:
    with pytest.raises(ConfigError, match="counts of samples"):
        make([11, 20], [1, 1], mode="repeat").set_weights([1, 2], at=0)


def test_records_of_sources_with_an_own_order(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("".join(f"{name}{i}.jpg {i}\n" for i in range(12)))
    sources = [RankDataset(tmp_path / name, rank=0, world_size=1, seed=3) for name in "ab"]
    mixture = Mixture([(source, 1) for source in sources], rank=0, world_size=1)
    assert mixture.records(range(len(mixture))) == list(mixture)
