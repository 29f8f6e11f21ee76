"""What the examples here share: real images, a small network, and a log of the samples that each step was made of.

None of it is particular to Penstock or to a framework; those parts are in the examples themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import penstock as ps

ARCHIVE = Path(__file__).parents[1] / "data" / "cifar10-small.tar.xz"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options of every example."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("cifar10"), help="images; unpacked there the first time (default: cifar10)")
    add("--checkpoint", type=Path, help="save there, and go on from what is there")
    add("--checkpoint-every", type=int, default=10, metavar="STEPS")
    add("--epochs", type=int, default=1)
    add("--batch-size", type=int, default=60, help="samples per step, over all ranks")
    add("--record", type=Path, metavar="FILE", help="write every step of rank R to FILE.rankR, with its samples")
    add("--stop-after", type=int, metavar="STEPS", help="be killed (SIGKILL) in this step, unless resumed")
    return parser


def images(folder: Path) -> ps.ImageDataset:
    """Images uint8 (3, 32, 32), half of them flipped at random, label and row number of each."""
    manifest = folder / "train.txt"
    if not manifest.exists():
        _unpack(folder)
    return ps.ImageDataset(ps.Manifest.open(manifest, root=folder), size=32, flip=True, row=True)


def _unpack(folder: Path) -> None:
    """1,000 images, which get their name when they are all there: ranks may do this at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, tarfile.open(ARCHIVE) as archive:
        whole = Path(scratch) / "whole"
        some = (file for file in archive if file.name.startswith("train/") and file.name.endswith(("0.jpg", "5.jpg")))
        archive.extractall(whole, some, filter="data")
        paths = sorted(whole.glob("train/*/*.jpg"))
        labels = {name: label for label, name in enumerate(sorted({path.parent.name for path in paths}))}
        lines = (f"{path.relative_to(whole)} {labels[path.parent.name]}\n" for path in paths)
        (whole / "train.txt").write_text("".join(lines))
        if not folder.exists():
            whole.rename(folder)


class Network(nn.Module):
    """Some 15,000 parameters, for images uint8 (N, 3, 32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 4, stride=4))
        self.hidden = nn.Linear(32 * 2 * 2, 32)
        self.classes = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features((images.float() - 120) / 64).relu().flatten(1)
        return self.classes(self.hidden(features).relu())


class Log:
    """What was trained on: JSON lines in ``FILE.rankR``, handed to the system at once, so that no kill takes any back.

    Args:
        args: from `arguments`.
        rank: which rank this is.
    """

    def __init__(self, args: argparse.Namespace, rank: int = 0) -> None:
        self.file = None if args.record is None else open(f"{args.record}.rank{rank}", "a", buffering=1)  # noqa: SIM115
        self.stop_after, self.quiet = args.stop_after, rank > 0

    def start(self, step: int) -> None:
        """So many steps were in the checkpoint."""
        if step:
            self.stop_after = None
            if not self.quiet:
                print(f"going on after step {step}")
        self._write(start=step)

    def step(self, step: int, loss: float, rows: Tensor, loader: Any) -> None:
        """Before the gradients of a step, which the optimizer has not seen yet.

        Args:
            step: from 1, of the whole run.
            rows: of its samples, (N,) int64.
            loader: what made them; how many batches it says that it did is part of the log.
        """
        if not self.quiet and step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}")
        made = loader.stats()["batches"] if type(loader) is ps.DataLoader else None
        self._write(step=step, loss=loss, rows=rows.tolist(), made=made)
        if step == self.stop_after:
            os.kill(os.getpid(), signal.SIGKILL)  # as a machine that is taken away goes: no handler, no farewell

    def _write(self, **line: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps(line) + "\n")
