"""From JPEG files to augmented batches: `ImageDataset` beside the engines that train on CPUs, and decoding alone.

Every peer runs in a process of its own, with the same two cores, files and work (``_image_peers.py``), and only one at
a time: rounds go from one to the next, so that a noisy moment hits all alike, and each waits until those before it are
idle. A round is a pass over at least ``--images`` images: the list names each file as often as that takes, since an
epoch of 500 images would mostly measure how a pass begins and ends. Workers are started, and caches filled, in a pass
that does not count. Processor time and memory are those of the process and all that it started (Pss: what processes
share counts once). "step" is how many times longer a step of a small model in the main process takes while batches are
made (waiting for batches does not count).

Peers need not be where Penstock is: ``--peers`` names a Python that has them, and one that is not installed is named in
the table with the reason.

    python benchmarks/images.py --data ~/imagenet-sample --peers /tmp/peers/bin/python
    python benchmarks/images.py --data ~/imagenet-sample --peers /tmp/peers/bin/python --kind web
    python benchmarks/images.py --data ~/imagenet-sample --peers /tmp/peers/bin/python --kind "11 megapixels"
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil

from _common import arguments, folder, parse, smaps_rollup, spread, table
from _image_peers import PEERS

_HERE = Path(__file__).parent
_EXAMPLES = _HERE.parent / "examples" / "data" / "cifar10-small.tar.xz"
_OURS = "penstock"
_MOSAICS = {"2.4 megapixels": (1272, 1888), "11 megapixels": (2704, 4064)}


@dataclass
class Round:
    """What one round of a peer took."""

    rate: float
    cpu: float


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
        before = cpu_seconds(self.process.pid)
        self.process.stdin.write(f"{images}\n")
        self.process.stdin.flush()
        with self._watched():
            found = self.answer()
        if self.missing:
            return None
        spent = cpu_seconds(self.process.pid) - before
        return Round(found["images"] / found["seconds"], 1e3 * spent / found["images"])

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Memory is looked at twice a second meanwhile."""
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


