"""Hugging Face Trainer: its checkpoints say where the loader is.

python hf_trainer.py --checkpoint run                  again after a kill: it goes on at the next batch
torchrun --nproc-per-node 2 hf_trainer.py --checkpoint run             on any number of ranks
"""

from __future__ import annotations

import os
from typing import Any

import torch
from common import Log, Network, arguments, images
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import penstock as ps
from penstock.integrations.transformers import PenstockTrainer


class Classifier(torch.nn.Module):
    """What the Trainer wants of a model: a loss for named tensors."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.network = Network()
        self.log = log

    def forward(self, images: Any, labels: Any, rows: Any) -> dict[str, Any]:
        scores = self.network(images)
        return {"loss": cross_entropy(scores, labels), "scores": scores}


class Trainer(PenstockTrainer):
    """Tells the log what it trains on."""

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        loss = super().training_step(model, inputs, *rest)
        loader = self.callback_handler.train_dataloader.base_dataloader
        self.model.log.step(self.state.global_step + 1, loss.item(), inputs["rows"], loader)
        return loss


def named(samples: list[Any]) -> dict[str, Any]:
    """A batch with names, as the Trainer passes it to the model."""
    pixels, labels, rows = torch.utils.data.default_collate(samples)
    return {"images": pixels, "labels": labels, "rows": rows}


def main() -> None:
    """Train as one of the ranks; from the checkpoint, if there is one."""
    args = arguments(__doc__).parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    options = TrainingArguments(
        output_dir=str(args.checkpoint or "run"),
        per_device_train_batch_size=args.batch_size // world,
        num_train_epochs=args.epochs,
        save_strategy="steps" if args.checkpoint else "no",
        save_steps=args.checkpoint_every,
        save_total_limit=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data = images(args.data)
    loader = ps.DataLoader(data, args.batch_size // world, shuffle="global", seed=0, collate_fn=named)
    log = Log(args, rank)
    trainer = Trainer(Classifier(log), options, train_loader=loader)
    last = get_last_checkpoint(options.output_dir) if args.checkpoint and args.checkpoint.exists() else None
    log.start(int(last.rsplit("-", 1)[1]) if last else 0)
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
