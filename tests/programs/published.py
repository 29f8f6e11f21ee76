"""Programs of other projects as they are published, with the changes that docs/guides/real-programs.md shows.

None of their text is kept here. They lie in a folder that ``PENSTOCK_TEST_PROGRAMS`` names: a folder for each
repository, named as the repository is, at the commit that `PROGRAMS` says; and ``packages``, the libraries they import
that are not among ours. ``python tests/programs/get.py FOLDER`` makes it.

A copy of a program is changed in two steps, and each change has to match its text exactly once, so a program that
has moved on is noticed:

* `Program.prepared` makes a run short on a CPU (a small model, few epochs). Every copy has it, that with torch's loader
  too.
* The guide's changes: under a program's heading the first ``diff`` block changes the loader, the second one also
  reads the data by Penstock.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GUIDE = ROOT / "docs" / "guides" / "real-programs.md"
SECTION = re.compile(r"^## `([\w-]+)`(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
DIFF = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLAIN, SWAPPED, NATIVE = range(3)
"""How many of the guide's changes are made."""
BATCH, WORKERS, CLASSES = 16, 2, 10


class Edit(NamedTuple):
    """A piece of a file, and what comes in its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Program:
    """Where a program comes from, how it is run, and what it prints.

    Attributes:
        repository: owner and name.
        commit: its version.
        paths: the parts of the repository that are needed.
        command: a path in the repository, or ``-m`` and a module, and arguments. ``{data}`` is the folder of the data,
            ``{samples}`` the number of images, ``{epochs}`` the number of epochs.
        loss: the line of a training step, its loss as the group.
        weights: the file with what it has trained, as a pattern; its key is ``state_dict``.
        batch: samples of a step.
        root: the folder with the repository's packages.
        prepared: changes of every copy.
        added: files that every copy has besides, as JSON.
        environment: variables that the program reads.
    """

    repository: str
    commit: str
    paths: tuple[str, ...]
    command: tuple[str, ...]
    loss: str
    weights: str = ""
    batch: int = BATCH
    root: str = "."
    prepared: tuple[Edit, ...] = ()
    added: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The repository's name: that of its folder, and its heading in the guide."""
        return self.repository.partition("/")[2]


_LINEAR = f"nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, {CLASSES}))"
_TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 224, "layers": 1, "width": 64, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 1},
}

PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "pytorch/examples",
            "77f55b912142e11fcfdf5b530231fb9c52f181e8",
            ("imagenet",),
            (
                *("imagenet/main.py", "{data}/folders", "--epochs", "{epochs}", "--batch-size", str(BATCH)),
                *("--workers", str(WORKERS), "--lr", "0.01", "--print-freq", "1", "--seed", "1", "--no-accel"),
            ),
            r"^Epoch: .*\tLoss (\S+)",
            "checkpoint.pth.tar",
            prepared=(Edit("imagenet/main.py", "model = models.__dict__[args.arch]()\n", f"model = {_LINEAR}\n"),),
        ),
        Program(
            "huggingface/pytorch-image-models",
            "aa4b5850c1543fa488abf260f18390eda46cf85d",
            ("train.py", "timm"),
            (
                *("train.py", "--data-dir", "{data}/folders", "--model", "test_vit", "--img-size", "224"),
                *("--model-kwargs", "patch_size=56"),
                *("--num-classes", str(CLASSES), "--val-split", "val", "--epochs", "{epochs}"),
                *("--batch-size", str(BATCH), "--workers", str(WORKERS), "--lr", "0.01"),
                *("--warmup-epochs", "0", "--log-interval", "1", "--seed", "1", "--device", "cpu", "--output", "out"),
            ),
            r"^Train: .*Loss: +(\S+)",
            "out/*/last.pth.tar",
        ),
        Program(
            "huggingface/accelerate",
            "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
            ("examples/cv_example.py",),
            ("examples/cv_example.py", "--data_dir", "{data}/named", "--cpu"),
            r"^loss ([\d.e-]+)",
            prepared=(
                Edit(
                    "examples/cv_example.py",
                    '"resnet50d", pretrained=True,',
                    '"test_vit", img_size=224, patch_size=56,',
                ),
                Edit("examples/cv_example.py", '"num_epochs": 3,', '"num_epochs": {epochs},'),
                Edit("examples/cv_example.py", '"batch_size": 64,', f'"batch_size": {BATCH},'),
                Edit(
                    "examples/cv_example.py",
                    "accelerator.backward(loss)\n",
                    "accelerator.backward(loss)\n            print('loss', loss.item(), flush=True)\n",
                ),
            ),
        ),
        Program(
            "mlfoundations/open_clip",
            "89fb801f1e6087880e951fc8354b8a2077b79c6d",
            ("src",),
            (
                *(
                    "-m",
                    "open_clip_train.main",
                    "--dataset-type",
                    "webdataset",
                    "--train-data",
                    "{data}/shards/{{0..3}}.tar",
                ),
                *("--train-num-samples", "{samples}", "--model", "tiny", "--device", "cpu", "--precision", "fp32"),
                *("--batch-size", str(BATCH), "--workers", str(WORKERS), "--epochs", "{epochs}", "--warmup", "1"),
                *("--log-every-n-steps", "1", "--seed", "1", "--logs", "logs", "--name", "run"),
            ),
            r"Train Epoch: .*Loss: (\S+)",
            "logs/run/checkpoints/epoch_*.pt",
            root="src",
            added={"src/open_clip/model_configs/tiny.json": _TINY},
            # WebDataset's shuffles give other orders than ours, so buffers of one: neither shuffles.
            environment={
                f"OPENCLIP_WDS_{what}_SHUFFLE_{size}": "1"
                for what in ("SHARD", "SAMPLE")
                for size in ("SIZE", "INITIAL")
            },
        ),
        Program(
            "pytorch/torchtitan",
            "c537bca68d96cbedcee6c22cfd693dfecdb54752",
            ("torchtitan",),
            (str(HERE / "torchtitan_loop.py"), "{data}/text", "--epochs", "{epochs}"),
            r"^loss ([\d.e-]+)",
            batch=4,
        ),
    )
}


