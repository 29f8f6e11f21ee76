"""The programs of examples/integrations: killed in the middle of an epoch, they go on from the framework's checkpoint,
with every sample once, on another number of ranks where the framework can.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from busy_support import HANG
from example_support import EXAMPLES, LIBRARIES, check, launch, options, output, read, write_images
from full_run import full_only
from test_code import ROOT, run_python

KILLED = -9


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some, for all programs."""
    folder = tmp_path_factory.mktemp("examples")
    write_images(folder / "small")
    return folder


@pytest.fixture
def folder(images: Path, request: pytest.FixtureRequest) -> Path:
    path = images / request.node.name
    path.mkdir()
    return path


def go_on(name: str, folder: Path, *, checkpoint: str = "run", ranks: tuple[int, int] = (1, 1)) -> None:
    """Kill it in the fifth step on some ranks, resume it on others."""
    saved = ["--checkpoint", str(folder / checkpoint)]
    codes = launch(name, folder, [*options(folder, "begun"), *saved, "--stop-after", "5"], ranks[0])
    assert KILLED in codes, output(folder)
    assert launch(name, folder, [*options(folder, "ended"), *saved], ranks[1]) == [0] * ranks[1], output(folder)
    check(*read(folder, "begun"), *read(folder, "ended"), ranks=ranks[1])


def test_plain_torch(folder: Path) -> None:
    """And as it stands, on the images that it unpacks."""
    assert launch("plain_torch", folder, ["--stop-after", "2"]) == [KILLED], output(folder)
    assert len((folder / "cifar10" / "train.txt").read_text().splitlines()) == 1000
    go_on("plain_torch", folder, checkpoint="run.pt")


def test_ddp_on_two_ranks_then_on_three(folder: Path) -> None:
    """By torchrun first."""
    saved = ["--checkpoint", str(folder / "run.pt")]
    arguments = [*options(folder, "begun"), *saved, "--stop-after", "5"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(EXAMPLES / "ddp.py"), *arguments]
    done = subprocess.run([*command, *program], cwd=folder, capture_output=True, text=True, timeout=HANG)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert launch("ddp", folder, [*options(folder, "ended"), *saved], ranks=3) == [0] * 3, output(folder)
    check(*read(folder, "begun"), *read(folder, "ended"), ranks=3)


@full_only("four ranks, one pair after the other; the example of DDP has ranks, too")
def test_fsdp2_on_two_shares_of_the_data_then_on_one(folder: Path) -> None:
    """The second time both ranks share the layers, and have the same samples."""
    saved = ["--checkpoint", str(folder / "run")]
    assert KILLED in launch("fsdp2", folder, [*options(folder, "begun"), *saved, "--stop-after", "5"], ranks=2)
    arguments = [*options(folder, "ended"), *saved, "--tensor-parallel", "2"]
    assert launch("fsdp2", folder, arguments, ranks=2) == [0, 0], output(folder)
    check(*read(folder, "begun"), *read(folder, "ended"), ranks=2, same=True)


@full_only("three ranks; test_lightning.py has it in this process")
def test_lightning_on_one_rank_then_on_two(folder: Path) -> None:
    pytest.importorskip("lightning")
    saved = ["--checkpoint", str(folder / "run")]
    assert launch("lightning_module", folder, [*options(folder, "begun"), *saved, "--stop-after", "5"]) == [KILLED]
    arguments = [*options(folder, "ended"), *saved, "--devices", "2"]
    assert launch("lightning_module", folder, arguments, ranks=2) == [0, 0], output(folder)
    check(*read(folder, "begun"), *read(folder, "ended"), ranks=2)


def test_accelerate_on_two_ranks_then_on_one(folder: Path) -> None:
    pytest.importorskip("accelerate")
    go_on("accelerate_loop", folder, ranks=(2, 1))


def test_code_blocks_of_the_guide(tmp_path: Path) -> None:
    write_images(tmp_path / "data")
    (tmp_path / "data" / "train.txt").rename(tmp_path / "train.txt")
    run_python(ROOT / "docs" / "guides" / "integrations.md", tmp_path, imports=LIBRARIES)


@full_only("three ranks; test_trainer.py has it in this process")
def test_hugging_face_trainer_on_one_rank_then_on_two(folder: Path) -> None:
    pytest.importorskip("transformers")
    go_on("hf_trainer", folder, ranks=(1, 2))
