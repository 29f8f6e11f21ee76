"""Runs the programs of examples/integrations, on some ranks, and reads their logs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from busy_support import HANG
from interpreter_support import Popen

import penstock as ps

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
ROWS, BATCH, STEPS, EPOCHS = 96, 12, 8, 2
LIBRARIES = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "accelerate",
    "lightning",
    "lightning.pytorch.callbacks",
    "transformers.trainer",
)


class Run(NamedTuple):
    """What a job wrote: the step that it began after, and of each step the lines of the ranks."""

    start: int
    steps: dict[int, list[dict[str, Any]]]

    def rows(self, step: int) -> list[int]:
        """Of all ranks."""
        return [row for line in self.steps[step] for row in line["rows"]]

    def loss(self, step: int) -> float:
        """Mean over the ranks."""
        return sum(line["loss"] for line in self.steps[step]) / len(self.steps[step])


def options(folder: Path, log: str) -> list[str]:
    """For the few images in the folder ``small`` beside this one."""
    sizes = ["--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--checkpoint-every", "2"]
    return ["--data", str(folder.parent / "small"), "--record", str(folder / log), *sizes]


def write_images(folder: Path) -> None:
    """Fewer images than the examples have, as they want them."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for row in range(ROWS):
        cv2.imwrite(str(folder / f"{row}.jpg"), rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    (folder / "train.txt").write_text("".join(f"{row}.jpg {row % 10}\n" for row in range(ROWS)))


def launch(name: str, folder: Path, arguments: list[str], ranks: int = 1) -> list[int]:
    """Exit codes of the ranks of a job, which find each other as torchrun tells them to."""
    told = ranks > 1 or name in ("ddp", "fsdp2")
    return run_ranks([str(EXAMPLES / f"{name}.py"), *arguments], folder, ranks, imports=LIBRARIES, told=told)


def run_ranks(command: list[str], folder: Path, ranks: int, *, imports: tuple[str, ...], told: bool) -> list[int]:
    """Run a program on some ranks, in a folder that gets what each says in ``out0``, ``out1``, ...

    Args:
        command: the program and its arguments.
        folder: the working folder.
        ranks: of the job.
        imports: what the program imports.
        told: the ranks are told of each other, as by torchrun.

    Returns:
        The exit codes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **world}
    programs = []
    for rank in range(ranks):
        here = {**job, "RANK": rank, "LOCAL_RANK": rank} if told else {}
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **{key: str(value) for key, value in here.items()}}
        with (folder / f"out{rank}").open("a") as out:
            program = ["-W", "ignore", *command]
            programs.append(Popen(program, imports=imports, cwd=folder, env=environment, stdout=out, stderr=out))
    try:
        return [program.wait(HANG) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()


def output(folder: Path) -> str:
    """What all ranks of all jobs said."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("out*")))


def read(folder: Path, log: str) -> list[Run]:
    """The logs of a job; one for each time that its ranks were started."""
    files = [_starts(folder / f"{log}.rank{rank}") for rank in _ranks(folder, log)]
    assert files, output(folder)
    assert len({len(starts) for starts in files}) == 1
    runs = []
    for starts in zip(*files, strict=True):
        begun = {start for start, _ in starts}
        assert len(begun) == 1
        lines = [line for _, steps in starts for line in steps]
        numbers = sorted({line["step"] for line in lines})
        runs.append(Run(begun.pop(), {n: [line for line in lines if line["step"] == n] for n in numbers}))
    return runs


def _ranks(folder: Path, log: str) -> Iterator[int]:
    for rank in count():
        if not (folder / f"{log}.rank{rank}").exists():
            return
        yield rank


def _starts(path: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    starts: list[tuple[int, list[dict[str, Any]]]] = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "start" in line:
            starts.append((line["start"], []))
        else:
            starts[-1][1].append(line)
    return starts


def check(begun: Run, ended: Run, *, ranks: int, same: bool = False) -> None:
    """Two jobs, of which the first was killed, have had every sample of every epoch once, as Penstock orders them.

    Args:
        ranks: of the second job.
        same: the ranks of the second job share layers, and so have the same samples.
    """
    assert begun.start == 0
    assert 0 < ended.start < STEPS, "the second job was to begin in the middle of an epoch"
    assert max(begun.steps) > ended.start, "some work was to be lost"
    assert list(ended.steps) == list(range(ended.start + 1, EPOCHS * STEPS + 1))
    assert all(len(lines) == ranks for lines in ended.steps.values())
    if same:
        assert all(line["rows"] == lines[0]["rows"] for lines in ended.steps.values() for line in lines)
        ended = Run(ended.start, {step: lines[:1] for step, lines in ended.steps.items()})
    for epoch in range(EPOCHS):
        sampler = ps.RandomSampler(range(ROWS), shuffle="global", seed=0)
        sampler.set_epoch(epoch)
        order = list(sampler)
        had = []
        for number in range(STEPS):
            step = epoch * STEPS + number + 1
            rows = (begun if step <= ended.start else ended).rows(step)
            assert sorted(rows) == sorted(order[number * BATCH : (number + 1) * BATCH])
            had += rows
        assert sorted(had) == list(range(ROWS))
    lost = ended.start + 1
    if len(begun.steps[lost]) == len(begun.steps[1]):  # no rank was ended before it said its loss
        assert abs(begun.loss(lost) - ended.loss(lost)) < 1e-5, "the model has to be what it was"
    for run in (begun, ended):
        made_by_penstock(run)


def made_by_penstock(run: Run) -> None:
    """The loader is ours, and has made each step's batch; Accelerate asks for one more than it gives."""
    for number, lines in enumerate(run.steps.values(), 1):
        assert all(line["made"] in (number, number + 1) or _at_end(line, number) for line in lines), lines


def _at_end(line: dict[str, Any], number: int) -> bool:
    return line["step"] % STEPS == 0 and line["made"] == number
