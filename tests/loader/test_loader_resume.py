"""Stopping and going on: same executor, another one, another number of ranks, other data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from entries_support import closed, opened
from full_run import examples, full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_conformance import (
    check_chain,
    check_close,
    check_elastic,
    check_end_of_pass,
    check_load_into_used,
    check_resume,
    travelled,
)
from loader_support import EXECUTORS, Draws, Faulty, Slow, Squares, Stream, batches, draw_load, plain
from torch.utils.data import ConcatDataset, Subset

import penstock as ps
from penstock import DataLoader, DistributedSampler, Manifest, MPDataset, RankDataset
from penstock.errors import StateError
from penstock.loader.dataloader_iter import Progress

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.* has no state_dict")

N = 61


@pytest.fixture
def manifest(write_manifest: Callable[..., Path]) -> Manifest:
    return Manifest.open(write_manifest(N))


def kinds(manifest: Manifest) -> dict[str, Callable[..., DataLoader[Any]]]:
    """Loaders of every kind that has an exact state, by name."""

    def mini_epochs(**how: Any) -> DataLoader[Any]:
        dataset = RankDataset(manifest, rank=1, world_size=2, mini_epochs=3, seed=1, load=draw_load)
        return DataLoader(dataset, batch_size=4, **how)

    def stream(**how: Any) -> DataLoader[Any]:
        dataset = MPDataset(manifest, batch_size=4, rank=2, world_size=3, seed=1, load=draw_load)
        return DataLoader(dataset, batch_size=4, **how)

    def dropping(**how: Any) -> DataLoader[Any]:
        dataset = MPDataset(manifest, batch_size=4, drop_last=True, rank=0, world_size=2, seed=1)
        return DataLoader(dataset, batch_size=4, **how)

    def block(**how: Any) -> DataLoader[Any]:
        return DataLoader(Draws(N), batch_size=7, shuffle="block", seed=3, drop_last=True, **how)

    def distributed(**how: Any) -> DataLoader[Any]:
        data = Draws(N)
        sampler = DistributedSampler(data, 2, 1, shuffle="global", seed=4)
        return DataLoader(data, batch_size=8, sampler=sampler, **how)

    def in_order(**how: Any) -> DataLoader[Any]:
        return DataLoader(Squares(N), batch_size=8, **how)

    def single(**how: Any) -> DataLoader[Any]:
        return DataLoader(Draws(11), batch_size=None, shuffle=True, seed=0, **how)

    def foreign(**how: Any) -> DataLoader[Any]:
        return DataLoader(Draws(N), batch_size=8, sampler=torch.arange(N).flip(0).tolist(), seed=5, **how)

    def lists(**how: Any) -> DataLoader[Any]:
        return DataLoader(Draws(N), batch_sampler=[[3, 1], [4], [1, 5, 9], [2]], seed=6, **how)

    def over_share(**how: Any) -> DataLoader[Any]:
        dataset = RankDataset(manifest, rank=1, world_size=2, seed=1, load=draw_load)
        sampler = ps.RandomSampler(dataset, shuffle="global", seed=8)
        return DataLoader(dataset, batch_size=8, sampler=sampler, **how)

    made = [mini_epochs, stream, dropping, block, distributed, in_order, single, foreign, lists, over_share]
    return {make.__name__: make for make in made}


NAMES = list(kinds(None))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_resume_at_every_batch(manifest: Manifest, name: str) -> None:
    make = kinds(manifest)[name]
    check_resume(make, passes=3)
    check_end_of_pass(make)
    check_load_into_used(make)
    check_chain(make, [1, 0, 2, 3])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("mini_epochs", [1, 2])
def test_length_is_that_of_a_whole_epoch_wherever_it_stands(manifest: Manifest, world: int, mini_epochs: int) -> None:
    """Of a data set with an order of its own, too: trainers count the batches of an epoch by it."""

    def loader(world: int) -> DataLoader[Any]:
        share = RankDataset(manifest, rank=0, world_size=world, mini_epochs=mini_epochs, seed=0)
        return DataLoader(share, batch_size=4)

    begun, whole = loader(2), len(loader(world))
    iterator = iter(begun)
    next(iterator)
    resumed = loader(world)
    resumed.load_state_dict(travelled(begun.state_dict()))
    assert len(resumed) == whole
    left = iter(resumed)
    next(left)
    assert len(resumed) == whole, "while the epoch runs"
    for _ in left:
        pass
    assert len(resumed) == whole, "behind its end"
    next(iter(resumed))
    assert len(resumed) == whole, "in the next one"


@full_only("threads at each position", but=["block", "stream", "single", "foreign"])
@pytest.mark.parametrize("name", NAMES)
def test_threads_resume_what_the_main_thread_began_and_the_other_way(manifest: Manifest, name: str) -> None:
    make = kinds(manifest)[name]
    threads = lambda: make(num_workers=2, executor="thread")  # noqa: E731
    check_resume(threads, passes=2, other=make)
    check_resume(make, passes=2, other=threads, positions=[0, 1, 3])
    check_load_into_used(threads)


@full_only("workers at each position", but=["block", "stream"])
@pytest.mark.parametrize("name", ["mini_epochs", "stream", "block", "single", "lists"])
def test_processes_resume_what_others_began(manifest: Manifest, name: str) -> None:
    make = kinds(manifest)[name]
    one = lambda: make(num_workers=1, executor="process")  # noqa: E731
    two = lambda: make(num_workers=2, executor="process", persistent_workers=True, prefetch_factor=3)  # noqa: E731
    check_resume(two, passes=2, other=make, positions=[1, 2, 3])
    auto = lambda: make(num_workers="auto")  # noqa: E731
    check_resume(make, passes=2, other=one, positions=[2])
    check_resume(auto, passes=2, other=make, positions=[1])
    check_load_into_used(one)
    check_load_into_used(two, old_goes_on=False)


@pytest.mark.parametrize("name", ["block", "stream"])
def test_close_ends_inline_passes_that_are_held(manifest: Manifest, name: str) -> None:
    check_close(kinds(manifest)[name])


@full_only("workers for each", but=["thread", "block-False-process", "stream-False-process"])
@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize(("name", "persistent"), [("block", False), ("block", True), ("stream", False)])
def test_close_ends_passes_that_are_held(manifest: Manifest, name: str, executor: str, persistent: bool) -> None:
    check_close(lambda: kinds(manifest)[name](num_workers=2, executor=executor, persistent_workers=persistent))


@full_only("workers for each", but=["inline", "thread", "3-process"])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("mini_epochs", [1, 3])
def test_another_number_of_ranks_goes_on(manifest: Manifest, executor: str, mini_epochs: int) -> None:
    workers = min(EXECUTORS[executor], 1 if executor == "process" else 2)

    def make(rank: int, world: int) -> DataLoader[Any]:
        dataset = RankDataset(manifest, rank=rank, world_size=world, mini_epochs=mini_epochs, seed=1)
        return DataLoader(dataset, batch_size=2, num_workers=workers, executor=executor)

    stages = [(3, 3), (2, 4), (5, 1), (1, 0)] if executor != "process" else [(2, 3), (1, 0)]
    check_elastic(make, lambda batch: batch[2].tolist(), N, stages)


@given(
    stages=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5),
    mini_epochs=st.integers(1, 4),
    kind=st.sampled_from(["rank", "stream", "sampler"]),
    batch_size=st.integers(1, 5),
)
@settings(max_examples=examples(15, 60))
def test_any_number_of_ranks_at_any_point(
    tmp_path_factory: pytest.TempPathFactory,
    stages: list[tuple[int, int]],
    mini_epochs: int,
    kind: str,
    batch_size: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "elastic.txt"
    if not path.exists():
        path.write_text("".join(f"{i}.jpg {i}\n" for i in range(N)))
    manifest = Manifest.open(path)

    def make(rank: int, world: int) -> DataLoader[Any]:
        if kind == "rank":
            data: Any = RankDataset(manifest, rank=rank, world_size=world, mini_epochs=mini_epochs, seed=1)
            return DataLoader(data, batch_size=batch_size)
        if kind == "stream":
            data = MPDataset(manifest, batch_size=batch_size, rank=rank, world_size=world, seed=1)
            return DataLoader(data, batch_size=batch_size)
        data = Draws(N)
        sampler = DistributedSampler(data, world, rank, shuffle="block", seed=4, block_size=4, window=2)
        return DataLoader(data, batch_size=batch_size, sampler=sampler)

    def rows_of(batch: Any) -> list[int]:
        rows: list[int] = (batch["index"] if kind == "sampler" else batch[2]).tolist()
        return rows

    check_elastic(make, rows_of, N, [*stages, (2, 0)])


@full_only("seconds of examples; test_any_number_of_ranks_at_any_point has them")
@given(stages=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=4), n=st.integers(0, 20))
@settings(max_examples=examples(15, 60))
def test_uneven_ranks_lose_and_repeat_nothing(
    tmp_path_factory: pytest.TempPathFactory, stages: list[tuple[int, int]], n: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"uneven{n}.txt"
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(n)))
    manifest = Manifest.open(path)

    def make(rank: int, world: int) -> DataLoader[Any]:
        dataset = RankDataset(manifest, rank=rank, world_size=world, remainder="uneven", shuffle="none")
        return DataLoader(dataset, batch_size=2)

    check_elastic(make, lambda batch: batch[2].tolist(), n, [*stages, (2, 0)], padded=False)


def test_a_short_rank_does_not_call_the_epoch_finished(manifest: Manifest) -> None:
    """Of five rows rank 0 has three and rank 1 two: rank 1 is through when rank 0 is not."""
    loaders = [
        DataLoader(RankDataset(manifest[:5], rank=rank, world_size=2, remainder="uneven"), batch_size=2)
        for rank in range(2)
    ]
    seen = [row for loader in loaders for row in next(iter(loader))[2].tolist()]
    alone = DataLoader(RankDataset(manifest[:5], rank=0, world_size=1, remainder="uneven"), batch_size=2)
    alone.load_state_dict(travelled(loaders[1].state_dict()))
    assert sorted(seen + [row for batch in batches(alone) for row in batch[2]]) == [0, 1, 2, 3, 4]


def test_augmentation_is_elastic_too(manifest: Manifest) -> None:
    """What a sample draws depends on its global position: 2 ranks that go on from 3 draw what 3 would have drawn."""

    def job(world: int, state: Any, count: int) -> tuple[set[tuple[int, float]], Any]:
        loaders = [
            DataLoader(RankDataset(manifest, rank=rank, world_size=world, seed=1, load=draw_load), batch_size=4)
            for rank in range(world)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        drawn: set[tuple[int, float]] = set()
        for _, *parts in zip(range(count), *loaders, strict=False):
            drawn |= {pair for rows, values in parts for pair in zip(rows.tolist(), values.tolist(), strict=True)}
        return drawn, loaders[0].state_dict()

    whole, _ = job(1, None, 100)
    first, state = job(3, None, 2)
    rest, _ = job(2, state, 100)
    padding = (first | rest) - whole
    assert len(whole) == N
    assert whole <= first | rest
    assert len(padding) <= 1  # a repeated row has a generator of its own


def test_loop_over_epochs_and_mini_epochs_as_documented(manifest: Manifest) -> None:
    def run(state: Any, stop: int | None) -> tuple[list[Any], Any]:
        dataset = RankDataset(manifest, rank=0, world_size=2, mini_epochs=3, seed=1)
        loader = DataLoader(dataset, batch_size=4)
        if state is not None:
            loader.load_state_dict(state)
        seen: list[Any] = []
        for epoch in range(loader.epoch, 3):
            dataset.set_epoch(epoch)
            for mini_epoch in range(dataset.mini_epoch, 3):
                dataset.set_mini_epoch(mini_epoch)
                for batch in loader:
                    seen.append((epoch, mini_epoch, batch[2].tolist()))
                    if len(seen) == stop:
                        return seen, loader.state_dict()
        return seen, None

    whole, _ = run(None, None)
    for stop in range(1, len(whole)):
        head, state = run(None, stop)
        tail, _ = run(travelled(state), None)
        assert head + tail == whole, f"stopped after {stop}"


@pytest.mark.parametrize("executor", EXECUTORS)
def test_prefetched_batches_are_not_counted(executor: str) -> None:
    loader = DataLoader(Squares(40), num_workers=EXECUTORS[executor], executor=executor)
    iterator = iter(loader)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 4]
    assert opened(loader.state_dict())["sampler"]["consumed"] == 3


def test_state_that_was_handed_out_does_not_change(manifest: Manifest) -> None:
    loader = kinds(manifest)["mini_epochs"]()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    copy = travelled(state)
    for _ in iterator:
        pass
    assert state == copy


class TestForeignStreams:
    """Iterable data sets that only they can order resume by skipping, if they have no state."""

    def make(self, workers: int = 0, executor: str = "auto") -> DataLoader[Any]:
        return DataLoader(Stream(23), batch_size=4, num_workers=workers, executor=executor)

    def test_resume(self) -> None:
        check_resume(self.make, passes=2)
        check_end_of_pass(self.make)
        check_resume(lambda: self.make(2, "thread"), passes=2, positions=[0, 4, 7])
        check_resume(lambda: self.make(2, "thread"), passes=2, positions=[2, 6], other=lambda: self.make(2, "process"))
        check_resume(lambda: self.make(2, "process"), passes=2, positions=[3])

    def test_batches_depend_on_workers_so_other_counts_are_refused(self) -> None:
        loader = self.make(2, "process")
        next(iter(loader))
        with pytest.raises(StateError, match="of 2 workers and the loader has 1"):
            self.make().load_state_dict(loader.state_dict())


class TestForeignStates:
    """A state of something else is refused, and the message says what differs."""

    def refused(self, state: Any, loader: DataLoader[Any], *words: str) -> None:
        with pytest.raises(StateError) as caught:
            loader.load_state_dict(state)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert isinstance(caught.value, ValueError)

    def test_other_rows(self, manifest: Manifest, write_manifest: Callable[..., Path]) -> None:
        other = Manifest.open(write_manifest(N, "other.txt", per_class=7))
        state = DataLoader(RankDataset(manifest, seed=1)).state_dict()
        self.refused(state, DataLoader(RankDataset(other, seed=1)), "fingerprint", manifest.fingerprint)

    @pytest.mark.parametrize("option", [{"seed": 2}, {"mini_epochs": 2}, {"remainder": "drop"}, {"shuffle": "none"}])
    def test_other_options(self, manifest: Manifest, option: dict[str, Any]) -> None:
        state = DataLoader(RankDataset(manifest, seed=1)).state_dict()
        self.refused(state, DataLoader(RankDataset(manifest, **{"seed": 1, **option})), next(iter(option)))

    def test_other_loaders(self, manifest: Manifest) -> None:
        ours = DataLoader(Squares(9), shuffle="global", seed=1).state_dict()
        self.refused(ours, DataLoader(Squares(9), shuffle="global", seed=2), "seed is 1 in the state and 2 here")
        self.refused(ours, DataLoader(Squares(8), shuffle="global", seed=1), "samples is 9 in the state and 8 here")
        self.refused(ours, DataLoader(Squares(9), seed=1), "'global'", "'none'")
        self.refused(ours, DataLoader(Stream(9)), "seed is 1 in the state and None here")
        self.refused(DataLoader(Stream(9)).state_dict(), DataLoader(Squares(9)), "sampler")
        rows = RankDataset(manifest, shuffle="none", seed=0)
        self.refused(DataLoader(rows).state_dict(), DataLoader(Squares(N)), "fingerprint is missing")

    @pytest.mark.parametrize("state", [{}, [], None, "state", {"version": 99}, {"version": 1, "seed": None}])
    def test_garbage(self, state: Any) -> None:
        with pytest.raises(StateError):
            DataLoader(Squares(9)).load_state_dict(state)

    def test_other_versions_are_named(self, manifest: Manifest) -> None:
        loader = DataLoader(RankDataset(manifest))
        entries = opened(loader.state_dict())
        entries["sampler"]["order_version"] = 99
        self.refused(closed(entries), loader, "version 99 of orders", "reads version 1", "newer Penstock")

    @pytest.mark.parametrize("name", ["epoch", "mini_epoch", "consumed", "dealt", "samples"])
    @pytest.mark.parametrize("value", [-1, 10**6, "one", None, True, [9, 9, 10**6]])
    def test_damage(self, manifest: Manifest, name: str, value: Any) -> None:
        loader = DataLoader(RankDataset(manifest, mini_epochs=2))
        entries = opened(loader.state_dict())
        entries["sampler"][name] = value
        state = closed(entries)
        if (name, value) == ("epoch", 10**6):
            loader.load_state_dict(state)  # that is an epoch
            assert loader.epoch == 10**6
            return
        with pytest.raises(StateError):
            loader.load_state_dict(state)

    def test_refused_states_leave_the_loader_where_it_was(self, manifest: Manifest) -> None:
        loader = DataLoader(RankDataset(manifest, seed=1), batch_size=8)
        iterator = iter(loader)
        next(iterator)
        before = loader.state_dict()
        with pytest.raises(StateError):
            loader.load_state_dict(DataLoader(RankDataset(manifest, seed=2)).state_dict())
        assert loader.state_dict() == before
        assert len(batches(iterator)) == len(loader) - 1


def test_out_of_order_resumes_what_was_not_had() -> None:
    """Batches that overtook others are not had twice; such a state is of this rank alone."""
    options: dict[str, Any] = {"batch_size": 4, "in_order": False, "num_workers": 2, "executor": "process"}
    loader = DataLoader(Slow(40, {0: 0.5}), **options)
    had = [plain(batch) for batch in itertools.islice(loader, 3)]
    state = travelled(loader.state_dict())
    assert [0, 1, 4, 9] not in had
    assert opened(state)["ahead"]
    again = DataLoader(Slow(40, {0: 0.1}), **options)
    again.load_state_dict(state)
    assert travelled(again.state_dict()) == state
    rest = [plain(batch) for batch in again]
    assert sorted(had + rest) == batches(DataLoader(Squares(40), 4))
    other = closed({**opened(state), "world": [0, 2]})
    with pytest.raises(StateError, match=r"number of ranks\] is \[0, 2\] in the state"):
        DataLoader(Slow(40, {}), **options).load_state_dict(other)


@pytest.mark.parametrize(
    ("wrap", "shuffle", "other"),
    [
        *((lambda data: Subset(data, range(20)), "none", other) for other in ({"seed": 7}, {"world_size": 3})),
        *(
            (lambda data: ConcatDataset([data, data]), "global", other)
            for other in ({"seed": 7}, {"world_size": 3}, {"shuffle": "none"})
        ),
    ],
)
def test_a_state_over_a_wrapped_share_is_of_that_share(
    tmp_path: Path, wrap: Any, shuffle: str, other: dict[str, Any]
) -> None:
    """Positions would mean other rows."""
    (tmp_path / "rows.txt").write_text("".join(f"a/{i}.jpg {i}\n" for i in range(60)))
    usual: dict[str, Any] = {"rank": 0, "world_size": 2, "shuffle": shuffle, "remainder": "uneven"}

    def loader_over(**options: Any) -> DataLoader[Any]:
        share = RankDataset(str(tmp_path / "rows.txt"), **{**usual, **options})
        return DataLoader(wrap(share), batch_size=4, shuffle=True, seed=1)

    loader = loader_over()
    next(iter(loader))
    state = loader.state_dict()
    loader_over().load_state_dict(state)
    with pytest.raises(StateError, match="data sets inside"):
        loader_over(**other).load_state_dict(state)


def test_batches_had_out_of_order_before_a_resume_are_counted_over() -> None:
    """Batch 1 was had before: the ones asked for now are 0, 2, 3 ..."""
    progress = Progress(None, 0, frozenset({1}))
    counts = []
    for number in range(3):
        progress.delivered(number)
        counts.append(progress.count)
    assert (counts, progress.ahead) == ([2, 3, 4], set())


def test_a_resume_goes_on_behind_a_batch_that_failed() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Faulty(8, {2}), 2, seed=0, collate_fn=list)

    first = loader()
    iterator = iter(first)
    assert next(iterator) == [0, 1]
    with pytest.raises(KeyError):
        next(iterator)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert list(second) == [[16, 25], [36, 49]]


@pytest.mark.parametrize("how", [{}, {"seed": 0}, {"shuffle": "global"}, {"shuffle": True}], ids=str)
def test_a_resumed_run_draws_from_torchs_generator_what_the_other_would_have(how: dict[str, Any]) -> None:
    """The base seed of a pass is drawn once, when it begins."""
    torch.manual_seed(0)
    loader: Any = DataLoader(range(40), 4, **how)  # type: ignore[arg-type]
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
        torch.rand(1)
    state, generator = loader.state_dict(), torch.get_rng_state()
    rest = [(batch.tolist(), torch.rand(1).item()) for batch in iterator]
    resumed: Any = DataLoader(range(40), 4, **how)  # type: ignore[arg-type]
    resumed.load_state_dict(state)
    torch.set_rng_state(generator)
    assert [(batch.tolist(), torch.rand(1).item()) for batch in resumed] == rest
