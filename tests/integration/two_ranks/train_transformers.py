"""The Trainer of Transformers: one with a ``get_train_dataloader`` of its own, and `PenstockTrainer`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import transformers
import transformers.trainer
from common import BATCH, FOLDER, KINDS, launch, make, told

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": BATCH,
    "num_train_epochs": 2,
    "use_cpu": True,
    "ddp_backend": "gloo",
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


class Model(torch.nn.Module):
    """One linear layer, which notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, rows: Any) -> dict[str, Any]:
        self.seen.append(rows.tolist())
        return {"loss": self.layer(rows[:, None].float()).square().mean()}


def named(rows: list[Any]) -> dict[str, Any]:
    return {"rows": torch.tensor([row.row if isinstance(row, tuple) else row for row in rows])}


def train(kind: str) -> Any:
    """By a subclass that makes its loader itself, and by ours."""
    from penstock.integrations.transformers import PenstockTrainer, TrainerLoaders

    class Own(TrainerLoaders, transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            self.made = self.accelerator.prepare(make(kind, collate_fn=named))
            return self.made

    arguments = transformers.TrainingArguments(str(FOLDER), **OPTIONS)
    own, found = Own(Model(), arguments), []
    own.train()
    found.append((own, own.made.base_dataloader))
    ours = PenstockTrainer(Model(), arguments, train_loader=make(kind, collate_fn=named))
    ours.train()
    found.append((ours, ours.callback_handler.train_dataloader.base_dataloader))
    return [told(loader, halves(trainer.model.seen)) for trainer, loader in found]


def halves(batches: list[list[int]]) -> list[list[list[int]]]:
    return [batches[: len(batches) // 2], batches[len(batches) // 2 :]]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    launch({kind: functools.partial(train, kind) for kind in KINDS})
