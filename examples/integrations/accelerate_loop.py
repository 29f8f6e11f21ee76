"""Hugging Face Accelerate: `prepare` keeps Penstock's loader, and `save_state` saves its position if that is asked for.

python accelerate_loop.py --checkpoint run             again after a kill: it goes on at the next batch
torchrun --nproc-per-node 2 accelerate_loop.py --checkpoint run        or with accelerate launch, on other numbers
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import DataLoaderConfiguration
from common import Log, Network, arguments, images
from torch.nn.functional import cross_entropy

import penstock as ps
from penstock.integrations.accelerate import Accelerator


class Steps:
    """A number that is part of a checkpoint."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """All that was prepared and registered, under the step's name when it is whole."""
    accelerator.save_state(str(folder / "partial"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "partial").rename(folder / f"step-{step:08d}")
    accelerator.wait_for_everyone()


def main() -> None:
    """Train as one of the ranks."""
    args = arguments(__doc__).parse_args()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    # The same loader on every rank; Accelerate deals whole batches, so its batch size is that of one rank.
    loader = ps.DataLoader(images(args.data), args.batch_size // accelerator.num_processes, shuffle="global", seed=0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    if args.checkpoint and (saved := sorted(args.checkpoint.glob("step-*"))):
        accelerator.load_state(str(saved[-1]))  # the loader's position, too

    log = Log(args, accelerator.process_index)
    log.start(steps.done)
    for _ in range(loader.epoch, args.epochs):  # the epoch moves on by itself
        for pixels, labels, rows in loader:
            loss = cross_entropy(model(pixels), labels)
            log.step(steps.done + 1, loss.item(), rows, loader.base_dataloader)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            steps.done += 1
            if args.checkpoint and steps.done % args.checkpoint_every == 0:
                save(accelerator, args.checkpoint, steps.done)
    accelerator.end_training()


if __name__ == "__main__":
    main()
