"""A training program in the shape of Accelerate's ``complete_cv_example.py``, and loaders for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import DataLoaderConfiguration
from integration_support import Noisy, accelerator
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import penstock as ps
from penstock.errors import ConfigError
from penstock.integrations.accelerate import Accelerator

SAMPLES, BATCH = 22, 4
STEPS = 6  # of an epoch on one rank
EPOCHS = 3


class Program(NamedTuple):
    """What a user of Accelerate writes, and how it passes over what a checkpoint has had.

    Attributes:
        loader: makes the training loader.
        stateful: ``use_stateful_dataloader``.
        passes: over the first steps of a resumed epoch with ``"skip_first_batches"``, or with ``"continue"``; or
            ``"not at all"``, since the loader stands at the batch.
        says_epoch: the program calls ``set_epoch``. Accelerate's example does not.
        checkpointing_steps: every so many steps a checkpoint, or ``"epoch"``.
    """

    loader: Any
    stateful: bool = False
    passes: str = "skip_first_batches"
    says_epoch: bool = False
    checkpointing_steps: int | str = 5


class Done(NamedTuple):
    """What a run has trained on: the loss of each step, and its batch."""

    losses: list[float]
    batches: list[Any]


def run_program(program: Program, folder: Path, resume: str | None = None, rank: int = 0, world: int = 1) -> Done:
    """Train, from the start or from a checkpoint in the folder (``step_N`` or ``epoch_N``)."""
    if world == 1:
        config = DataLoaderConfiguration(use_stateful_dataloader=program.stateful)
        accelerate = Accelerator(cpu=True, dataloader_config=config)
    else:
        accelerate = accelerator(rank, world, use_stateful_dataloader=program.stateful)
    torch.manual_seed(42)
    model, train_dataloader = torch.nn.Linear(2, 1), program.loader()
    eval_dataloader = (torchs, ours)[isinstance(train_dataloader, ps.DataLoader)]("in order")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03 / 25)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, epochs=EPOCHS, steps_per_epoch=STEPS)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerate.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step, starting_epoch, resume_step = 0, 0, None
    if resume is not None:
        accelerate.load_state(str(folder / resume))
        if "epoch" in resume:
            starting_epoch = int(resume.replace("epoch_", "")) + 1
            overall_step = starting_epoch * len(train_dataloader)
        else:
            overall_step = int(resume.replace("step_", ""))
            starting_epoch, resume_step = divmod(overall_step, len(train_dataloader))

    done = Done([], [])
    for epoch in range(starting_epoch, EPOCHS):
        model.train()
        active, passed = train_dataloader, 0
        if program.says_epoch:
            train_dataloader.set_epoch(epoch)
        if resume_step is not None and epoch == starting_epoch:
            if program.passes == "skip_first_batches":
                active = accelerate.skip_first_batches(train_dataloader, resume_step)
            elif program.passes == "continue":
                passed = resume_step
        for step, batch in enumerate(active):
            if step < passed:
                continue
            loss = torch.nn.functional.mse_loss(model(_features(batch)), torch.ones(len(_features(batch)), 1))
            done.losses.append(loss.item())
            done.batches.append(_features(batch).tolist())
            accelerate.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if isinstance(program.checkpointing_steps, int) and overall_step % program.checkpointing_steps == 0:
                accelerate.save_state(str(folder / f"step_{overall_step}"))
        model.eval()
        seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(_features(batch)).argmax(dim=-1)
            seen += len(accelerate.gather_for_metrics(predictions))
        assert seen == SAMPLES
        if program.checkpointing_steps == "epoch":
            accelerate.save_state(str(folder / f"epoch_{epoch}"))
    return done


def _features(batch: Any) -> torch.Tensor:
    return (batch[0] if isinstance(batch, list) else batch).float()


def plain() -> TensorDataset:
    """The same samples in each pass: (index, half of it)."""
    index = torch.arange(SAMPLES, dtype=torch.float64)
    return TensorDataset(torch.stack([index, index / 2], 1))


class OwnOrder(torch.utils.data.Sampler[int]):
    """An order by epoch, which is not ours."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def torchs(order: str) -> Any:
    """torch's loader in one of three orders."""
    if order == "by epoch":
        return TorchDataLoader(plain(), BATCH, sampler=ps.RandomSampler(range(SAMPLES), shuffle="global", seed=5))
    if order == "somebody's":
        return TorchDataLoader(plain(), BATCH, sampler=OwnOrder())
    return TorchDataLoader(plain(), BATCH, shuffle=order == "shuffled")


def ours(order: str, **how: Any) -> Any:
    """Ours in the same order."""
    if order == "by epoch":
        return ps.DataLoader(plain(), BATCH, shuffle="global", seed=5, **how)
    if order == "somebody's":
        return ps.DataLoader(plain(), BATCH, sampler=OwnOrder(), **how)
    return ps.DataLoader(plain(), BATCH, shuffle=order == "shuffled", **how)


def noisy(**how: Any) -> Any:
    """Samples with random draws, which are functions of seed, epoch and position."""
    return ps.DataLoader(Noisy(SAMPLES), BATCH, shuffle="global", seed=5, **how)


def on_ranks(rank: int, world: int, folder: Path, stateful: bool, passes: str, resume: str | None) -> Done:
    """The program on one of several ranks."""
    program = Program(noisy, stateful, passes, says_epoch=True, checkpointing_steps=2)
    return run_program(program, folder, resume, rank, world)


def refused(rank: int, world: int) -> str:
    """What is said where rank 0 reads for all and a position is asked for."""
    accelerate = accelerator(rank, world, dispatch_batches=True, use_stateful_dataloader=True)
    try:
        accelerate.prepare(noisy())
    except ConfigError as error:
        return str(error)
    return "nothing"
