"""Make pages of docs/ from those beside this file, which are written by hand, and the results in results/.

In performance.md and training-from-stores.md the lines between ``<!-- results: NAME -->`` and ``<!-- end -->`` stand
where the tables of results/NAME.json go, with date, machine, versions and command; as long as there is no such file
they are kept. On performance.md they are folded, below the pictures that _charts.py draws of the same results.

    python benchmarks/render.py                         # write the pages and the pictures
    python benchmarks/render.py --take .bench           # take over what was measured, then the same
    python benchmarks/render.py --check                 # exit code 1 if they are not what comes out
"""

from __future__ import annotations

import argparse
import html
import inspect
import json
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # whoever loads this as a file
import _charts

HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
PAGES = {
    HERE / "performance.md": DOCS / "performance.md",
    HERE / "training-from-stores.md": DOCS / "guides" / "training-from-stores.md",
}
FOLDED = {HERE / "performance.md"}
_HEAD = "<!-- Made by benchmarks/render.py of benchmarks/{} and benchmarks/results; edit those. -->\n\n"
_BLOCK = re.compile(r"^<!-- results: (\w+) -->\n(.*?)^<!-- end -->\n", re.MULTILINE | re.DOTALL)


def pages(results: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Return the pages. Raises as `check` does."""
    notes = {source: source.read_text(encoding="utf-8") for source in PAGES}
    check(notes.values(), results)
    return {
        PAGES[source]: _HEAD.format(source.name) + fill(text, results, folded=source in FOLDED)
        for source, text in notes.items()
    }


def pictures(results: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Return the pictures whose results are all there."""
    made = {}
    for name, chart in _charts.CHARTS.items():
        needed = list(inspect.signature(chart).parameters)
        if all(result in results for result in needed):
            made[DOCS / name] = chart(**{result: results[result] for result in needed})
    return made


def check(notes: Collection[str], results: dict[str, dict[str, Any]]) -> None:
    """Compare the places of results with those that there are.

    Raises:
        ValueError: results have no place in the notes, or two, or were measured with ``--quick``.
    """
    places = [match[1] for text in notes for match in _BLOCK.finditer(text)]
    for name, result in results.items():
        if places.count(name) != 1:
            raise ValueError(f"results/{name}.json: the pages have {places.count(name)} blocks for it, not one")
        if result["quick"]:
            raise ValueError(f"results/{name}.json was measured with --quick, which shows nothing but that it runs")
    if sum(text.count("<!-- results:") for text in notes) != len(places):
        raise ValueError("a page has a block of results without its end")


def fill(notes: str, results: dict[str, dict[str, Any]], *, folded: bool = False) -> str:
    """Return a page with the results in their places, each behind one line that opens it if `folded`."""
    made = fold if folded else block
    return _BLOCK.sub(lambda match: made(results[match[1]]) if match[1] in results else match[2], notes)


def fold(result: dict[str, Any]) -> str:
    """Return the tables of one benchmark behind the names of its tables."""
    titles = [re.split(r"[;:,] ", " ".join(table["title"].split()))[0] for table in result["tables"]]
    shown = "; ".join(dict.fromkeys(titles))
    summary = f"<summary>Tables of {result['script']}.py: {html.escape(shown)}</summary>"
    return f'<details markdown="1">\n{summary}\n\n{block(result)}\n</details>\n'


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
    pages(stored(folder))
    for path in found:
        shutil.copyfile(path, RESULTS / path.name)


def main() -> int:
    """Write or check the pages and the pictures; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--take", type=Path, metavar="FOLDER", help="take over the results of a run first")
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if the page would differ")
    options = parser.parse_args()
    try:
        if options.take is not None:
            take(options.take)
        results = stored()
        made = pages(results)
        made |= pictures(results)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not options.check:
        for path, text in made.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return 0
    differs = [path.name for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    print(f"docs: {', '.join(differs)} differ: run benchmarks/render.py" if differs else "docs are up to date")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
