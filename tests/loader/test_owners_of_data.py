"""Each state goes back to its owner: a user's to the worker that it came from, a position to the loader that holds it.

A test marked ``xfail`` shows a fault of today. The change that removes the fault takes the mark away.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from entries_support import opened
from full_run import full_only
from loader_support import Range, ended
from owners_support import (
    Augmented,
    EpochOrdered,
    GlobalDraws,
    GlobalMap,
    GlobalStream,
    LaterState,
    LateState,
    NoisyIterators,
    Span,
    TorchDrawing,
    seed_noise,
    split_span,
)
from state_support import DrawingStream, IteratorStream, PlainStream, as_they_are, share
from torch.utils.data import IterableDataset

import penstock as ps
from penstock.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*has no state_dict")

N = 24
T = TypeVar("T")


def xfail(reason: str, *, raises: type[Exception] = AssertionError) -> pytest.MarkDecorator:
    """Return the mark of a fault of today; any other error than the one it shows is a failure."""
    return pytest.mark.xfail(strict=True, reason=reason, raises=raises)


@contextmanager
def running(loader: ps.DataLoader[Any]) -> Iterator[Any]:
    """An iterator, whose workers end here unless they are to persist."""
    iterator = iter(loader)
    if loader.persistent_workers:
        yield iterator
    else:
        with ended(iterator):
            yield iterator


def travelled(state: T) -> T:
    """Return a state as it comes back from a file."""
    copy: T = json.loads(json.dumps(state))
    return copy


def stopped(loader: ps.DataLoader[Any], batches: int | None) -> tuple[Any, list[Any]]:
    """Return a state and what comes after it.

    Args:
        loader: to be run.
        batches: had before the state is taken. None: the whole first epoch, and the rest is the second.
    """
    if batches is None:
        list(loader)
        state = travelled(loader.state_dict())
        return state, list(loader)
    with running(loader) as iterator:
        for _ in range(batches):
            next(iterator)
        state = travelled(loader.state_dict())
        return state, list(iterator)


def resumed(loader: ps.DataLoader[Any], state: Any) -> list[Any]:
    loader.load_state_dict(state)
    return list(loader)


# Users' states. The measure is the run that never stopped.


def spans() -> ps.DataLoader[Any]:
    return ps.DataLoader(Span(0, N), 3, num_workers=2, worker_init_fn=split_span, collate_fn=as_they_are)


@full_only("workers for each", but=["1"])
@pytest.mark.parametrize("batches", [0, 1, None])
def test_each_worker_goes_on_in_its_own_range(batches: int | None) -> None:
    state, rest = stopped(spans(), batches)
    found = resumed(spans(), state)
    assert sorted(itertools.chain.from_iterable(found)) == sorted(itertools.chain.from_iterable(rest))
    assert found == rest


def test_a_state_from_before_the_first_pass_leaves_each_worker_its_range() -> None:
    loader = spans()
    state = travelled(loader.state_dict())
    assert resumed(spans(), state) == list(loader)


def augmented(*, persistent: bool) -> ps.DataLoader[Any]:
    return ps.DataLoader(
        Augmented(N),
        2,
        num_workers=4,
        persistent_workers=persistent,
        worker_init_fn=seed_noise,
        collate_fn=as_they_are,
    )


@full_only("workers for each", but=["2-True", "None-False"])
@pytest.mark.parametrize(("batches", "persistent"), [(0, False), (2, False), (None, False), (0, True), (2, True)])
def test_workers_draw_their_own_augmentation_after_a_resume(batches: int | None, persistent: bool) -> None:
    state, rest = stopped(augmented(persistent=persistent), batches)
    found = resumed(augmented(persistent=persistent), state)
    drawn = [draw for batch in found for _, draw in batch]
    assert len(set(drawn)) == len(drawn)
    assert found == rest


def test_an_epoch_chosen_after_loading_is_that_of_new_workers() -> None:
    def run(epochs: list[int], state: Any = None) -> tuple[list[Any], Any]:
        dataset = EpochOrdered(N)
        loader = ps.DataLoader(dataset, 3, num_workers=2, collate_fn=as_they_are)
        if state is not None:
            loader.load_state_dict(state)
        passes = []
        for epoch in epochs:
            dataset.choose(epoch)
            passes.append(list(loader))
        return passes, travelled(loader.state_dict())

    (first, second), _ = run([0, 1])
    _, state = run([0])
    (again,), _ = run([1], state)
    assert again != first, "the order of epoch 0 is repeated"
    assert again == second


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "stops"), [(LateState, (0, 1, 3)), (LaterState, (2, 3))])
def test_a_state_may_begin_in_iter(kind: type[LateState], stops: tuple[int, ...], workers: int) -> None:
    def make() -> ps.DataLoader[Any]:
        return ps.DataLoader(kind(N), 3, num_workers=workers, collate_fn=as_they_are)

    seen = [item for batch in make() for item in batch]
    assert sorted(seen) == list(range(N))
    for batches in stops:
        state, rest = stopped(make(), batches)
        assert resumed(make(), state) == rest


def noisy() -> ps.DataLoader[Any]:
    return ps.DataLoader(NoisyIterators(N), 3, collate_fn=as_they_are)


def test_an_iterator_that_gave_nothing_yet_keeps_its_generator() -> None:
    torch.manual_seed(1)
    state, rest = stopped(noisy(), 0)
    torch.manual_seed(2)
    assert resumed(noisy(), state) == rest


@pytest.mark.parametrize("batches", [1, 4, 8])
def test_an_iterator_put_back_leaves_the_callers_generators(batches: int) -> None:
    torch.manual_seed(1)
    loader = noisy()
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state, drawn = travelled(loader.state_dict()), torch.get_rng_state()
    rest, following = list(iterator), list(loader)
    again = noisy()
    again.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert (list(again), list(again)) == (rest, following)


def test_an_iterator_that_is_over_is_not_made_again() -> None:
    torch.manual_seed(1)
    loader = noisy()
    list(loader)
    state, drawn = travelled(loader.state_dict()), torch.get_rng_state()
    following = list(loader)
    again = noisy()
    again.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert list(again) == following


class Noisy(Range):
    """Draws from a generator of its own, as `Augmented` does, but has no state."""

    noise = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return index, float(self.noise.random())


@pytest.mark.parametrize("epochs", [0, 1])
def test_with_a_seed_generators_of_workers_follow_from_it(epochs: int) -> None:
    """Whatever the global generators are. Made by ``worker_init_fn`` from the worker's seed, without a state."""

    def make() -> ps.DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": 1, "worker_init_fn": seed_noise, "collate_fn": as_they_are}
        return ps.DataLoader(Noisy(N), 3, shuffle=True, seed=3, **options)

    torch.manual_seed(1)
    loader = make()
    first = [list(loader) for _ in range(epochs)]
    state, following = travelled(loader.state_dict()), [list(loader), list(loader)]
    assert len({json.dumps(each) for each in [*first, *following]}) == epochs + 2
    torch.manual_seed(2)
    again = make()
    again.load_state_dict(state)
    assert [list(again), list(again)] == following


