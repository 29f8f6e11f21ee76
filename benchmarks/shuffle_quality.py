"""How well orders mix, and what they read: a class-sorted list of 1,000 classes.

* displacement: mean distance of a sample from its place in the file, as a share of the file (a random order: 0.333);
* classes in a batch of 256 consecutive positions (a random order: 226; the file's own: 1 or 2);
* runs: how many stretches of consecutive rows are read while a job passes through a window of positions, and their
  mean length. Few and long is good for spinning disks and network file systems. A shuffle buffer reads the file in its
  own order: one run.

The peers are shuffle buffers, which draw from the next so many rows. `penstock shuffle-quality` measures the same on a
manifest of one's own; here every batch and every window is looked at.

The last table is about batches grouped by aspect ratio: how much of a padded batch is padding, and how far a sample
moves from its place in the stream.

    python benchmarks/shuffle_quality.py
"""

from __future__ import annotations

import argparse

import numpy as np

from _common import parse, table
from penstock.hashing import derive_key
from penstock.order import make_order
from penstock.samplers import BatchSampler, DistributedSampler, GroupedBatchSampler
from penstock.tools.quality import Invertible, ShuffleBuffer, TableOrder, measure, sorted_labels

CLASSES, BATCH = 1000, 256


def quality(name: str, order: Invertible, window: int) -> list[str]:
    n = len(order)
    labels = sorted_labels(n, CLASSES)
    found = measure(
        lambda epoch: order, batch_size=BATCH, epochs=1, labels=labels, batches=None, window=window, windows=None
    )
    read = [
        "streams" if found.streams else f"{found.window:,}",
        f"{found.runs:,.0f}",
        f"{found.rows_a_run:,.1f}",
    ]
    return [name, f"{found.displacement:.4f}", f"{found.classes:.1f}", f"{found.classes_low:.0f}", *read]


def orders(n: int) -> None:
    rows = [quality("none", make_order("none", n), 65_536)]
    rows += [
        quality(f"shuffle buffer of {size:,} (peer)", ShuffleBuffer(n, size, derive_key(0, 0, "buffer")), 65_536)
        for size in (1000, 10_000)
    ]
    for block_size in (64, 256, 1024, 4096):
        for window in (1, 16, 64, 256):
            if block_size * window > n:
                continue
            order = make_order("block", n, seed=1, block_size=block_size, window=window)
            rows.append(quality(f"block, block_size={block_size}, window={window}", order, block_size * window))
    rows.append(quality("global", make_order("global", n, seed=1), 65_536))
    drawn = TableOrder(np.random.default_rng(0).permutation(n))
    rows.append(quality("numpy.random.permutation (peer)", drawn, 65_536))
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
    options = parse(parser, {"samples": 65_536, "images": 5_000})
    orders(options.samples)
    for batch_size in (2, 16):
        padding(options.images, batch_size)


if __name__ == "__main__":
    main()
