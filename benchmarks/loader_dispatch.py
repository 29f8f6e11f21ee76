"""How work is dealt to workers: threads share the next batch, processes make whole ones, beside torch's DataLoader.

Samples sleep instead of computing, so the figures do not depend on the number of cores. All loaders have the same
workers, the same order, and may begin the same number of batches.

1. Time from ``iter()`` to the first batch, all samples equally slow; the next few batches show the price: whole
   batches come together, shared ones one after the other.
2. One sample in 50 takes 20 times as long. A consumer that does nothing shows the throughput. One that trains as long
   per batch as all workers together need for one, and a tenth more, shows how long a loader that is fast enough on
   average still keeps it waiting.
3. One sample in 10 takes 20 times as long, 4 and 16 workers, the dataset declared pure and not declared: batches a
   second in order, and of whatever is ready. No loader with so many workers can be faster than the work allows, which
   the title says. The first batch is not counted, since starting the workers is no part of it.

    python benchmarks/loader_dispatch.py --repeat 3
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset

import penstock
from _common import parse, spread, table

LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "torch": (torch.utils.data.DataLoader, {}),
    "penstock process": (penstock.DataLoader, {"executor": "process"}),
    "penstock thread": (penstock.DataLoader, {"executor": "thread"}),
}


class Slow(Dataset[int]):
    """Samples that take ``seconds``; one in ``rare`` takes 20 times that. It declares nothing."""

    def __init__(self, length: int, seconds: float, rare: int | None = None) -> None:
        self.length, self.seconds, self.rare = length, seconds, rare

    def __len__(self) -> int:
        return self.length

    def takes(self, index: int) -> float:
        """Seconds of one sample."""
        return self.seconds * (20 if self.rare and index % self.rare == 0 else 1)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.takes(index))
        return index


class PureSlow(Slow):
    """The same, declared."""

    pure = True


@dataclass
class Pass:
    """Seconds of a pass: to each batch, of waiting for it, and what order it was in."""

    waits: list[float]
    total: float
    order: list[int]


def run(name: str, dataset: Slow, options: argparse.Namespace, seed: int, train: float = 0.0) -> Pass:
    """One pass, each batch followed by ``train`` seconds of the consumer."""
    make, extra = LOADERS[name]
    loader = make(dataset, batch_size=options.batch_size, shuffle=True, num_workers=options.workers, **extra)
    torch.manual_seed(seed)
    waits, order = [], []
    start = last = time.perf_counter()
    iterator = iter(loader)
    for batch in iterator:
        waits.append(time.perf_counter() - last)
        order += batch.tolist()
        if train:
            time.sleep(train)
        last = time.perf_counter()
    total = time.perf_counter() - start
    del iterator
    getattr(loader, "close", lambda: None)()
    return Pass(waits, total, order)


def measure(dataset: Slow, options: argparse.Namespace, train: float = 0.0) -> dict[str, list[Pass]]:
    """All loaders in turn, several times. Raises AssertionError unless all gave the same samples in the same order."""
    passes: dict[str, list[Pass]] = {name: [] for name in LOADERS}
    for k, name in itertools.product(range(options.repeat), LOADERS):
        passes[name].append(run(name, dataset, options, k, train))
        assert passes[name][k].order == passes["torch"][k].order
    return passes


def first(options: argparse.Namespace) -> None:
    """Time to the first batch, and to the batches of one round of all workers."""
    workers, size = options.workers, options.batch_size
    dataset = PureSlow(2 * workers * size, options.milliseconds / 1e3)
    rows = []
    for name, passes in measure(dataset, options).items():
        one = [1e3 * p.waits[0] for p in passes]
        round_ = [1e3 * sum(p.waits[:workers]) for p in passes]
        rows.append((name, *spread(one), *spread(round_), f"{1e3 * passes[0].total:.0f}"))
    ideal = 1e3 * dataset.seconds * size / workers
    title = f"Batches of {size} samples of {options.milliseconds:g} ms, {workers} workers: at best {ideal:.0f} ms each"
    header = [
        "loader",
        "1st batch, ms: min",
        "median",
        "max",
        f"{workers} batches, ms: min",
        "median",
        "max",
        f"{2 * workers} batches",
    ]
    table(title, header, rows, peer="torch")


def mix(options: argparse.Namespace) -> None:
    """One sample in 50 takes 20 times as long."""
    length = options.batches * options.batch_size
    dataset = PureSlow(length, options.mix_milliseconds / 1e3, rare=50)
    ideal = sum(map(dataset.takes, range(length))) / options.batches / options.workers
    idle, busy = measure(dataset, options), measure(dataset, options, train=1.1 * ideal)
    rows = []
    for name in LOADERS:
        rate = [options.batches / p.total for p in idle[name]]
        share = [100 * sum(p.waits[1:]) / (p.total - p.waits[0]) for p in busy[name]]
        longest = [1e3 * max(p.waits[1:]) for p in busy[name]]
        often = [sum(wait > 1e-3 for wait in p.waits[1:]) for p in busy[name]]
        rows.append((name, *spread(rate), *spread(share), *spread(longest), *spread(often)))
    title = (
        f"{options.batches} batches of {options.batch_size}, {options.mix_milliseconds:g} ms per sample, one in 50 "
        f"takes 20 times as long, {options.workers} workers: at best {1 / ideal:.1f}/s. "
        f"Waiting time with {1.1e3 * ideal:.0f} ms of training per batch"
    )
    header = [
        "loader",
        "batches/s: min",
        "median",
        "max",
        "% of time: min",
        "median",
        "max",
        "longest, ms: min",
        "median",
        "max",
    ]
    table(title, [*header, "batches > 1 ms: min", "median", "max"], rows, peer="torch")


AHEAD: dict[str, tuple[Callable[..., Any], type[Slow], dict[str, Any]]] = {
    "torch, in order": (torch.utils.data.DataLoader, Slow, {}),
    "torch, in_order=False": (torch.utils.data.DataLoader, Slow, {"in_order": False}),
}
for kind in ("process", "thread"):
    for declared, of in (("", Slow), (", pure", PureSlow)):
        for order, in_order in (("in order", True), ("in_order=False", False)):
            AHEAD[f"penstock {kind}{declared}, {order}"] = (
                penstock.DataLoader,
                of,
                {"executor": kind, "in_order": in_order},
            )


def ahead(options: argparse.Namespace, workers: int) -> None:
    """One sample in 10 takes 20 times as long."""
    batches = options.ahead_batches * workers
    length, seconds = batches * options.batch_size, options.ahead_milliseconds / 1e3
    work = Slow(length, seconds, rare=10)
    ideal = workers * batches / sum(map(work.takes, range(length)))
    rates: dict[str, list[float]] = {name: [] for name in AHEAD}
    for repeat, (name, (make, of, extra)) in itertools.product(range(options.repeat), AHEAD.items()):
        loader = make(
            of(length, seconds, rare=10), batch_size=options.batch_size, shuffle=True, num_workers=workers, **extra
        )
        torch.manual_seed(repeat)
        iterator = iter(loader)
        next(iterator)
        start = time.perf_counter()
        count = sum(1 for _ in iterator)
        rates[name].append(count / (time.perf_counter() - start))
        del iterator
        getattr(loader, "close", lambda: None)()
    peer = "torch, in order"
    rows = []
    for name, rate in rates.items():
        any_order = rates[name.replace("in order", "in_order=False")]
        share = [100 * a / b for a, b in zip(rate, any_order, strict=True)]
        rows.append((name, *spread(rate), f"{100 * sorted(rate)[len(rate) // 2] / ideal:.0f}", *spread(share)))
    header = ["loader", "batches/s: min", "median", "max", "% of what the work allows"]
    table(
        f"{batches} batches of {options.batch_size}, {options.ahead_milliseconds:g} ms per sample, one in 10 takes "
        f"20 times as long, {workers} workers: at best {ideal:.0f}/s",
        [*header, "% of any order: min", "median", "max"],
        rows,
        peer=peer,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a sample in the first part")
    parser.add_argument("--mix-milliseconds", type=float, default=4.0, help="of an ordinary sample in the mix")
    parser.add_argument("--batches", type=int, default=40, help="of the mix (default: %(default)s)")
    parser.add_argument("--ahead-milliseconds", type=float, default=1.0, help="of an ordinary sample in the last part")
    parser.add_argument("--ahead-batches", type=int, default=40, help="for each worker (default: %(default)s)")
    quick = {"repeat": 1, "batches": 8, "milliseconds": 2.0, "mix_milliseconds": 1.0, "ahead_batches": 3}
    options = parse(parser, quick)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # sleeping needs no cores
    first(options)
    mix(options)
    for workers in (4, 16):
        ahead(options, workers)


if __name__ == "__main__":
    main()
