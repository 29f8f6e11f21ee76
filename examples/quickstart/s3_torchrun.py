"""Train on WebDataset shards in S3 under torchrun. Started again, the program resumes."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", help="such as s3://bucket/train-{000..099}.tar")
    parser.add_argument("--stop-after", type=int, help="stop after so many batches")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    shards = ps.ShardDataset(args.shards, seed=0)  # this rank's share
    images = ps.ImageDataset(shards, size=16)
    loader = ps.DataLoader(images, batch_size=48 // ranks, num_workers=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
    if Path("run.pt").exists():
        saved = torch.load("run.pt")
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])  # on any number of ranks
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)

    step = 0
    for epoch in range(loader.epoch, 2):
        loader.set_epoch(epoch)  # keeps the position in an epoch that was loaded
        samples = batches = 0
        for pixels, labels in loader:  # uint8 (N, 3, 16, 16); int64 (N,)
            optimizer.zero_grad()
            nn.functional.cross_entropy(parallel(pixels / 255), labels).backward()
            optimizer.step()
            samples, batches, step = samples + len(labels), batches + 1, step + 1
            if step == args.stop_after:
                break
        print(
            f"rank {rank}, epoch {epoch}: {batches} batches, {samples} samples", flush=True
        )
        if step == args.stop_after:
            if rank == 0:  # the state is that of the whole job
                state = {"model": model.state_dict(), "loader": loader.state_dict()}
                torch.save(state, "run.pt")
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
