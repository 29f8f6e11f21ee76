"""Use our loaders with Accelerate, Lightning and Transformers, and end with an error if those are not what they were.

Its argument is a folder for checkpoints.
"""

from __future__ import annotations

import sys
from typing import Any

import accelerate
import lightning.fabric
import lightning.pytorch
import torch
import transformers.trainer

LIBRARIES = ("accelerate", "lightning", "torch.utils.data", "transformers")


def contents() -> dict[tuple[str, ...], Any]:
    """What is in their modules, and in the classes that are in those."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(LIBRARIES):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith(LIBRARIES):
                found |= {(value.__module__, value.__qualname__, own): one for own, one in vars(value).items()}
    return found


def make(**how: Any) -> Any:
    import penstock as ps

    return ps.DataLoader(torch.arange(24.0).reshape(24, 1), 4, shuffle="global", seed=3, **how)


def use_accelerate() -> None:
    """Prepare, and be refused."""
    from penstock.errors import ConfigError

    loader = make()
    try:
        accelerate.Accelerator(cpu=True).prepare(loader)
    except ConfigError:
        pass
    else:
        raise AssertionError("torch's loader was made")

    from penstock.integrations.accelerate import Accelerator

    prepared = Accelerator(cpu=True).prepare(loader)
    assert len(list(Accelerator(cpu=True).skip_first_batches(prepared, 2))) == 4
    prepared.load_state_dict(prepared.state_dict())


class Model(lightning.pytorch.LightningModule):
    """One layer, for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def train_dataloader(self) -> Any:
        return make()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def use_lightning() -> None:
    """By a hook, and by Fabric."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.pytorch.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet).fit(Model())
    lightning.fabric.Fabric(accelerator="cpu", devices=1).setup_dataloaders(make())


class Named(torch.nn.Module):
    """One layer, for Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, rows: Any) -> dict[str, Any]:
        return {"loss": self.layer(rows).square().mean()}


def use_transformers(folder: str, resume: str | None = None) -> None:
    """From the start, or from a checkpoint."""
    from penstock.integrations.transformers import PenstockTrainer

    loader = make(collate_fn=lambda rows: {"rows": torch.stack(rows)})
    sizes: dict[str, Any] = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "save_steps": 2}
    arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[], disable_tqdm=True, **sizes)
    PenstockTrainer(Named(), arguments, train_loader=loader).train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    before = contents()
    use_accelerate()
    use_lightning()
    use_transformers(sys.argv[1])
    use_transformers(sys.argv[1], sys.argv[1] + "/checkpoint-2")
    after = contents()
    changed = [key for key, value in before.items() if after.get(key) is not value]
    assert not changed, changed
