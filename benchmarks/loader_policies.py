"""What each policy of the loader earns: the same work with it and without it, in turn, in one run.

    python benchmarks/loader_policies.py                      all; the last one of `groups` needs Ray
    python benchmarks/loader_policies.py parts groups         some of them

parts       all threads load the samples of the next batch together; without: a whole batch each
rows        a dataset that is asked for the rows of a batch at once; without: one after the other
groups      batches that are little work are handed over several at a time; without: one at a time

Samples sleep instead of computing, so figures do not depend on the number of cores; only those of `groups` do, since
what is saved there is the processor's work. Every batch of a pass is compared to what it should be. A policy that no
option switches off is compared to its nearest public equivalent.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import penstock as ps
from _common import parse, spread, table
from _policy_data import Far, FarTogether, Slow, SlowTogether, Tiny
from _ray_cluster import cluster, joined, ours

SEED = 1


class Trial(NamedTuple):
    """Something that happens, with a policy and without it.

    Attributes:
        policy: by name.
        figures: what is measured, with its unit.
        run: one round; whether the policy is in force -> a value for each figure.
    """

    policy: str
    figures: tuple[str, ...]
    run: Callable[[bool], tuple[float, ...]]


Row = tuple[object, ...]


def rounds(trial: Trial, repeat: int) -> list[Row]:
    """A row for each figure, of rounds in turn; which of the two begins alternates."""
    found: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for number in range(repeat):
        for with_it in (True, False) if number % 2 == 0 else (False, True):
            found[with_it].append(trial.run(with_it))
    rows: list[Row] = []
    for place, name in enumerate(trial.figures):
        one, other = ([values[place] for values in found[with_it]] for with_it in (True, False))
        ratio = statistics.median(one) / statistics.median(other)
        rows.append((trial.policy, name, *spread(one), *spread(other), f"{ratio:.2g}x"))
    return rows


def in_order(length: int) -> list[int]:
    """The samples of a pass with `SEED`, as an inline loader has them."""
    loader: ps.DataLoader[Any] = ps.DataLoader(Tiny(length), 64, shuffle=True, seed=SEED)
    return [index for batch in loader for index in batch.tolist()]


def passed(loader: Any, length: int, train: float = 0.0) -> tuple[list[float], float]:
    """Seconds of waiting for each batch of a pass, and of the pass. All batches are what they should be."""
    order: list[int] = []
    waits: list[float] = []
    start = last = time.perf_counter()
    for batch in loader:
        waits.append(time.perf_counter() - last)
        order += batch.tolist()
        if train:
            time.sleep(train)
        last = time.perf_counter()
    assert order == in_order(length)
    return waits, time.perf_counter() - start


def shuffled(data: Any, size: int, workers: int, **how: Any) -> ps.DataLoader[Any]:
    """A loader on this machine."""
    return ps.DataLoader(data, size, shuffle=True, seed=SEED, num_workers=workers, **how)


def parts(options: argparse.Namespace) -> Iterator[Trial]:
    """The next batch, in parts, by four threads."""
    size, workers = 32, 4

    def run(with_it: bool) -> tuple[float, ...]:
        length, seconds = 2 * workers * size, 20e-3
        data = Slow(length, seconds) if with_it else SlowTogether(length, seconds)
        with shuffled(data, size, workers, executor="thread") as loader:
            waits, _ = passed(loader, length)
        return (1e3 * waits[0],)

    yield Trial("parts", ("first batch of threads, ms",), run)


def rows(options: argparse.Namespace) -> Iterator[Trial]:
    """Rows of a batch that are asked for together."""
    size, workers = 16, 2

    def run(with_it: bool) -> tuple[float, ...]:
        data = (FarTogether if with_it else Far)(options.batches * size, 2e-3)
        with shuffled(data, size, workers, executor="process") as loader:
            waits, seconds = passed(loader, len(data))
        return 1e3 * waits[0], seconds

    yield Trial("rows", ("first batch, 2 ms to storage, ms", f"{options.batches} batches, 2 ms to storage, s"), run)


def groups(options: argparse.Namespace) -> Iterator[Trial]:
    """Batches of next to no work, handed over together."""
    size, count = 16, 100 * options.batches

    def run(workers: int, **how: Any) -> tuple[float, ...]:
        before = sum(os.times()[:4])
        with shuffled(Tiny(count * size), size, workers, executor="process", **how) as loader:
            _, seconds = passed(loader, count * size)
        return 1e6 * seconds / count, 1e6 * (sum(os.times()[:4]) - before) / count

    def processes(with_it: bool) -> tuple[float, ...]:
        return run(2, **({} if with_it else {"prefetch_factor": 2}))

    names = "a tiny batch, 2 processes; without: prefetch_factor=2, us", "the same, us of all processors"
    yield Trial("groups", names, processes)


def groups_of_ray(options: argparse.Namespace) -> Iterator[Trial]:
    """The same in a cluster."""
    size, count = 16, 8 * options.batches

    def run(with_it: bool) -> tuple[float, ...]:
        how = {} if with_it else {"prefetch_factor": 2}
        with ours(Tiny(count * size), size, 2, shuffle=True, seed=SEED, **how) as loader:
            begin(loader, 2)
            _, seconds = passed(loader, count * size)
        return (1e3 * seconds / count,)

    with cluster():
        yield Trial("groups", ("a tiny batch, 2 workers of Ray; without: prefetch_factor=2, ms",), run)


def begin(loader: ps.DataLoader[Any], workers: int) -> None:
    """Have all workers started, and the pass that was begun for it once more."""
    end = time.monotonic() + 240
    while joined(loader) < workers:
        assert time.monotonic() < end
        next(iter(loader))
    loader.set_epoch(0)


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Iterator[Trial]], ...]] = {
    "parts": (parts,),
    "rows": (rows,),
    "groups": (groups, groups_of_ray),
}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=50, help="of a pass, about (default: %(default)s)")
    options = parse(parser, {"repeat": 1, "batches": 8, "parts": ["parts", "rows", "groups"]})
    warnings.filterwarnings("ignore", "This DataLoader will create")  # sleeping needs no cores
    found: list[Row] = []
    for part in itertools.chain.from_iterable(PARTS[name] for name in options.parts):
        for trial in part(options):
            found += rounds(trial, options.repeat)
    columns = ("policy", "what", "with: min", "median", "max", "without: min", "median", "max", "with / without")
    table(f"With each policy and without it, {options.repeat} rounds in turn, ratios of medians", columns, found)


if __name__ == "__main__":
    main()
