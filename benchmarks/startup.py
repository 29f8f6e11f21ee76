"""How long programs take to start: `import penstock` beyond torch's own import, and ``penstock ... --help``.

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

from _common import interleave, parse, table

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
    "bench readers",
    "serve",
)
AFTER_TORCH = {"import penstock": "import penstock", "penstock.DataLoader": "import penstock; penstock.DataLoader"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeat", type=int, default=9, help="processes of each kind (default: %(default)s)")
    repeat = parse(parser, {"repeat": 1}).repeat
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
    table(f"whole processes, ms, {repeat} each", ["", "min", "median", "max", "processor, median"], rows)


def _milliseconds(seconds: Sequence[float]) -> list[str]:
    """Smallest, middle and largest."""
    return [f"{1000 * one:,.1f}" for one in (min(seconds), statistics.median(seconds), max(seconds))]


def _process(arguments: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)


def _help(name: str) -> Callable[[], object]:
    return _process(["-m", "penstock", *name.split(), "--help"])


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
