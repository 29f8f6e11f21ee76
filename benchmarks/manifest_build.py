"""How fast a text manifest is indexed, from the page cache, on one core.

Beside it: ``wc -l``, which looks for line feeds alone and keeps nothing, and Python's list of lines.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import xxhash

from _common import arguments, folder, interleave, make_manifest, parse, spread, table
from penstock.manifest import Manifest
from penstock.manifest.scan import LineRules, Scanner
from penstock.storage import File


def main() -> None:
    options = parse(arguments(__doc__), {"lines": 200_000, "repeat": 2})
    with folder(options.dir) as where:
        path = where / "meta.txt"
        make_manifest(path, options.lines)
        os.utime(path, ns=(0, 0))
        size = path.stat().st_size
        peers = {
            "Manifest.open, index written and synced": lambda: build(path),
            "the pass alone: offsets and xxh3_128": lambda: scan(path),
            "wc -l": lambda: subprocess.run(["wc", "-l", path], check=True, stdout=subprocess.DEVNULL),
            "open(...).readlines()": lambda: len(path.open().readlines()),
        }
        path.read_bytes()
        samples = interleave(peers, options.repeat)
        wc = samples["wc -l"].median
        rows = []
        for name, one in samples.items():
            speed = spread([size / 1e9 / seconds for seconds in one.wall])
            cpu = sum(one.cpu) / len(one.cpu)
            million = f"{options.lines / 1e6 / one.median:.3g}"
            rows.append((name, *speed, million, f"{size / 1e9 / max(cpu, 1e-9):.3g}", f"{one.median / wc:.3g}x"))
    width = size / max(options.lines, 1)
    title = f"Indexing {options.lines:,} lines of {width:.1f} bytes, {size / 1e6:,.0f} MB; bar: 0.8 GB/s"
    columns = ["what", "GB/s min", "median", "max", "M lines/s", "GB per CPU s", "time / wc"]
    table(title, columns, rows, peer="wc -l")


def build(path: Path) -> None:
    """Index the file anew."""
    path.with_name(path.name + ".pstk").unlink(missing_ok=True)
    Manifest.open(path, progress=False)


def scan(path: Path) -> None:
    """Find the rows and keep nothing."""
    with open(os.devnull, "wb") as nowhere:
        scanner, digest = Scanner(LineRules(), nowhere), xxhash.xxh3_128()
        source = File(str(path))
        for piece in source.pieces(0, source.size):
            digest.update(piece)
            scanner.feed(piece)
        scanner.end()


if __name__ == "__main__":
    main()
