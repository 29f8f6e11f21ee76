"""Training programs as data: setups of a loader, and steps that a run goes through with or without interruptions.

`Run` interprets a program. With ``stops=False`` it is the run that never stopped: crashes, evaluation passes and
questions are left out. Both must see the same batches.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.data
from entries_support import opened
from loader_support import EXECUTORS, draw_load
from torch.utils.data import Dataset

import penstock as ps

N = 23
GROUPS = [row * row % 3 for row in range(N)]
WEIGHTS = [1.0 + row % 4 for row in range(N)]
LENGTHS = [1 + row * 5 % 9 for row in range(N)]

Batch = list[Any]
Step = tuple[Any, ...]


class Rows(Dataset[Any]):
    """Each item is its index, and a draw of its own generator where it has one: under our loader."""

    pure = True
    draws = True

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float]:
        return int(index), float(ps.generator().random()) if self.draws else 0.0


def listed(samples: list[Any]) -> list[Any]:
    """Collate a batch into a list."""
    return list(samples)


@dataclass(frozen=True)
class Setup:
    """What a job's loaders are made of, besides their kind."""

    batch_size: int = 4
    rank: int = 0
    world: int = 1
    executor: str = "inline"
    seed: int | None = None
    """The loader's."""
    remainder: str = "pad"
    drop_last: bool = False


@dataclass
class Parts:
    """One rank's objects."""

    dataset: Any
    subject: Any = None
    """The sampler, or the data set with an order of its own: whoever has ``set_epoch``."""
    options: dict[str, Any] = field(default_factory=dict)
    generator: torch.Generator | None = None


Maker = Callable[[Setup], Parts]


def over(setup: Setup, sampler: Any, generator: torch.Generator | None = None) -> Parts:
    """Return the parts of a loader over a sampler of indices."""
    options = {"sampler": sampler, "batch_size": setup.batch_size, "drop_last": setup.drop_last}
    return Parts(Rows(), sampler, options, generator)


def in_batches(setup: Setup, sampler: Any, generator: torch.Generator | None = None) -> Parts:
    """Return the parts of a loader over a batch sampler."""
    del setup
    return Parts(Rows(), sampler, {"batch_sampler": sampler}, generator)


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def distributed(shuffle: Any) -> Maker:
    """Return a maker of `ps.DistributedSampler`; the block shuffle has blocks small enough to matter."""

    def make(setup: Setup) -> Parts:
        return over(setup, distributed_sampler(setup, shuffle))

    return make


def distributed_sampler(setup: Setup, shuffle: Any) -> ps.DistributedSampler:
    block: dict[str, Any] = {"block_size": 4, "window": 2} if shuffle == "block" else {}
    return ps.DistributedSampler(
        range(N), setup.world, setup.rank, shuffle=shuffle, seed=3, remainder=setup.remainder, **block
    )


def random(*, drawn: bool = False, **options: Any) -> Maker:
    """Return a maker of `ps.RandomSampler`; ``drawn``: from a generator."""

    def make(setup: Setup) -> Parts:
        generator = seeded_generator() if drawn else None
        return over(setup, ps.RandomSampler(range(N), generator=generator, **options), generator)

    return make


def weighted(*, drawn: bool = False, **options: Any) -> Maker:
    def make(setup: Setup) -> Parts:
        generator = seeded_generator() if drawn else None
        return over(setup, ps.WeightedRandomSampler(WEIGHTS, N - 4, generator=generator, **options), generator)

    return make


def grouped_sampler(setup: Setup, inner: Any, **options: Any) -> Any:
    if not isinstance(inner, ps.DistributedSampler):
        options |= {"world_size": setup.world, "rank": setup.rank}
    return ps.GroupedBatchSampler(inner, GROUPS, setup.batch_size, drop_last=setup.drop_last, **options)


def grouped(inner: Callable[[Setup], Any], **options: Any) -> Maker:
    return lambda setup: in_batches(setup, grouped_sampler(setup, inner(setup), **options))


def budget_sampler(setup: Setup) -> Any:
    remainder = None if setup.drop_last else setup.remainder
    return ps.TokenBudgetBatchSampler(
        LENGTHS,
        9 * setup.batch_size,
        seed=3,
        classes=4,
        drop_last=setup.drop_last,
        remainder=remainder,
        world_size=setup.world,
        rank=setup.rank,
    )


