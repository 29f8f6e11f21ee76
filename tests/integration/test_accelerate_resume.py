"""Programs of Accelerate's users, saved and resumed: they train on what they would have trained on, with torch's loader
and with ours, whether they pass over the first steps themselves or leave that to the state of the loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from full_run import full_only

pytest.importorskip("accelerate")
from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_support import (
    EPOCHS,
    STEPS,
    Done,
    Program,
    noisy,
    on_ranks,
    ours,
    refused,
    run_program,
    torchs,
)
from gloo_support import start_ranks, write_rows
from loader_support import Range, Stream
from state_support import CountingCollate

import penstock as ps
from penstock.integrations.accelerate import Accelerator

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step", "ignore:.*does not declare itself pure")


def _reset() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Accelerate keeps its state in singletons."""
    yield
    _reset()


def run(program: Program, folder: Path, resume: str | None = None) -> Done:
    _reset()
    return run_program(program, folder, resume)


WORKERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2, "executor": "process", "persistent_workers": True},
}
SAVED = [5, 10, 15]  # in the first epoch, in the second, in the third


@full_only("a training for each", but=["by epoch-continue", "in order-skip_first_batches"])
@pytest.mark.parametrize("passes", ["skip_first_batches", "continue"])
@pytest.mark.parametrize("order", ["in order", "by epoch", "somebody's"])
def test_steps_and_losses_are_those_with_torchs_loader(tmp_path: Path, order: str, passes: str) -> None:
    """``complete_cv_example`` passes over the steps that a checkpoint has had; so do most programs of Accelerate."""
    says_epoch = order != "in order"
    theirs = Program(partial(torchs, order), passes=passes, says_epoch=says_epoch)
    mine = Program(partial(ours, order), passes=passes, says_epoch=says_epoch)
    whole = run(theirs, tmp_path / "torch")
    assert len(whole.losses) == EPOCHS * STEPS
    assert run(mine, tmp_path / "ours") == whole
    for step in SAVED:
        expected = run(theirs, tmp_path / "torch", f"step_{step}")
        assert expected.losses == whole.losses[step:]
        assert run(mine, tmp_path / "ours", f"step_{step}") == expected


def test_an_order_that_is_drawn_is_the_one_that_torchs_loader_draws(tmp_path: Path) -> None:
    """A shuffle without a seed: a resumed epoch is drawn anew, by torch and so by us."""
    theirs, mine = Program(partial(torchs, "shuffled")), Program(partial(ours, "shuffled"))
    whole = run(theirs, tmp_path / "torch")
    assert run(mine, tmp_path / "ours") == whole
    for step in SAVED:
        resumed = run(theirs, tmp_path / "torch", f"step_{step}")
        assert len(resumed.losses) == EPOCHS * STEPS - step
        assert run(mine, tmp_path / "ours", f"step_{step}") == resumed


@pytest.mark.parametrize("stateful", [False, True], ids=["without a state", "with a state"])
def test_epochs_are_resumed(tmp_path: Path, stateful: bool) -> None:
    program = Program(noisy, stateful, says_epoch=True, checkpointing_steps="epoch")
    whole = run(program, tmp_path)
    for epoch in range(EPOCHS):
        assert run(program, tmp_path, f"epoch_{epoch}").losses == whole.losses[(epoch + 1) * STEPS :]


@full_only("workers for each", but=["inline", "thread", "True-skip_first_batches-process"])
@pytest.mark.parametrize("how", WORKERS)
@pytest.mark.parametrize(
    "stateful, passes",
    [(False, "skip_first_batches"), (False, "continue"), (True, "skip_first_batches"), (True, "not at all")],
)
def test_seeded_samples_are_those_of_the_whole_run(tmp_path: Path, how: str, stateful: bool, passes: str) -> None:
    """Also their random draws, and also in the epochs after the one that was resumed."""
    program = Program(partial(noisy, **WORKERS[how]), stateful, passes, says_epoch=True)
    whole = run(program, tmp_path)
    for step in SAVED:
        assert run(program, tmp_path, f"step_{step}") == Done(*(part[step:] for part in whole))


@pytest.mark.parametrize("stateful", [False, True], ids=["without a state", "with a state"])
def test_the_epoch_moves_on_after_a_resumed_one(tmp_path: Path, stateful: bool) -> None:
    """Where nobody says the epoch. With torch's loader the one that was resumed would come once more."""
    program = Program(noisy, stateful)
    whole = run(program, tmp_path)
    assert run(program, tmp_path, "step_5") == Done(*(part[5:] for part in whole))


def test_a_run_that_was_resumed_is_resumed_again(tmp_path: Path) -> None:
    """The second checkpoint is saved while the first batches are passed over."""
    often = Program(noisy, True, says_epoch=True, checkpointing_steps=1)
    whole = run(often, tmp_path)
    for passes in ("skip_first_batches", "not at all"):
        _ = run(often, tmp_path, "step_8")
        again = run(often._replace(passes=passes), tmp_path, "step_10")
        assert again == Done(*(part[10:] for part in whole))


def test_a_checkpoint_without_a_position_restores_none(tmp_path: Path) -> None:
    """And one that has a position is not obeyed by who does not ask for it."""
    without, with_ = (Program(noisy, stateful, says_epoch=True) for stateful in (False, True))
    whole = run(without, tmp_path / "without")
    assert not list((tmp_path / "without").rglob("dl_state_dict*"))
    assert run(with_, tmp_path / "without", "step_5").losses == whole.losses[5:]
    assert run(with_, tmp_path / "with") == whole
    assert (tmp_path / "with" / "step_5" / "dl_state_dict.bin").exists()
    assert run(without, tmp_path / "with", "step_5").losses == whole.losses[5:]