GLOBALS: dict[str, Callable[..., ps.DataLoader[Any]]] = {
    "map": lambda **how: ps.DataLoader(GlobalMap(N), 3, shuffle=True, collate_fn=as_they_are, **how),
    "stream": lambda **how: ps.DataLoader(GlobalStream(N), 3, collate_fn=as_they_are, **how),
    "large stream": lambda **how: ps.DataLoader(GlobalStream(N, 200_000), 3, collate_fn=as_they_are, **how),
}


@pytest.mark.parametrize("batches", ["before iter", 0, 2, 3, "all"])
@pytest.mark.parametrize("how", [{}, {"num_workers": 1, "executor": "thread"}], ids=["inline", "thread"])
@pytest.mark.parametrize("kind", GLOBALS)
def test_global_generators_in_an_owner_s_state_are_restored(kind: str, how: dict[str, Any], batches: int | str) -> None:
    """As by torchdata: orders and draws of this epoch and the next ones."""
    torch.manual_seed(1)
    loader = GLOBALS[kind](**how)
    running = [] if batches == "before iter" else iter(loader)
    list(itertools.islice(running, N if batches == "all" else batches if isinstance(batches, int) else 0))
    state = travelled(loader.state_dict())
    expected = [list(running), list(loader), list(loader)]
    assert expected[1] != expected[2]
    torch.manual_seed(2)
    loader = GLOBALS[kind](**how)
    loader.load_state_dict(state)
    found = [list(loader) if expected[0] else [], list(loader), list(loader)]
    assert found == expected


