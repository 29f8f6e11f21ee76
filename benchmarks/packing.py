"""Documents in sequences of one length: real tokens, speed, memory and the way to the middle, beside the usual ways.

Lengths are drawn: web pages, chats, code (log-normal), and two kinds of documents. Each way makes one epoch of
sequences. The others are plain functions after well-known code; documents longer than a sequence are cut first:

    padded              each document is padded to the capacity
    longest of 8        eight documents are padded to the longest of them (the usual collate function)
    cut                 documents in a row are cut at each capacity, sequences shuffled (MosaicML, LitData, nanoGPT)
    next fit            shuffled documents are taken until the next one does not fit
    windows of 1,000    best-fit decreasing inside each thousand of shuffled documents (TRL, which stores the result)
    windows of 4,096    the same inside each 4,096, as a stream does it

*Cut documents* would have fitted into a sequence. *Deviation* is that of the sequences' mean document length, over its
mean. *Cost* is what attention over 8 sequences takes on the dearest of 8 ranks, over the mean: squares of document
lengths (of padded ones with the padding). *Bound* is what no way to deal the same sequences can stay below: one rank
has the dearest one, and seven others. *Middle* is the time until the sequence in the middle of an epoch is known, in a
process that has the lengths: those that cannot compute it make what comes before, or would keep a list. *Private
memory* is what a process has of its own in the middle of an epoch, beyond its imports. The last table has many
documents.

    python benchmarks/packing.py --documents 5000000 --many 1000000000
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from _common import folder, parse, remark, smaps_rollup, spread, table
from _lengths import DRAWN, write_lengths

MIB = 1 << 20
LONGEST = 1 << 20
RANKS, BATCH = 8, 8
Array = Any
Ways = Iterator[list[int]]


# The usual ways: each yields lists of pieces, from a sequence of the epoch on.


def shuffled_pieces(lengths: Array, capacity: int) -> Array:
    """Return the tokens of all pieces in random order: full ones of long documents, and what remains of each."""
    full, rest = np.divmod(lengths, capacity)
    pieces = np.concatenate([np.full(int(full.sum()), capacity, np.int32), rest[rest > 0]])
    np.random.default_rng(0).shuffle(pieces)
    return pieces


def padded(pieces: Array, capacity: int, begin: int) -> Ways:
    """Yield one piece after the other."""
    for piece in range(begin, len(pieces)):
        yield [piece]


def longest_of_8(pieces: Array, capacity: int, begin: int) -> Ways:
    """Yield eight at a time, which are one batch."""
    for first in range(BATCH * begin, len(pieces), BATCH):
        yield list(range(first, min(first + BATCH, len(pieces))))


def next_fit(pieces: Array, capacity: int, begin: int) -> Ways:
    """Yield a sequence when the next piece does not fit."""

    def made() -> Ways:
        pack: list[int] = []
        used = 0
        for first in range(0, len(pieces), 4096):
            for piece, length in enumerate(pieces[first : first + 4096].tolist(), first):
                used += length
                if used > capacity:
                    yield pack
                    pack, used = [], length
                pack.append(piece)
        yield pack

    return itertools.islice(made(), begin, None)


def best_fit(pieces: list[int], first: int, capacity: int) -> list[list[int]]:
    """Put the longest piece first, each where it leaves least room."""
    packs: list[list[int]] = []
    spaces: list[tuple[int, int]] = []
    for piece in sorted(range(len(pieces)), key=pieces.__getitem__, reverse=True):
        length = pieces[piece]
        place = bisect.bisect_left(spaces, (length,))
        if place == len(spaces):
            space, number = capacity, len(packs)
            packs.append([])
        else:
            space, number = spaces.pop(place)
        packs[number].append(first + piece)
        if space > length:
            bisect.insort(spaces, (space - length, number))
    return packs


def windows(size: int) -> Callable[[Array, int, int], Ways]:
    """Return the way that packs so many pieces at a time, and shuffles their sequences."""

    def made(pieces: Array, capacity: int) -> Ways:
        rng = random.Random(0)
        for first in range(0, len(pieces), size):
            packs = best_fit(pieces[first : first + size].tolist(), first, capacity)
            rng.shuffle(packs)
            yield from packs

    return lambda pieces, capacity, begin: itertools.islice(made(pieces, capacity), begin, None)


def cut(tokens: int, capacity: int, begin: int) -> Ways:
    """Yield where each sequence begins and ends in the row of all tokens."""
    order = np.random.default_rng(0).permutation(-(-tokens // capacity))
    for number in order[begin:]:
        start = int(number) * capacity
        yield [start, min(start + capacity, tokens)]


# Each way, and what is lost on a resume if a state is to be a few numbers.
PEERS: dict[str, tuple[Callable[[Array, int, int], Ways], str]] = {
    "padded": (padded, "nothing"),
    "longest of 8": (longest_of_8, "nothing"),
    "cut": (cut, "nothing"),
    "next fit": (next_fit, "the open sequence, or the time to the same place"),
    "windows of 1,000": (windows(1000), "nothing; the same documents meet in each epoch"),
    "windows of 4,096": (windows(4096), "the open window, or the time to the same place"),
}
SLOW = ("windows of 1,000", "windows of 4,096")
OURS = ("PackedDataset, batches of 64", "PackedDataset, blocks of 4,096")


class Documents:
    """Documents that nobody reads."""

    def __init__(self, n: int) -> None:
        self.n, self.fingerprint = n, f"drawn-{n}"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> Any:
        raise NotImplementedError


def dataset(path: str, capacity: int, **options: Any) -> Any:
    """Return our packs of documents with these lengths, for one rank unless told otherwise."""
    import penstock as ps

    documents = Documents(len(np.load(path, mmap_mode="r")))
    return ps.PackedDataset(documents, capacity, lengths=path, **{"rank": 0, "world_size": 1, "seed": 1, **options})


# What comes out.


def quality(lengths: Array, splits: Array, slots: float, shape: str = "") -> dict[str, float]:
    """Return real tokens, how much the mean document length varies, and the cost, of sequences one after the other."""
    tokens, documents = np.add.reduceat(lengths, splits[:-1]), np.diff(splits)
    means = tokens / documents
    squares = np.add.reduceat(lengths.astype(np.float64) ** 2, splits[:-1])
    if shape == "padded":
        squares = np.ones(len(tokens))
    if shape == "longest of 8":
        squares = documents * np.maximum.reduceat(lengths, splits[:-1]).astype(np.float64) ** 2
    # Of these, a sequence is a batch already.
    batch = 1 if shape == "longest of 8" else BATCH
    steps = len(squares) // (RANKS * batch)
    ranks = squares[: steps * RANKS * batch].reshape(steps, RANKS, batch).sum(axis=2)
    return {
        "real": 100 * float(lengths.sum(dtype=np.int64)) / slots,
        "deviation": float(means.std() / means.mean()),
        "cost": float((ranks.max(axis=1) / ranks.mean(axis=1)).mean()) if steps else 1.0,
    }


def _cut_quality(lengths: Array, capacity: int) -> dict[str, float]:
    """Return that of sequences which are cut from the row of all tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    bounds = np.append(np.arange(0, ends[-1], capacity), ends[-1])
    pieces = np.diff(np.union1d(bounds, ends), prepend=0)[1:]
    splits = np.union1d(bounds, ends).searchsorted(bounds)
    order = np.random.default_rng(0).permutation(len(bounds) - 1)
    sizes = np.diff(splits)[order]
    places = np.repeat(splits[order], sizes) + np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    inside = (ends - 1) // capacity > (ends - lengths) // capacity
    found = quality(pieces[places], np.concatenate([[0], np.cumsum(sizes)]), float(ends[-1]))
    return {**found, "cut": 100 * float((inside & (lengths <= capacity)).mean())}


