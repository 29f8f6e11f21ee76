"""Make docs/performance.md from performance.md, which is written by hand, and the results in results/.

In performance.md the lines between ``<!-- results: NAME -->`` and ``<!-- end -->`` stand where the tables of
results/NAME.json go, with date, machine, versions and command; as long as there is no such file they are kept.

    python benchmarks/render.py                         # write docs/performance.md
    python benchmarks/render.py --take .bench           # take over what was measured, then the same
    python benchmarks/render.py --check                 # exit code 1 if docs/performance.md is not what comes out
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS, NOTES, PAGE = HERE / "results", HERE / "performance.md", HERE.parent / "docs" / "performance.md"
_HEAD = "<!-- Made by benchmarks/render.py of benchmarks/performance.md and benchmarks/results; edit those. -->\n\n"
_BLOCK = re.compile(r"^<!-- results: (\w+) -->\n(.*?)^<!-- end -->\n", re.MULTILINE | re.DOTALL)


def render(notes: str, results: dict[str, dict[str, Any]]) -> str:
    """The page.

    Raises:
        ValueError: results have no place in the notes, or two, or were measured with ``--quick``.
    """
    places = [match[1] for match in _BLOCK.finditer(notes)]
    for name, result in results.items():
        if places.count(name) != 1:
            raise ValueError(f"results/{name}.json: performance.md has {places.count(name)} blocks for it, not one")
        if result["quick"]:
            raise ValueError(f"results/{name}.json was measured with --quick, which shows nothing but that it runs")
    if notes.count("<!-- results:") != len(places):
        raise ValueError("performance.md has a block of results without its end")
    return _HEAD + _BLOCK.sub(lambda match: block(results[match[1]]) if match[1] in results else match[2], notes)


def block(result: dict[str, Any]) -> str:
    """The tables of one benchmark, and where they come from."""
    machine, versions = result["machine"], result["versions"]
    load = f"load before {machine['load before']:g}"
    where = [machine["processor"], f"{machine['cores']} cores", f"{machine['memory GiB']:g} GiB", machine["kernel"]]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "penstock")
    commit = f" at {result['commit']}" if result["commit"] else ""
    parts = [
        f"Measured on {result['date'][:10]}: {', '.join([*where, machine['disk'], load])}; "
        f"penstock {versions['penstock']}{commit}, {named}.",
        f"```bash\n{result['command']}\n```",
    ]
    for table in result["tables"]:
        title = " ".join(table["title"].split())
        parts += [f"{_escaped(title)}:", markdown(table["columns"], table["rows"])]
    return "\n\n".join([*parts, *map(_escaped, result["remarks"])]) + "\n"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)


def _escaped(text: str) -> str:
    return re.sub(r"([|*<])", r"\\\1", text)


def stored(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All results of a folder, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def take(folder: Path) -> None:
    """Copy the results of a run; those of --quick are refused when the page is made."""
    found = sorted(folder.glob("*.json"))
    if not found:
        raise ValueError(f"{folder}: no results; make bench writes them")
    RESULTS.mkdir(exist_ok=True)
    render(NOTES.read_text(encoding="utf-8"), stored(folder))
    for path in found:
        shutil.copyfile(path, RESULTS / path.name)


def main() -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--take", type=Path, metavar="FOLDER", help="take over the results of a run first")
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if the page would differ")
    options = parser.parse_args()
    try:
        if options.take is not None:
            take(options.take)
        page = render(NOTES.read_text(encoding="utf-8"), stored())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    same = PAGE.read_text(encoding="utf-8") == page
    print("docs/performance.md is up to date" if same else "docs/performance.md differs: run benchmarks/render.py")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