@pytest.mark.parametrize("kind", [DrawingStream, GlobalDraws])
def test_persistent_workers_are_seeded_by_a_loaded_state(kind: Callable[[int], Any]) -> None:
    loader = ps.DataLoader(kind(N), 3, num_workers=2, persistent_workers=True, collate_fn=as_they_are)
    state = travelled(loader.state_dict())
    first = list(loader)
    assert resumed(loader, state) == first
    list(loader)
    assert resumed(loader, state) == first


def test_persistent_workers_are_seeded_in_the_middle_of_an_epoch() -> None:
    loader = ps.DataLoader(DrawingStream(N), 3, num_workers=2, persistent_workers=True, collate_fn=as_they_are)
    state, rest = stopped(loader, 3)
    assert resumed(loader, state) == rest


WORKERS = 4


def state_of_workers(kind: Callable[[int], Any]) -> Any:
    return stopped(ps.DataLoader(kind(100), 3, num_workers=WORKERS, collate_fn=as_they_are), 2 * WORKERS)[0]


def test_generators_are_in_a_state_only_where_the_data_set_draws() -> None:
    assert len(json.dumps(state_of_workers(IteratorStream))) < 300 * WORKERS


def test_a_generator_that_is_drawn_from_is_compact() -> None:
    assert len(json.dumps(state_of_workers(TorchDrawing))) < 5_000 * WORKERS


# Errors, in the first run and behind a resume.


class Flaky(IterableDataset[int]):
    """Has no state; fails at some items if it is told to."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        for item in share(N):
            if item == self.at:
                raise LookupError(f"item {item}")
            yield item


class Forgetful(Span):
    """A state of 256 KiB, which is not taken after each batch."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": "x" * (1 << 18)}


class Unreliable(Forgetful):
    """Fails at an item that it gave before."""

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            if item == 4:
                raise LookupError(f"item {item}")
            yield item


