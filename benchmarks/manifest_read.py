"""How many rows a second a manifest gives, at random, in batches of 256 and one by one.

Beside it: the list of lines in memory, split and converted in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from _common import arguments, folder, interleave, make_manifest, parse, spread, table
from penstock.manifest import Manifest

BATCH = 256


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=int, default=1000, help="batches of one measurement (default: %(default)s)")
    options = parse(parser, {"lines": 200_000, "repeat": 2, "batches": 50})
    with folder(options.dir) as where:
        path = where / "meta.txt"
        make_manifest(path, options.lines)
        os.utime(path, ns=(0, 0))
        manifest = Manifest.open(path, root="/data", progress=False)
        lines = path.read_text().splitlines()
        random = np.random.default_rng(0)
        batches = [random.integers(0, options.lines, BATCH) for _ in range(options.batches)]

        def run(read: Callable[[Any], Any]) -> Callable[[], None]:
            def measure() -> None:
                for batch in batches:
                    read(batch)

            return measure

        def split(batch: Any) -> list[tuple[str, int]]:
            pairs = [lines[k].rsplit(None, 1) for k in batch.tolist()]
            return [("/data/" + name, int(label)) for name, label in pairs]

        def one_by_one(batch: Any) -> None:
            for k in batch.tolist():
                manifest[k]

        peers = {
            "records: list of Record": (manifest.records, 1.0),
            "take: pyarrow.Table (path, int64 label)": (manifest.take, 1.0),
            "raw: large_binary": (manifest.raw, 2.5),
            "m[i]: Record, one by one": (one_by_one, 0.3),
            "list of str in memory, rsplit and int": (split, None),
        }
        run(manifest.records)()  # maps the pages
        samples = interleave({name: run(read) for name, (read, _) in peers.items()}, options.repeat)
    count = BATCH * options.batches
    peer = samples["list of str in memory, rsplit and int"].median
    rows = []
    for name, (_, bar) in peers.items():
        one = samples[name]
        speed = spread([count / 1e6 / seconds for seconds in one.wall])
        cpu = f"{sum(one.cpu) / len(one.cpu) / count * 1e6:.2f}"
        rows.append((name, *speed, "-" if bar is None else f"{bar}", cpu, f"{one.median / peer:.2f}x"))
    title = f"Reading {options.lines:,} lines at random, batches of {BATCH}, page cache warm"
    table(title, ["what", "M rows/s min", "median", "max", "bar", "CPU us/row", "time / list"], rows, peer="list of")


if __name__ == "__main__":
    main()
