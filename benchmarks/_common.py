"""What all benchmarks share: a table, peers measured in turn, memory of processes, files to read."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from _report import Figure, Peer, begin, is_number, record, remark

__all__ = [
    "Samples",
    "arguments",
    "folder",
    "in_a_process",
    "interleave",
    "make_manifest",
    "parse",
    "remark",
    "smaps_rollup",
    "spread",
    "table",
]


@dataclass
class Samples:
    """Times of one peer in seconds: by the clock, and of the processor (children that ended included)."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle time by the clock."""
        return statistics.median(self.wall)


def interleave(fns: dict[str, Callable[[], Any]], repeat: int) -> dict[str, Samples]:
    """Run all functions ``repeat`` times in turn, so that a noisy moment hits every peer alike. No warming up."""
    samples = {name: Samples() for name in fns}
    for _ in range(repeat):
        for name, function in fns.items():
            before, start = os.times(), time.perf_counter()
            function()
            samples[name].wall.append(time.perf_counter() - start)
            samples[name].cpu.append(sum(os.times()[:4]) - sum(before[:4]))
    return samples


def spread(values: Sequence[float], digits: int = 3, unit: str = "") -> tuple[Figure, Figure, Figure]:
    """Smallest, middle and largest value as text, which remembers all of them; `unit` is added ("x")."""
    kept = tuple(float(f"{value:.6g}") for value in values)
    low, middle, high = (_text(value, digits) + unit for value in (min(kept), statistics.median(kept), max(kept)))
    return Figure(low, kept), Figure(middle, kept), Figure(high, kept)


def _text(value: float, digits: int) -> str:
    """So many digits that count, without exponents of large numbers."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, peer: Peer = None) -> None:
    """Print a table to standard output, as wide as it needs to be. Columns of numbers are aligned to the right.

    With ``--json`` it is written there, too, with ratios to `peer`.
    """
    record(title, columns, rows, peer)
    result = Table(title=escape(title), title_justify="left")
    for k, name in enumerate(columns):
        numeric = all(is_number(str(row[k])) for row in rows)
        result.add_column(escape(name), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        result.add_row(*(escape(str(cell)) for cell in row))
    Console(width=200).print(result)


def smaps_rollup(pid: int) -> dict[str, int]:
    """Memory of a process in bytes, by the names of Linux: Pss_Anon, Anonymous, Private_Dirty, Rss ..."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        lines = [line.split() for line in file.readlines()[1:]]
    return {name.rstrip(":"): int(value) * 1024 for name, value, *_ in lines}


def make_manifest(path: str | os.PathLike[str], lines: int, classes: int = 1000, prefix: str = "train") -> None:
    """Write ``train/class_0042/img_00001234.jpg 42`` lines, sorted by class; about 38 bytes each, 300 MB/s."""
    per_class = max(1, -(-lines // classes))
    with open(path, "wb") as file:
        for label, first in enumerate(range(0, lines, per_class)):
            count = min(per_class, lines - first)
            pattern = f"{prefix}/class_{label:04d}/img_00000000.jpg {label}\n".encode()
            block = np.tile(np.frombuffer(pattern, np.uint8), (count, 1))
            numbers = np.arange(first, first + count)
            end = pattern.index(b".jpg")
            for digit in range(8):
                block[:, end - 1 - digit] = 48 + numbers // 10**digit % 10
            file.write(block.data)


def in_a_process(measure: Callable[..., None], *what: Any) -> Any:
    """Return what ``measure(*what, connection)`` sends, in a process that is forked from a server."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=measure, args=(*what, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def arguments(description: str | None, lines: int = 10_000_000, repeat: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--lines", type=int, default=lines, help="rows of the manifest (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=repeat, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    return parser


def parse(
    parser: argparse.ArgumentParser, quick: dict[str, Any] | None = None, versions: Sequence[str] = ()
) -> argparse.Namespace:
    """The options of the command line, with ``--json`` and ``--quick``, which changes defaults to those of `quick`.

    `versions` names distributions that only other processes of the benchmark import.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write tables, values and machine there")
    parser.add_argument("--quick", action="store_true", help="sizes that show that it runs, and nothing else")
    if parser.parse_args().quick:
        parser.set_defaults(**(quick or {}))
    options = parser.parse_args()
    begin(options.json, options, versions)
    return options


@contextlib.contextmanager
def folder(given: str | None) -> Iterator[Path]:
    """A folder that is removed afterwards, within the one that was given or the system's temporary one."""
    with tempfile.TemporaryDirectory(dir=given, prefix="penstock-bench-") as name:
        yield Path(name)