def pss(pid: int) -> int:
    """Bytes of memory of a process and all that it started."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError, psutil.Error):
            total += smaps_rollup(process.pid)["Pss"]
    return total


def start(name: str, listing: Path, work: Path, python: str, cores: set[int]) -> Peer:
    """A peer, when it is ready or has said what is missing."""
    mine = work / name.replace(" ", "").replace(",", "-").replace("+", "-")
    mine.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, str(_HERE / "_image_peers.py"), name, str(listing), str(mine)]
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


def write_listing(data: Path | None, where: Path, kind: str, count: int, least: int) -> tuple[int, int]:
    """Absolute paths of the JPEGs in a folder, or of others that are made of them, each with a label, over and over
    until there are `least` lines; the number of files, and of lines.
    """
    data = examples(where.parent / "examples") if data is None else data
    files = sorted(path for path in data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{data}: no JPEG files")
    if kind != "as they are":
        (where.parent / "made").mkdir()
        files = list(made(files, where.parent / "made", kind, count))
    times = -(-least // len(files))
    where.write_text("".join(f"{path.absolute()} {number}\n" for number, path in enumerate(files)) * times)
    return len(files), len(files) * times


def examples(to: Path) -> Path:
    """Mosaics of the small images of examples/data, 512 x 384, for want of photographs."""
    to.mkdir()
    with tarfile.open(_EXAMPLES) as archive:
        members = [archive.extractfile(info) for info in archive if info.name.endswith(".jpg")]
        data = [np.frombuffer(member.read(), np.uint8) for member in members if member is not None]
    tiles = [cv2.imdecode(one, cv2.IMREAD_COLOR) for one in data]
    for number in range(500):
        chosen = np.random.default_rng(number).choice(len(tiles), (12, 16))
        mosaic = np.concatenate([np.concatenate([tiles[k] for k in row], 1) for row in chosen])
        cv2.imwrite(str(to / f"{number:03d}.jpg"), mosaic, [cv2.IMWRITE_JPEG_QUALITY, 90])
    return to


def made(files: list[Path], to: Path, kind: str, count: int) -> Iterator[Path]:
    """Other images: the same ones as the web has them (quality 60 to 75), or mosaics of 2.4 or 11 megapixels."""
    chosen = random.Random(0)
    for number in range(len(files) if kind == "web" else count):
        if kind == "web":
            image, quality = cv2.imread(str(files[number])), chosen.randint(60, 75)
        else:
            (height, width), quality = _MOSAICS[kind], 90
            tiles = [cv2.resize(cv2.imread(str(chosen.choice(files))), (width // 4, height // 4)) for _ in range(16)]
            image = np.concatenate([np.concatenate(tiles[row : row + 4], axis=1) for row in range(0, 16, 4)])
        path = to / f"{number:05d}.jpg"
        cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, quality])
        yield path


def report(peers: list[Peer], title: str) -> None:
    """The table."""
    rates = {peer.name: [r.rate for r in peer.rounds] for peer in peers if peer.rounds}
    rows = []
    for peer in sorted(peers, key=lambda p: -statistics.median(rates.get(p.name, [0]))):
        if peer.name not in rates:
            reason = peer.missing.splitlines()[0][:60] if peer.missing else "no round"
            rows.append((peer.name, f"not measured: {reason}", *[""] * 7))
            continue
        # Rounds of all peers stand beside each other, so ratios are taken round by round.
        ratios = [o / t for o, t in zip(rates.get(_OURS, []), rates[peer.name], strict=False)]
        ratio = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        cpu = statistics.median(r.cpu for r in peer.rounds)
        figures = (
            *spread(rates[peer.name], 4),
            f"{cpu:.2f}",
            f"{peer.memory / 2**20:.0f}",
            "" if math.isnan(peer.slower) else f"{peer.slower:.2f}x",
            ratio,
        )
        rows.append((peer.name, peer.version, *figures))
    header = ["peer", "version", "images/s: min", "median", "max", "CPU ms/image", "memory, MiB", "step", "ours / it"]
    table(title, header, rows, peer="torch + OpenCV")


def main() -> None:
    parser = arguments(__doc__, repeat=5)
    parser.add_argument("--data", type=Path, help="folder of JPEG files (default: mosaics of examples/data)")
    parser.add_argument("--images", type=int, default=5000, help="least images of a round (default: %(default)s)")
    parser.add_argument("--kind", choices=["as they are", "web", *_MOSAICS], default="as they are")
    parser.add_argument("--count", type=int, default=200, help="mosaics to be made (default: %(default)s)")
    parser.add_argument("--peers", default=sys.executable, help="Python that has the peers (default: this one)")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="PEER")
    options = parse(parser, {"repeat": 1, "images": 128, "only": ["penstock", "decode alone", "torch + OpenCV"]})
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    with folder(options.dir) as where:
        files, images = write_listing(options.data, where / "files.txt", options.kind, options.count, options.images)
        peers: list[Peer] = []
        try:
            for name in options.only:
                python = sys.executable if name.startswith(_OURS) or name == "decode alone" else options.peers
                peers.append(start(name, where / "files.txt", where, python, cores))
                peers[-1].run(1)  # a pass that does not count
            began = time.time()
            for _ in range(options.repeat):
                for peer in peers:
                    settle(peers)
                    measured = peer.run(options.images)
                    if measured is not None:
                        peer.rounds.append(measured)
            for peer in peers:
                settle(peers)
                peer.train(options.images // 2)
            seconds = time.time() - began
            title = f"{files} files ({options.kind}), {images} images a round, {options.repeat} rounds, "
            title += f"{seconds:.0f} s in all, {len(cores)} cores"
            report(peers, title + ": random-resized-crop 224, flip, uint8 batches of 64")
        finally:
            for peer in peers:
                peer.end()


if __name__ == "__main__":
    main()
