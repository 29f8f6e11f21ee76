"""Data on a device mesh: peers in "tp" get the same batches, and a checkpoint continues on a mesh of another shape.

torchrun --nproc-per-node 4 resume_on_mesh.py run --mesh 2 2 --die-at 7     killed two steps after a checkpoint
torchrun --nproc-per-node 4 resume_on_mesh.py run --mesh 4 1                continues on four data ranks
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--mesh", type=int, nargs=2, required=True, metavar=("DP", "TP"))
parser.add_argument("--die-at", type=int, metavar="STEP")
args = parser.parse_args()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", tuple(args.mesh), mesh_dim_names=("dp", "tp"))
loader = ps.DataLoader(range(96), 8 // args.mesh[0], shuffle=True, seed=0, mesh=mesh)
checkpoint = args.folder / "checkpoint"
resumes = checkpoint.exists()
dist.barrier()  # no rank writes the checkpoint before all have looked for one
if resumes:
    dcp.load({"loader": loader}, checkpoint_id=checkpoint)
with (args.folder / f"{args.mesh[0]}x{args.mesh[1]}.{dist.get_rank()}").open("w") as log:
    for step, batch in enumerate(loader, 1):
        print(json.dumps(batch.tolist()), file=log, flush=True)
        if step == 5:
            dcp.save({"loader": loader}, checkpoint_id=checkpoint)
        if step == args.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
