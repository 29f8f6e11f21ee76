"""Ray Train: a worker that dies is started again, and all go on from the last checkpoint that was reported.

    python ray_train.py --checkpoint run                               a cluster on this machine, two workers
    python ray_train.py --checkpoint run --workers 3                   after a failure: the rest, on three

Ray Train starts the workers and their process group; the data are each worker's own, made where it runs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from common import Log, Network, arguments, images
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn.functional import cross_entropy

import penstock as ps


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    args: argparse.Namespace = config["args"]
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()

    # prepare_data_loader of Ray Train would build torch's loader: ours has its sampler already, and needs none.
    data = images(args.data)
    sampler = ps.DistributedSampler(data, shuffle="global", seed=0)
    loader = ps.DataLoader(data, args.batch_size // world, sampler=sampler)
    torch.manual_seed(0)
    network = Network()
    model = prepare_model(network)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    step = 0
    if checkpoint := ray.train.get_checkpoint():  # after a failure, or of an earlier run of this name
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "all.pt", weights_only=True)
        network.load_state_dict(saved["model"])
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
            if step % args.checkpoint_every == 0:
                with tempfile.TemporaryDirectory() as folder:
                    parts = {"model": network, "optimizer": optimizer, "loader": loader}
                    if rank == 0:
                        state = {"step": step} | {name: part.state_dict() for name, part in parts.items()}
                        torch.save(state, Path(folder) / "all.pt")
                    mine = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                    ray.train.report({"loss": loss.item()}, checkpoint=mine)  # every worker reports
                if args.stop_after:  # what dies within two seconds of a report takes it along: wait until Ray has it
                    ray.train.get_all_reported_checkpoints()


def main() -> None:
    """Start the workers and wait for them."""
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=2)
    add("--address", default="local", help="of the cluster (default: one on this machine)")
    add("--max-failures", type=int, default=1, help="so often workers are started again (default: 1)")
    args = parser.parse_args()
    args.data = args.data.resolve()  # workers have folders of their own
    run = (args.checkpoint or Path("run")).resolve()
    images(args.data)  # unpacked and indexed before the workers need them
    ray.init(args.address)
    trainer = TorchTrainer(
        train,
        train_loop_config={"args": args},
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(
            name=run.name,
            storage_path=str(run.parent),
            failure_config=ray.train.FailureConfig(max_failures=args.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
