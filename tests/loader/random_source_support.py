"""Data sets of every kind for random programs, and what a run over them must deliver, by arithmetic alone.

`Job` runs a program on all ranks in lock step: it is stopped, goes on in new objects with another number of ranks,
batch size or executor, and compares every batch with the place in the epoch's order where the job is.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import torch
from loader_support import EXECUTORS
from PIL import Image
from source_cases import (
    END,
    SOURCES,
    number_of,
    per_file,
    write_array,
    write_documents,
    write_tar,
    write_text,
    write_tokens,
)
from state_support import IteratorStream, PlainStream, StatefulStream
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import penstock as ps
import penstock.wds as wds
from penstock.datasets.lmdb import LoadLmdb, write_keys
from penstock.datasets.source_dataset import SourceDataset
from penstock.plan.share import SharePlan

N = 23
NUMBERS = list(range(N))
SEED = 3

Step = tuple[Any, ...]


@dataclass(frozen=True)
class Setup:
    """How a job's loaders are made. The last three are the same for the whole job."""

    world: int = 1
    batch_size: int = 4
    executor: str = "inline"
    remainder: str = "pad"
    mini_epochs: int = 1
    drop_last: bool = False

    def deal(self, rank: int) -> dict[str, Any]:
        """Return the options of a data set that shares itself out."""
        return {"rank": rank, "world_size": self.world, "seed": SEED, "remainder": self.remainder}


def as_list(samples: list[Any]) -> list[Any]:
    """Collate a batch to its items."""
    return list(samples)


def drawn(record: Any) -> tuple[int, float]:
    """Return which record it is, and a draw of the sample's own generator."""
    return number_of(record), float(ps.generator().random())


drawn.pure = True  # type: ignore[attr-defined]


def drawn_value(key: str, value: bytes) -> tuple[int, float]:
    """Return the same of a value in a database."""
    del key
    return drawn(torch.tensor(list(value)))


class Words(Dataset[Any]):
    """A user's own map-style data set."""

    pure = True

    def __init__(self, first: int = 0, n: int = N) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return self.first + index, float(ps.generator().random())


@dataclass(repr=False)
class Case:
    """A data set whose samples have a place in an epoch's order.

    Args:
        make: the data set of one rank.
        options: of its loader, besides those of the setup.
        items: a batch as the items that are compared, each with its number first.
        shuffle: the order's name, as in `penstock.make_order`, with its options; None where that is a mixture's.
        minis: whether it has mini-epochs.
        batches: whether the data set makes the batches, whose size is then the job's.
        once: whether an epoch has every sample once.
    """

    make: Callable[[Setup, int], Any]
    options: Callable[[Setup, Any, int], dict[str, Any]] = lambda setup, dataset, rank: {}
    items: Callable[[Any], list[Any]] = as_list
    shuffle: tuple[str, dict[str, int]] | None = ("global", {})
    minis: bool = True
    batches: bool = False
    once: bool = True
    orders: dict[int, list[Any]] = field(default_factory=dict)

    def loader(self, setup: Setup, rank: int) -> ps.DataLoader[Any]:
        """Return one rank's loader."""
        dataset = self.make(setup, rank)
        options: dict[str, Any] = {
            "batch_size": setup.batch_size,
            "drop_last": setup.drop_last and not self.batches,
            "executor": setup.executor,
            "num_workers": EXECUTORS[setup.executor],
            "collate_fn": as_list,
        }
        return ps.DataLoader(dataset, **(options | self.options(setup, dataset, rank)))

    def order(self, epoch: int) -> list[Any]:
        """Return the items of a whole epoch: one rank that never stopped, one sample at a time."""
        if epoch not in self.orders:
            alone = Setup(batch_size=4, remainder="uneven")
            if self.minis:
                dataset = self.make(alone, 0)
                dataset.set_epoch(epoch)
                found = [dataset[index] for index in range(len(dataset))]
                found = [item for one in found for item in self.items(one if self.items is not as_list else [one])]
            else:
                loader = self.loader(alone, 0)
                loader.set_epoch(epoch)
                found = [item for batch in loader for item in self.items(batch)]
            if self.shuffle is not None:
                name, block = self.shuffle
                order = ps.make_order(name, N, seed=SEED, epoch=epoch, **block)
                assert [item[0] for item in found] == order[np.arange(N)].tolist()
            self.orders[epoch] = found
        return self.orders[epoch]


