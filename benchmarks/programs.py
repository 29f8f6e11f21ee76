"""Programs of other projects as they are published, on torch's loader and on ours: samples a second in training.

tests/programs/published.py says how they are run, docs/guides/real-programs.md what is changed. The models are small:
data set the pace, and each program has two workers. A run is an epoch in a fresh interpreter. It is measured from
the first printed step to the last: samples a second by the clock, and milliseconds of processor time a sample, of the
program and its workers, training included.

    python benchmarks/programs.py --programs FOLDER --data ~/imagenet-sample
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "programs"))
from program_data import write_data
from published import PROGRAMS, SWAPPED, Program, changes, run

from _common import arguments, folder, parse, spread, table

KINDS = ("as published", "our loader", "data read by us, too")


class Pace(NamedTuple):
    """Samples a second by the clock, and milliseconds of processor time a sample."""

    rate: float
    cpu: float


def measure(program: Program, source: Path, where: Path, data: Path, made: int) -> Pace:
    """Run a program once."""
    with folder(str(where)) as copy:
        done = run(program, source, copy / "program", data, made=made, epochs=1)
    samples = program.batch * (len(done.losses) - 1)
    seconds, cpu = done.seconds[-1] - done.seconds[0], done.cpu[-1] - done.cpu[0]
    return Pace(samples / seconds, 1000 * cpu / samples)


def main() -> None:
    """Measure the programs in rounds, one after the other: each with all of its changes in turn."""
    parser = arguments(__doc__, repeat=5)
    parser.add_argument("--programs", type=Path, help="what tests/programs/get.py made")
    parser.add_argument("--data", type=Path, help="a folder of JPEG files")
    parser.add_argument("--each", type=int, default=40, help="images of each of ten classes (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), choices=PROGRAMS)
    options = parse(parser, {"each": 16, "repeat": 1})
    programs = options.programs or os.environ.get("PENSTOCK_TEST_PROGRAMS")
    if programs is None or options.data is None:
        parser.error("say where the programs are (--programs, or PENSTOCK_TEST_PROGRAMS), and JPEG files (--data)")
    source = Path(programs).resolve()
    rows: list[list[object]] = []
    with folder(options.dir) as where:
        write_data(options.data.resolve(), where / "data", each=options.each)
        for name in options.only:
            kinds = range(len(changes(name)) + 1)
            paces: dict[int, list[Pace]] = {made: [] for made in kinds}
            for _ in range(options.repeat):
                for made in kinds:
                    done = measure(PROGRAMS[name], source, where, where / "data", made)
                    paces[made].append(done)
                    print(name, KINDS[made], f"{done.rate:.1f} {done.cpu:.2f}", file=sys.stderr, flush=True)
            for made in kinds:
                rates = [pace.rate for pace in paces[made]]
                ratios = [pace.rate / plain.rate for pace, plain in zip(paces[made], paces[0], strict=True)]
                cpu = statistics.median(pace.cpu for pace in paces[made])
                ratio = spread(ratios, unit="x") if made >= SWAPPED else ("", "", "")
                rows.append([name, KINDS[made], *spread(rates), *ratio, f"{cpu:.2f}"])
    columns = ["program", "loader", "samples/s: min", "median", "max", "ratio: min", "median", "max", "cpu ms/sample"]
    table(f"Programs as published, {10 * options.each} images, two workers", columns, rows)


if __name__ == "__main__":
    main()