def batched_sampler(setup: Setup, inner: Any) -> Any:
    return ps.BatchSampler(inner, setup.batch_size, setup.drop_last)


def iterations(make: Callable[[Setup], Any], start: int = 0) -> Maker:
    return lambda setup: in_batches(setup, ps.IterationBasedBatchSampler(make(setup), 13, start))


def torch_random(*, drawn: bool = False, **options: Any) -> Maker:
    def make(setup: Setup) -> Parts:
        generator = seeded_generator() if drawn else None
        return over(setup, torch.utils.data.RandomSampler(Rows(), generator=generator, **options), generator)

    return make


def torch_drawn(kind: str, *, drawn: bool) -> Maker:
    def make(setup: Setup) -> Parts:
        generator = seeded_generator() if drawn else None
        if kind == "subset":
            return over(setup, torch.utils.data.SubsetRandomSampler(range(2, N), generator=generator), generator)
        return over(setup, torch.utils.data.WeightedRandomSampler(WEIGHTS, N, generator=generator), generator)

    return make


def torch_distributed(shuffle: bool) -> Maker:
    def make(setup: Setup) -> Parts:
        sampler: Any = torch.utils.data.DistributedSampler(
            Rows(), setup.world, setup.rank, shuffle=shuffle, seed=3, drop_last=setup.remainder == "drop"
        )
        return over(setup, sampler)

    return make


def shuffled(shuffle: Any, *, drawn: bool = False) -> Maker:
    """Return a maker of loaders without a sampler of the user's."""

    def make(setup: Setup) -> Parts:
        generator = seeded_generator() if drawn else None
        options: dict[str, Any] = {"shuffle": shuffle, "batch_size": setup.batch_size, "drop_last": setup.drop_last}
        return Parts(Rows(), None, options | ({"generator": generator} if drawn else {}), generator)

    return make


def rank_dataset(manifest: Any, **options: Any) -> Maker:
    def make(setup: Setup) -> Parts:
        dataset = ps.RankDataset(
            manifest,
            rank=setup.rank,
            world_size=setup.world,
            seed=3,
            remainder=setup.remainder,
            load=draw_load,
            **options,
        )
        return Parts(dataset, dataset, {"batch_size": setup.batch_size, "drop_last": setup.drop_last})

    return make


def mp_dataset(manifest: Any) -> Maker:
    def make(setup: Setup) -> Parts:
        dataset = ps.MPDataset(
            manifest,
            batch_size=setup.batch_size,
            rank=setup.rank,
            world_size=setup.world,
            seed=3,
            remainder=setup.remainder,
            load=draw_load,
        )
        return Parts(dataset, dataset, {"batch_size": setup.batch_size})

    return make


def global_order(setup: Setup) -> Any:
    del setup
    return ps.RandomSampler(range(N), shuffle="global", seed=3)


def repeated(setup: Setup) -> Any:
    del setup
    return ps.RandomSampler(range(N), replacement=True, num_samples=2 * N - 3, shuffle="global", seed=3)


def shares(setup: Setup) -> Any:
    return distributed_sampler(setup, "global")


def torchs_shares(setup: Setup) -> Any:
    return distributed_sampler(setup, True)


def unseeded(setup: Setup) -> Any:
    del setup
    return ps.RandomSampler(range(N))


