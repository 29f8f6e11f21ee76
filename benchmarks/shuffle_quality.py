"""How well orders mix, and what they read: a class-sorted list of 1,000 classes.

* displacement: mean distance of a sample from its place in the file, as a share of the file (a random order: 0.333);
* classes in a batch of 256 consecutive positions (a random order: 226; the file's own: 1 or 2);
* runs: how many stretches of consecutive rows are read while a job passes through a window of positions, and their
  mean length. Few and long is good for spinning disks and network file systems. A shuffle buffer reads the file in its
  own order: one run.

The peers are shuffle buffers, which draw from the next so many rows.

The last table is about batches grouped by aspect ratio: how much of a padded batch is padding, and how far a sample
moves from its place in the stream.

    python benchmarks/shuffle_quality.py
"""

from __future__ import annotations

import argparse
import random

import numpy as np

from _common import table
from penstock.order import make_order
from penstock.samplers import BatchSampler, DistributedSampler, GroupedBatchSampler

CLASSES, BATCH = 1000, 256


def shuffle_buffer(n: int, size: int) -> np.ndarray:
    """The order in which a buffer of that size gives out the rows of a file."""
    rng = random.Random(0)
    buffer = list(range(min(size, n)))
    out = []
    for row in range(len(buffer), n):
        place = rng.randrange(size)
        out.append(buffer[place])
        buffer[place] = row
    rng.shuffle(buffer)
    return np.array(out + buffer)


def runs_read(order: np.ndarray, window: int) -> tuple[float, float]:
    """Runs of consecutive rows within each window of positions: mean count and mean length in rows."""
    counts = []
    for start in range(0, len(order) - window + 1, window):
        rows = np.sort(order[start : start + window])
        counts.append(1 + int(np.count_nonzero(np.diff(rows) > 1)))
    count = float(np.mean(counts))
    return count, window / count


def quality(name: str, order: np.ndarray, window: int, reads: str | None = None) -> list[str]:
    n = len(order)
    displacement = np.abs(order - np.arange(n)).mean() / n
    labels = (order * CLASSES // n)[: n // BATCH * BATCH].reshape(-1, BATCH)
    labels = np.sort(labels, axis=1)
    classes = 1 + np.count_nonzero(np.diff(labels, axis=1), axis=1)
    runs, length = runs_read(order, window)
    read = [f"{window:,}", f"{runs:,.0f}", f"{length:,.1f}"] if reads is None else [reads, "1", f"{n:,}"]
    return [name, f"{displacement:.4f}", f"{classes.mean():.1f}", f"{np.percentile(classes, 5):.0f}", *read]


def orders(n: int) -> None:
    positions = np.arange(n)
    rows = [quality("none", positions, 65_536)]
    rows += [
        quality(f"shuffle buffer of {size:,} (peer)", shuffle_buffer(n, size), 65_536, "streams")
        for size in (1000, 10_000)
    ]
    for block_size in (64, 256, 1024, 4096):
        for window in (1, 16, 64, 256):
            if block_size * window > n:
                continue
            order = make_order("block", n, seed=1, block_size=block_size, window=window)[positions]
            rows.append(quality(f"block, block_size={block_size}, window={window}", order, block_size * window))
    rows.append(quality("global", make_order("global", n, seed=1)[positions], 65_536))
    rows.append(quality("numpy.random.permutation (peer)", np.random.default_rng(0).permutation(n), 65_536))
    columns = ["order", "displacement", "classes / batch", "5th percentile", "window, rows", "runs read", "rows a run"]
    table(f"{n:,} class-sorted rows, {CLASSES:,} classes, batches of {BATCH}", columns, rows)


def padding(n: int, batch_size: int) -> None:
    rng = np.random.default_rng(0)
    portrait = rng.random(n) < 0.3  # shapes much like COCO's: two thirds 640 x 480, one third the other way
    long = np.full(n, 640)
    short = rng.integers(360, 520, n)
    heights, widths = np.where(portrait, long, short), np.where(portrait, short, long)
    groups = (heights >= widths).astype(np.uint8)
    sampler = DistributedSampler(range(n), 1, 0, "global")
    place = np.empty(n, dtype=np.int64)
    place[np.fromiter(sampler, dtype=np.int64)] = np.arange(n)
    rows = []
    for name, batches in (
        ("ungrouped", BatchSampler(sampler, batch_size, False)),
        ("grouped, order='completion'", GroupedBatchSampler(sampler, groups, batch_size)),
        (
            "grouped, order='first' (maskrcnn-benchmark's)",
            GroupedBatchSampler(sampler, groups, batch_size, order="first"),
        ),
    ):
        listed = list(batches)
        pixels = sum(max(heights[b]) * max(widths[b]) * len(b) for b in map(np.array, listed))
        moved = np.abs(place[np.concatenate(listed)] - np.arange(n))
        padded = 1 - float((heights * widths).sum()) / float(pixels)
        rows.append([name, f"{padded:.3f}", f"{moved.mean():.2f}", f"{moved.max()}"])
    columns = ["batches", "share of padding", "mean displacement", "largest displacement"]
    table(f"{n:,} images, batches of {batch_size}, two aspect-ratio groups", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A multiple of all block sizes: then windows of positions are windows of the shuffle.
    parser.add_argument("--samples", type=int, default=1_028_096)
    parser.add_argument("--images", type=int, default=117_266)
    options = parser.parse_args()
    orders(options.samples)
    for batch_size in (2, 16):
        padding(options.images, batch_size)


if __name__ == "__main__":
    main()
