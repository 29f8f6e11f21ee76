"""Who splits the data among the ranks: every row of the table in `penstock.loader.who_splits`, on 1, 2 and 8 ranks."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from full_run import full_only
from loader_support import Range, Stream
from torch.utils.data import (
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    random_split,
)

import penstock as ps
from penstock.errors import ConfigError, PartitionError, StateError
from penstock.loader import who_splits
from penstock.sources.batched import BatchedDataset

N = 48
RANKS = [1, 2, 8]
Loader = ps.DataLoader[Any]


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(who_splits, "_warned", False)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], list[Any]]:
    """Call a function on each rank of a job, one after the other, and return what each gives."""

    def run(ranks: int, call: Callable[[], Any]) -> list[Any]:
        found = []
        for rank in range(ranks):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            torch.manual_seed(rank)
            found.append(call())
        return found

    return run


class Numbers(BatchedDataset):
    """A data set by our base class, of the whole data."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def manifest(folder: Path) -> ps.Manifest:
    file = folder / "rows.txt"
    if not file.exists():
        file.write_text("".join(f"{row}.jpg {row}\n" for row in range(N)))
    return ps.Manifest.open(file)


def shard_set(folder: Path) -> ps.ShardSet:
    if not (folder / "part-0000.tar").exists():
        with ps.ShardWriter(str(folder / "part-%04d.tar"), maxcount=16) as writer:
            for row in range(N):
                writer.write({"__key__": f"{row:04d}", "cls": row})
    return ps.ShardSet(str(folder / "part-{0000..0002}.tar"))


def share(folder: Path, **options: Any) -> Any:
    return ps.RankDataset(manifest(folder), load=row_of, **options)


