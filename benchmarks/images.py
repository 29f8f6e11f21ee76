"""From JPEG files to augmented batches: `ImageDataset` beside the engines that train on CPUs, and decoding alone.

Every peer runs in a process of its own, with the same two cores, files and work (``_image_peers.py``), and only one at
a time: rounds go from one to the next, so that a noisy moment hits all alike, and each waits until those before it are
idle. A round is a pass over at least ``--images`` images: the list names each file as often as that takes, since an
epoch of 500 images would mostly measure how a pass begins and ends. Workers are started, and caches filled, in a pass
that does not count. Processor time and memory are those of the process and all that it started (Pss: what processes
share counts once). "step" is how many times longer a step of a small model in the main process takes while batches are
made (waiting for batches does not count). "antialias" says whether crops that shrink are antialiased: by a filter as
Pillow's, by averages over pixel areas where both sides shrink, or not at all. "ours / it" compares the first of ours
with each, round by round.

Kinds of files: as they are, as the web has them, mosaics, CIFAR-10's small ones (which are padded and cut to their own
size) as files, in shards or as pixels in arrays, files that are not in the page cache (of which "MiB read" says how
much came from the disk), and tar shards.

Peers need not be where Penstock is: ``--peers`` names a Python that has them, and one that is not installed is named in
the table with the reason.

    python benchmarks/images.py --data ~/imagenet-sample --peers /tmp/peers/bin/python
    python benchmarks/images.py --data ~/imagenet-sample --peers /tmp/peers/bin/python --kind web
    python benchmarks/images.py --data ~/imagenet-sample --peers /tmp/peers/bin/python --kind "11 megapixels"
    python benchmarks/images.py --data ~/cifar10-jpg.tar.xz --peers /tmp/peers/bin/python --kind small --images 50000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from _common import arguments, folder, parse, remark, smaps_rollup, spread, table
from _image_files import KINDS, drop, read_listing, write_listing
from _image_peers import ROWS

_HERE = Path(__file__).parent
_OURS = "penstock"
_BY_HAND = [_OURS, *(f"{_OURS}, {how}" for how in ("inline", "one process", "thread", "arrays", "arrays, inline"))]
_TUNING = 15.0
_COLUMNS = ["peer", "version", "antialias", "images/s: min", "median", "max", "CPU ms/image", "memory, MiB", "step"]
_COLUMNS += ["ours / it", "by CPU"]


@dataclass
class Round:
    """What one round of a peer took."""

    rate: float
    cpu: float
    """Milliseconds an image."""
    read: float
    """MiB that came from the disk."""


@dataclass
class Peer:
    """A peer's process, and its rounds."""

    name: str
    process: subprocess.Popen[str]
    version: str = ""
    missing: str = ""
    rounds: list[Round] = field(default_factory=list)
    memory: int = 0
    slower: float = float("nan")

    def answer(self) -> dict[str, Any]:
        """The next line that it says; what is missing, if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"missing": f"ended with {self.process.wait()}"}
        self.missing = found.get("missing", "")
        return found

    def run(self, images: int) -> Round | None:
        """One round; None if there is nothing to run any more."""
        if self.missing:
            return None
        assert self.process.stdin is not None
        before, read = cpu_seconds(self.process.pid), bytes_read(self.process.pid)
        self.process.stdin.write(f"{images}\n")
        self.process.stdin.flush()
        with self._watched():
            found = self.answer()
        if self.missing:
            return None
        spent = cpu_seconds(self.process.pid) - before
        read = bytes_read(self.process.pid) - read
        return Round(found["images"] / found["seconds"], 1e3 * spent / found["images"], read / 2**20)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Memory is looked at twice a second meanwhile, and at the end: a round may be shorter."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.5):
                self.memory = max(self.memory, pss(self.process.pid))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.memory = max(self.memory, pss(self.process.pid))

    def train(self, images: int) -> None:
        """How much longer a step of training takes while batches are made."""
        if not self.missing and self.name != "decode alone":
            assert self.process.stdin is not None
            self.process.stdin.write(f"train {images}\n")
            self.process.stdin.flush()
            self.slower = self.answer().get("slower", float("nan"))

    def end(self) -> None:
        """Its processes end."""
        for process in tree(self.process.pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that it started."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and all that it started, those that have ended included."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def bytes_read(pid: int) -> int:
    """Bytes that a process and all that it started had the disk read."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            total += process.io_counters().read_bytes
    return total


