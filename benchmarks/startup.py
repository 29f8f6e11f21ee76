"""How long programs take to start: to the first batch, `import penstock` beyond torch's own, ``penstock ... --help``.

Processes are started in turn, so that a busy machine disturbs all alike. Times are by the clock, from start to end of a
process, with a Python that does nothing beside them; what is imported after torch is timed within its process.

    python benchmarks/startup.py --repeat 9
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from _common import folder, interleave, make_manifest, parse, remark, spread, table

COMMANDS = (
    "",
    "doctor",
    "demo",
    "manifest",
    "manifest check",
    "shards",
    "shards pack",
    "cache info",
    "profile",
    "plan",
    "shuffle-quality",
    "bench clips",
    "serve",
)
AFTER_TORCH = {"import penstock": "import penstock", "penstock.DataLoader": "import penstock; penstock.DataLoader"}

PENSTOCK = """
import penstock as ps

class Rows(torch.utils.data.Dataset):
    def __init__(self, path):
        self.manifest = ps.Manifest.open(path)

    def __len__(self):
        return len(self.manifest)

    def __getitem__(self, index):
        record = self.manifest[index]
        return record.path, record.label

batch = next(iter(ps.DataLoader(Rows(path), batch_size=64, shuffle="global", seed=0)))
"""
TORCH = """
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self, path):
        self.rows = open(path).read().splitlines()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        path, label = self.rows[index].rsplit(" ", 1)
        return path, int(label)

batch = next(iter(DataLoader(Rows(path), batch_size=64, shuffle=True)))
"""
SPLIT_FIRST = "[line.rsplit(' ', 1) for line in open(path)]"
FIRST_BATCH = {
    "penstock, Manifest with its index there": PENSTOCK,
    "penstock, Manifest indexed now": "import os\nos.unlink(path + '.pstk')" + PENSTOCK,
    "torch, list of lines": TORCH,
    "torch, list of paths and labels": TORCH.replace("open(path).read().splitlines()", SPLIT_FIRST).replace(
        '.rsplit(" ", 1)', ""
    ),
}
"""What a program does after ``import torch``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeat", type=int, default=9, help="processes of each kind (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=1_000_000, help="rows of the manifest (default: %(default)s)")
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    options = parse(parser, {"repeat": 1, "lines": 10_000}, versions=["torch"])
    repeat = options.repeat
    with folder(options.dir) as where:
        _first_batch(where / "train.txt", options.lines, repeat)
    _after_torch(min(repeat, 5))
    fns = {
        "python -c pass": _process(["-c", "pass"]),
        "python -c 'import penstock'": _process(["-c", "import penstock"]),
    }
    fns |= {" ".join(["penstock", *name.split(), "--help"]): _help(name) for name in COMMANDS}
    fns["penstock --version"] = _process(["-m", "penstock", "--version"])
    _ = [function() for function in fns.values()]  # what it reads is in memory, and compiled
    found = interleave(fns, repeat)
    rows = [
        (name, *_milliseconds(times.wall), f"{1000 * statistics.median(times.cpu):.0f}")
        for name, times in found.items()
    ]
    table(f"whole processes, ms, {repeat} each", ["", "min", "median", "max", "CPU, median"], rows)


def _milliseconds(seconds: Sequence[float]) -> list[str]:
    """Smallest, middle and largest."""
    return [f"{1000 * one:,.1f}" for one in (min(seconds), statistics.median(seconds), max(seconds))]


def _process(arguments: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)


def _help(name: str) -> Callable[[], object]:
    return _process(["-m", "penstock", *name.split(), "--help"])


def _first_batch(path: Path, lines: int, repeat: int) -> None:
    make_manifest(path, lines)
    times: dict[str, list[float]] = {name: [] for name in FIRST_BATCH}
    modules: dict[str, str] = {}
    before = "import sys, time, torch\npath = sys.argv[1]\nmodules, start = set(sys.modules), time.perf_counter()\n"
    after = "print(time.perf_counter() - start, len(set(sys.modules) - modules))"
    run = [sys.executable, "-c", "import penstock, sys; penstock.Manifest.open(sys.argv[1])", str(path)]
    subprocess.run(run, check=True)
    for _ in range(repeat):
        for name, code in FIRST_BATCH.items():
            command = [sys.executable, "-c", before + code + after, str(path)]
            seconds, modules[name] = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True
            ).stdout.split()
            times[name].append(1000 * float(seconds))
    rows = [(name, *spread(times[name]), modules[name]) for name in FIRST_BATCH]
    columns = ["", "min", "median", "max", "modules imported"]
    remark("Inline loaders, batches of 64 in random order; the page cache is warm.")
    table(
        f"after import torch to the first batch of {lines:,} rows, ms, {repeat} each",
        columns,
        rows,
        peer="torch, list of lines",
    )


def _after_torch(repeat: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in ("import torch", *AFTER_TORCH)}
    for _ in range(repeat):
        for name, code in AFTER_TORCH.items():
            clock = "time.perf_counter()"
            program = f"import time\na = {clock}\nimport torch\nb = {clock}\n{code}\nprint(b - a, {clock} - b)"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            torchs, ours = map(float, done.stdout.split())
            found["import torch"].append(torchs)
            found[name].append(ours)
    rows = [(name, *_milliseconds(times)) for name, times in found.items()]
    table(f"in a process that has imported torch, ms, {repeat} each", ["", "min", "median", "max"], rows)


if __name__ == "__main__":
    main()
