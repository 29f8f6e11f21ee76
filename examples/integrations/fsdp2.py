"""FSDP2 on a mesh: the data follow its data-parallel dimension, which is not always the rank.

    torchrun --nproc-per-node 2 fsdp2.py --checkpoint run                          two shards, two shares of the data
    torchrun --nproc-per-node 2 fsdp2.py --checkpoint run --tensor-parallel 2      after a kill: both ranks get the same

The model and the optimizer are saved by torch.distributed.checkpoint, each rank its shards. The loader's state is that
of the job, the same on all ranks, and is saved once.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# Imported before ranks join: later it would keep their group, whose threads can then abort a process that ends.
import torch.distributed.nn
from common import Log, Network, arguments, images
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import penstock as ps


def newest(folder: Path) -> Path | None:
    """The last checkpoint that is whole: its metadata are written at the end."""
    return max((path.parent for path in folder.glob("*/.metadata")), default=None)


def main() -> None:
    """Train as one of the ranks."""
    parser = arguments(__doc__)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS", help="that share each layer")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)
    model = Network()
    if args.tensor_parallel > 1:
        parallelize_module(model, mesh["tensor"], {"hidden": ColwiseParallel(), "classes": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    # The mesh's dimension "data" splits the data: ranks that share layers get the same samples.
    data = images(args.data)
    sampler = ps.DistributedSampler(data, shuffle="global", seed=0, mesh=mesh)
    loader = ps.DataLoader(data, args.batch_size // mesh["data"].size(), sampler=sampler)

    step = 0
    if args.checkpoint and (folder := newest(args.checkpoint)):
        weights, moments = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments, "loader": loader, "step": 0}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = saved["step"]

    log = Log(args, dist.get_rank())
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
            if args.checkpoint and step % args.checkpoint_every == 0:
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optimizer": moments, "loader": loader, "step": step}
                dcp.save(state, checkpoint_id=args.checkpoint / f"{step:08d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