def kinds(manifest: Any) -> dict[str, Maker]:
    """Return every kind of loader by name."""
    return {
        **{f"distributed-{shuffle}": distributed(shuffle) for shuffle in (True, False, "global", "block", "none")},
        "random": random(),
        "random-generator": random(drawn=True),
        "random-generator-many": random(drawn=True, num_samples=2 * N + 5),
        "random-generator-replacement": random(drawn=True, replacement=True, num_samples=2 * N),
        "random-global": random(shuffle="global", seed=3),
        "random-block": random(shuffle="block", seed=3, block_size=4, window=2),
        "random-global-few": random(shuffle="global", num_samples=N - 5),
        "random-global-many": random(shuffle="global", num_samples=2 * N + 5),
        "random-global-replacement": random(shuffle="global", replacement=True, num_samples=N + 5),
        "random-replacement": random(replacement=True, num_samples=N + 5),
        "random-many": random(num_samples=2 * N + 5),
        "weighted-seeded": weighted(seed=3),
        "weighted": weighted(),
        "weighted-generator": weighted(drawn=True),
        "weighted-apart": weighted(seed=3, replacement=False),
        "sequential": lambda setup: over(setup, ps.SequentialSampler(range(N))),
        "infinite": lambda setup: over(
            setup, ps.InfiniteSampler(range(N), seed=3, rank=setup.rank, world_size=setup.world)
        ),
        "infinite-torch": lambda setup: over(
            setup, ps.InfiniteSampler(range(N), shuffle=True, seed=3, rank=setup.rank, world_size=setup.world)
        ),
        "batch": lambda setup: in_batches(setup, batched_sampler(setup, shares(setup))),
        "batch-unseeded": lambda setup: in_batches(setup, batched_sampler(setup, unseeded(setup))),
        "grouped": grouped(shares),
        "grouped-torch": grouped(torchs_shares),
        "grouped-first": grouped(shares, order="first"),
        "grouped-class": grouped(shares, order="class"),
        "grouped-random": grouped(global_order),
        "grouped-repeated": grouped(repeated),
        "token-budget": lambda setup: in_batches(setup, budget_sampler(setup)),
        "iterations": iterations(lambda setup: batched_sampler(setup, shares(setup))),
        "iterations-started": iterations(lambda setup: batched_sampler(setup, shares(setup)), 5),
        "iterations-grouped": iterations(lambda setup: grouped_sampler(setup, shares(setup))),
        "iterations-repeated": iterations(lambda setup: grouped_sampler(setup, repeated(setup))),
        "torch-random": torch_random(),
        "torch-random-generator": torch_random(drawn=True),
        "torch-random-many": torch_random(drawn=True, num_samples=2 * N + 5),
        "torch-random-replacement": torch_random(replacement=True, num_samples=N + 5),
        "torch-distributed": torch_distributed(True),
        "torch-distributed-none": torch_distributed(False),
        "torch-subset": torch_drawn("subset", drawn=False),
        "torch-subset-generator": torch_drawn("subset", drawn=True),
        "torch-weighted": torch_drawn("weighted", drawn=False),
        "torch-weighted-generator": torch_drawn("weighted", drawn=True),
        "torch-sequential": lambda setup: over(setup, torch.utils.data.SequentialSampler(range(N))),
        "list": lambda setup: over(setup, [row * 7 % N for row in range(N)]),
        "batch-list": lambda setup: in_batches(setup, [[0, 1], [5], [3, 2, 1], [7, 8], [9], [4, 6]]),
        "shuffle": shuffled(True),
        "shuffle-generator": shuffled(True, drawn=True),
        "shuffle-global": shuffled("global"),
        "no-shuffle": shuffled(False),
        "rank-dataset": rank_dataset(manifest),
        "rank-dataset-block": rank_dataset(manifest, group=4),
        "rank-dataset-mini": rank_dataset(manifest, mini_epochs=3),
        "mp-dataset": mp_dataset(manifest),
    }


LOADERS_SEED = ("random", "torch-random", "torch-distributed", "torch-subset", "torch-weighted", "sequential", "list")
"""Kinds that a seed of the loader changes; others have their own."""


def loader_of(parts: Parts, setup: Setup) -> ps.DataLoader[Any]:
    """Return a loader over the parts."""
    return ps.DataLoader(
        parts.dataset,
        collate_fn=listed,
        executor=setup.executor,
        num_workers=EXECUTORS[setup.executor],
        seed=setup.seed,
        **parts.options,
    )


@contextmanager
def undisturbed(parts: Parts) -> Iterator[None]:
    """Leave torch's global generator and the user's where they were."""
    own = None if parts.generator is None else parts.generator.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    if parts.generator is not None and own is not None:
        parts.generator.set_state(own)


def order_of(batches: list[Any]) -> list[Any]:
    """Return what a program saw without the draws."""
    return [batch if isinstance(batch, str) else [index for index, _ in batch] for batch in batches]