def _peer_quality(name: str, lengths: Array, capacity: int) -> dict[str, float]:
    if name == "cut":
        return _cut_quality(lengths, capacity)
    pieces = shuffled_pieces(lengths, capacity)
    packs = list(PEERS[name][0](pieces, capacity, 0))
    splits = np.concatenate([[0], np.cumsum([len(pack) for pack in packs])])
    mine = pieces[np.fromiter(itertools.chain.from_iterable(packs), np.int64, len(pieces))]
    slots = capacity * len(packs)
    if name == "longest of 8":
        slots = int((np.diff(splits) * np.maximum.reduceat(mine, splits[:-1]).astype(np.int64)).sum())
    return {**quality(mine, splits, slots, name), "cut": 0.0}


def _our_quality(path: str, capacity: int) -> dict[str, float]:
    from penstock.datasets.packs import PackPlan

    packs = dataset(path, capacity)
    found = packs.documents(packs.rows(range(packs.packs)))
    result = {**quality(found.lengths, found.splits, packs.packs * capacity), "cut": 0.0}
    steps = min(200, packs.packs // (RANKS * BATCH))
    costs = np.ones((steps, RANKS, BATCH))
    for rank in range(RANKS):
        plan = PackPlan(packs.source, "global", BATCH, rank=rank, world_size=RANKS, seed=1)
        dealt = plan.view(None).rows(np.arange(steps * BATCH))
        costs[:, rank] = packs.costs(dealt).reshape(steps, BATCH)
    ranks = costs.sum(axis=2)
    bounds = [least(step.reshape(-1)) for step in costs]
    return {
        **result,
        "balanced": float((ranks.max(axis=1) / ranks.mean(axis=1)).mean()),
        "bound": float(np.mean(bounds)) if steps else 1.0,
    }


def least(costs: Array) -> float:
    """Return what the dearest of all ranks has at least, over the mean, however sequences are dealt.

    The k dearest of them are on k ranks, or on j < k. These have ``BATCH * j`` sequences, the others of which cost no
    less than the cheapest ones, and the dearest rank has no less than their mean.
    """
    sums, found = np.concatenate([[0], np.cumsum(np.sort(costs))]), sum(costs) / RANKS
    for k in range(1, RANKS + 1):
        j = np.arange(-(-k // BATCH), k + 1)
        found = max(found, ((sums[-1] - sums[-1 - k] + sums[BATCH * j - k]) / j).min())
    return float(found / (sums[-1] / RANKS))


# Measuring, each in a fresh process.


def _private() -> int:
    """Return the bytes of this process that no file holds, without what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return smaps_rollup(os.getpid())["Anonymous"]


def _peer_epoch(name: str, path: str, capacity: int) -> dict[str, float]:
    lengths, way = np.load(path, mmap_mode="r"), PEERS[name][0]

    def walk(begin: int = 0) -> Ways:
        if name == "cut":
            return way(int(lengths.sum(dtype=np.int64)), capacity, begin)
        return way(shuffled_pieces(lengths, capacity), capacity, begin)

    began = time.process_time()
    packs = sum(1 for _ in walk())
    rate, before = len(lengths) / (time.process_time() - began), _private()
    began = time.process_time()
    walked = walk(packs // 2)
    next(walked)
    middle = time.process_time() - began
    return {"rate": rate, "middle": 1e3 * middle, "memory": (_private() - before) / MIB}


def _our_epoch(name: str, path: str, capacity: int) -> dict[str, float]:
    """Measure ours: packs of a rank's batch anywhere, or all of them in blocks."""
    few = str(Path(path).with_name("few.npy"))
    dataset(few, capacity).documents([0])  # imports
    before = _private()
    packs = dataset(path, capacity)
    places = np.random.default_rng(0).integers(0, max(1, packs.packs - 64), 1000).tolist()
    states = [packs.state_dict(place) for place in places[:50]]
    size, seconds, documents = (64, 2.0, 0) if name == OURS[0] else (4096, 5.0, 0)
    began = time.process_time()
    for place in itertools.cycle(places) if size == 64 else range(0, packs.packs, size):
        documents += len(packs.documents(packs.rows(range(place, min(place + size, packs.packs)))).rows)
        if time.process_time() - began > seconds:
            break
    rate, times = documents / (time.process_time() - began), []
    memory = _private() - before
    for state in states:
        began = time.process_time()
        packs.load_state_dict(state)
        packs.documents(packs.rows(range(min(BATCH, len(packs)))))
        times.append(time.process_time() - began)
    return {"rate": rate, "middle": 1e3 * statistics.median(times), "memory": memory / MIB}


def epoch_of(name: str, path: str, capacity: int) -> dict[str, float]:
    """Measure one way."""
    return (_our_epoch if name in OURS else _peer_epoch)(name, path, capacity)


def quality_of(name: str, path: str, capacity: int) -> dict[str, float]:
    """Return what one way makes; makes the index of ours, too."""
    if name in OURS:
        return _our_quality(path, capacity)
    return _peer_quality(name, np.load(path, mmap_mode="r")[:], capacity)


def seeks(name: str, path: str, capacity: int) -> dict[str, float]:
    """Measure seeking among many documents: with ``order="global"``, with balance, and in blocks."""
    dataset(str(Path(path).with_name("few.npy")), capacity).documents([0])  # imports
    before, began, used = _private(), time.perf_counter(), time.process_time()
    packs = dataset(path, capacity, rank=3, world_size=64, **SOUGHT[name])
    found = {"made": time.perf_counter() - began, "used": time.process_time() - used}
    size = BATCH if name == "balanced" else 64
    places = np.random.default_rng(0).integers(0, max(1, len(packs) // size - 1), 200) * size
    times: dict[str, list[float]] = {"cpu": [], "wall": []}
    for state in [packs.state_dict(int(place)) for place in places]:
        began, used = time.perf_counter(), time.process_time()
        packs.load_state_dict(state)
        packs.documents(packs.rows(range(min(size, len(packs)))))
        times["cpu"].append(1e3 * (time.process_time() - used))
        times["wall"].append(1e3 * (time.perf_counter() - began))
    for kind, values in times.items():
        found |= {kind: statistics.median(values), f"{kind}, worst": max(values)}
    return {**found, "state": len(json.dumps(packs.state_dict(1))), "memory": (_private() - before) / MIB}


SOUGHT: dict[str, dict[str, Any]] = {"plain": {}, "balanced": {"balance": BATCH}, "blocks": {"order": "block"}}
CHILDREN = {"epoch": epoch_of, "quality": quality_of, "seeks": seeks}


def fresh(what: str, name: str, path: Path, capacity: int) -> dict[str, float]:
    """Return what a child measures. The class indexes lie beside the lengths."""
    command = [sys.executable, __file__, "--child", what, "--name", name, "--path", str(path)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(path.parent)}
    done = subprocess.run(
        [*command, "--capacity", str(capacity)], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def measure(kind: str, capacity: int, options: argparse.Namespace, where: Path) -> None:
    """Print a table for one distribution and one capacity."""
    sizes = {name: options.slow if name in SLOW else options.documents for name in (*PEERS, *OURS)}
    for n in set(sizes.values()):
        if not (where / f"{kind}-{n}.npy").exists():
            write_lengths(where / f"{kind}-{n}.npy", kind, n, longest=LONGEST, dtype=np.int32)
    paths = {name: where / f"{kind}-{n}.npy" for name, n in sizes.items()}
    made = {name: fresh("quality", name, paths[name], capacity) for name in (*PEERS, OURS[0])}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sizes}
    for _ in range(options.repeat):
        for name, found in runs.items():
            found.append(fresh("epoch", name, paths[name], capacity))
    title, columns = f"{kind}: sequences of {capacity:,} tokens", ["sequences", "documents"]
    table(
        title,
        [*columns, "real tokens, %", "cut documents, %", "deviation", "cost", "cost, balance=8", "bound"],
        [[name, f"{sizes[name]:,}", *_figures(of)] for name, of in made.items()],
    )
    rows = []
    for name, results in runs.items():
        rate, middle, memory = ([result[key] for result in results] for key in results[0])
        speeds = [*spread(rate), spread(middle)[1], spread(memory)[1]]
        rows.append([name, f"{sizes[name]:,}", *speeds, PEERS[name][1] if name in PEERS else "nothing"])
    columns += ["documents/CPU s: min", "median", "max", "middle, CPU ms", "private memory, MiB", "a resume loses"]
    table(title, columns, rows, peer="windows of 1,000")


def _figures(of: dict[str, float]) -> list[str]:
    cells = [f"{of['real']:.2f}", f"{of['cut']:.1f}", f"{of['deviation']:.3f}", f"{of['cost']:.3f}"]
    return [*cells, *(f"{of[name]:.3f}" if name in of else "-" for name in ("balanced", "bound"))]


def measure_many(documents: int, capacity: int, where: Path) -> None:
    """Print a table of seeking among many documents, on one of 64 ranks."""
    path = where / "many.npy"
    write_lengths(path, "web", documents, longest=LONGEST, dtype=np.int32)
    rows = []
    for what, name in (
        ("makes the index", "plain"),
        ("finds it, 64 packs", "plain"),
        ("balance=8, 8 packs", "balanced"),
        ("order=block: packs the blocks", "blocks"),
        ("order=block, 64 packs", "blocks"),
    ):
        found = fresh("seeks", name, path, capacity)
        kept = found["cpu"] <= 10 and found["state"] <= 1024 and found["memory"] <= 20
        bar = f"10 ms, 1 KiB, 20 MiB: {'met' if kept else 'MISSED'}"
        rows.append([what, *(f"{value:.3g}" for value in found.values()), bar])
    columns = ["64 ranks", "dataset, s", "CPU s", "seek, CPU ms: median", "max", "seek, ms: median", "max"]
    columns += ["state, bytes", "private memory, MiB", "bar"]
    table(f"web: {documents:,} documents, sequences of {capacity:,} tokens", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=5_000_000)
    parser.add_argument("--slow", type=int, default=200_000, help="documents of best fit (default: %(default)s)")
    parser.add_argument("--many", type=int, default=1_000_000_000, help="takes 10 bytes of disk each; 0 for none")
    parser.add_argument("--kinds", nargs="*", default=list(DRAWN), choices=DRAWN)
    parser.add_argument("--capacities", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    for name in ("child", "name", "path"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--capacity", type=int, help=argparse.SUPPRESS)
    quick = {"documents": 20_000, "slow": 5000, "many": 100_000, "kinds": ["web"], "capacities": [2048], "repeat": 1}
    options = parse(parser, quick)
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.name, options.path, options.capacity)))
        return
    with folder(options.dir) as where:
        write_lengths(where / "few.npy", "web", 1000, longest=LONGEST, dtype=np.int32)
        for kind, capacity in itertools.product(options.kinds, options.capacities):
            measure(kind, capacity, options, where)
        remark("A list of an epoch takes 8 bytes per document and per sequence; a state of Penstock is a few numbers.")
        if options.many:
            measure_many(options.many, max(options.capacities), where)


if __name__ == "__main__":
    main()