class Run(NamedTuple):
    """What a program printed: its losses, and when, by the clock and by the processor's time of all its processes."""

    losses: list[float]
    seconds: list[float]
    cpu: list[float]
    output: str


def changes(name: str) -> list[list[Edit]]:
    """Return the changes of a program that the guide shows: of the loader, then of the data.

    Raises:
        KeyError: the guide has no such heading.
    """
    section = dict(SECTION.findall(GUIDE.read_text()))[name]
    return [list(_edits(block)) for block in DIFF.findall(section)]


def _edits(block: str) -> list[Edit]:
    """The hunks of a diff: each begins with ``@@``, those of a file with ``--- FILE``."""
    edits = []
    for part in re.split(r"^--- ", block, flags=re.MULTILINE)[1:]:
        file, *hunks = re.split(r"^@@.*\n", part, flags=re.MULTILINE)
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if not line.startswith("+"))
            new = "".join(line[1:] for line in lines if not line.startswith("-"))
            edits.append(Edit(file.split()[0], old, new))
    return edits


def copy(program: Program, source: Path, folder: Path, *, made: int, epochs: int) -> None:
    """Copy a program into a folder, changed.

    Args:
        program: which one.
        source: the folder with all repositories.
        folder: gets it.
        made: how many of the guide's changes are made.
        epochs: that it trains for.

    Raises:
        AssertionError: what a change replaces is not in the program exactly once.
    """
    for path in program.paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        original = source / program.name / path
        if original.is_dir():
            shutil.copytree(original, folder / path, symlinks=True)
        else:
            shutil.copy(original, folder / path)
    for path, value in program.added.items():
        (folder / path).write_text(json.dumps(value))
    edits = [*program.prepared, *(edit for each in changes(program.name)[:made] for edit in each)]
    for edit in edits:
        text = (folder / edit.file).read_text()
        assert text.count(edit.old) == 1, f"{text.count(edit.old)} times in {program.name}/{edit.file}:\n{edit.old}"
        (folder / edit.file).write_text(text.replace(edit.old, edit.new.replace("{epochs}", str(epochs))))


def run(
    program: Program,
    source: Path,
    folder: Path,
    data: Path,
    *,
    made: int,
    epochs: int = 2,
    arguments: Sequence[str] = (),
) -> Run:
    """Run a program in a folder of its own, in a fresh interpreter on one thread.

    Args:
        program: which one.
        source: the folder with all repositories.
        folder: a new one; has the copy, and what the program writes.
        data: what `write_data` wrote.
        made: how many of the guide's changes are made.
        epochs: that it trains for.
        arguments: of the program, in addition.

    Returns:
        What it printed.
    """
    copy(program, source, folder, made=made, epochs=epochs)
    samples = sum(1 for _ in (data / "named").iterdir())
    paths = [ROOT / "src", folder / program.root, source / "packages"]
    environment = {
        **os.environ,
        **program.environment,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [part.format(data=data, samples=samples, epochs=epochs) for part in program.command] + [*arguments]
    started = [sys.executable, "-W", "ignore", str(HERE / "launch.py"), *command]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    losses, seconds, cpu, said = [], [], [], []
    with subprocess.Popen(started, cwd=folder, env=environment, **how) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if found := re.search(program.loss, line):
                losses.append(float(found[1].rstrip(",")))
                seconds.append(time.perf_counter())
                cpu.append(_processor_seconds(process.pid))
    output = "".join(said)
    assert process.returncode == 0, output
    return Run(losses, seconds, cpu, output)


def _processor_seconds(pid: int) -> float:
    """Time that a process, its children and those of them that have ended have had."""
    total, waiting = 0, [pid]
    while waiting:
        pid = waiting.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")
