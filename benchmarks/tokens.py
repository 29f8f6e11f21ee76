"""Sequences of tokens: `TokenDataset` beside torch's DataLoader with its default collate function.

The peer is what programs write: a dataset over one memory map that gives an int64 tensor for each sequence, shuffled,
in batches that ``default_collate`` makes. The map is a plain array (slicing ``np.memmap`` itself takes twice as long).
Both have the same file, in the page cache, sequences, types, batch size and number of workers, and are measured in
turn; a pass begins with ``iter()``, and persistent workers are started before. Each batch is read once by the consumer
(one sum), as a training step would.

    python benchmarks/tokens.py --repeat 5
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data
from torch.utils.data import Dataset

import penstock
from _common import arguments, folder, interleave, parse, spread, table


class Plain(Dataset[torch.Tensor]):
    """One tensor a sequence."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens = np.asarray(np.memmap(path, np.uint16, "r"))
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = index * self.length
        return torch.from_numpy(self.tokens[begin : begin + self.length].astype(np.int64))


def loaders(path: Path, length: int, batch_size: int) -> dict[str, Any]:
    """Ours and torch's, by name."""
    ours = penstock.TokenDataset(path, length, dtype="uint16", seed=0)
    theirs = Plain(path, length)
    made: dict[str, Any] = {}
    for workers in (0, 1, 2):
        more: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        made[f"torch, {workers} workers"] = torch.utils.data.DataLoader(theirs, batch_size, shuffle=True, **more)
        made[f"penstock, {workers} workers"] = penstock.DataLoader(ours, batch_size, **more)
    for executor, workers in (("thread", 1), ("thread", 2), ("process", 2)):
        more = {"num_workers": workers, "executor": executor, "persistent_workers": executor == "process"}
        made[f"penstock, {workers} workers, {executor}"] = penstock.DataLoader(ours, batch_size, **more)
    return made


def cpu_seconds() -> float:
    """Processor time of this process and its workers."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def one_pass(loader: Any, length: int, expected: int, cpu: list[float]) -> Callable[[], None]:
    """A pass that reads each batch once, and counts sequences; its processor time is appended."""

    def run() -> None:
        count, total, before = 0, 0, cpu_seconds()
        for batch in loader:
            count += len(batch)
            total += int(batch.view(-1)[:: length // 8].sum())
        cpu.append(cpu_seconds() - before)
        assert count == expected, f"{count} sequences instead of {expected}"

    return run


def main() -> None:
    parser = arguments(__doc__, lines=40_000)
    parser.add_argument("--length", type=int, default=2048, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 64, 512])
    options = parse(parser, {"lines": 1000, "repeat": 1, "batch_sizes": [64]})
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.set_num_threads(1)
    with folder(options.dir) as where:
        path = where / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, options.lines * options.length, dtype=np.uint16).tofile(path)
        for batch_size in options.batch_sizes:
            measure(path, batch_size, options)


def measure(path: Path, batch_size: int, options: Any) -> None:
    """A table for one batch size."""
    made = loaders(path, options.length, batch_size)
    for loader in made.values():  # workers start; pages and slots are there
        for _ in itertools.islice(loader, 30):
            pass
    cpu: dict[str, list[float]] = {name: [] for name in made}
    runs = {name: one_pass(loader, options.length, options.lines, cpu[name]) for name, loader in made.items()}
    samples = interleave(runs, options.repeat)
    best = min(found.median for name, found in samples.items() if name.startswith("torch"))
    rows = []
    for name, found in samples.items():
        alike = samples["torch, " + ", ".join(name.split(", ")[1:2])].median
        rate = [options.lines / seconds for seconds in found.wall]
        each = statistics.median(cpu[name]) / options.lines * 1e6
        rows.append(
            (name, *spread(rate, 4), f"{each:.1f}", f"{alike / found.median:.1f}x", f"{best / found.median:.1f}x")
        )
    title = (
        f"{options.lines:,} sequences of {options.length} tokens (uint16 to int64), shuffled, batches of {batch_size}"
    )
    header = ["loader", "sequences/s: min", "median", "max", "CPU us each", "torch alike", "best of torch"]
    table(title, header, rows, peer=lambda name: "torch, " + name.split(", ")[1])
    for loader in made.values():
        getattr(loader, "close", lambda: None)()


if __name__ == "__main__":
    main()