def flaky(at: int | None = None, **options: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(Flaky(at), 3, collate_fn=as_they_are, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_that_the_first_run_did_not_have_shows(workers: int) -> None:
    state, _ = stopped(flaky(num_workers=workers), 3)
    loader = flaky(4, num_workers=workers)
    loader.load_state_dict(state)
    with pytest.raises(LookupError, match="item 4"):
        next(iter(loader))


def test_an_error_between_two_snapshots_shows() -> None:
    state, rest = stopped(ps.DataLoader(Forgetful(0, N), 1, collate_fn=as_they_are), 5)
    assert json.dumps(state).count('"since": 0') == 0, "a snapshot was taken there"
    assert resumed(ps.DataLoader(Forgetful(0, N), 1, collate_fn=as_they_are), state) == rest
    loader = ps.DataLoader(Unreliable(0, N), 1, collate_fn=as_they_are)
    loader.load_state_dict(state)
    with pytest.raises(LookupError, match="item 4"):
        iter(loader)


def test_a_stream_that_has_become_shorter_is_refused() -> None:
    state, _ = stopped(ps.DataLoader(PlainStream(N), 3, collate_fn=as_they_are), 6)
    loader = ps.DataLoader(PlainStream(9), 3, collate_fn=as_they_are)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="6 batches when this state was saved, but now it yields 3"):
        iter(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_first_run_is_not_told_twice(workers: int) -> None:
    loader = flaky(8, num_workers=workers)
    with running(loader) as iterator:
        next(iterator)
        next(iterator)
        with pytest.raises(LookupError, match="item 8"):
            next(iterator)
        state, rest = travelled(loader.state_dict()), list(iterator)
    assert bool(rest) == bool(workers)
    assert resumed(flaky(8, num_workers=workers), state) == rest


class Strict(Span):
    """Has no state before its first item, and says so by an error that is no missing attribute."""

    def state_dict(self) -> dict[str, Any]:
        if self.at is None:
            raise LookupError("nothing was had yet")
        return super().state_dict()


def test_an_error_of_a_state_is_never_passed_over() -> None:
    with pytest.raises(LookupError, match="nothing was had yet"):
        iter(ps.DataLoader(Strict(0, N), 3, collate_fn=as_they_are))
    with pytest.raises(LookupError, match="nothing was had yet"):
        next(iter(ps.DataLoader(Strict(0, N), 3, collate_fn=as_they_are, num_workers=1)))


# Streams of ours: a snapshot is the cursor of the stream that a loader reads.


def stream_of(path: Path) -> Any:
    shards(path)
    files = sorted(str(file) for file in (path / "shards").glob("*.tar"))
    return ps.StreamShards(files, shuffle="shards", seed=3)


def test_a_state_is_of_the_stream_that_the_loader_reads(tmp_path: Path) -> None:
    expected, rest = stopped(loader_over(stream_of(tmp_path)), 3)
    dataset = stream_of(tmp_path)
    train = loader_over(dataset)
    iterator = iter(train)
    for _ in range(3):
        next(iterator)
    next(iter(dataset))
    assert opened(train.state_dict())["workers"] == opened(expected)["workers"]
    dataset.set_epoch(5)
    assert opened(train.state_dict())["workers"] == opened(expected)["workers"]
    assert next(iterator) == rest[0]
    dataset = stream_of(tmp_path)
    again = loader_over(dataset)
    assert resumed(again, travelled(train.state_dict())) == rest[1:]
    assert dataset.epoch == 0


@full_only("workers for each", but=["{}", "1-{'num_workers': 2}", "3-{'num_workers': 2, 'persistent_workers': True}"])
@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("batches", [0, 1, 3, None])
def test_a_stream_goes_on_in_its_epoch_and_the_next(batches: int | None, how: dict[str, Any], tmp_path: Path) -> None:
    def make() -> ps.DataLoader[Any]:
        return ps.DataLoader(stream_of(tmp_path), 4, collate_fn=numbers, **how)

    loader = make()
    state, rest = stopped(loader, batches)
    following = list(loader)
    again = make()
    assert (resumed(again, state), list(again)) == (rest, following)
    assert rest != following


# Mixtures: the sources that a rank sees do not depend on which rank it is.

MIXTURES = [
    ((0.5, 0.5), 2),
    ((0.5, 0.5), 3),
    ((0.5, 0.5), 8),
    ((0.5, 0.5), 64),
    ((0.7, 0.2, 0.1), 2),
    ((0.7, 0.2, 0.1), 3),
    ((0.7, 0.2, 0.1), 8),
    ((0.7, 0.2, 0.1), 64),
    ((0.5, 0.25, 0.25), 4),
]


@pytest.mark.parametrize(("weights", "ranks"), MIXTURES)
def test_every_rank_has_every_source_by_its_weight(weights: tuple[float, ...], ranks: int) -> None:
    for rank in range(min(ranks, 8)):
        sources = [(Range(31 * ranks), weight) for weight in weights]
        mixture = ps.Mixture(sources, rank=rank, world_size=ranks, tag=True, seed=1)
        loader: Any = ps.DataLoader(mixture, 100, collate_fn=as_they_are)
        counts = Counter(source for batch in loader for _, source in batch)
        for source, weight in enumerate(weights):
            # Blocks vary less than draws do, of which five deviations are one in a million.
            slack = 5 * (counts.total() * weight * (1 - weight)) ** 0.5
            assert abs(counts[source] - weight * counts.total()) < slack, (rank, source)


# Who splits: one line of code on one rank and on eight.


def rows(path: Path, **options: Any) -> Any:
    return ps.open(lines(path), load=row_of, **options)


def lines(path: Path) -> Path:
    """Return a manifest; one that is there is not written again, since somebody may read it."""
    file = path / "meta.txt"
    if not file.exists():
        file.write_text("".join(f"images/{row}.jpg {row}\n" for row in range(64)))
    return file


def row_of(record: ps.Record) -> int:
    return record.row


def arrays(path: Path, **options: Any) -> Any:
    file = path / "features-0.npy"
    if not file.exists():
        np.save(file, np.arange(64).reshape(64, 1))
    return ps.open(file, **options)


def tokens(path: Path, **options: Any) -> Any:
    file = path / "tokens.npy"
    if not file.exists():
        np.save(file, np.repeat(np.arange(64, dtype=np.uint16), 4))
    return ps.open(file, sequence_length=4, stride=4, **options)


def table(path: Path, **options: Any) -> Any:
    file = path / "rows.parquet"
    if not file.exists():
        pyarrow.parquet.write_table(pa.table({"row": list(range(64))}), file)
    return ps.open(file, **options)


def shards(path: Path, **options: Any) -> Any:
    folder = path / "shards"
    if not folder.exists():
        folder.mkdir()
        with ps.ShardWriter(str(folder / "part-%04d.tar"), maxcount=16) as writer:
            for row in range(64):
                writer.write({"__key__": f"{row:04d}", "cls": row})
    return ps.open(folder, **options)


SOURCES: dict[str, Callable[..., Any]] = {
    "rows": rows,
    "arrays": arrays,
    "tokens": tokens,
    "table": table,
    "shards": shards,
}


def number_of(sample: Any) -> int:
    """Return which sample it is."""
    if isinstance(sample, dict):
        return int(sample["row"] if "row" in sample else sample["__key__"])
    return int(np.asarray(sample).reshape(-1)[0])


def numbers(samples: list[Any]) -> list[int]:
    """Collate samples to their numbers."""
    return [number_of(sample) for sample in samples]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", SOURCES)
def test_shuffle_over_an_opened_source_works_on_any_number_of_ranks(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[list[list[int]]] = []
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        torch.manual_seed(rank)
        loader = ps.DataLoader(SOURCES[name](tmp_path), 4, shuffle=True, collate_fn=numbers)
        passes.append([list(itertools.chain.from_iterable(loader)) for _ in range(2)])
    for epoch in range(2):
        assert {len(share[epoch]) for share in passes} == {64 // ranks}
        assert sorted(itertools.chain.from_iterable(share[epoch] for share in passes)) == list(range(64))
    first, second = ([share[epoch] for share in passes] for epoch in range(2))
    assert first != second
    assert first[0] != sorted(first[0])


# Two loaders over one data set.


def mixture(path: Path, **options: Any) -> Any:
    del path
    return ps.Mixture([(Range(40), 0.5), (Range(40), 0.5)], **options)


def batches_of_rows(path: Path, **options: Any) -> Any:
    return ps.MPDataset(ps.Manifest.open(lines(path)), batch_size=4, load=row_of, **options)


SHARED: dict[str, Callable[..., Any]] = {**SOURCES, "mixture": mixture, "stream of rows": batches_of_rows}


def loader_over(dataset: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(dataset, 4, collate_fn=numbers)


@pytest.mark.parametrize("name", SHARED)
def test_a_state_is_the_loaders_whoever_else_reads_its_data_set(name: str, tmp_path: Path) -> None:
    alone = loader_over(SHARED[name](tmp_path, seed=3))
    expected, rest = stopped(alone, 3)
    following = list(alone)
    dataset = SHARED[name](tmp_path, seed=3)
    train = loader_over(dataset)
    iterator = iter(train)
    for _ in range(3):
        next(iterator)
    list(loader_over(dataset))
    assert train.state_dict() == expected
    assert resumed(loader_over(SHARED[name](tmp_path, seed=3)), travelled(train.state_dict())) == rest
    assert list(iterator) == rest
    assert list(train) == following


@pytest.mark.parametrize("name", SHARED)
def test_two_loaders_each_have_all_epochs_of_a_data_set(name: str, tmp_path: Path) -> None:
    alone = loader_over(SHARED[name](tmp_path, seed=3))
    expected = [list(alone) for _ in range(3)]
    dataset = SHARED[name](tmp_path, seed=3)
    first, second = loader_over(dataset), loader_over(dataset)
    for epoch in range(3):
        assert list(first) == expected[epoch]
        assert list(second) == expected[epoch]


@pytest.mark.parametrize("name", SHARED)
def test_interleaved_loaders_each_have_a_position_in_a_data_set(name: str, tmp_path: Path) -> None:
    alone = loader_over(SHARED[name](tmp_path, seed=3))
    expected, rest = stopped(alone, 3)
    following = list(alone)
    dataset = SHARED[name](tmp_path, seed=3)
    first, second = loader_over(dataset), loader_over(dataset)
    one, two = iter(first), iter(second)
    for _ in range(3):
        next(one)
        next(two)
    assert first.state_dict() == expected
    assert second.state_dict() == expected
    assert (list(one), list(two)) == (rest, rest)
    assert (list(first), list(second)) == (following, following)


@pytest.mark.parametrize("name", SHARED)
def test_reading_a_data_set_by_hand_moves_no_loader(name: str, tmp_path: Path) -> None:
    alone = loader_over(SHARED[name](tmp_path, seed=3))
    expected, rest = stopped(alone, 3)
    following = list(alone)
    dataset = SHARED[name](tmp_path, seed=3)
    train = loader_over(dataset)
    iterator = iter(train)
    for _ in range(3):
        next(iterator)
    list(dataset)
    assert train.state_dict() == expected
    assert list(iterator) == rest
    list(dataset)
    assert list(train) == following
