"""``num_workers="auto"`` beside every manual setting, after it was tuned, and what the tuning itself costs.

For each dataset, without and with a training step (the main process sleeps, as it does while an accelerator works),
one round tunes a new loader, alone, opens one with each setting by hand beside it, and then goes through all of them in
turns of half a second, until each had ``--seconds``: a machine may be half as fast one second as the next. After its
turn a loader gets the time to make what it may ahead; it stands still then, and passes that over in its next turn.
"auto / best" compares it with the manual setting that had the best median, within the same round. "tuning" is how long
the run was tuned, and "cost" how much longer it took for these batches than the best setting would have, from its first
batch on. All loaders give the same batches, which is checked.

    python benchmarks/auto_workers.py --repeat 3 --seconds 2
    python benchmarks/auto_workers.py --data python native --steps 0
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
import warnings
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

import penstock as ps
from _common import folder, parse, spread, table
from penstock.cores import cores

BATCH = 32
_LENGTH = 1 << 26  # samples: a pass never ends
_PATIENCE = 60.0
_TURN, _WARM = 0.5, 0.1


class Rows(Dataset[Any]):
    """Rows of an array: making a sample costs next to nothing."""

    pure = True

    def __init__(self) -> None:
        self.rows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (20_000, 1024), np.uint8))

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.rows[index % len(self.rows)]


class Python(Rows):
    """About a millisecond of Python, for which threads take turns."""

    def __getitem__(self, index: int) -> Any:
        total = 0
        for value in range(20_000):
            total += value & index
        return super().__getitem__(index), total


class Impure(Python):
    """The same, and it does not say that it is pure."""

    pure = False


class Sleeping(Rows):
    """Waits two milliseconds, as for storage."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


class Native(Rows):
    """About a millisecond outside of Python's lock."""

    releases_gil = True

    def __init__(self) -> None:
        super().__init__()
        self.packed = zlib.compress(np.random.default_rng(0).integers(0, 8, 300_000, np.uint8).tobytes())

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), zlib.crc32(zlib.decompress(self.packed))


def images(directory: Path) -> Any:
    """An `ImageDataset` over JPEG files of half a megapixel."""
    rng = np.random.default_rng(0)
    for number in range(64):
        image = cv2.resize(rng.integers(0, 256, (48, 64, 3), np.uint8), (800, 600), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(directory / f"{number}.jpg"), image)
    lines = "".join(f"{number % 64}.jpg {number % 10}\n" for number in range(400_000))
    (directory / "train.txt").write_text(lines)
    return ps.ImageDataset(ps.Manifest.open(directory / "train.txt", root=directory), size=224, flip=True)


DATA = {"rows": Rows, "python": Python, "impure": Impure, "sleeping": Sleeping, "native": Native, "images": None}


def manual(dataset: Any) -> dict[str, dict[str, Any]]:
    """What somebody may choose by hand."""
    counts = sorted({1, 2, cores(), 2 * cores()} | ({8, 16, 32} if isinstance(dataset, Sleeping) else set()))
    kinds = ["process", *(["thread"] if getattr(dataset, "pure", False) else [])]
    kinds += ["auto"] if getattr(dataset, "releases_gil", False) else []
    found: dict[str, dict[str, Any]] = {"inline": {}}
    for kind, count in itertools.product(kinds, counts):
        found[f"{kind} {count}"] = {"executor": kind, "num_workers": count}
    return found


class Running:
    """A loader that a training goes through, with pauses."""

    def __init__(self, dataset: Any, how: dict[str, Any], step: float, truth: list[int]) -> None:
        self.loader = ps.DataLoader(dataset, BATCH, shuffle="block", seed=0, **how)
        self.batches, self.seconds = 0, 0.0
        self._step, self._truth = step, truth
        self._iterator, self._number = iter(self.loader), 0
        for _ in range(len(truth)):
            self._next()

    def _next(self) -> float:
        """Go on by a batch; the time when it was there."""
        batch, number = next(self._iterator), self._number
        had = time.perf_counter()
        if number < len(self._truth):
            assert digest(batch) == self._truth[number], "not the batches of the inline executor"
        self._number += 1
        del batch
        time.sleep(self._step) if self._step else None
        return had

    def tune(self) -> tuple[float, int]:
        """Until it has chosen: seconds from the first batch on, and batches meanwhile."""
        now = began = time.perf_counter()
        asked = 0.0
        while now - began < _PATIENCE:
            now = self._next()
            if now - asked > 0.05:  # not at each batch: asking takes as long as a cheap one
                asked = now
                if self.loader.stats()["tuning"]["chosen"] is not None:
                    break
        return now - began, self._number - len(self._truth)

    def go(self, seconds: float) -> None:
        """A turn of so many seconds, after what had been made ahead."""
        ahead = self._ahead
        start = first = time.perf_counter()
        while ahead > 0 or first < start + _WARM:
            first, ahead = self._next(), ahead - 1
        now, count = first, 0
        while now < first + seconds or count < 2:
            now, count = self._next(), count + 1
        self.batches, self.seconds = self.batches + count, self.seconds + now - first
        time.sleep(0.02 + 1.2 * self._ahead * (now - first) / count)

    @property
    def _ahead(self) -> int:
        """Batches that may be made and not taken."""
        return 2 * self.loader.num_workers + 1

    @property
    def rate(self) -> float:
        """Batches/s, in its turns."""
        return self.batches / self.seconds

    @property
    def chosen(self) -> str:
        """By the tuning."""
        found = self.loader.stats()["tuning"]["chosen"]
        return "not decided" if found is None else f"{found['executor']} {found['workers']}".removesuffix(" 0")


