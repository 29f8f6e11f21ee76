"""What a benchmark measured, as JSON: the tables as printed, every value behind them, and where and when that was.

`spread` gives text that still knows its values, so that `record` finds them in the rows of a table: a name (the row's
first columns), a unit (the column's head), all values with their least, median and largest, the ratio to the peer of
the table, and columns of processor time. The file is written anew after each table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Figure", "Peer", "begin", "is_number", "record", "remark"]

Peer = str | Callable[[str], str] | None
"""What the rows of a table are compared to: how that row's name begins, or a function of a row's name."""

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = {  # module -> distribution
    "torch": "torch",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "cv2": "opencv-python-headless",
    "PIL": "pillow",
    "webdataset": "webdataset",
    "ray": "ray",
    "pandas": "pandas",
    "aiohttp": "aiohttp",
    "fsspec": "fsspec",
}


class Figure(str):
    """Text of a number, and the values that it was taken from: the same tuple for all texts of one group."""

    values: tuple[float, ...]

    def __new__(cls, text: str, values: tuple[float, ...]) -> Figure:
        made = super().__new__(cls, text)
        made.values = values
        return made


_file: Path | None = None
_found: dict[str, Any] = {}


def begin(file: Path | None, options: argparse.Namespace, more: Sequence[str]) -> None:
    """From now on tables are written to `file`, if there is one; `more` are distributions of other processes."""
    global _file
    _file = file
    if file is None:
        return
    _found.update(
        script=Path(sys.argv[0]).stem,
        command=_command(sys.argv[1:]),
        quick=options.quick,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        machine=_machine(getattr(options, "dir", None)),
        more=list(more),
        tables=[],
        remarks=[],
    )


def record(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], peer: Peer) -> None:
    """Add a table to the file, if there is one."""
    if _file is not None:
        cells = [[str(cell) for cell in row] for row in rows]
        measured = _measured(columns, rows, peer)
        _found["tables"].append({"title": title, "columns": list(columns), "rows": cells, "measured": measured})
        _write(_file)


def remark(text: str) -> None:
    """Print a line that belongs to the tables, and add it to the file."""
    print(text, flush=True)
    if _file is not None:
        _found["remarks"].append(text)
        _write(_file)


def _write(file: Path) -> None:
    versions = {"python": platform.python_version(), "penstock": _version("penstock")}
    versions |= {name: _version(name) for module, name in _PACKAGES.items() if module in sys.modules}
    versions |= {name: _version(name) for name in _found["more"]}
    found = {name: value for name, value in _found.items() if name != "more"} | {"versions": versions}
    partial = file.with_name(file.name + ".partial")
    text = json.dumps(found, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda flat: re.sub(r"\n\s*", " ", flat[0]), text)  # a row is a line
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(file)


def is_number(text: str) -> bool:
    """Whether a cell counts as a number: one, a ratio, a share, or nothing."""
    try:
        float(text.replace(",", "").rstrip("x%") or "0")
    except ValueError:
        return text in ("", "-")
    return True


def _measured(columns: Sequence[str], rows: Sequence[Sequence[object]], peer: Peer) -> list[dict[str, Any]]:
    """One item for each row and group of columns that `spread` made."""
    texts = [k for k in range(len(columns)) if not all(is_number(str(row[k])) for row in rows)]
    leading = [k for k in texts if k == texts.index(k)] or [0]  # the columns from the first on that hold words
    items = []
    for row in rows:
        labels = [str(row[k]) for k in leading if row[k]]
        cpu = {columns[k]: _number(str(row[k])) for k in range(len(columns)) if _is_cpu(columns[k], row[k])}
        figures = [k for k in range(len(columns)) if isinstance(row[k], Figure)]
        for _, group in itertools.groupby(figures, key=lambda k: id(row[k].values)):  # type: ignore[attr-defined]
            first = next(group)
            values = row[first].values  # type: ignore[attr-defined]
            item = {"name": ", ".join(labels), "unit": _unit(columns[first]), "values": list(values)}
            item |= {"min": min(values), "median": statistics.median(values), "max": max(values)}
            items.append(item | ({"cpu": cpu} if cpu else {}) | {"labels": labels})
    for item in items:
        other = _peer_of(item, items, peer)
        if other is not None and other["median"]:
            item["ratio"] = {"to": other["name"], "of medians": item["median"] / other["median"]}
    for item in items:
        del item["labels"]
    return items


def _peer_of(item: dict[str, Any], items: Sequence[dict[str, Any]], peer: Peer) -> dict[str, Any] | None:
    """The item that another is compared to: of the same unit, and most like it in the other columns."""
    if peer is None:
        return None
    begins = peer if isinstance(peer, str) else peer(item["name"])
    alike = [
        other
        for other in items
        if other["unit"] == item["unit"] and any(label.startswith(begins) for label in other["labels"])
    ]
    return max(alike, key=lambda other: len(set(other["labels"]) & set(item["labels"])), default=None)


def _is_cpu(column: str, cell: object) -> bool:
    return "CPU" in column and not isinstance(cell, Figure) and str(cell) not in ("", "-") and is_number(str(cell))


def _number(text: str) -> float:
    return float(text.replace(",", "").rstrip("x%"))


def _unit(column: str) -> str:
    return re.sub(r"(: |, | |^)(min|least)$", "", column)


def _command(arguments: Sequence[str]) -> str:
    """The command line without where results go, and without the names of this machine's folders."""
    kept, skip = [f"benchmarks/{Path(sys.argv[0]).name}"], False
    for argument in arguments:
        if not skip and argument != "--json":
            kept.append("FOLDER" if argument.startswith("/") else argument)
        skip = argument == "--json"
    return shlex.join(["python", *kept])


def _commit() -> str | None:
    """Of this tree; with "+" if files of the package or of the benchmarks differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine(directory: str | None) -> dict[str, Any]:
    """Processor, memory, kernel and disk, and how busy it was."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory GiB": round(memory / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "disk": _disk(directory or os.environ.get("TMPDIR", "/tmp")),
        "load before": round(os.getloadavg()[0], 2),
    }


def _disk(folder: str) -> str:
    """The file system that a folder is on, and its device's kind."""
    path = Path(folder).resolve()
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [(len(where), device, kind) for device, where, kind, *_ in mounts if path.is_relative_to(where)]
    _, device, kind = max(inside, default=(0, "", "unknown"))
    turns = Path("/sys/block", re.sub(r"p?\d+$", "", Path(device).name), "queue/rotational")
    spins = turns.read_text().strip() == "1" if turns.is_file() else None
    return kind + {True: ", rotational", False: ", not rotational", None: ""}[spins]