class Run:
    """A program that runs.

    Args:
        make: makes the parts of the loader.
        setup: of the loader.
        stops: whether it is interrupted.
    """

    def __init__(self, make: Maker, setup: Setup, *, stops: bool) -> None:
        self.make, self.setup, self.stops = make, setup, stops
        self.parts = make(setup)
        self.loader: Any = loader_of(self.parts, setup)
        with undisturbed(self.parts):
            self.by_chance = self.parts.generator is not None or (
                "base_seed" in opened(loader_of(make(setup), setup).state_dict())
            )
        """Whether passes draw from torch's generator or the user's."""
        self.drawn = self.resumed = False
        """Whether a loaded state has drawn for the pass to come."""
        self.seen: list[Any] = []
        self.iterator: Iterator[Any] | None = None
        self.left: Iterator[Any] | None = None
        """The pass that was broken off last; a crash takes it up again."""
        self.had = 0
        self.told = False
        """Whether an epoch was set since the last batch."""
        self.fresh = False
        """Whether a resumed pass has had nothing since the crash."""
        self.evaluated = False
        self.wished = False
        """Whether an epoch was set in the pass that runs: a state does not hold that for the pass after."""

    def __call__(self, program: list[Step]) -> list[Any]:
        """Return what the program sees: batches, and where passes begin and end."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for step in program:
                getattr(self, step[0])(*step[1:])
            self.loader.close()
        return self.seen

    # What changes the course of the program.

    def begin(self) -> None:
        """Begin a pass."""
        self._settle()
        self.iterator, self.left, self.had = iter(self.loader), None, 0
        self.told = self.wished = self.fresh = False
        self.seen.append("begin")

    def take(self, count: int) -> None:
        """Have so many batches."""
        if self.iterator is None:
            self.begin()
        assert self.iterator is not None
        for _ in range(count):
            batch = next(self.iterator, None)
            self.told = self.fresh = self.drawn = self.resumed = False
            if batch is None:
                self.iterator = self.left = None
                self.seen.append("end")
                break
            self.seen.append(batch)
            self.had += 1

    def finish(self) -> None:
        """Read the pass to its end; an endless one for long enough."""
        self.take(2 * N)
        self.leave()

    def leave(self) -> None:
        """Break off the loop."""
        self._settle()
        if self.iterator is not None:
            self.left, self.iterator = self.iterator, None

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader an epoch."""
        self._tell("set_epoch", epoch)

    def set_subject_epoch(self, epoch: int) -> None:
        """Tell the sampler or the data set."""
        self._tell("set_subject_epoch", epoch)

    def set_mini_epoch(self, mini_epoch: int) -> None:
        """Tell the data set a mini-epoch."""
        # Of the epoch that some loader showed last.
        if getattr(self.parts.subject, "mini_epochs", 1) > mini_epoch and not self.evaluated:
            self._tell("set_mini_epoch", mini_epoch)

    def _tell(self, step: str, number: int) -> None:
        verb = step.replace("subject_", "")
        target: Any = self.loader if step == "set_epoch" else self.parts.subject
        # Before the first batch of a resumed pass it would move that; in the run that never stopped it has had batches.
        # And a state at the beginning of a pass holds what that has drawn, for its own epoch alone.
        if not hasattr(target, verb) or (self.fresh and self.had) or (self.drawn and self.by_chance):
            return
        # The epoch of a state just loaded keeps its mini-epoch.
        if self.resumed and verb == "set_epoch" and getattr(self.parts.subject, "mini_epochs", 1) > 1:
            return
        getattr(target, verb)(number)
        self.told = self.wished = True

    def _settle(self) -> None:
        """Have a batch, if the pass that has begun is one of chance: a state draws what else its first batch does."""
        if self.by_chance and self.iterator is not None and (self.fresh or not self.had):
            self.take(1)

    @property
    def _unclear(self) -> bool:
        """Whether nobody can know which pass goes on: the one that runs, or the one for which an epoch was set."""
        passes = self.iterator is not None or self.left is not None
        return passes and (
            (self.wished and self.had > 0) or (self.by_chance and self.iterator is None and not self.had)
        )

    # Interruptions.

    def crash(self, changes: dict[str, Any], epoch_first: bool) -> None:
        """End the process, and go on from a state in a new one.

        Args:
            changes: of the setup.
            epoch_first: tell the loader its epoch, as training loops do.
        """
        self._settle()
        if self._unclear:
            return
        lives = (self.iterator is not None or self.left is not None) and not self.told
        self.resumed = True
        self.drawn = not lives
        if not self.stops:
            running = self.left if self.iterator is None else self.iterator
            self.iterator = running if lives else None
            self.fresh = lives
            self._settle()
            return
        state = json.loads(json.dumps(self.loader.state_dict()))
        chance = torch.get_rng_state()
        self.loader.close()
        self.iterator = self.left = None
        torch.manual_seed(77)
        self.setup = Setup(**(vars(self.setup) | changes))
        self.parts = self.make(self.setup)
        self.loader = loader_of(self.parts, self.setup)
        self.loader.load_state_dict(state)
        torch.set_rng_state(chance)
        if epoch_first:
            self.loader.set_epoch(self.loader.epoch)
        if lives:
            self.iterator, self.fresh = iter(self.loader), True
            self._settle()

    def state(self) -> None:
        """Ask for a state."""
        self._settle()
        if self.stops and not self._unclear:
            json.dumps(self.loader.state_dict())

    def look(self) -> None:
        """Ask for lengths and epochs."""
        if self.stops:
            self.loader.epoch  # noqa: B018
            for sized in (self.loader, self.parts.subject):
                with suppress(TypeError):
                    len(sized)

    def evaluate(self, count: int) -> None:
        """Read the same sampler or data set by another loader."""
        self.evaluated = True
        if self.stops:
            with undisturbed(self.parts):
                list(
                    itertools.islice(loader_of(self.parts, Setup(**(vars(self.setup) | {"executor": "inline"}))), count)
                )

    def walk(self, count: int) -> None:
        """Go through the sampler or the data set by hand."""
        self.evaluated = True
        if self.stops and self.parts.subject is not None:
            with undisturbed(self.parts):
                list(itertools.islice(self.parts.subject, count))

    def copy(self, how: str) -> None:
        """Copy the loader, and read the copy."""
        if self.stops:
            with undisturbed(self.parts):
                other = copy.deepcopy(self.loader) if how == "deepcopy" else pickle.loads(pickle.dumps(self.loader))
                next(iter(other), None)