def digest(batch: Any) -> int:
    """Of all its bytes."""
    result = xxhash.xxh3_64()
    for part in batch if isinstance(batch, list | tuple) else [batch]:
        result.update(part.numpy().tobytes())
    return result.intdigest()


def measure(name: str, dataset: Any, step: float, options: argparse.Namespace) -> list[list[str]]:
    """The rows of the two tables for one dataset and step."""
    with ps.DataLoader(dataset, BATCH, shuffle="block", seed=0) as loader:
        truth = [digest(batch) for batch in itertools.islice(loader, 8)]
    rates: dict[str, list[float]] = {setting: [] for setting in manual(dataset)}
    tuned: list[tuple[float, float, int, str]] = []  # batches/s; seconds of tuning, batches meanwhile; what was chosen
    for _ in range(options.repeat):
        with ExitStack() as stack:
            auto = Running(dataset, {"num_workers": "auto"}, step, truth)
            stack.callback(auto.loader.close)
            took = auto.tune()
            runs = {}
            for setting, how in manual(dataset).items():
                runs[setting] = Running(dataset, how, step, truth)
                stack.callback(runs[setting].loader.close)
            for _ in range(max(1, round(options.seconds / _TURN))):
                for one in (*runs.values(), auto):
                    one.go(min(options.seconds, _TURN))
            for setting, one in runs.items():
                rates[setting].append(one.rate)
            tuned.append((auto.rate, *took, auto.chosen))
            runs.clear()
            del auto, one
    best = max(rates, key=lambda setting: statistics.median(rates[setting]))
    ratios = [one[0] / rate for one, rate in zip(tuned, rates[best], strict=True)]
    top = statistics.median(rates[best])
    met = "met" if statistics.median(ratios) >= 0.9 else "missed"
    head = [name, f"{1000 * step:g}"]
    chosen = ", ".join(dict.fromkeys(one[3] for one in tuned))
    rate = [*head, best, f"{top:.4g}", chosen, *spread([one[0] for one in tuned]), *spread(ratios), met]
    cost = [seconds - batches / top for _, seconds, batches, _ in tuned]
    return [rate, [*head, *spread([one[1] for one in tuned]), *spread(cost)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=list(DATA), help="datasets to measure")
    parser.add_argument("--steps", nargs="+", type=float, default=[0.0, 10.0], help="milliseconds of a training step")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one loader in a round (default: %(default)s)")
    parser.add_argument("--dir", default=None, help="folder for the images (default: a temporary one)")
    options = parse(parser, {"repeat": 1, "seconds": 0.3, "data": ["rows"], "steps": [0.0]})
    warnings.filterwarnings("ignore", "This DataLoader will create")
    print(f"torch {torch.__version__}, {cores()} cores, load {os.getloadavg()[0]:.1f} before the start")
    rates, costs = [], []
    with folder(options.dir) as directory:
        for name, step in itertools.product(options.data, options.steps):
            make: Any = DATA[name]
            rate, cost = measure(name, images(directory) if make is None else make(), step / 1000, options)
            rates.append(rate)
            costs.append(cost)
            print(f"{name}, step {step:g} ms: {rate[-2]} of the best at most", flush=True)
    header = ["data", "step, ms", "best by hand", "batches/s", "chosen", "auto: min", "median", "max"]
    header += ["auto / best: min", "median", "max", "bar: 0.9"]
    times = f"{options.repeat} rounds of {options.seconds} s each"
    table(f"Tuned, batches of {BATCH}, {times}", header, rates)
    header = ["data", "step, ms", "tuning, s: min", "median", "max", "cost, s: min", "median", "max"]
    table("Cost of the tuning", header, costs)


if __name__ == "__main__":
    main()
