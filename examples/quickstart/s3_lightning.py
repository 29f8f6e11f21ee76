"""Train on WebDataset shards in S3 with Lightning. Started again, the program resumes."""

import argparse
from pathlib import Path

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn, optim

import penstock as ps


class Classifier(lightning.LightningModule):
    def __init__(self, shards):
        super().__init__()
        self.shards = shards
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))

    def train_dataloader(self):
        shards = ps.ShardDataset(self.shards, seed=0)  # this rank's share
        images = ps.ImageDataset(shards, size=16)
        return ps.DataLoader(images, 48 // self.trainer.world_size, num_workers=2)

    def training_step(self, batch, number):
        pixels, labels = batch
        return nn.functional.cross_entropy(self.model(pixels / 255), labels)

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=0.1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", help="such as s3://bucket/train-{000..099}.tar")
    parser.add_argument("--max-steps", type=int, default=-1)
    args = parser.parse_args()
    last = Path("checkpoints/last.ckpt")
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 2, "logger": False}
    every_5 = {"every_n_train_steps": 5, "enable_version_counter": False}
    options["callbacks"] = ModelCheckpoint(last.parent, last.stem, **every_5)
    trainer = lightning.Trainer(
        max_steps=args.max_steps, enable_progress_bar=False, **options
    )
    trainer.fit(Classifier(args.shards), ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        batches = trainer.train_dataloader.stats()["batches"]
        print(f"step {trainer.global_step}, {batches} batches in this run")


if __name__ == "__main__":
    main()