def torchs_parts(name: str, setup: Setup) -> Parts:
    """Return what torch has in the place of our samplers that follow it, by the name of the kind."""
    generator = seeded_generator() if "generator" in name else None
    options: dict[str, Any] = {"batch_size": setup.batch_size, "drop_last": setup.drop_last}
    drop = setup.remainder == "drop"
    samplers: dict[str, Callable[[], Any]] = {
        "distributed-True": lambda: torch.utils.data.DistributedSampler(
            Rows(), setup.world, setup.rank, seed=3, drop_last=drop
        ),
        "distributed-False": lambda: torch.utils.data.DistributedSampler(
            Rows(), setup.world, setup.rank, shuffle=False, drop_last=drop
        ),
        "random": lambda: torch.utils.data.RandomSampler(range(N)),
        "random-generator": lambda: torch.utils.data.RandomSampler(range(N), generator=generator),
        "random-generator-many": lambda: torch.utils.data.RandomSampler(
            range(N), num_samples=2 * N + 5, generator=generator
        ),
        "random-many": lambda: torch.utils.data.RandomSampler(range(N), num_samples=2 * N + 5),
        "random-replacement": lambda: torch.utils.data.RandomSampler(range(N), True, N + 5),
        "sequential": lambda: torch.utils.data.SequentialSampler(range(N)),
    }
    if name == "batch-unseeded":
        batches = torch.utils.data.BatchSampler(
            torch.utils.data.RandomSampler(range(N)), setup.batch_size, setup.drop_last
        )
        return Parts(Rows(), batches, {"batch_sampler": batches})
    sampler = samplers[name]()
    return Parts(Rows(), sampler, options | {"sampler": sampler}, generator)


class TorchRun(Run):
    """A program without interruptions, by torch's loader over torch's samplers."""

    def __init__(self, parts: Parts, setup: Setup) -> None:
        super().__init__(lambda setup: parts, setup, stops=False)
        parts.dataset.draws = False
        self.by_chance = False
        self.loader = torch.utils.data.DataLoader(parts.dataset, collate_fn=listed, **parts.options)

    def __call__(self, program: list[Step]) -> list[Any]:
        """Return what the program sees."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for step in program:
                getattr(self, step[0])(*step[1:])
        return self.seen