def images(folder: Path) -> Path:
    """Write a folder of class folders with a picture each, of which the class is the number."""
    for number in NUMBERS:
        (folder / f"{number:02d}").mkdir(parents=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / f"{number:02d}" / "one.png")
    return folder


def database(folder: Path) -> Path:
    """Write an LMDB database with a byte a value, and the manifest of its keys beside it."""
    path = folder / "data.lmdb"
    with lmdb.open(str(path), map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        for number in NUMBERS:
            transaction.put(f"{number:03d}".encode(), bytes([number]))
    write_keys(path, folder / "keys.txt")
    return path


def numbered(batch: Any) -> list[Any]:
    """Return the items of a batch that has only numbers, or numbers first."""
    values = batch[0] if isinstance(batch, list | tuple) else batch
    return [(int(number),) for number in np.asarray(values).reshape(len(values), -1)[:, 0].tolist()]


def by_label(batch: Any) -> list[Any]:
    """Return the labels of a batch of pictures, and what is in them."""
    return [(int(label), int(image[0, 0, 0])) for image, label in batch]


def by_number(batch: Any) -> list[Any]:
    """Return the numbers of a batch of dicts, or of one dict."""
    return [(int(item["number"]),) for item in (batch if isinstance(batch, list) else [batch])]


def sharing(make: Callable[..., Any], **options: Any) -> Case:
    """Return a case of a data set that shares itself out and takes ``load``."""
    return Case(lambda setup, rank: make(load=drawn, mini_epochs=setup.mini_epochs, **setup.deal(rank), **options))


def sampled(dataset: Any, items: Callable[[Any], list[Any]] = as_list, **options: Any) -> Case:
    """Return a case of somebody's data set under our sampler, which shares out."""

    def over(setup: Setup, dataset: Any, rank: int) -> dict[str, Any]:
        sampler = ps.DistributedSampler(
            dataset, setup.world, rank, shuffle="global", seed=SEED, remainder=setup.remainder
        )
        return {"sampler": sampler, **options}

    return Case(lambda setup, rank: dataset, over, items, minis=False)


def mixture(sources: list[Any], *, once: bool, **options: Any) -> Case:
    """Return a case of a mixture."""

    def make(setup: Setup, rank: int) -> Any:
        return ps.Mixture(sources, mini_epochs=setup.mini_epochs, **setup.deal(rank), **options)

    return Case(make, shuffle=None, once=once)


def cases(folder: Path, address: str) -> dict[str, Case]:
    """Return every kind of data set whose samples have a place in an order.

    Args:
        folder: for files.
        address: of a server that serves ``train``, the rows of `write_text`.
    """

    def place(name: str) -> Path:
        path = folder / name
        path.mkdir()
        return path

    sources: dict[str, Any] = {name: make(place(name), NUMBERS) for name, make in SOURCES.items()}
    arrays = per_file(place("rows"), "row-{}.npy", NUMBERS, write_array)
    labels = per_file(place("labels"), "label-{}.npy", NUMBERS, write_array)
    tokens = per_file(place("tokens 2"), "tokens-{}.npy", NUMBERS, write_tokens)
    documents = per_file(place("documents 2"), "tokens-{}.npy", NUMBERS, write_documents)
    videos = [record.path for record in sources["videos"].records(np.arange(N))]
    manifest, folder_of_mds, set_of_shards = sources["text"], sources["MDS"], sources["shards"]
    pictures = ps.open(images(place("pictures"))).source
    base = database(folder)
    keys = ps.Manifest.open(folder / "keys.txt", label=None)
    load = LoadLmdb(base, decode=drawn_value)
    load.pure = True  # type: ignore[attr-defined]
    return {
        **{
            name: sharing(lambda source=sources[name], **options: ps.RankDataset(source, **options))
            for name in ("text", "csv", "jsonl", "parquet", "arrow")
        },
        "in blocks": Case(
            lambda setup, rank: ps.RankDataset(
                manifest, group=4, load=drawn, mini_epochs=setup.mini_epochs, **setup.deal(rank)
            ),
            shuffle=("block", {"block_size": 6, "window": 1}),
        ),
        "unshuffled": Case(
            lambda setup, rank: ps.RankDataset(
                manifest, shuffle="none", load=drawn, mini_epochs=setup.mini_epochs, **setup.deal(rank)
            ),
            shuffle=("none", {}),
        ),
        "pictures": Case(
            lambda setup, rank: ps.ImageDataset(
                ps.RankDataset(pictures, mini_epochs=setup.mini_epochs, **setup.deal(rank))
            ),
            items=lambda batch: by_label(batch if isinstance(batch, list) else [batch]),
        ),
        "videos": Case(
            lambda setup, rank: ps.VideoDataset(
                videos, frames=2, size=8, labels=NUMBERS, mini_epochs=setup.mini_epochs, **setup.deal(rank)
            ),
            items=lambda batch: [
                (int(label), int(video.sum())) for video, label in (batch if isinstance(batch, list) else [batch])
            ],
        ),
        "robots": Case(
            lambda setup, rank: ps.LeRobotDataset(sources["robots"], mini_epochs=setup.mini_epochs, **setup.deal(rank)),
            items=by_number,
        ),
        "arrays": sharing(lambda **options: ps.ArrayDataset(arrays, **options)),
        "labelled arrays": sharing(lambda **options: ps.ArrayDataset(arrays, labels=labels, **options)),
        "arrays in batches": Case(
            lambda setup, rank: ps.ArrayDataset(arrays, mini_epochs=setup.mini_epochs, **setup.deal(rank)),
            lambda setup, dataset, rank: {"collate_fn": None},
            lambda batch: numbered(batch.reshape(-1)),
        ),
        "tokens": sharing(lambda **options: ps.TokenDataset(tokens, 3, **options)),
        "documents": sharing(lambda **options: ps.TokenDataset(documents, 3, end_token=END, **options)),
        "parquet table": sharing(lambda **options: ps.TableDataset(sources["parquet table"], **options)),
        "arrow table": sharing(lambda **options: ps.TableDataset(sources["arrow table"], **options)),
        "shards": sharing(lambda **options: ps.ShardDataset(set_of_shards, **options)),
        "MDS": sharing(lambda **options: ps.MDSDataset(folder_of_mds, **options)),
        "compressed MDS": sharing(lambda **options: ps.MDSDataset(sources["compressed MDS"], **options)),
        "server": sharing(lambda **options: ps.RankServerDataset(address, "train", **options)),
        "LMDB": Case(
            lambda setup, rank: ps.RankDataset(keys, load=load, mini_epochs=setup.mini_epochs, **setup.deal(rank))
        ),
        "a user's source": sharing(
            lambda load, **share: SourceDataset(sources["a user's"], SharePlan(sources["a user's"], **share), load)
        ),
        "stream of rows": Case(
            lambda setup, rank: ps.MPDataset(
                manifest,
                batch_size=setup.batch_size,
                drop_last=setup.drop_last,
                load=drawn,
                **setup.deal(rank),
            ),
            minis=False,
            batches=True,
        ),
        "mixture": mixture([(Words(0, 12), 1), (Words(12, 11), 1)], mode="repeat", once=True),
        "mixture with a subset": mixture(
            [(Subset(Words(), range(3, 14)), 0.7), (Words(30, 9), 0.3)], stop="all", once=False
        ),
        "somebody's": sampled(Words()),
        "concatenated": sampled(ConcatDataset([Words(0, 12), Words(12, 11)])),
        "tensors": sampled(TensorDataset(torch.arange(N)), lambda batch: [(number_of(item),) for item in batch]),
        "shards under a sampler": sampled(set_of_shards, lambda batch: [(number_of(sample),) for sample in batch]),
        "served rows under a sampler": sampled(
            ps.ServerDataset(address, "train"), lambda batch: [(row,) for _, _, row in batch]
        ),
    }


class Place(NamedTuple):
    """Where a job is.

    ``done`` and ``base`` are the mini-epochs and samples that were behind the job when the epoch was dealt out, and
    ``had`` each rank's samples of this mini-epoch since.
    """

    epoch: int = 0
    mini_epoch: int = 0
    done: int = 0
    base: int = 0
    had: tuple[int, ...] = ()


def positions(n: int, setup: Setup, rank: int, place: Place) -> tuple[list[int], int, int]:
    """Return a rank's positions in a mini-epoch, and where that begins and ends in the epoch."""
    minis, mini = setup.mini_epochs - place.done, place.mini_epoch - place.done
    if mini < 0:
        return [], place.base, place.base
    left, parts = n - place.base, setup.world * minis
    share = left // parts if setup.remainder == "drop" else -(-left // parts)
    end = n if setup.remainder == "uneven" else place.base + share * parts
    begin = min(place.base + mini * share * setup.world, end)
    stop = min(begin + share * setup.world, end)
    return list(range(begin + rank, stop, setup.world)), begin, stop


class Job:
    """All ranks of a job in lock step.

    Args:
        case: its data set.
        setup: at its beginning.
    """

    def __init__(self, case: Case, setup: Setup) -> None:
        self.case, self.setup = case, setup
        self.place = Place(had=(0,) * setup.world)
        self.loaded = False
        """Whether a state was loaded, and nothing has begun since."""
        self.left = False
        """Whether the pass at this place was broken off."""
        self.counts: Counter[int] | None = Counter()
        """What the ranks have had of this epoch; None where somebody has chosen a place in it."""
        self.batches = 0
        self.iterators: list[Iterator[Any]] | None = None
        self._make()

    def __call__(self, program: list[Step]) -> None:
        """Run a program, and compare all that it delivers."""
        for step in program:
            getattr(self, step[0])(*step[1:])
        for loader in self.loaders:
            loader.close()

    def _make(self) -> None:
        self.loaders = [self.case.loader(self.setup, rank) for rank in range(self.setup.world)]

    # Steps.

    def take(self, count: int) -> None:
        """Have so many batches on every rank. If one of them has no more, all go to the end."""
        self._begin()
        assert self.iterators is not None
        found = [list(itertools.islice(iterator, count)) for iterator in self.iterators]
        ended = any(len(batches) < count for batches in found)
        if ended:
            for batches, iterator in zip(found, self.iterators, strict=True):
                batches += iterator
        self._check(found, whole=ended)
        if ended:
            self._end()

    def finish(self) -> None:
        """Go through the rest of the mini-epoch."""
        self.take(N + 1)

    def leave(self) -> None:
        """Break off the loop."""
        if self.iterators is not None:
            self.iterators, self.left = None, True

    def set_epoch(self, epoch: int, data_set: bool = False) -> None:
        """Tell each loader, or its data set, an epoch between two passes, as training loops do."""
        if self.iterators is not None:
            return
        for loader in self.loaders:
            (loader.dataset if data_set and self.case.minis else loader).set_epoch(epoch)
        if not (self.loaded and epoch == self.place.epoch):
            self._go(Place(epoch))

    def set_mini_epoch(self, mini_epoch: int) -> None:
        """Tell each data set a mini-epoch between two passes."""
        if self.iterators is not None or not self.case.minis or mini_epoch >= self.setup.mini_epochs:
            return
        for loader in self.loaders:
            loader.dataset.set_mini_epoch(mini_epoch)
        place = self.place
        if not (self.loaded and mini_epoch == place.mini_epoch):
            done, base = (0, 0) if mini_epoch < place.done else (place.done, place.base)
            self._go(Place(place.epoch, mini_epoch, done, base))
            self.counts = None

    def crash(self, changes: dict[str, Any], saver: int, epoch_first: bool) -> None:
        """End all processes, and go on from a state.

        Args:
            changes: of the setup.
            saver: which rank's state all of them load. If they are not at the same sample, each loads its own.
            epoch_first: tell the loaders the epoch that they are in.
        """
        states = [json.loads(json.dumps(loader.state_dict())) for loader in self.loaders]
        for loader in self.loaders:
            loader.close()
        even = len(set(self.place.had)) == 1
        changes = changes if even else changes | {"world": self.setup.world}
        if self.case.batches:
            changes = changes | {"batch_size": self.setup.batch_size}
        old, self.setup = self.setup, replace(self.setup, **changes)
        self.iterators, self.left, self.loaded = None, False, True
        self._make()
        if even:
            states = [states[saver % old.world]] * self.setup.world
        for loader, state in zip(self.loaders, states, strict=True):
            loader.load_state_dict(state)
            assert loader.epoch == self.place.epoch
        if self.setup.world != old.world:
            self.place = self._dealt_anew(old)
        if epoch_first:
            for loader in self.loaders:
                loader.set_epoch(self.place.epoch)

    # The model.

    @property
    def _order(self) -> list[Any]:
        return self.case.order(self.place.epoch)

    def _dealt_anew(self, old: Setup) -> Place:
        """Return the place of other ranks: behind what all ranks together have had."""
        place, n = self.place, len(self._order)
        _, begin, stop = positions(n, old, 0, place)
        consumed = min(begin + place.had[0] * old.world, stop, n)
        finished = place.mini_epoch < place.done or consumed >= min(stop, n)
        return place._replace(done=place.mini_epoch + finished, base=consumed, had=(0,) * self.setup.world)

    def _go(self, place: Place) -> None:
        """Go to the beginning of a pass that somebody has chosen."""
        self.place = place._replace(had=(0,) * self.setup.world)
        self.loaded = self.left = False
        self.counts = Counter() if place.mini_epoch == 0 else None

    def _begin(self) -> None:
        if self.iterators is None:
            if self.left:
                self._advance(whole=False)
            self.iterators, self.loaded = [iter(loader) for loader in self.loaders], False

    def _end(self) -> None:
        self.iterators = None
        self._advance(whole=True)

    def _advance(self, *, whole: bool) -> None:
        place = self.place
        self.counts = self.counts if whole and not self.setup.drop_last else None
        self.left = False
        if place.mini_epoch + 1 < self.setup.mini_epochs:
            self.place = place._replace(mini_epoch=place.mini_epoch + 1, had=(0,) * self.setup.world)
        else:
            self._check_epoch()
            self._go(Place(place.epoch + 1))

    def _check(self, found: list[list[Any]], *, whole: bool) -> None:
        """Compare what every rank got with the positions that are its own."""
        order, had = self._order, list(self.place.had)
        for rank, batches in enumerate(found):
            mine = positions(len(order), self.setup, rank, self.place)[0]
            rest = mine[had[rank] :]
            size = self.setup.batch_size
            chunks = [rest[begin : begin + size] for begin in range(0, len(rest), size)]
            if self.setup.drop_last and chunks and len(chunks[-1]) < size:
                chunks.pop()
            expected = chunks if whole else chunks[: len(batches)]
            seen = [self.case.items(batch) for batch in batches]
            where = f"rank {rank} of {self.setup.world} at {self.place}"
            assert [len(items) for items in seen] == [len(chunk) for chunk in expected], where
            for item, position in zip(itertools.chain(*seen), itertools.chain(*expected), strict=True):
                if position < len(order):
                    assert item == order[position], f"{where}, position {position}"
                else:
                    assert item[0] == order[position % len(order)][0], f"{where}, padding {position}"
            had[rank] += sum(map(len, seen))
            if self.counts is not None:
                self.counts.update(item[0] for items in seen for item in items)
        if self.setup.remainder != "uneven":
            assert len({len(batches) for batches in found}) == 1
        self.place = self.place._replace(had=tuple(had))

    def _check_epoch(self) -> None:
        """Check that all ranks together have had every sample of the epoch."""
        if self.counts is None or not self.case.once:
            return
        if self.setup.remainder == "drop":
            assert max(self.counts.values(), default=0) <= 1
        else:
            assert set(self.counts) == set(NUMBERS)
        if self.setup.remainder == "uneven":
            assert self.counts.total() == N


# Streams.


def label(sample: Any) -> int:
    return int(sample["cls"])


def nothing_more(dataset: Any) -> dict[str, Any]:
    return {}


class StreamCase(NamedTuple):
    """A data set whose passes are what a loader gives that never stops.

    Args:
        make: the data set of one rank.
        epochs: whether they are those of epochs, which can be chosen.
        ranks: on how many ranks every sample comes once.
        options: of the loader, besides size and workers.
    """

    make: Callable[[int, int], Any]
    epochs: bool = False
    ranks: int = 1
    options: Callable[[Any], dict[str, Any]] = nothing_more


def streams(folder: Path) -> dict[str, StreamCase]:
    """Return every kind of stream, and data sets with an order of their own under somebody's sampler."""
    write_text(folder / "train.txt", NUMBERS)
    manifest = ps.Manifest.open(folder / "train.txt")

    def rows(mini_epochs: int = 1) -> Callable[[int, int], Any]:
        return lambda rank, world: ps.RankDataset(
            manifest, rank=rank, world_size=world, seed=SEED, load=drawn, mini_epochs=mini_epochs
        )

    (folder / "streamed").mkdir()
    shards = per_file(folder / "streamed", "{:03d}.tar", NUMBERS, write_tar, 3)
    packed = per_file(folder / "streamed", "{:03d}.tar.gz", NUMBERS, write_tar, 3)
    return {
        "shards": StreamCase(
            lambda rank, world: ps.StreamShards(shards, seed=SEED, load=label, rank=rank, world_size=world), True, 3
        ),
        "shuffled shards": StreamCase(
            lambda rank, world: ps.StreamShards(
                packed, seed=SEED, load=label, buffer_bytes=4000, rank=rank, world_size=world
            ),
            True,
            3,
        ),
        "mixed shards": StreamCase(
            lambda rank, world: ps.Mixture(
                [
                    (ps.StreamShards(shards[:4], seed=SEED, load=label, rank=0, world_size=1), 0.6),
                    (ps.StreamShards(packed[4:], seed=SEED, load=label, rank=0, world_size=1), 0.4),
                ],
                stop=31,
            ),
            True,
        ),
        "mixed streams": StreamCase(
            lambda rank, world: ps.Mixture([(IteratorStream(12), 0.5), (IteratorStream(11), 0.5)], stop=17, tag=True)
        ),
        "pipeline": StreamCase(
            lambda rank, world: wds.WebDataset(shards, shardshuffle=True).shuffle(7).map(label),
        ),
        "a user's with a state": StreamCase(lambda rank, world: StatefulStream(N)),
        "a user's with stateful iterators": StreamCase(lambda rank, world: IteratorStream(N)),
        "a user's without a state": StreamCase(lambda rank, world: PlainStream(N)),
        "a share under a sampler": StreamCase(
            rows(), True, options=lambda dataset: {"sampler": ps.RandomSampler(dataset, shuffle="global", seed=5)}
        ),
        "a share under torch's sampler": StreamCase(
            rows(), True, options=lambda dataset: {"sampler": torch.utils.data.RandomSampler(dataset), "seed": 5}
        ),
        "mini-epochs under a sampler": StreamCase(
            rows(3), options=lambda dataset: {"sampler": ps.RandomSampler(dataset, shuffle="global", seed=5)}
        ),
    }


class StreamJob:
    """The ranks of a job over a stream, each of which goes on from its own state.

    Args:
        case: the stream.
        world: ranks.
        batch_size, drop_last: of the loaders.
        workers: processes; none is inline.
    """

    def __init__(self, case: StreamCase, world: int, batch_size: int, drop_last: bool, workers: int = 0) -> None:
        self.case, self.world, self.batch_size, self.drop_last = case, world, batch_size, drop_last
        self.workers = workers
        self.number, self.had = 0, 0
        self.loaded = self.left = False
        self.iterators: list[Iterator[Any]] | None = None
        self.loaders = [self._loader(rank) for rank in range(world)]
        self.whole = [self._loader(rank) for rank in range(world)]
        """Those that never stop: their passes are the measure."""
        self.passes: list[list[list[Any]]] = []

    def __call__(self, program: list[Step]) -> None:
        """Run a program, and compare all that it delivers."""
        for step in program:
            getattr(self, step[0])(*step[1:])
        for loader in self.loaders:
            loader.close()

    def _loader(self, rank: int) -> ps.DataLoader[Any]:
        dataset = self.case.make(rank, self.world)
        options: dict[str, Any] = {"drop_last": self.drop_last, "collate_fn": as_list, "num_workers": self.workers}
        return ps.DataLoader(dataset, self.batch_size, **(options | self.case.options(dataset)))

    def _expected(self) -> list[list[Any]]:
        """Return the batches of each rank in the pass that runs."""
        while len(self.passes) <= self.number:
            self.passes.append([list(loader) for loader in self.whole])
            if self.case.ranks > 1 and not self.drop_last:
                assert sorted(itertools.chain(*itertools.chain(*self.passes[-1]))) == NUMBERS
        return self.passes[self.number]

    def take(self, count: int) -> None:
        """Have so many batches on every rank; at the end of one, all go to theirs."""
        expected = self._expected()
        if self.iterators is None:
            if self.left:
                self.number, self.had, self.left = self.number + 1, 0, False
                expected = self._expected()
            self.iterators, self.loaded = [iter(loader) for loader in self.loaders], False
        found = [list(itertools.islice(iterator, count)) for iterator in self.iterators]
        ended = any(len(batches) < count for batches in found)
        stop = None if ended else self.had + count
        for batches, iterator, right in zip(found, self.iterators, expected, strict=True):
            batches += iterator if ended else []
            assert batches == right[self.had : stop], f"pass {self.number}, batch {self.had}"
        self.had += count
        if ended:
            self.iterators, self.number, self.had = None, self.number + 1, 0

    def finish(self) -> None:
        """Go through the rest of the pass."""
        self.take(2 * N)

    def set_epoch(self, epoch: int, data_set: bool = False) -> None:
        """Tell each loader an epoch between two passes."""
        del data_set
        if self.case.epochs and self.iterators is None and not self.left:
            for loader in self.loaders:
                loader.set_epoch(epoch)
            if not (self.loaded and epoch == self.number):
                self.number, self.had, self.loaded = epoch, 0, False

    def crash(self, changes: dict[str, Any], saver: int, epoch_first: bool) -> None:
        """End all processes, and go on from the states in new ones."""
        del changes, saver
        states = [json.loads(json.dumps(loader.state_dict())) for loader in self.loaders]
        for loader in self.loaders:
            loader.close()
        self.loaders = [self._loader(rank) for rank in range(self.world)]
        for loader, state in zip(self.loaders, states, strict=True):
            loader.load_state_dict(state)
        self.iterators, self.loaded = None, True
        if epoch_first and self.case.epochs:
            self.set_epoch(self.number)
