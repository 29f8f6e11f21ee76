"""Run the benchmarks one after the other: results in .bench/NAME.json, what they print in .bench/NAME.txt.

A benchmark that fails is named at the end, the others go on, and the exit code is 1. `make bench` runs the subset, in
an environment that has the peers (peers.txt); `make bench-all` runs everything. `render.py --take .bench` then makes
docs/performance.md from the results.

    python benchmarks/run.py                            # the subset: about a quarter of an hour on two cores
    python benchmarks/run.py --all --data FOLDER        # all; a folder with imagenet-sample/ and cifar10-jpg.tar.xz
    python benchmarks/run.py --quick                    # whether they run at all; the figures mean nothing
    python benchmarks/run.py server tokens              # some
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """A script with arguments, and about how many minutes that takes on two cores."""

    name: str
    script: str
    subset: str | None
    """Arguments in the subset; None if it is not part of it."""
    minutes: float
    full: str = ""
    full_minutes: float = 5
    data: str | None = None
    """What of the folder of data it takes, if one is given."""

    def arguments(self, options: argparse.Namespace) -> list[str]:
        """Of the command line."""
        chosen = "--quick" if options.quick else self.full if options.all or self.subset is None else self.subset
        given = ["--data", str(options.data / self.data)] if options.data and self.data is not None else []
        return [*shlex.split(chosen), *given]

    def expected(self, options: argparse.Namespace) -> float:
        """Minutes."""
        return 0.3 if options.quick else self.full_minutes if options.all or self.subset is None else self.minutes


_KINDS = '--kind "{}" --images {} --count {}'
JOBS = [
    Job("loader_overhead", "loader_overhead", "--parts large small --repeat 3 --seconds 0.7", 1.5, "", 6),
    Job("loader_undeclared", "loader_undeclared", None, 0, "", 6),
    Job("loader_first", "loader_overhead", None, 0, "--parts first second --repeat 3", 5),
    Job("images", "images", "--images 1000 --repeat 3", 3.5, "", 14, data="imagenet-sample"),
    Job("images_web", "images", None, 0, "--kind web", 9, "imagenet-sample"),
    Job("images_2", "images", None, 0, _KINDS.format("2.4 megapixels", 400, 100), 10, "imagenet-sample"),
    Job("images_11", "images", None, 0, _KINDS.format("11 megapixels", 120, 40), 10, "imagenet-sample"),
    Job("images_small", "images", None, 0, _KINDS.format("small", 50_000, 0), 8, "cifar10-jpg.tar.xz"),
    Job("images_small_shards", "images", None, 0, _KINDS.format("small shards", 50_000, 0), 4, "cifar10-jpg.tar.xz"),
    Job("images_small_arrays", "images", None, 0, _KINDS.format("small arrays", 50_000, 0), 3, "cifar10-jpg.tar.xz"),
    Job("images_cold", "images", None, 0, "--kind cold", 12, "imagenet-sample"),
    Job("images_shards", "images", None, 0, "--kind shards", 4, "imagenet-sample"),
    Job("image_formats", "image_formats", None, 0, "", 6, "imagenet-sample"),
    Job("images_decode", "images_decode", None, 0, "--images 2000", 8, "imagenet-sample"),
    Job("images_accuracy", "images_accuracy", None, 0, "--part psnr", 3, "imagenet-sample"),
    Job("shards", "shards", "--lines 5000 --repeat 3", 1.2, "", 5, ""),
    Job("tokens", "tokens", "--lines 10000 --repeat 3 --batch-sizes 64", 0.6, "--lines 20000", 3),
    Job("manifest_memory", "manifest_memory", "--repeat 3", 1.2, "", 1.5),
    Job("manifest_build", "manifest_build", "--repeat 3", 0.4, "", 0.8),
    Job("manifest_read", "manifest_read", "--repeat 3 --batches 500", 0.4, "", 0.8),
    Job("manifest_cold", "manifest_cold", None, 0, "", 3),
    Job("samplers", "samplers", "--samples 10000000 --grouped 2000000", 2.6, "", 6),
    Job("clips", "clips", None, 0, "", 12),
    Job("token_budget", "token_budget", None, 0, "", 15),
    Job("packing", "packing", None, 0, "", 30),
    Job("plans", "plans", None, 0, "", 8),
    Job("permutation", "permutation", "--repeat 3 --numpy 20000000", 0.2, "", 1),
    Job("shuffle_quality", "shuffle_quality", None, 0, "", 1),
    Job("server", "server", "--lines 1000000 --repeat 3 --seconds 0.7", 1.0, "", 3),
    Job("ray_executor", "ray_executor", "cheap large driver --repeat 3", 1.3, "", 6),
    Job("storage", "storage", "--size 128 --repeat 3", 0.5, "", 2),
    Job("remote", "remote", None, 0, "", 9, ""),
    Job("remote_start", "remote", None, 0, "--parts start --shards 1000 --latency 50 --repeat 3", 6, ""),
    Job("remote_faults", "remote", None, 0, "--parts faults", 9, ""),
    Job("nodes", "nodes", None, 0, "", 4),
    Job("cache_server", "cache_server", None, 0, "", 2),
    Job("rank_dataset", "rank_dataset", None, 0, "", 1.5),
    Job("mp_dataset", "mp_dataset", None, 0, "", 2),
    Job("loader_dispatch", "loader_dispatch", None, 0, "--repeat 3", 6),
    Job("loader_policies", "loader_policies", None, 0, "", 20),
    Job("loader_memory", "loader_memory", None, 0, "", 4),
    Job("loader_statistics", "loader_statistics", None, 0, "", 1.5),
    Job("auto_workers", "auto_workers", None, 0, "--repeat 3", 20),
    Job("tables", "tables", None, 0, "", 3),
    Job("text", "text", None, 0, "", 12),
    Job("tokenizing", "tokenizing", None, 0, "", 10),
    Job("programs", "programs", None, 0, "--repeat 3", 12, "imagenet-sample"),
    Job("startup", "startup", "--repeat 5", 0.3, "", 0.5),
]


def run(job: Job, options: argparse.Namespace) -> str:
    """Run one; why it failed, or nothing."""
    results, printed = options.out / f"{job.name}.json", options.out / f"{job.name}.txt"
    results.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / f"{job.script}.py"), *job.arguments(options), "--json", str(results)]
    limit = 60 * max(5, 4 * job.expected(options))
    lines, late = [""], threading.Event()
    with printed.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

        def end() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
                lines = [line.strip()] if line.strip() else lines
            code = process.wait()
        except BaseException:
            end()
            raise
        finally:
            timer.cancel()
    if code == 0 and results.is_file():
        return ""
    results.unlink(missing_ok=True)  # half of it
    if late.is_set():
        return f"took longer than {limit / 60:.0f} minutes"
    return f"exit code {code}: {lines[0][:150]}" if code else "no results were written"


def main(arguments: list[str] | None = None, jobs: Sequence[Job] = JOBS) -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(job.name for job in jobs))
    parser.add_argument("--all", action="store_true", help="everything, in full")
    parser.add_argument("--quick", action="store_true", help="see that they run, in sizes that measure nothing")
    parser.add_argument("--data", type=Path, help="folder with imagenet-sample/ and cifar10-jpg.tar.xz")
    parser.add_argument("--out", type=Path, default=Path(".bench"), help="where results go (default: %(default)s)")
    options = parser.parse_args(arguments)
    known = {job.name for job in jobs}
    if unknown := set(options.names) - known:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    if options.data is not None:
        options.data = options.data.resolve()
    all_of_them = options.all or options.quick
    wanted = [
        job
        for job in jobs
        if job.name in options.names or (not options.names and (all_of_them or job.subset is not None))
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(wanted)} benchmarks, about {sum(job.expected(options) for job in wanted):.0f} minutes", flush=True)
    failed: dict[str, str] = {}
    for job in wanted:
        print(f"\n== {job.name}: {job.script}.py {shlex.join(job.arguments(options))}", flush=True)
        began = time.monotonic()
        if reason := run(job, options):
            failed[job.name] = reason
        print(f"== {job.name}: {reason or 'done'}, {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