@full_only("two ranks for each", but=["False-skip_first_batches"])
@pytest.mark.parametrize(
    "stateful, passes",
    [(False, "skip_first_batches"), (False, "continue"), (True, "skip_first_batches"), (True, "not at all")],
)
def test_two_ranks_resume(tmp_path: Path, stateful: bool, passes: str) -> None:
    whole = start_ranks(2, on_ranks, 2, tmp_path, stateful, passes, None)
    assert [len(rank.losses) for rank in whole] == [9, 9]
    resumed = start_ranks(2, on_ranks, 2, tmp_path, stateful, passes, "step_4")
    assert resumed == [Done(*(part[4:] for part in rank)) for rank in whole]


def test_one_rank_that_reads_for_all_has_no_position() -> None:
    """Its loader is a round ahead, and those of the other ranks read nothing: a state would lose samples."""
    assert all("dispatch_batches=False" in said for said in start_ranks(2, refused, 2))


# skip_first_batches on loaders of all kinds.


def make(kind: str, path: Path) -> Any:
    if kind == "RankDataset":
        return ps.DataLoader(ps.RankDataset(path, seed=1), batch_size=4)
    if kind.startswith("stream"):
        return ps.DataLoader(Stream(22), 4, num_workers=2 * (kind != "stream"))
    return noisy()


def rows(loader: Any) -> list[Any]:
    return [(batch[2] if isinstance(batch, list) else batch).tolist() for batch in loader]


@full_only("workers for each", but=["RankDataset", "stream", "stream with workers-1"])
@pytest.mark.parametrize("skipped", [0, 1, 5, 6])
@pytest.mark.parametrize("kind", ["seeded", "stream", "stream with workers", "RankDataset", "dispatched"])
def test_skipping_counts_from_the_beginning_of_the_epoch(tmp_path: Path, kind: str, skipped: int) -> None:
    """As often as one likes; the loader itself stays whole, and goes on with the next epoch."""
    path = write_rows(tmp_path, 22)
    config = DataLoaderConfiguration(dispatch_batches=kind == "dispatched")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    prepared, expected = accelerator.prepare(make(kind, path)), make(kind, path)
    first = rows(expected)
    rest = accelerator.skip_first_batches(prepared, skipped)
    assert isinstance(rest, ps.DataLoader)
    assert rows(rest) == first[skipped:]
    if skipped >= len(first):
        return  # Accelerate counts no epoch in which there was nothing
    assert rows(rest) == rows(expected)[skipped:]
    if not kind.startswith("stream"):
        assert (len(rest), len(prepared)) == (max(0, 6 - skipped), 6)
    assert rows(prepared) == rows(expected)
    assert rows(accelerator.skip_first_batches(rest, 1)) == rows(expected)[skipped + 1 :]


@pytest.mark.parametrize("kind", ["seeded", "RankDataset", "stream"])
def test_skipping_takes_no_notice_of_a_position_that_was_restored(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path, 22)
    begun, prepared, expected = make(kind, path), make(kind, path), rows(make(kind, path))
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    begun, prepared = accelerator.prepare(begun), accelerator.prepare(prepared)
    iterator = iter(begun)
    assert [next(iterator), next(iterator), next(iterator)]
    prepared.load_state_dict(begun.state_dict())
    assert rows(accelerator.skip_first_batches(prepared, 2)) == expected[2:]


class CallsAndRows(CountingCollate):
    def __call__(self, samples: list[Any]) -> Any:
        return torch.tensor([super().__call__(samples)[0], *samples])


def test_skipping_keeps_a_restored_state_of_the_collate_function(tmp_path: Path) -> None:
    """Its batches are not made, so only the state knows what they did to it."""

    def prepared() -> tuple[Any, Any]:
        _reset()
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        loader = ps.DataLoader(list(range(12)), 2, shuffle="global", collate_fn=CallsAndRows())
        return accelerator, accelerator.prepare(loader)

    accelerator, loader = prepared()
    expected = []
    for step, batch in enumerate(loader):
        expected.append(batch.tolist())
        if step == 2:
            accelerator.save_state(str(tmp_path))
    accelerator, loader = prepared()
    accelerator.load_state(str(tmp_path))
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 3)] == expected[3:]


def test_what_is_skipped_is_not_made() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(noisy())
    assert len(rows(accelerator.skip_first_batches(prepared, 4))) == 2
    assert prepared.base_dataloader.stats()["batches"] == 2


def test_the_position_of_a_skipping_loader_is_that_of_the_whole_one() -> None:
    prepared = Accelerator(cpu=True).prepare(noisy())
    rest = Accelerator(cpu=True).skip_first_batches(prepared, 3)
    next(iter(rest))
    other = noisy()
    other.load_state_dict(prepared.state_dict())
    assert rows(other) == rows(noisy())[4:]


def test_loaders_of_torch_are_skipped_by_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(noisy())
    theirs = accelerator.prepare(torch.utils.data.DataLoader(Range(9), batch_size=2))
    rest = accelerator.skip_first_batches(theirs, 3)
    assert type(rest.base_dataloader) is torch.utils.data.DataLoader
    assert rows(rest) == [[6, 7], [8]]
