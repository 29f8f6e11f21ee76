"""What ``penstock demo`` runs: a training on real images that is killed twice and loses nothing.

Two ranks train a small network on 5,000 JPEG files, are killed in the middle of an epoch, go on as one rank, are
killed again, and come to the end as two. The logs of the ranks show that every sample was trained on exactly once per
epoch. Then the order itself is put to the test: class-sorted, shuffled by Penstock, shuffled by torch.

The training program is ``examples/train_ddp.py``, started as it stands. ``penstock/tools/cli/demo.py`` has the options.
"""

from __future__ import annotations

import math
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.wording import counted

if TYPE_CHECKING:
    from demo_history import Attempt
    from rich.console import Console

__all__ = ["Data", "Plan", "plan_for", "run"]

_ORDERS = {"none": "sorted by class", "global": "Penstock's shuffle", "torch": "torch's RandomSampler"}


@dataclass(frozen=True)
class Plan:
    """How much to train. All jobs of a demo train alike, whatever their order, seed and number of ranks."""

    epochs: int
    batch_size: int
    per_class: int
    test_per_class: int
    checkpoint_every: int
    seeds: Sequence[int]

    @property
    def steps_per_epoch(self) -> int:
        """Of the whole job: batches of ten classes, the last one may be smaller."""
        return math.ceil(10 * self.per_class / self.batch_size)

    def kills(self) -> tuple[int, int]:
        """Two steps in the middle of an epoch and some steps after a checkpoint, so that something is lost."""
        total = self.epochs * self.steps_per_epoch
        every = self.checkpoint_every
        first, second = (int(total * share) // every * every + every // 2 + 1 for share in (0.35, 0.72))
        return first, second


def plan_for(epochs: int | None, *, quick: bool) -> Plan:
    """Return how much to train: a fifth of the images and one seed if it is to be quick."""
    if quick:
        return Plan(epochs or 2, 50, per_class=100, test_per_class=50, checkpoint_every=5, seeds=(0,))
    return Plan(epochs or 5, 100, per_class=500, test_per_class=100, checkpoint_every=10, seeds=(0, 1, 2))


@dataclass(frozen=True)
class Data:
    """The unpacked images, their meta files, and the program to train with."""

    root: Path
    meta: Path
    test_meta: Path
    program: Path
    samples: int
    test_samples: int


def run(console: Console, plan: Plan, archive: Path, program: Path, out: Path) -> dict[str, Any]:
    """Do all of it; return what ``--json`` prints. ``report["ok"]`` says whether every sample was trained on once."""
    from demo_plot import draw
    from demo_report import print_results, summary

    console.rule("[bold]1  Images and meta file", align="left")
    data = _prepare(console, plan, archive, program, out)
    console.rule("[bold]2  Train, be killed, go on with another number of ranks", align="left")
    attempts = _interrupted(console, plan, data, out / "runs")
    console.rule("[bold]3  Does the order matter, and is it as good as torch's?", align="left")
    runs = _compare(console, plan, data, out / "runs")
    console.rule("[bold]4  Results", align="left")
    good = print_results(console, plan, data, attempts, runs, _ORDERS)
    plot: Path | None = out / "demo.png"
    if draw(out / "demo.png", plan, attempts, runs, _ORDERS):
        console.print(f"Plot: {plot}")
    else:
        plot = None
        console.print("No plot: it needs matplotlib (pip install matplotlib).", style="yellow")
    return {"ok": good, **summary(plan, data, attempts, runs), "plot": plot}


def _prepare(console: Console, plan: Plan, archive: Path, program: Path, out: Path) -> Data:
    """Unpack the images, write meta files sorted by class, and index them."""
    from penstock.manifest import Manifest

    root = out / "images"
    metas = out / "train.txt", out / "test.txt"
    started = time.perf_counter()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            tar.extractall(root, filter="data")
        metas[0].write_text("".join(_class_sorted(root / "train", plan.per_class)))
        metas[1].write_text("".join(_class_sorted(root / "test", plan.test_per_class)))
    except (OSError, tarfile.TarError) as error:
        raise PenstockError(f"cannot unpack {archive} into {root}: {error}") from error
    unpacked = time.perf_counter() - started
    started = time.perf_counter()
    train, test = (Manifest.open(meta, root=root) for meta in metas)
    indexed = 1000 * (time.perf_counter() - started)
    console.print(f"unpacked {archive.name} into {root} in {unpacked:.1f} s")
    console.print(f"{metas[0]}: {counted(len(train), 'image')}, sorted by class")
    console.print(f"{metas[1]}: {counted(len(test), 'image')}")
    console.print(f"indexed both in {indexed:.0f} ms; fingerprint of the training data {train.fingerprint[:16]}")
    return Data(root, metas[0], metas[1], program, len(train), len(test))


def _class_sorted(split: Path, per_class: int) -> list[str]:
    """Lines ``path label``; labels number the class folders, paths start from the folder above."""
    lines = []
    for label, folder in enumerate(sorted(path for path in split.iterdir() if path.is_dir())):
        files = sorted(folder.glob("*.jpg"))[:per_class]
        lines += [f"{file.relative_to(split.parent).as_posix()} {label}\n" for file in files]
    return lines


def _arguments(plan: Plan, data: Data, metrics: Path, **options: Any) -> list[str]:
    values = {
        "meta": data.meta,
        "test_meta": data.test_meta,
        "root": data.root,
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "checkpoint_every": plan.checkpoint_every,
        "metrics": metrics,
        **options,
    }
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def _interrupted(console: Console, plan: Plan, data: Data, folder: Path) -> list[Attempt]:
    """Train on 2 ranks, 1 rank, 2 ranks; the first two jobs are killed."""
    from demo_history import read_attempt
    from demo_jobs import Fleet, Job

    checkpoint = folder / "checkpoint.pt"
    checkpoint.unlink(missing_ok=True)
    attempts: list[Attempt] = []
    start = 0
    for ranks, kill in zip((2, 1, 2), (*plan.kills(), None), strict=True):
        name = f"attempt-{len(attempts) + 1}"
        metrics = folder / f"{name}.jsonl"
        options: dict[str, Any] = {"seed": plan.seeds[0], "checkpoint": checkpoint}
        if kill is not None:
            options["stop_after"] = kill - start
        arguments = [*_arguments(plan, data, metrics, **options), *(["--resume"] if attempts else [])]
        what = "start" if start == 0 else f"resume from the checkpoint of step {start}"
        console.print(f"[bold]{what} on {counted(ranks, 'rank')}[/bold]")
        with Fleet() as fleet:
            shown = not console.stderr  # its bar goes to standard output, where --json has its object alone
            fleet.start(Job(name, data.program, arguments, folder, ranks=ranks, dies=kill is not None, shown=shown))
            fleet.wait()
        attempts.append(read_attempt(metrics, ranks))
        if kill is not None:
            _clear_bar(console)
            start = kill // plan.checkpoint_every * plan.checkpoint_every
            epoch, step = divmod(kill - 1, plan.steps_per_epoch)
            where = f"in step {step + 1} of {plan.steps_per_epoch} of epoch {epoch + 1}"
            console.print(f"[red]killed {where}: lost the {kill - start} steps since the checkpoint[/red]")
    return attempts


def _clear_bar(console: Console) -> None:
    """Remove the progress bar that a killed process has left on the terminal."""
    from rich.control import Control
    from rich.segment import ControlType

    if console.is_terminal:
        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        console.show_cursor()


def _compare(console: Console, plan: Plan, data: Data, folder: Path) -> dict[str, list[Attempt]]:
    """The same training in three orders, without interruption, with each of the seeds; two jobs at a time."""
    from demo_history import read_attempt
    from demo_jobs import Fleet, Job
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    waiting = []
    for seed in plan.seeds:
        for order in _ORDERS:
            name = f"{order}-seed-{seed}"
            arguments = _arguments(plan, data, folder / f"{name}.jsonl", seed=seed, shuffle=order)
            waiting.append(Job(name, data.program, [*arguments, "--quiet"], folder))
    names = [job.name for job in waiting]
    text = f"{len(_ORDERS)} orders, {counted(len(plan.seeds), 'seed')}, one rank each"
    columns = (TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn())
    with Fleet() as fleet, Progress(*columns, console=console) as progress:
        bar = progress.add_task(text, total=len(names))
        running = 0
        while waiting or running:
            while waiting and running < 2:
                fleet.start(waiting.pop(0))
                running += 1
            fleet.wait()
            running -= 1
            progress.advance(bar)
    runs = {name: read_attempt(folder / f"{name}.jsonl", 1) for name in names}
    return {order: [runs[f"{order}-seed-{seed}"] for seed in plan.seeds] for order in _ORDERS}
