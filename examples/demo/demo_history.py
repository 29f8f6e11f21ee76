"""What the logs of a training run say: which samples it was trained on, how fast, and in how much memory.

A job that is killed loses the steps since its last checkpoint, and the next job does them again; that is by design.
So a step counts if it is in the checkpoint that every later job started from: `surviving` drops the others, and
`count_samples` counts what is left. Every sample once per epoch means that the smallest and the largest count are 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import PenstockError

__all__ = ["Attempt", "Step", "Test", "count_samples", "final_accuracy", "last_tests", "read_attempt", "surviving"]


@dataclass(eq=False)
class Step:
    """One step of all ranks together."""

    number: int
    epoch: int
    loss: float
    rows: npt.NDArray[np.int64]


@dataclass
class Test:
    """One measurement on the test set, after an epoch."""

    epoch: int
    step: int
    accuracy: float
    images: int


@dataclass
class Attempt:
    """One job, from its start or its resumption to its end or its death."""

    start: int
    ranks: int
    steps: list[Step]
    tests: list[Test]
    samples_per_second: float
    waiting: float
    memory: list[int | None] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The last step that all ranks have logged; the start if there is none."""
        return self.steps[-1].number if self.steps else self.start


def read_attempt(metrics: Path, ranks: int) -> Attempt:
    """The log of one job, from the files ``metrics.rank0``, ``metrics.rank1``, ...

    A step that not all ranks have logged is left out: the job was killed in it.

    Raises:
        PenstockError: a rank has logged no step at all.
    """
    logs = [_read_lines(Path(f"{metrics}.rank{rank}")) for rank in range(ranks)]
    by_rank = [{line["step"]: line for line in lines if line["event"] == "step"} for lines in logs]
    if not all(by_rank):
        raise PenstockError(f"a rank has logged no step in {metrics}.rank*")
    steps = []
    for number in sorted(set.intersection(*(set(lines) for lines in by_rank))):
        parts = [lines[number] for lines in by_rank]
        rows = np.concatenate([np.asarray(part["rows"], dtype=np.int64) for part in parts])
        loss = sum(part["loss"] * len(part["rows"]) for part in parts) / len(rows)
        steps.append(Step(number, parts[0]["epoch"], loss, rows))
    fields = ("epoch", "step", "accuracy", "images")
    measured = [Test(*(line[name] for name in fields)) for line in logs[0] if line["event"] == "epoch"]
    speed, waiting = _speed(list(by_rank[0].values()), samples=len(steps[0].rows) if steps else 0)
    return Attempt(
        logs[0][0]["step"], ranks, steps, measured, speed, waiting, [_largest_memory(lines) for lines in logs]
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _speed(lines: Sequence[dict[str, Any]], *, samples: int) -> tuple[float, float]:
    """Samples per second and share of waiting of rank 0, without its first step, in which everything warms up."""
    if len(lines) < 3:
        return float("nan"), float("nan")
    first, last = lines[1], lines[-1]
    seconds = last["seconds"] - first["seconds"]
    return (len(lines) - 2) * samples / seconds, (last["waited"] - first["waited"]) / seconds


def _largest_memory(lines: Sequence[dict[str, Any]]) -> int | None:
    return max((line["memory"] for line in lines if line.get("memory") is not None), default=None)


def surviving(attempts: Sequence[Attempt]) -> list[Step]:
    """The steps that the final model is made of, in order."""
    kept: list[Step] = []
    for number, attempt in enumerate(attempts):
        last = min((later.start for later in attempts[number + 1 :]), default=attempt.end)
        kept += [step for step in attempt.steps if step.number <= last]
    return kept


def last_tests(attempts: Sequence[Attempt]) -> dict[int, Test]:
    """The last measurement after each epoch."""
    return {test.epoch: test for attempt in attempts for test in attempt.tests}


def final_accuracy(attempt: Attempt) -> float:
    """On the test set after the last epoch; NaN if there was none."""
    return attempt.tests[-1].accuracy if attempt.tests else float("nan")


def count_samples(steps: Sequence[Step], *, samples: int, epochs: int) -> npt.NDArray[np.int64]:
    """How often each sample was trained on in each epoch: int64 of shape (epochs, samples)."""
    counts = np.zeros((epochs, samples), dtype=np.int64)
    for step in steps:
        np.add.at(counts[step.epoch], step.rows, 1)
    return counts
