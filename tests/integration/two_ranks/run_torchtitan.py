"""A loop in torchtitan's form: loaders are `Stateful`, know their data-parallel rank, and go into a DCP checkpoint.

torchrun --nproc-per-node 2 run_torchtitan.py job FOLDER --steps 5     saves after each step, stops after the fifth
torchrun --nproc-per-node 3 run_torchtitan.py job FOLDER               goes on, to the end
"""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps

ROWS, GLOBAL_BATCH, SEED = 72, 12, 3


class RankLoader(ps.DataLoader[Any]):
    """A state for each rank, pickled under its name, as torchtitan's ParallelAwareDataloader writes it."""

    def __init__(self, dataset: Any, dp_rank: int, dp_world_size: int, **options: Any) -> None:
        self.dp_world_size = dp_world_size
        self._rank_id = f"dp_rank_{dp_rank}"
        super().__init__(dataset, **options)

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: pickle.dumps(super().state_dict()), "world_size": self.dp_world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["world_size"] == self.dp_world_size
        super().load_state_dict(pickle.loads(state[self._rank_id]))


class Step:
    """The count of steps, as torchtitan's train state."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["step"]


def batches(loader: Any, epochs: int) -> Iterator[Any]:
    """Endless in torchtitan, which counts steps; here an epoch and another one."""
    for epoch in range(loader.epoch, epochs):
        loader.set_epoch(epoch)
        yield from loader


def main() -> None:
    """Write each step's rows, of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=["job", "rank"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    rank, world = mesh["dp"].get_local_rank(), mesh["dp"].size()
    data = ps.RankDataset(str(options.folder / "rows.txt"), seed=SEED, process_group=mesh["dp"].get_group())
    how: dict[str, Any] = {"batch_size": GLOBAL_BATCH // world, "num_workers": 2}
    loader: Any = RankLoader(data, rank, world, **how) if options.form == "rank" else ps.DataLoader(data, **how)
    assert isinstance(loader, Stateful)
    step = Step()
    states: dict[str, Any] = {"dataloader": loader, "train_state": step}
    checkpoint = options.folder / "checkpoint"
    if checkpoint.exists():
        dcp.load(states, checkpoint_id=checkpoint)
    with (options.folder / f"rows.{world}.{rank}").open("a") as out:
        for _, labels, _ in batches(loader, epochs=2):
            total = torch.tensor([len(labels)])
            dist.all_reduce(total)
            assert total.item() == GLOBAL_BATCH
            step.number += 1
            out.write(json.dumps([step.number, labels.tolist()]) + "\n")
            if options.steps:
                dcp.save(states, checkpoint_id=checkpoint)
            if step.number == options.steps:
                break
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
