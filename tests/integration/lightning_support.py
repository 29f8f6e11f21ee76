"""A model that notes what it is given, and what ranks run."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as lightning
import torch
from integration_support import Noisy
from lightning.pytorch.callbacks import BasePredictionWriter

import penstock as ps


class Model(lightning.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []
        self.checked: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen.append(batch.tolist())
        return self.layer(torch.ones(1, 1)).mean()

    def predict_step(self, batch: Any, index: int) -> Any:
        return batch[:, 0].long().tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Writer(BasePredictionWriter):
    """Notes each prediction with the indices that Lightning knows of."""

    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
        self.written.append((prediction, indices))


def trainer(**options: Any) -> lightning.Trainer:
    """On one CPU, and silent."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**{"accelerator": "cpu", "devices": 1, **quiet, **options})


def fit_on_ranks(rank: int, world: int, kind: str, *, path: str = "", distribute: bool = True) -> Any:
    """Of each of two epochs this rank's indices; the types of the loader and of its sampler."""
    warnings.simplefilter("ignore")
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test")
    model = Model()
    run = trainer(max_epochs=2, devices=world, strategy="ddp", use_distributed_sampler=distribute)
    run.fit(model, _loader(kind, path))
    half = len(model.seen) // 2
    indices = [
        [int(sample[0]) for batch in part for sample in batch] for part in (model.seen[:half], model.seen[half:])
    ]
    loader: Any = run.train_dataloader
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    return indices, type(loader).__name__, type(sampler).__name__


def _loader(kind: str, path: str) -> ps.DataLoader[Any]:
    data = Noisy(24)
    if kind == "share":
        return ps.DataLoader(ps.RankDataset(path, load=_row, seed=1), batch_size=4)
    if kind == "seed":
        return ps.DataLoader(data, 4, shuffle=True, seed=3)
    if kind == "ours is dealt":
        return ps.DataLoader(data, 4, sampler=ps.DistributedSampler(data, shuffle="global", seed=3))
    if kind == "torch's is dealt":
        return ps.DataLoader(data, 4, sampler=torch.utils.data.DistributedSampler(data, seed=3))
    return ps.DataLoader(data, 4, shuffle=kind == "torch's shuffle")


def _row(record: ps.Record) -> Any:
    return torch.tensor([record.row])
