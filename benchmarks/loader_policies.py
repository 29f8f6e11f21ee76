"""What each policy of the loader earns: the same work with it and without it, in turn, in one run.

    python benchmarks/loader_policies.py                      all; those from `careful` on need Ray
    python benchmarks/loader_policies.py parts groups         some of them

parts       all threads load the samples of the next batch together; without: a whole batch each
rows        a dataset that is asked for the rows of a batch at once; without: one after the other
groups      batches that are little work are handed over several at a time; without: one at a time
careful     a batch that workers die over is made sample by sample; without: the pass ends there
hedging     a batch that is late is made once more, elsewhere; without: it is waited for
elasticity  workers become more and fewer; without: their number stays
crowding    workers begin beside those of another loader of the program; without: they wait for room

Samples sleep instead of computing, so figures do not depend on the number of cores; only those of `groups` do, since
what is saved there is the processor's work. Every batch of a pass is compared to what it should be. A policy that no
option switches off is compared to its nearest public equivalent; `careful` is switched off where the executor says that
it has it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import penstock as ps
from _common import parse, remark, spread, table
from _policy_data import Deadly, Far, FarTogether, Slow, SlowTogether, Timed, Tiny
from _ray_cluster import cluster, joined, ours
from penstock.errors import WorkerError

BAR = 2.0
"""Seconds that a consumer may wait for its next batch when a node is lost."""

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


def careful(options: argparse.Namespace) -> Iterator[Trial]:
    """A sample that ends every worker that makes it, and a loader that is told to skip what fails."""
    length = 4 * options.batches
    expected = in_order(length)
    bad = expected[length // 4]

    def run(with_it: bool) -> tuple[float, ...]:
        data = Deadly(length)
        how = {"persistent_workers": False, "on_error": "skip"}
        with ours(data, 4, 2, shuffle=True, seed=SEED, **how) as loader:
            begin(loader, 2)
            data.bad = bad
            had: list[int] = []
            waits = [0.0]
            iterator = iter(loader)
            window: Any = iterator
            window._batches.executor.isolates = with_it
            last = time.perf_counter()
            with contextlib.nullcontext() if with_it else contextlib.suppress(WorkerError):
                for batch in iterator:
                    waits.append(time.perf_counter() - last)
                    had += batch.tolist()
                    last = time.perf_counter()
            waits.append(time.perf_counter() - last)
        assert had == [index for index in expected if index != bad][: len(had)]
        assert not with_it or len(had) == length - 1
        return len(had), max(waits)

    with cluster():
        yield Trial("careful", (f"samples received of {length}, of which one kills", "longest wait, s"), run)


def hedging(options: argparse.Namespace) -> Iterator[Trial]:
    """A worker that is slow."""
    size, count = 4, 60

    def run(with_it: bool) -> tuple[float, ...]:
        data = Slow(size * count, 0.02)
        how = {"persistent_workers": False, "ray_options": {"hedge": with_it}}
        with ours(data, size, 3, shuffle=True, seed=SEED, **how) as loader:
            begin(loader, 3)
            passed(loader, len(data))
            loader.set_epoch(0)
            data.slow_worker = 0
            waits, seconds = passed(loader, len(data))
        return 1e3 * max(waits), seconds

    with cluster(nodes=3, cpus=1):
        names = "longest wait, one worker of 3 gets 10 times slower, ms", f"{count} batches of 80 ms, the same, s"
        yield Trial("hedging", names, run)


def losses(options: argparse.Namespace) -> Iterator[Trial]:
    """A node that is lost, with hedging and without it."""
    size, count, at = 4, 200, 20
    gaps: dict[bool, list[float]] = {True: [], False: []}

    def run(with_it: bool) -> tuple[float, ...]:
        data = Timed(size * count, 0.01)
        with (
            cluster(nodes=3, cpus=1) as found,
            ours(data, size, 3, shuffle=True, seed=SEED, ray_options={"hedge": with_it}) as loader,
        ):
            begin(loader, 3)
            expected = list(loader)
            loader.set_epoch(0)
            had: list[Any] = []
            gap = last = 0.0
            for batch in loader:
                now = time.perf_counter()
                gap = max(gap, now - last) if len(had) > at else 0.0
                had.append(batch)
                if len(had) == at:
                    next(iter(found.worker_nodes)).kill_raylet()
                last = time.perf_counter()
            assert len(had) == len(expected) == count
            for one, other in zip(had, expected, strict=True):
                assert all(map(torch.equal, one, other))
        gaps[with_it].append(gap)
        return (gap,)

    yield Trial("hedging", ("longest wait, one node of 3 is lost, s",), run)
    for hedge, seen in gaps.items():
        met = "met" if max(seen) < BAR else "missed"
        remark(
            f"A node lost, hedge={hedge}: {max(seen):.2f} s at most without a batch in {len(seen)} rounds, bar < "
            f"{BAR:g} s: {met}. All {count} batches and their random draws "
            "were equal to those of a pass without the loss."
        )


def elasticity(options: argparse.Namespace) -> Iterator[Trial]:
    """Workers that become more, and fewer."""
    size, count = 4, 3 * options.batches

    def grow(with_it: bool, *, without: int = 1) -> tuple[float, ...]:
        limits = {"max_workers": 4} if with_it else {}
        workers = 1 if with_it else without
        with ours(Slow(size * count, 0.02), size, workers, shuffle=True, seed=SEED, ray_options=limits) as loader:
            begin(loader, workers)
            return (passed(loader, size * count)[1],)

    def shrink(with_it: bool) -> tuple[float, ...]:
        limits = {"min_workers": 1} if with_it else {}
        with ours(Slow(2 * size * count, 0.005), size, 4, shuffle=True, seed=SEED, ray_options=limits) as loader:
            begin(loader, 4)
            held, last = 0.0, time.perf_counter()
            start = last
            for _ in loader:
                time.sleep(0.03)
                now = time.perf_counter()
                held, last = held + joined(loader) * (now - last), now
            return held / (last - start), last - start

    with cluster(cpus=4):
        yield Trial("elasticity", (f"{count} batches of 80 ms, 1 worker at first, s",), grow)
        yield Trial("elasticity", ("the same; without: 4 workers at once",), lambda on: grow(on, without=4))
        yield Trial("elasticity", ("workers held, 4 at first, 1 is enough", f"{2 * count} batches of that, s"), shrink)


def crowding(options: argparse.Namespace) -> Iterator[Trial]:
    """A second loader, where the first one's workers have all CPUs."""
    import ray

    hold = 10.0

    class Holder:
        """Has a CPU."""

        def there(self) -> None:
            """Say that it has."""

    def first(loader: ps.DataLoader[Any]) -> float:
        start = time.perf_counter()
        with loader:
            next(iter(loader))
            return time.perf_counter() - start

    def second(**how: Any) -> ps.DataLoader[Any]:
        return ours(Slow(64, 1e-3), 4, 1, ray_options=how)

    def taken(with_it: bool) -> tuple[float, ...]:
        if with_it:
            return beside(True)
        # The loader cannot know that these are of its program.
        actors = [ray.remote(num_cpus=1)(Holder).remote() for _ in range(2)]
        ray.get([actor.there.remote() for actor in actors])
        release = threading.Timer(hold, lambda: [ray.kill(actor) for actor in actors])
        release.start()
        try:
            return (first(second()),)
        finally:
            release.join()

    def beside(with_it: bool) -> tuple[float, ...]:
        with ours(Slow(4000, 1e-3), 4, 2) as train:
            begin(train, 2)
            iterator = iter(train)
            next(iterator)
            seconds = first(second() if with_it else second(num_cpus=0))
            del iterator
            return (seconds,)

    with cluster():
        name = "first batch of a second loader; without: "
        yield Trial("crowding", (f"{name}CPUs come free after {hold:g} s, s",), taken)
        yield Trial("crowding", (f"{name}num_cpus=0 by hand, s",), beside)


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Iterator[Trial]], ...]] = {
    "parts": (parts,),
    "rows": (rows,),
    "groups": (groups, groups_of_ray),
    "careful": (careful,),
    "hedging": (hedging, losses),
    "elasticity": (elasticity,),
    "crowding": (crowding,),
}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=50, help="of a pass, about (default: %(default)s)")
    options = parse(parser, {"repeat": 1, "batches": 8, "parts": ["parts", "rows", "groups"]})
    warnings.filterwarnings("ignore", "This DataLoader will create")  # sleeping needs no cores
    warnings.filterwarnings("ignore", ".* cannot be loaded and was left out")
    found: list[Row] = []
    for part in itertools.chain.from_iterable(PARTS[name] for name in options.parts):
        for trial in part(options):
            found += rounds(trial, options.repeat)
    columns = ("policy", "what", "with: min", "median", "max", "without: min", "median", "max", "with / without")
    table(f"With each policy and without it, {options.repeat} rounds in turn, ratios of medians", columns, found)


if __name__ == "__main__":
    main()
