"""What a position costs: in filters, in mixtures, in all of it at once; and what the ledger's answers cost.

Filters keep a share of many rows. Beside ours: the numbers of kept rows as an array, as torch's `Subset` takes them,
and a bitmap whose bits are counted from the beginning at each request. *Private memory* is what a process has of its
own with the filter in place, beyond its imports. Times are the processor's.

    python benchmarks/plans.py --rows 51000000 --samples 1000000000
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _common import folder, parse, smaps_rollup, spread, table
from _lengths import write_lengths

MIB = 1 << 20
REQUEST = 4096
LONGEST, CAPACITY = 8_192, 8_192
KEPT = {"1 %": 0.01, "10 %": 0.1, "50 %": 0.5, "90 %": 0.9}


def _private() -> int:
    """Return the bytes of this process that no file holds, without what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return smaps_rollup(os.getpid())["Anonymous"]


def _each(ask: Callable[[Any], object], questions: list[Any]) -> list[float]:
    """Return the milliseconds that each question takes; the first one is asked twice."""
    ask(questions[0])
    times = []
    for question in questions:
        began = time.process_time()
        ask(question)
        times.append(1e3 * (time.process_time() - began))
    return times


# Filters.


def _counted(mask: Any) -> Callable[[Any], object]:
    """Return look-ups in a bitmap by counting from its beginning."""
    bits = np.packbits(mask)
    return lambda ordinals: np.flatnonzero(np.unpackbits(bits))[ordinals]


def _kept(mask: Any) -> Callable[[Any], object]:
    from penstock.plan.filter import KeptRows

    return KeptRows.of_mask(mask).__getitem__


FILTERS: dict[str, tuple[str, Callable[[Any], Callable[[Any], object]], int]] = {
    "Subset": ("penstock Subset", _kept, 200),
    "array": ("an array of rows", lambda mask: np.flatnonzero(mask).__getitem__, 200),
    "counted": ("a bitmap that is counted", _counted, 3),
}


def filtered(name: str, path: str, count: int) -> dict[str, float]:
    """Measure look-ups in a filter."""
    _, make, requests = FILTERS[name]
    ordinals = list(np.random.default_rng(0).integers(0, count, (requests, REQUEST)))
    warm = np.zeros(1 << 20, bool)
    warm[::2] = True
    make(warm)(np.arange(10))
    mask = np.load(path, mmap_mode="r")
    before, began = _private(), time.process_time()
    ask = make(mask)
    made = time.process_time() - began
    memory = (_private() - before) / MIB
    times = _each(ask, ordinals)
    few = _each(ask, [part[:256] for part in ordinals])
    rate = REQUEST * len(times) / (1e3 * sum(times))
    return {"made": made, "rate": rate, "batch": statistics.median(few), "memory": memory}


def measure_filters(rows: int, repeat: int, where: Path) -> None:
    """Print a table for each share that is kept."""
    for label, share in KEPT.items():
        path = where / f"{share}.npy"
        mask = np.random.default_rng(1).random(rows, dtype=np.float32) < share
        np.save(path, mask)
        count = int(mask.sum())
        del mask
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in FILTERS}
        for _ in range(repeat):
            for name, found in runs.items():
                found.append(fresh("filter", name, path, count))
        result = []
        for name, found in runs.items():
            made, rate, batch, memory = ([one[key] for one in found] for key in found[0])
            bar = f"9 M/s: {'met' if statistics.median(rate) >= 9 else 'MISSED'}" if name == "Subset" else ""
            cells = [spread(values)[1] for values in (made, batch, memory)]
            result.append([FILTERS[name][0], *spread(rate), *cells, bar])
        columns = ["filter", "million look-ups/CPU s: min", "median", "max", "made, CPU s", "a batch of 256, CPU ms"]
        title = f"{label} of {rows:,} rows kept, {REQUEST:,} look-ups at a time"
        table(title, [*columns, "private memory, MiB", "bar"], result, peer="an array of rows")
        path.unlink()


# Mixtures, and what the ledger says of them.