def pss(pid: int) -> int:
    """Bytes of memory of a process and all that it started."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError, psutil.Error):
            total += smaps_rollup(process.pid)["Pss"]
    return total


def start(name: str, listing: Path, work: Path, python: str, cores: set[int], kind: str) -> Peer:
    """A peer, when it is ready or has said what is missing."""
    mine = work / name.replace(" ", "").replace(",", "-").replace("+", "-")
    mine.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, str(_HERE / "_image_peers.py"), name, str(listing), str(mine), kind]
    with (mine / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    peer = Peer(name, process)
    peer.version = peer.answer().get("ready", "")
    return peer


def settle(peers: list[Peer], longest: float = 60.0) -> None:
    """Wait until no peer does anything: some make batches ahead after a pass, which the next one would pay for."""
    deadline = time.monotonic() + longest
    before = sum(cpu_seconds(peer.process.pid) for peer in peers)
    while time.monotonic() < deadline:
        time.sleep(0.25)
        now = sum(cpu_seconds(peer.process.pid) for peer in peers)
        if now - before < 0.02:
            return
        before = now


def report(peers: list[Peer], title: str, kind: str) -> None:
    """The table, and what the bars of images are about."""
    mine = next((peer for peer in peers if peer.name.startswith(_OURS) and peer.rounds), None)
    rows = []
    for peer in sorted(peers, key=lambda p: -statistics.median([r.rate for r in p.rounds] or [0])):
        if not peer.rounds:
            reason = peer.missing.splitlines()[0][:60] if peer.missing else "no round"
            rows.append((peer.name, f"not measured: {reason}", *[""] * (len(_COLUMNS) - 2)))
            continue
        figures = (
            "" if kind.startswith("small") else ROWS[peer.name].antialias,
            *spread([r.rate for r in peer.rounds], 4),
            f"{statistics.median(r.cpu for r in peer.rounds):.3g}",
            f"{peer.memory / 2**20:.0f}",
            "" if math.isnan(peer.slower) else f"{peer.slower:.2f}x",
            *(ratio(mine, peer).texts() if mine else ("", "")),
        )
        read = statistics.median(r.read for r in peer.rounds)
        rows.append((peer.name, peer.version, *figures, *([f"{read:.0f}"] if kind == "cold" else [])))
    table(title, [*_COLUMNS, *(["MiB read"] if kind == "cold" else [])], rows, peer="torch + OpenCV")
    if mine:
        remarks(mine, [peer for peer in peers if peer.rounds])


@dataclass
class Ratio:
    """How many times as fast one is as another, round by round: rounds of all stand beside each other."""

    wall: list[float]
    cpu: list[float]

    def texts(self) -> tuple[str, str]:
        """Median, least and largest of both."""
        wall, cpu = (f"{statistics.median(v):.2f}x ({min(v):.2f} to {max(v):.2f})" for v in (self.wall, self.cpu))
        return wall, cpu


def ratio(one: Peer, other: Peer) -> Ratio:
    """By the clock, and by processor time an image."""
    pairs = list(zip(one.rounds, other.rounds, strict=False))
    return Ratio([a.rate / b.rate for a, b in pairs], [b.cpu / a.cpu for a, b in pairs])


def remarks(mine: Peer, peers: list[Peer]) -> None:
    """Ours beside plain decoding and the best of the others; "auto" beside the best by hand."""
    for peer in peers:
        if peer.name == "decode alone":
            remark("{} / decode alone: {} in wall time, {} in CPU time.".format(mine.name, *ratio(mine, peer).texts()))
    others = [peer for peer in peers if not ROWS[peer.name].here]
    for name, found in (("peer", others), ("antialiased peer", [p for p in others if ROWS[p.name].antialias != "no"])):
        if found:
            best = min(found, key=lambda peer: statistics.median(r.cpu for r in peer.rounds))
            texts = ratio(mine, best).texts()
            remark(f"{mine.name} / best {name} ({best.name}): {texts[0]} in wall time, {texts[1]} in CPU time.")
    auto = next((peer for peer in peers if peer.name.endswith(", auto")), None)
    by_hand = [peer for peer in peers if peer.name in _BY_HAND]
    if auto and by_hand:
        best = max(by_hand, key=lambda peer: statistics.median(r.rate for r in peer.rounds))
        remark(f'num_workers="auto" / best by hand ({best.name}): {ratio(auto, best).texts()[0]} in wall time.')


def warm(peer: Peer, images: int) -> None:
    """A pass that does not count; for "auto", until it has had the time to choose."""
    peer.run(1)
    until = time.monotonic() + (_TUNING if peer.name.endswith("auto") else 0)
    while time.monotonic() < until and peer.run(images) is not None:
        pass


def measure(peers: list[Peer], options: argparse.Namespace, listing: Path) -> None:
    """Rounds, one peer after the other in each; then how much a step of training takes beside each."""
    for _ in range(options.repeat):
        for peer in peers:
            settle(peers)
            if options.kind == "cold":
                drop([*read_listing(listing)[0], *(listing.parent / "shards").glob("*.tar")])
            measured = peer.run(options.images)
            if measured is not None:
                peer.rounds.append(measured)
    for peer in peers:
        settle(peers)
        peer.train(min(options.images // 2, 2500))


def main() -> None:
    parser = arguments(__doc__, repeat=5)
    parser.add_argument("--data", type=Path, help="folder or archive of JPEG files (default: made of examples/data)")
    parser.add_argument("--images", type=int, default=5000, help="least images of a round (default: %(default)s)")
    parser.add_argument("--kind", choices=list(KINDS), default="as they are")
    parser.add_argument("--count", type=int, default=200, help="mosaics to be made (default: %(default)s)")
    parser.add_argument("--peers", default=sys.executable, help="Python that has the peers (default: this one)")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    options = parse(parser, {"repeat": 1, "images": 128, "only": ["penstock", "decode alone", "torch + OpenCV"]})
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    with folder(options.dir) as where:
        listing = where / "files.txt"
        files, images = write_listing(options.data, listing, options.kind, options.count, options.images)
        peers: list[Peer] = []
        try:
            for name in options.only:
                if options.kind in ROWS[name].kinds:
                    python = sys.executable if ROWS[name].here else options.peers
                    peers.append(start(name, listing, where, python, cores, options.kind))
                    warm(peers[-1], options.images)
            began = time.monotonic()
            measure(peers, options, listing)
            title = f"{files} files ({KINDS[options.kind]}), {images} images per round, {options.repeat} rounds, "
            title += f"{time.monotonic() - began:.0f} s in all, {len(cores)} cores: "
            title += "random crop 32 of 40" if options.kind.startswith("small") else "random-resized-crop 224"
            report(peers, title + ", flip, uint8 batches of 64", options.kind)
        finally:
            for peer in peers:
                peer.end()


if __name__ == "__main__":
    main()
