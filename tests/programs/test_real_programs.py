"""Programs as they are published train alike on torch's loader and on ours, after the change that the guide shows.

They are not in this repository: `published` says where they are looked for, and which commits they are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from full_run import full_only
from published import NATIVE, PLAIN, PROGRAMS, SWAPPED, Program, Run, changes, copy, run

STEPS = {"examples": 8, "pytorch-image-models": 7, "accelerate": 6, "open_clip": 8, "torchtitan": 30}
"""Of an epoch."""
EPOCHS = dict.fromkeys(PROGRAMS, 2) | {"open_clip": 1}
"""WebDataset's `batched` takes the first sample of the next batch before it gives one. So at an epoch's end the program
augments a sample more than on `penstock.wds`, and from then on draws other numbers.
"""
NATIVES = [name for name in PROGRAMS if len(changes(name)) > 1]
REASON = "programs that train for seconds"


@pytest.fixture(scope="module")
def ran(programs: Path, written: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a program with some of its changes, once, and return its folder and what it printed."""
    had: dict[tuple[str, int], tuple[Path, Run]] = {}

    def get(name: str, made: int) -> tuple[Path, Run]:
        if (name, made) not in had:
            folder = tmp_path_factory.mktemp(name)
            had[name, made] = folder, run(PROGRAMS[name], programs, folder, written, made=made, epochs=EPOCHS[name])
        return had[name, made]

    return get


def trained(program: Program, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a program's last checkpoint."""
    path = max(folder.glob(program.weights), key=lambda path: path.stat().st_mtime)
    weights: dict[str, torch.Tensor] = torch.load(path, weights_only=False)["state_dict"]
    return weights


@pytest.mark.slow
@full_only(REASON)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_on_torchs_loader(name: str, ran: Any) -> None:
    """Each step's loss is the same, and so are the weights in the end, bit for bit: batches and augmentations are."""
    program = PROGRAMS[name]
    (plain, before), (swapped, after) = ran(name, PLAIN), ran(name, SWAPPED)
    assert len(before.losses) == EPOCHS[name] * STEPS[name]
    assert before.losses == after.losses
    assert len(set(after.losses)) > STEPS[name] / 2
    if program.weights:
        wanted, weights = trained(program, plain), trained(program, swapped)
        assert list(weights) == list(wanted)
        assert all(torch.equal(weights[key], wanted[key]) for key in wanted)


@pytest.mark.slow
@full_only(REASON)
@pytest.mark.parametrize("name", NATIVES)
def test_trains_on_data_read_by_penstock(name: str, ran: Any) -> None:
    """As many steps, in an order of our own."""
    _, native = ran(name, NATIVE)
    _, plain = ran(name, PLAIN)
    assert len(native.losses) == len(plain.losses)
    assert all(map(math.isfinite, native.losses))
    assert native.losses != plain.losses


@pytest.mark.slow
@full_only(REASON)
def test_torchtitan_resumes(programs: Path, written: Path, tmp_path: Path) -> None:
    """A run that is stopped goes on from its state: the losses are those of a run that never was."""
    losses = {}
    for what in ("whole", "--save", "--load"):
        (tmp_path / what).mkdir()
        arguments = [] if what == "whole" else [what, str(tmp_path / "step.pt")]
        program = PROGRAMS["torchtitan"]
        done = run(program, programs, tmp_path / what, written, made=SWAPPED, epochs=1, arguments=arguments)
        losses[what] = done.losses
    assert 0 < len(losses["--save"]) < len(losses["whole"])
    assert losses["--save"] + losses["--load"] == losses["whole"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_guide_shows_the_changes(name: str, tmp_path: Path) -> None:
    """Of each program, and each replaces something that would be found."""
    for edits in changes(name):
        assert edits
        for file, old, new in edits:
            assert Path(file).suffix == ".py"
            assert old.strip()
            assert old != new
            assert "penstock" in new or "transform" in new or "ormalize" in new or "snapshot" in new


def test_a_program_that_has_moved_on_is_noticed(tmp_path: Path) -> None:
    """What a change replaces has to be there once."""
    program = Program("somebody/examples", "", ("imagenet",), (), "")
    main = tmp_path / "source" / "examples" / "imagenet" / "main.py"
    main.parent.mkdir(parents=True)
    text = "".join(edit.old for edit in changes("examples")[0])
    for number, wrong in enumerate([text.replace("train_loader", "loader"), text + text]):
        main.write_text(wrong)
        with pytest.raises(AssertionError, match=r"times in examples/imagenet/main\.py"):
            copy(program, tmp_path / "source", tmp_path / str(number), made=SWAPPED, epochs=1)
    main.write_text(text)
    copy(program, tmp_path / "source", tmp_path / "right", made=SWAPPED, epochs=1)
    assert "train_loader = penstock.DataLoader(" in (tmp_path / "right" / "imagenet" / "main.py").read_text()
