"""DistributedDataParallel: killed on any number of ranks, goes on with any other number, at the next sample.

    torchrun --nproc-per-node 2 ddp.py --checkpoint run.pt
    torchrun --nproc-per-node 3 ddp.py --checkpoint run.pt         after a kill: the rest of the epoch, on three

``examples/train_ddp.py`` is the longer one, with a test set and measurements.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

# Imported before ranks join: later it would keep their group, whose threads can then abort a process that ends.
import torch.distributed.nn
from common import Log, Network, arguments, images
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import penstock as ps


def main() -> None:
    """Train as one of the ranks."""
    args = arguments(__doc__).parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    # The sampler deals each batch of the job to the ranks. Its state counts samples of the whole job.
    data = images(args.data)
    sampler = ps.DistributedSampler(data, shuffle="global", seed=0)
    loader = ps.DataLoader(data, args.batch_size // world, sampler=sampler)

    torch.manual_seed(0)
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    step = 0
    if args.checkpoint and args.checkpoint.exists():  # every rank reads the same file, whichever wrote it
        saved = torch.load(args.checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]

    log = Log(args, rank)
    log.start(step)
    for epoch in range(loader.epoch, args.epochs):
        loader.set_epoch(epoch)
        for pixels, labels, rows in loader:
            step += 1
            loss = cross_entropy(model(pixels), labels)
            log.step(step, loss.item(), rows, loader)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.checkpoint and step % args.checkpoint_every == 0 and rank == 0:
                parts = {"model": model.module, "optimizer": optimizer, "loader": loader}
                partial = args.checkpoint.with_suffix(".partial")
                torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, partial)
                os.replace(partial, args.checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
