"""Lightning's Trainer asks hooks for loaders, and gives them a sampler for their rank; Fabric does so when asked to."""

from __future__ import annotations

import functools
from typing import Any

import lightning
import pytest
import torch
from common import BATCH, KINDS, Rows, launch, make, told
from lightning.fabric import Fabric

import penstock as ps

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "strategy": "ddp",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Model(lightning.LightningModule):
    """One linear layer, which notes what it is given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[list[int]]] = []
        self.checked: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen[-1].append(batch.tolist())
        return self.layer(torch.ones(1, 1)).mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.checked += batch.tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Hooked(Model):
    """Makes its own loader."""

    def train_dataloader(self) -> Any:
        return make(self.kind)


class Data(lightning.LightningDataModule):
    """Makes the loader for any model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        return make(self.kind)


class InOrder(Data):
    """Has data for validation, in an order with a name."""

    def val_dataloader(self) -> Any:
        return ps.DataLoader(Rows(), BATCH, shuffle="none")


class Failing(Data):
    """Has a mistake in its hook."""

    def train_dataloader(self) -> Any:
        raise KeyError("a mistake")


def fit(kind: str) -> Any:
    """By a data module, in whose hook our loader is imported; then by a module's hook."""
    found = []
    for model, data in ((Model(kind), Data(kind)), (Hooked(kind), None)):
        trainer = lightning.Trainer(**OPTIONS)
        trainer.fit(model, datamodule=data)
        found.append(told(trainer.train_dataloader, model.seen))
    return found


def fit_again() -> Any:
    """After a hook that raised, which leaves Lightning's recorder where it was; with a loader of two classes."""
    model, data = Model("dpex"), InOrder("dpex")
    with pytest.raises(KeyError):
        lightning.Trainer(**OPTIONS).fit(model, datamodule=Failing("dpex"))
    trainer = lightning.Trainer(**OPTIONS)
    trainer.fit(model, datamodule=data)
    loader: Any = trainer.train_dataloader
    return {
        "epochs": model.seen,
        "class": type(loader).__name__,
        "batch_size": loader.batch_size,
        "checked": model.checked,
    }


def set_up(kind: str) -> Any:
    """By Fabric."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    wrapped: Any = fabric.setup_dataloaders(make(kind))
    loader = wrapped._dataloader
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in wrapped])
    return [told(loader, epochs)]


if __name__ == "__main__":
    fits = [{kind: functools.partial(fit, kind)} for kind in KINDS]
    again = {"again": fit_again}
    launch(*fits, again, {"fabric-global": lambda: set_up("global"), "fabric-share": lambda: set_up("share")})
