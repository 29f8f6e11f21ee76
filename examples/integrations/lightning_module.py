"""Lightning: the Trainer saves the loader's state in its checkpoint, and puts it back.

    python lightning_module.py --checkpoint run            again after a kill: it goes on at the next batch
    torchrun --nproc-per-node 2 lightning_module.py --checkpoint run --devices 2

Nothing of Penstock is called for that: Lightning asks loaders for their ``state_dict``.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from common import Log, Network, arguments, images
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

import penstock as ps


class Classifier(lightning.LightningModule):
    """A network and its training step."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.network = Network()

    def train_dataloader(self) -> ps.DataLoader[Any]:
        """This rank's batches. It is called when the process group is there."""
        data = images(self.args.data)
        sampler = ps.DistributedSampler(data, shuffle="global", seed=0)
        return ps.DataLoader(data, self.args.batch_size // self.trainer.world_size, sampler=sampler)

    def on_train_start(self) -> None:
        self.log_file = Log(self.args, self.global_rank)
        self.log_file.start(self.global_step)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        pixels, labels, rows = batch
        loss = cross_entropy(self.network(pixels), labels)
        self.log_file.step(self.global_step + 1, loss.item(), rows, self.trainer.train_dataloader)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 2e-3)


def main() -> None:
    """Train; from the checkpoint, if there is one."""
    parser = arguments(__doc__)
    parser.add_argument("--devices", type=int, default=1, help="ranks on this machine (default: 1)")
    args = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    save, last = [], None
    if args.checkpoint:
        every = ModelCheckpoint(
            args.checkpoint, "last", every_n_train_steps=args.checkpoint_every, enable_version_counter=False
        )
        save, last = [every], args.checkpoint / "last.ckpt"
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        callbacks=save,
        enable_checkpointing=bool(save),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(args), ckpt_path=last if last and last.exists() else None)


if __name__ == "__main__":
    main()