def _mixture(samples: int, ranks: int, *, schedule: bool) -> Any:
    """Return seven sources, one of them rare."""
    import penstock as ps

    parts = [(1, 400), (1, 300), (2, 150), (4, 80), (8, 40), (16, 29), (1000, 1)]
    sources = [(range(max(1000, samples // size)), weight) for size, weight in parts]
    stages = [(samples // 3, [1] * 7), (samples // 2, [7, 6, 5, 4, 3, 2, 1])] if schedule else None
    return ps.Mixture(sources, stop=samples, schedule=stages, seed=1, rank=min(3, ranks - 1), world_size=ranks)


def mixed(name: str, path: str, samples: int) -> dict[str, float]:
    """Measure the place of positions in a mixture."""
    mixture = _mixture(samples, 1, schedule=name == "schedule")
    rng = np.random.default_rng(0)
    many, few = (_each(mixture.rows, list(rng.integers(0, samples, (50, count)))) for count in (REQUEST, 256))
    order = mixture.plan.source.order(0).mixture
    found = list(zip(*(part.tolist() for part in order.locate(rng.integers(0, samples, 1000))), strict=True))
    back = sum(_each(lambda one: order.position(*one), found))
    return {"many": 1e3 * statistics.median(many) / REQUEST, "few": statistics.median(few), "back": back}


def measure_mixtures(samples: int, where: Path) -> None:
    """Print a table of places in mixtures."""
    rows = []
    for name, label in (("plain", "seven sources, a rare one"), ("schedule", "and weights that change twice")):
        found = fresh("mixture", name, where, samples)
        bar = f"20 us: {'met' if found['many'] < 20 else 'MISSED'}"
        rows.append([label, *(f"{value:.3g}" for value in found.values()), bar])
    columns = ["mixture", f"a position of {REQUEST:,}, CPU us", "256 positions, CPU ms", "position of a sample, CPU us"]
    table(f"{samples:,} samples", [*columns, "bar"], rows)


def opened(name: str, path: str, samples: int) -> dict[str, float]:
    """Measure opening a mixture of many sources, and its first batches of 256 samples of one of 64 ranks."""
    import penstock as ps

    def make(count: int) -> Any:
        weights = np.random.default_rng(0).integers(1, 1000, count).tolist()
        return ps.Mixture([(range(1000), weight) for weight in weights], stop=samples, seed=1, rank=3, world_size=64)

    small = make(3)
    small.plan.source.order(0).mixture.locate(np.arange(256))
    before, began = _private(), time.process_time()
    mixture = make(int(name))
    order = mixture.plan.source.order(0).mixture
    order.locate(np.arange(1))
    made = time.process_time() - began
    starts = np.random.default_rng(0).integers(0, samples - 256 * 64, 50)
    times = _each(order.locate, [start + 64 * np.arange(256) for start in starts])
    return {"made": 1e3 * made, "index": 1e6 * statistics.median(times) / 256, "memory": (_private() - before) / MIB}


def measure_opening(samples: int, where: Path) -> None:
    """Print a table of mixtures by the number of their sources."""
    found = [(count, fresh("opening", str(count), where, samples)) for count in (10, 1000)]
    rows = [[f"{count:,} sources", *(f"{value:.3g}" for value in values.values())] for count, values in found]
    columns = ["mixture", "opening, CPU ms", "the source at a position, 256 at a time, CPU ns", "private memory, MiB"]
    table(f"{samples:,} samples, one of 64 ranks", columns, rows)


def asked(name: str, path: str, samples: int) -> dict[str, float]:
    """Measure the answers of a ledger of 10,000 ranks with batches of 32."""
    import penstock as ps

    ranks, batch = 10_000, 32
    if name == "sampler":
        data = range(samples)
        order = ps.DistributedSampler(data, ranks, 3, "global", seed=1)
        loader = ps.DataLoader(data, batch_size=batch, sampler=order)
    else:
        loader = ps.DataLoader(_mixture(samples, ranks, schedule=True), batch_size=batch)
    ledger = ps.Ledger(loader)
    rng, last = np.random.default_rng(0), ledger.steps_per_epoch
    steps = rng.integers(0, last, 20).tolist()
    found = [(int(said.rows[0]), int(said.sources[0])) for said in map(ledger.rows, steps)]
    return {
        "step": max(_each(ledger.rows, steps)),
        "rank": max(_each(lambda step: ledger.rows(step, rank=77), steps)),
        "row": max(_each(lambda one: ledger.steps(one[0], source=one[1], epoch=0), found)),
        "seen": max(_each(lambda one: ledger.seen(one[0], source=one[1], until=last // 2), found)),
    }


def measure_ledger(samples: int, where: Path) -> None:
    """Print a table of a ledger's answers."""
    rows = []
    for name, label in (("sampler", "DistributedSampler"), ("mixture", "seven sources, weights that change twice")):
        found = fresh("ledger", name, where, samples)
        bar = f"50 ms: {'met' if max(found.values()) < 50 else 'MISSED'}"
        rows.append([label, *(f"{value:.3g}" for value in found.values()), bar])
    columns = ["ledger", "rows(step), CPU ms", "of a rank", "steps(row)", "seen(row)", "bar"]
    table(f"{samples:,} samples, 10,000 ranks with batches of 32, the longest of 20", columns, rows)


# All of it.


def together(name: str, path: str, documents: int) -> dict[str, float]:
    """Measure packs of filters in a mixture whose weights change: which documents a batch has, by the plan alone."""
    import penstock as ps

    def make(lengths: str) -> tuple[Any, Any]:
        n = len(np.load(lengths, mmap_mode="r"))
        parts = []
        for k, share in enumerate((0.9, 0.5, 0.1)):
            some = ps.Subset(range(n), np.random.default_rng(k).random(n, dtype=np.float32) < share)
            parts.append(ps.PackedDataset(some, CAPACITY, lengths=lengths, rank=0, world_size=1))
        stop = sum(part.packs for part in parts)
        sources = list(zip(parts, (5, 3, 2), strict=True))
        mixture = ps.Mixture(sources, stop=stop, schedule=[(stop // 2, [1, 1, 1])], seed=1, rank=3, world_size=64)
        loader = ps.DataLoader(mixture, batch_size=8)
        return loader, ps.Ledger(loader)

    _, few = make(str(Path(path).with_name("few.npy")))
    few.rows(0)
    before, began = _private(), time.process_time()
    loader, ledger = make(path)
    made = time.process_time() - began
    steps = np.random.default_rng(0).integers(0, ledger.steps_per_epoch, 200).tolist()
    times = _each(lambda step: ledger.rows(step, rank=3), steps)
    return {
        "made": made,
        "seek": statistics.median(times),
        "worst": max(times),
        "state": len(json.dumps(loader.state_dict())),
        "memory": (_private() - before) / MIB,
    }


def measure_together(documents: int, where: Path) -> None:
    """Print a table of packs of filters in a mixture."""
    for name, count in (("few.npy", 5000), ("many.npy", documents)):
        write_lengths(where / name, "web", count, longest=LONGEST, dtype=np.int32)
    rows = []
    for label in ("makes filters and indexes", "finds them"):
        found = fresh("together", label, where / "many.npy", documents)
        kept = found["seek"] <= 10 and found["state"] <= 1024 and found["memory"] <= 20
        bar = f"10 ms, 1 KiB, 20 MiB: {'met' if kept else 'MISSED'}"
        rows.append([label, *(f"{value:.3g}" for value in found.values()), bar])
    columns = ["packs of three filters, mixed, weights that change", "made, CPU s", "8 packs, CPU ms: median", "max"]
    table(f"{documents:,} documents, 64 ranks", [*columns, "state, bytes", "private memory, MiB", "bar"], rows)


CHILDREN = {"filter": filtered, "mixture": mixed, "opening": opened, "ledger": asked, "together": together}


def fresh(what: str, name: str, path: Path, count: int) -> dict[str, float]:
    """Return what a process of its own measures. Filters and indexes are kept beside the data."""
    command = [sys.executable, __file__, "--child", what, "--name", name, "--path", str(path), "--count", str(count)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(path.parent if path.suffix else path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{what}, {name}: failed\n{done.stderr}")
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=51_000_000, help="of a filter (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=1_000_000_000, help="of a mixture (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=100_000_000, help="of packs (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    for name in ("child", "name", "path"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parse(parser, {"rows": 100_000, "samples": 10_000_000, "documents": 20_000, "repeat": 1})
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.name, options.path, options.count)))
        return
    with folder(options.dir) as where:
        measure_filters(options.rows, options.repeat, where)
        measure_mixtures(options.samples, where)
        measure_opening(options.samples, where)
        measure_ledger(options.samples, where)
        measure_together(options.documents, where)


if __name__ == "__main__":
    main()
