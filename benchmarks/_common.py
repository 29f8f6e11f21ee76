"""What all benchmarks share: a table, peers measured in turn, memory of processes, files to read."""

from __future__ import annotations

import argparse
import contextlib
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

__all__ = ["Samples", "arguments", "folder", "interleave", "make_manifest", "smaps_rollup", "spread", "table"]


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


def spread(values: Sequence[float], digits: int = 3) -> tuple[str, str, str]:
    """Smallest, middle and largest value as text."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{low:.{digits}g}", f"{middle:.{digits}g}", f"{high:.{digits}g}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to standard output, as wide as it needs to be. Columns of numbers are aligned to the right."""
    result = Table(title=escape(title), title_justify="left")
    for k, name in enumerate(columns):
        numeric = all(_is_number(str(row[k])) for row in rows)
        result.add_column(escape(name), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        result.add_row(*(escape(str(cell)) for cell in row))
    Console(width=200).print(result)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "").rstrip("x%") or "0")
    except ValueError:
        return text in ("", "-")
    return True


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


def arguments(description: str | None, lines: int = 10_000_000, repeat: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--lines", type=int, default=lines, help="rows of the manifest (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=repeat, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    return parser


@contextlib.contextmanager
def folder(given: str | None) -> Iterator[Path]:
    """A folder that is removed afterwards, within the one that was given or the system's temporary one."""
    with tempfile.TemporaryDirectory(dir=given, prefix="penstock-bench-") as name:
        yield Path(name)