def mixture(folder: Path, **options: Any) -> Any:
    del folder
    return ps.Mixture([(Range(N // 2), 0.5), (Range(N // 2), 0.5)], **options)


def table(folder: Path, **options: Any) -> Any:
    file = folder / "rows.parquet"
    if not file.exists():
        pyarrow.parquet.write_table(pa.table({"row": list(range(N))}), file)
    return ps.open(file, **options)


def row_of(record: Any) -> int:
    return int(record.row)


def number_of(item: Any) -> int:
    if isinstance(item, dict):
        return int(item["row"] if "row" in item else item["__key__"])
    return int(item.row if isinstance(item, ps.Record) else item)


def numbers(items: list[Any]) -> list[int]:
    return [number_of(item) for item in items]


WHOLE: dict[str, Callable[[Path], Any]] = {
    "manifest": manifest,
    "by base class": lambda folder: Numbers(),
    "shards": shard_set,
}
SHARES: dict[str, Callable[..., Any]] = {"rows": share, "table": table, "mixture": mixture}


def loader_over(dataset: Any, **options: Any) -> Loader:
    return ps.DataLoader(dataset, 4, collate_fn=numbers, **options)


def epochs(loader: Loader, count: int = 2) -> list[list[int]]:
    return [list(itertools.chain.from_iterable(loader)) for _ in range(count)]


def together(found: list[list[list[int]]], epoch: int) -> list[int]:
    """Return what all ranks have had of an epoch."""
    return sorted(itertools.chain.from_iterable(each[epoch] for each in found))


@contextmanager
def is_silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# A share already.


@full_only("many ranks for each", but=["1", "2"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": "global"}, {"split": True}, {"seed": 5}])
@pytest.mark.parametrize("name", SHARES)
def test_a_share_keeps_its_own_order(name: str, options: Any, ranks: int, tmp_path: Path, job: Any) -> None:
    def read(**options: Any) -> Any:
        loader = loader_over(SHARES[name](tmp_path, seed=5), **options)
        assert loader.splits == "the dataset"
        return epochs(loader), loader.epoch

    found = job(ranks, lambda: read(**options))
    assert found == job(ranks, read)
    for had, epoch in found:
        assert had[0] != had[1]
        assert epoch == 2


@pytest.mark.parametrize("name", SHARES)
def test_a_share_refuses_another_order(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not shuffle='block': choose the order there"):
        loader_over(SHARES[name](tmp_path), shuffle="block")
    assert loader_over(SHARES[name](tmp_path, shuffle="block"), shuffle="block").splits == "the dataset"
    loader_over(SHARES[name](tmp_path, shuffle="none"), shuffle="none")


def test_a_share_in_order_refuses_a_shuffle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not shuffle=True: choose the order there"):
        loader_over(share(tmp_path, shuffle="none"), shuffle=True)
    loader_over(mixture(tmp_path, shuffle="none"), shuffle=True)  # whose order is that of its weights
    loader_over(share(tmp_path, shuffle="none"), shuffle="none")
    with pytest.raises(ConfigError, match="not shuffle='none': choose the order there"):
        loader_over(share(tmp_path), shuffle="none")


def images_of(folder: Path, **options: Any) -> Any:
    return ps.ImageDataset(ps.RankDataset(manifest(folder), **options))


@full_only("many ranks for each", but=["rows-1", "rows-2", "table-2"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("name", ["rows", "table"])
def test_a_share_is_read_in_order_for_shuffle_false(name: str, ranks: int, tmp_path: Path, job: Any) -> None:
    def read() -> Any:
        data = SHARES[name](tmp_path, seed=5)
        loader = loader_over(data, shuffle=False)
        had = epochs(loader)
        again = loader_over(data, shuffle=False)
        next(iter(again))
        rest = loader_over(SHARES[name](tmp_path, seed=5), shuffle=False)
        rest.load_state_dict(again.state_dict())
        assert epochs(rest, 1)[0] == had[0][4:]
        assert loader.splits == "the dataset"
        return [*had, epochs(loader_over(data), 1)[0]]

    found = job(ranks, read)
    for rank, (first, second, own) in enumerate(found):
        assert first == second == [*range(rank, N, ranks)]
        assert own != first  # the dataset keeps its own order for others
    assert together(found, 0) == [*range(N)]


def test_images_are_read_in_order_for_shuffle_false(tmp_path: Path) -> None:
    loader: Any = ps.DataLoader(images_of(tmp_path, shuffle="block", block_size=4), 4, shuffle=False)
    assert [record.row for record in loader.dataset.source.records(range(N))] == [*range(N)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (mixture, "this Mixture determines its own order, which is not shuffle=False"),
        (lambda folder: share(folder, mini_epochs=2), "this RankDataset determines its own order"),
        (lambda folder: ps.MPDataset(manifest(folder), batch_size=4), "this MPDataset determines its own order"),
        (lambda folder: ConcatDataset([share(folder), share(folder)]), "this RankDataset determines its own order"),
        (lambda folder: ConcatDataset([mixture(folder, shuffle="none")]), "this Mixture determines its own order"),
    ],
)
def test_shuffle_false_is_refused_where_there_is_no_order_of_rows(make: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        loader_over(make(tmp_path), shuffle=False)
    assert len(loader_over(make(tmp_path))) > 0


def test_the_order_of_a_share_follows_from_its_own_seed(tmp_path: Path) -> None:
    for data in (share(tmp_path, seed=5), mixture(tmp_path, seed=5), images_of(tmp_path, seed=5)):
        loader_over(data, seed=5)
        with pytest.raises(ConfigError, match=r"follows from its own seed=5, not from seed=3 of the DataLoader"):
            loader_over(data, seed=3)
        with pytest.raises(ConfigError, match="not from a generator"):
            loader_over(data, shuffle=True, generator=torch.Generator())
    loader_over(share(tmp_path, shuffle="none"), seed=3)  # for the draws, since the order has no seed


SELECTING: dict[str, Callable[[Any], Any]] = {
    "torch's sequential": torch.utils.data.SequentialSampler,
    "sequential": ps.SequentialSampler,
    "subset": lambda data: torch.utils.data.SubsetRandomSampler(range(N // 2)),
    "weighted": lambda data: torch.utils.data.WeightedRandomSampler([1.0] * N, N),
    "list": lambda data: [0, 1],
}


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("make", [share, images_of, mixture])
def test_samplers_of_rows_over_positions_are_refused(make: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"are rows, but an index of this .* is a position in its own order"):
        data = make(tmp_path)
        loader_over(data, sampler=SELECTING[name](data))
    with pytest.raises(ConfigError, match="are rows"):
        loader_over(ConcatDataset([data]), sampler=SELECTING[name](data))
    loader_over(data, sampler=torch.utils.data.RandomSampler(data))
    rows = share(tmp_path, shuffle="none")
    assert epochs(loader_over(rows, sampler=torch.utils.data.SequentialSampler(rows)), 1)[0] == [*range(N)]


class Transformed(Subset[Any]):
    """A subset with its own `__getitem__`, as in many programs."""

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [ps.DataLoader, torch.utils.data.DataLoader])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: ConcatDataset([data])])
@pytest.mark.parametrize("make", [share, table, mixture])
def test_indices_of_torchs_subset_are_rows_or_refused(kind: Any, wrap: Any, make: Any, tmp_path: Path) -> None:
    data = make(tmp_path)
    stack, own = StackDataset(wrap(data), range(len(data))), Transformed(wrap(data), range(8))
    for part in (*random_split(wrap(data), [0.75, 0.25]), stack, own):
        with pytest.raises(ConfigError, match=r"penstock.Subset\(dataset, rows\)"):
            next(iter(kind(part, 4, collate_fn=numbers)))
    assert len(list(kind(data, 4, collate_fn=numbers))) == -(-len(data) // 4)
    if make is mixture:
        return
    data = make(tmp_path, shuffle="none")
    parts = random_split(wrap(data), [0.75, 0.25])
    rows: list[set[int]] = [set(), set()]
    for epoch in range(3):
        data.set_epoch(epoch)
        for mine, part in zip(rows, parts, strict=True):
            mine.update(itertools.chain.from_iterable(kind(part, 4, collate_fn=numbers, shuffle=True)))
    assert not rows[0] & rows[1]
    assert sorted(rows[0] | rows[1]) == [*range(N)]


def test_a_subset_of_padded_rows_is_refused(tmp_path: Path, job: Any) -> None:
    def read(**options: Any) -> list[int]:
        return numbers(list(Subset(share(tmp_path, shuffle="none", **options), range(3))))

    with pytest.raises(ConfigError, match="in another epoch"):
        job(2, read)
    assert job(2, lambda: read(remainder="uneven")) == [[0, 2, 4], [1, 3, 5]]


def test_an_image_data_set_is_as_its_records(tmp_path: Path) -> None:
    images = ps.ImageDataset(ps.RankDataset(manifest(tmp_path)), size=8)
    assert loader_over(images, shuffle=True).splits == "the dataset"
    with pytest.raises(ConfigError, match="not shuffle='block'"):
        loader_over(images, shuffle="block")


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(4))])
def test_a_share_cannot_be_made_whole(wrap: Callable[[Any], Any], tmp_path: Path, job: Any) -> None:
    def refuse() -> None:
        with pytest.raises(ConfigError, match="open it with rank=0, world_size=1"):
            loader_over(wrap(share(tmp_path, shuffle="none")), split=False)

    job(2, refuse)
    job(1, lambda: loader_over(wrap(share(tmp_path, shuffle="none")), split=False))


def test_the_whole_on_every_rank_is_said_where_it_is_opened(tmp_path: Path, job: Any) -> None:
    def read() -> Any:
        whole = share(tmp_path, rank=0, world_size=1)
        with pytest.raises(ConfigError, match="omit rank and world_size"):
            loader_over(whole, split=True)
        return sorted(epochs(loader_over(whole, shuffle=True, split=False))[0])

    assert job(2, read) == [[*range(N)]] * 2


# Ours, and whole.


@full_only("many ranks for each", but=["1", "2"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": "block"}, {"shuffle": True, "seed": 7}])
@pytest.mark.parametrize("name", WHOLE)
def test_a_shuffled_loader_splits_data_of_ours(
    name: str, options: dict[str, Any], ranks: int, tmp_path: Path, job: Any
) -> None:
    def read() -> Any:
        loader = loader_over(WHOLE[name](tmp_path), **options)
        assert loader.splits == loader.stats()["split_by"] == ("nobody" if ranks == 1 else "the loader")
        return epochs(loader)

    with is_silent():
        found = job(ranks, read)
    assert {len(each[epoch]) for each in found for epoch in range(2)} == {N // ranks}
    assert together(found, 0) == together(found, 1) == [*range(N)]
    assert all(each[0] != each[1] for each in found)


@pytest.mark.parametrize("ranks", [2, 8])
def test_it_splits_as_a_distributed_sampler_does(ranks: int, job: Any) -> None:
    def read() -> Any:
        data = Numbers(N + 1)
        by_hand = ps.DistributedSampler(data, shuffle="block", seed=3)
        return epochs(loader_over(data, shuffle="block", seed=3)), epochs(loader_over(data, sampler=by_hand))

    assert all(ours == expected for ours, expected in job(ranks, read))


def test_drop_last_leaves_out_what_does_not_divide(job: Any) -> None:
    found = job(2, lambda: epochs(loader_over(Numbers(17), shuffle=True, drop_last=True)))
    assert len(set(together(found, 0))) == len(together(found, 0)) == 16


@pytest.mark.parametrize(("before", "after"), [(2, 8), (8, 2), (2, 1), (1, 2)])
def test_another_number_of_ranks_resumes(before: int, after: int, job: Any) -> None:
    def make() -> Loader:
        return loader_over(Numbers(96), shuffle=True, seed=3, split=True)

    def stop() -> Any:
        loader = make()
        iterator = iter(loader)
        had = [*next(iterator), *next(iterator)]
        return had, json.loads(json.dumps(loader.state_dict()))

    def go_on(state: Any) -> Any:
        loader = make()
        loader.load_state_dict(state)
        return epochs(loader)

    stopped = job(before, stop)
    (state,) = {json.dumps(state) for _, state in stopped}
    rest = job(after, lambda: go_on(json.loads(state)))
    had = itertools.chain.from_iterable(had for had, _ in stopped)
    assert sorted([*had, *together(rest, 0)]) == [*range(96)]
    assert together(rest, 1) == [*range(96)]


def test_the_loaders_own_choice_resumes_on_other_ranks(job: Any) -> None:
    def make(state: Any = None) -> Loader:
        loader = loader_over(Numbers(), shuffle=True)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def stop() -> Any:
        loader = make()
        return next(iter(loader)), loader.state_dict()

    stopped = job(2, stop)
    rest = job(8, lambda: epochs(make(stopped[0][1])))
    assert sorted([*stopped[0][0], *stopped[1][0], *together(rest, 0)]) == [*range(N)]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_an_unseeded_shuffle_goes_on_with_one_rank_or_with_several(before: int, after: int, job: Any) -> None:
    """On one rank it is torch's order, on several ours."""
    loader = lambda: loader_over(Numbers(), shuffle=True)  # noqa: E731
    state = job(before, lambda: loader().state_dict())[0]

    def refuse() -> None:
        with pytest.raises(StateError, match=r"shuffle is '(randperm|global)' in the state and '(global|randperm)'"):
            loader().load_state_dict(state)

    job(after, refuse)


@pytest.mark.parametrize("name", WHOLE)
def test_a_loader_in_order_reads_all_and_warns_once(name: str, tmp_path: Path, job: Any) -> None:
    with pytest.warns(UserWarning, match=r"in order: pass split=True.*or pass split=False") as said:
        found = job(2, lambda: epochs(loader_over(WHOLE[name](tmp_path))))
    assert len(said) == 1
    assert Path(said[0].filename) == Path(__file__)
    assert found == [[[*range(N)]] * 2] * 2


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("n", [N, N + 3])
def test_a_loader_in_order_may_split(n: int, ranks: int, job: Any) -> None:
    def read(**options: Any) -> Any:
        loader = loader_over(Numbers(n), split=True, **options)
        assert loader.splits == "the loader"
        return epochs(loader)

    with is_silent():
        found = job(ranks, read)
        dropped = job(ranks, lambda: read(drop_last=True))
    assert together(found, 0) == together(found, 1) == [*range(n)]
    assert all(each[0] == sorted(each[0]) for each in found)
    assert len({len(each[0]) for each in dropped}) == 1


def test_a_loader_in_order_drops_what_does_not_divide_among_the_ranks(job: Any) -> None:
    """In batches of one there is no last batch to drop, and ranks have equally many all the same."""
    found = job(2, lambda: [*ps.DataLoader(Numbers(5), 1, split=True, drop_last=True, collate_fn=list)])
    assert sorted(sum(batch) for rank in found for batch in rank) == [0, 1, 2, 3]
    assert [len(rank) for rank in found] == [2, 2]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": "global"}, {"shuffle": "none"}])
@pytest.mark.parametrize("make", [Numbers, lambda: Range(N)])
def test_every_rank_reads_all_if_told_so(make: Callable[[], Any], options: Any, job: Any) -> None:
    def read() -> Any:
        loader = loader_over(make(), split=False, **options)
        assert loader.splits == "nobody"
        return sorted(epochs(loader)[0])

    with is_silent():
        assert job(2, read) == [[*range(N)]] * 2


def test_one_rank_is_silent(job: Any) -> None:
    with is_silent():
        assert job(1, lambda: epochs(loader_over(Numbers()))) == [[[*range(N)]] * 2]


def test_a_generator_is_no_order_of_all_ranks(job: Any) -> None:
    def make(**options: Any) -> Loader:
        return loader_over(Numbers(), shuffle=True, generator=torch.Generator(), **options)

    def refuse() -> None:
        with pytest.raises(ConfigError, match="pass seed= instead of generator=, or split=False"):
            make()
        assert make(split=False).splits == "nobody"

    job(2, refuse)
    job(1, make)


def test_a_world_that_comes_late_is_refused(job: Any) -> None:
    (made, in_order, told) = job(
        1, lambda: [loader_over(Numbers(), shuffle=True), loader_over(Numbers()), loader_over(Numbers(), split=True)]
    )[0]

    def read() -> Any:
        with pytest.raises(PartitionError, match="created with one rank, and now there are 2"):
            iter(made)

    job(2, read)
    with pytest.warns(UserWarning, match="in order: pass split=True"):
        iter(in_order)
    assert job(2, lambda: len(epochs(told)[0]))[1] == N // 2


def test_a_world_that_is_half_known_is_left_to_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's child processes have one of the two variables until the process group is there."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    loader = loader_over(Numbers(), shuffle=True)
    assert isinstance(loader.sampler, RandomSampler)
    with pytest.raises(PartitionError, match="only WORLD_SIZE is set"):
        iter(loader)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_loader_says_what_it_is_in_a_world_that_is_half_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    manifest(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "2")
    share = ps.RankDataset(str(tmp_path / "rows.txt"))
    with ps.TarWriter(str(tmp_path / "shard.tar")) as shard:
        shard.write({"__key__": "0", "cls": 0})
    for data in (share, ps.ShardDataset(str(tmp_path / "shard.tar"))):
        assert f"share: rank not known yet, of {2 if name == 'WORLD_SIZE' else 1}" in repr(data)
    sampler = ps.RandomSampler(range(N), shuffle="global", seed=0)
    batches = ps.GroupedBatchSampler(sampler, [0] * N, 2)
    for loader, owner in (
        (loader_over(Range(N), num_workers="auto", seed=0), "nobody"),
        (loader_over(share), "the dataset"),
        (ps.DataLoader(Range(N), batch_sampler=batches), "a sampler" if name == "WORLD_SIZE" else "nobody"),
    ):
        assert (loader.splits, loader.stats()["split_by"]) == (owner, owner)
        assert "samples/s" in loader.summary()
        assert f"split by {owner}" in repr(loader)


def test_a_share_may_be_opened_in_a_world_that_is_half_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says to frameworks that it is dealt."""
    manifest(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    share = ps.RankDataset(str(tmp_path / "rows.txt"), shuffle="none")
    for dataset in (share, Subset(share, range(4))):
        assert isinstance(loader_over(dataset).sampler, DistributedSampler)


# Anybody else's.


@pytest.mark.parametrize("options", [{}, {"shuffle": True}])
def test_other_data_keep_torchs_meaning(options: Any, job: Any) -> None:
    def read() -> Any:
        loader = loader_over(Range(N), **options)
        assert loader.splits == "nobody"
        assert isinstance(loader.sampler, RandomSampler if options else SequentialSampler)
        return sorted(epochs(loader)[0])

    with is_silent():
        assert job(2, read) == [[*range(N)]] * 2


def test_other_data_that_all_ranks_read_alike_are_said(job: Any) -> None:
    with pytest.warns(UserWarning, match="pass split=True to the DataLoader"):
        assert job(2, lambda: sorted(epochs(loader_over(Range(N), shuffle="global"))[0])) == [[*range(N)]] * 2


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": "block", "seed": 4}])
@pytest.mark.parametrize("ranks", RANKS)
def test_other_data_are_split_if_told_so(options: Any, ranks: int, job: Any) -> None:
    with is_silent():
        found = job(ranks, lambda: epochs(loader_over(Range(N), split=True, **options)))
    assert together(found, 0) == together(found, 1) == [*range(N)]
    assert all((each[0] != each[1]) == bool(options) for each in found)


# Inside of torch's data sets.


def halves() -> Any:
    """Return two halves of data of ours, one of them a `Subset` of a `Subset`, as one data set."""
    first, second = random_split(Numbers(), [N // 2, N // 2], torch.Generator().manual_seed(4))
    return ConcatDataset([first, Subset(Subset(second, range(N // 2)), range(N // 2))])


INSIDE: dict[str, Callable[[Path], Any]] = {
    "subset": lambda folder: Subset(manifest(folder), range(N)),
    "halves": lambda folder: halves(),
    "concatenated": lambda folder: ConcatDataset([Subset(shard_set(folder), range(16)), Numbers(N)]),
    "stacked": lambda folder: StackDataset(Numbers(), Numbers()),
}


def places(items: list[Any]) -> list[int]:
    return [number_of(item[0] if type(item) is tuple else item) for item in items]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", INSIDE)
def test_data_of_ours_are_split_inside_of_torchs(name: str, ranks: int, tmp_path: Path, job: Any) -> None:
    def read() -> Any:
        loader: Loader = ps.DataLoader(INSIDE[name](tmp_path), 4, shuffle=True, collate_fn=places)
        assert loader.splits == ("nobody" if ranks == 1 else "the loader")
        return epochs(loader)

    with is_silent():
        found = job(ranks, read)
    whole = sorted([*range(16), *range(N)] if name == "concatenated" else range(N))
    assert together(found, 0) == together(found, 1) == whole


def test_data_of_ours_inside_of_torchs_warn_in_order(job: Any) -> None:
    with pytest.warns(UserWarning, match="reads all of this ConcatDataset, in order: pass split=True"):
        assert [sorted(had[0]) for had in job(2, lambda: epochs(loader_over(halves())))] == [[*range(N)]] * 2


def test_other_data_inside_of_torchs_keep_torchs_meaning(job: Any) -> None:
    def read() -> Any:
        both = ConcatDataset([Subset(Range(N), range(N // 2)), Range(N // 2)])
        loader = loader_over(both, shuffle=True)
        assert isinstance(loader.sampler, RandomSampler)
        assert loader.splits == "nobody"
        return len(epochs(loader)[0])

    with is_silent():
        assert job(2, read) == [N, N]


def test_shares_inside_of_torchs_are_shares(tmp_path: Path, job: Any) -> None:
    def read() -> Any:
        loader = loader_over(ConcatDataset([share(tmp_path, seed=1), share(tmp_path, seed=2)]), shuffle=True)
        assert loader.splits == "the dataset"
        return epochs(loader)

    assert together(job(2, read), 0) == sorted([*range(N)] * 2)


SHARED = "which is split among the 2 ranks, and a {}, which is not"
REST = [manifest, lambda folder: Subset(Range(N), range(N))]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"split": True}, {"split": False}, {"sampler": range(4)}])
@pytest.mark.parametrize("rest", REST)
def test_a_share_and_unsplit_data_are_refused(rest: Any, options: Any, tmp_path: Path, job: Any) -> None:
    """Each rank would read all of one part, and a share of the other."""

    def mixed() -> Any:
        return ConcatDataset([Subset(share(tmp_path, shuffle="none"), range(4)), rest(tmp_path)])

    def refuse() -> None:
        with pytest.raises(ConfigError, match=SHARED.format(r"\w+") + ": replace a RankDataset by the data"):
            loader_over(mixed(), **options)

    job(2, refuse)
    (late,) = job(1, lambda: loader_over(mixed(), **options))
    if "split" not in options:
        with pytest.raises(ConfigError, match="split among the 2 ranks"):
            job(2, lambda: iter(late))


@pytest.mark.parametrize("rest", REST)
def test_the_remedies_for_mixed_data_work(rest: Any, tmp_path: Path, job: Any) -> None:
    def read(data: Any, **options: Any) -> Any:
        return job(2, lambda: epochs(loader_over(data(), shuffle=True, **options), 1))

    def below() -> Any:
        return ConcatDataset([share(tmp_path).manifest, rest(tmp_path)])

    twice = sorted([*range(N)] * 2)
    assert together(read(below, split=True), 0) == twice
    assert [sorted(each[0]) for each in read(below, split=False)] == [twice] * 2
    mixed = read(lambda: ps.Mixture([(manifest(tmp_path), 0.5), (rest(tmp_path), 0.5)]))
    assert [len(each[0]) for each in mixed] == [N, N]


def test_a_share_that_was_opened_whole_is_unsplit_data(tmp_path: Path, job: Any) -> None:
    def read() -> Any:
        whole = share(tmp_path, shuffle="none", rank=0, world_size=1)
        return epochs(loader_over(ConcatDataset([whole, Subset(Range(N), range(N))]), split=False), 1)

    assert [sorted(each[0]) for each in job(2, read)] == [sorted([*range(N)] * 2)] * 2


def test_unsplit_data_of_ours_and_others_are_refused_with_shuffle(job: Any) -> None:
    """The loader would split one of them by its rule, and not the other."""

    def read(**options: Any) -> Any:
        return epochs(loader_over(ConcatDataset([Numbers(), Range(N)]), **options))

    def refuse() -> None:
        with pytest.raises(ConfigError, match="contains a Numbers, " + SHARED.format("Range") + ": pass split=True"):
            read(shuffle=True)

    job(2, refuse)
    twice = sorted([*range(N)] * 2)
    assert together(job(2, lambda: read(shuffle=True, split=True)), 0) == twice
    assert [sorted(had[0]) for had in job(2, lambda: read(shuffle=True, split=False))] == [twice, twice]
    with pytest.warns(UserWarning, match="reads all of this ConcatDataset, in order"):
        job(2, read)


def test_samplers_over_shares_inside_of_torchs_are_refused(tmp_path: Path, job: Any) -> None:
    def refuse() -> None:
        inside = Subset(share(tmp_path), range(4))
        for make in (ps.DistributedSampler, ps.InfiniteSampler):
            with pytest.raises(ps.errors.PenstockError, match="already one rank's share"):
                make(inside)
        with pytest.raises(PartitionError, match="one rank's share of a RankDataset"):
            ps.Mixture([(inside, 1)])

    job(2, refuse)


# Samplers and iterable data sets.


@pytest.mark.parametrize("split", [True, False])
def test_a_sampler_says_itself_what_a_rank_reads(split: bool) -> None:
    with pytest.raises(ConfigError, match=r"split= is for.* a range determines .*: omit it"):
        loader_over(Range(N), sampler=range(N), split=split)
    batches = ps.BatchSampler(ps.SequentialSampler(Range(N)), 4, False)
    with pytest.raises(ConfigError, match="Here a BatchSampler determines"):
        ps.DataLoader(Range(N), batch_sampler=batches, split=split)
    with pytest.raises(ConfigError, match="Here a Stream determines"):
        loader_over(Stream(N), split=split)


def test_who_splits_is_said(tmp_path: Path, job: Any) -> None:
    def look() -> None:
        data = Numbers()
        assert loader_over(data, sampler=ps.DistributedSampler(data)).splits == "a sampler"
        assert loader_over(data, sampler=ps.RandomSampler(data)).splits == "nobody"
        assert loader_over(data).splits == "nobody"
        assert loader_over(Subset(share(tmp_path, shuffle="none"), range(4)), shuffle=True).splits == "the dataset"
        stream = ps.MPDataset(manifest(tmp_path), batch_size=4)
        assert loader_over(stream).splits == "the dataset"

    job(2, look)


def test_the_report_says_that_the_loader_splits(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job(2, lambda: loader_over(Numbers(), shuffle=True).report())
    assert "split by the loader" in " ".join(capsys.readouterr().out.split())
    job(2, lambda: loader_over(Numbers()).report())
    assert "split by" not in capsys.readouterr().out


def test_a_split_given_twice_is_refused(tmp_path: Path, job: Any) -> None:
    def refuse() -> None:
        data = share(tmp_path)
        sampler = torch.utils.data.DistributedSampler(np.arange(N), num_replicas=2, rank=0)  # type: ignore[var-annotated, arg-type]
        with pytest.raises(PartitionError, match="would split it again"):
            loader_over(data, sampler=sampler)

    job(2, refuse)


def manifest_of_eight(path: Path) -> ps.Manifest:
    file = path / "eight.txt"
    file.write_text("".join(f"{row}.jpg {row}\n" for row in range(8)))
    return ps.Manifest.open(file)


@pytest.mark.parametrize("split", ["yes", 0, 1.0])
def test_split_is_true_false_or_none(split: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split takes True, False or None"):
        ps.DataLoader(manifest_of_eight(tmp_path), split=split)  # type: ignore[arg-type]


def test_a_whole_share_inside_of_a_subset_does_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    whole = torch.utils.data.Subset(ps.RankDataset(manifest_of_eight(tmp_path), rank=0, world_size=1), range(4))
    with pytest.raises(ConfigError, match="opened with world_size=1"):
        ps.DataLoader(whole, split=True)
