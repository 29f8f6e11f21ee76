"""One small network on real CIFAR-10 images, with and without a Ray cluster: the loss is the same at every step.

    python examples/ray_train_cifar.py                   a cluster on this machine, for as long as it runs
    python examples/ray_train_cifar.py --address 10.0.0.1:6379 --epochs 5 --workers 8

Three ways to train, each with and without the cluster: a single process, DataParallel (which without GPUs only calls
the network), and DDP with two gloo ranks. Every step's loss is compared to the last bit; a table tells accuracy, loss
and speed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel

import penstock as ps

ARCHIVE = Path(__file__).parent / "data" / "cifar10-small.tar.xz"
WAYS = ("single", "DataParallel", "DDP, 2 ranks")


class Outcome(NamedTuple):
    """What a run came to: the loss of every step, test accuracy, images per second after the first batch."""

    losses: list[float]
    accuracy: float
    speed: float


def unpack(folder: Path, images: int | None) -> None:
    """Images, and a manifest of each split, of so many of them."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for split in ("train", "test"):
        paths = sorted((folder / split).glob("*/*.jpg"))
        paths = paths[:: max(1, len(paths) // images)] if images else paths
        labels = {name: label for label, name in enumerate(sorted({path.parent.name for path in paths}))}
        lines = (f"{path.relative_to(folder)} {labels[path.parent.name]}\n" for path in paths)
        (folder / f"{split}.txt").write_text("".join(lines))


def network() -> nn.Module:
    """Some 35,000 parameters, the same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 4, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 10)),
    )


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 pixels to floats around 0."""
    return images.to(torch.float32).sub_(120).div_(64)


def loaders(args: argparse.Namespace, ranks: int, address: str | None) -> tuple[ps.DataLoader[Any], ps.DataLoader[Any]]:
    """Training and test batches; made in the cluster if there is an address."""
    how: dict[str, Any] = {}
    if address is not None:
        options = ps.RayOptions(address, num_cpus=args.num_cpus)
        how = {"executor": "ray", "num_workers": args.workers, "ray_options": options}
    train = ps.ImageDataset(ps.Manifest.open(args.folder / "train.txt", root=args.folder), size=32, flip=True)
    sampler = ps.DistributedSampler(train, shuffle="global", seed=0)
    test = ps.ImageDataset(ps.Manifest.open(args.folder / "test.txt", root=args.folder), size=32)
    return ps.DataLoader(train, args.batch_size // ranks, sampler=sampler, **how), ps.DataLoader(test, 250, **how)


def train(args: argparse.Namespace, way: str, address: str | None) -> Outcome:
    """Train one network; under DDP, as one of its ranks."""
    torch.set_num_threads(1)
    model = network()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    parallel = {"single": lambda: model, "DataParallel": lambda: DataParallel(model)}.get(
        way, lambda: DistributedDataParallel(model)
    )()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    losses, seconds, images_seen = [], 0.0, 0
    train_loader, test_loader = loaders(args, ranks, address)
    with train_loader, test_loader:
        for epoch in range(args.epochs):
            train_loader.set_epoch(epoch)
            begin = 0.0
            for images, labels in train_loader:
                begin = begin or time.perf_counter()  # the first batch is waited for once
                loss = cross_entropy(parallel(normalise(images)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                images_seen += len(labels)
            seconds += time.perf_counter() - begin
        model.eval()
        with torch.no_grad():
            hits = sum(int((model(normalise(images)).argmax(1) == labels).sum()) for images, labels in test_loader)
    return Outcome(losses, hits / len(test_loader.dataset), ranks * images_seen / seconds)  # type: ignore[arg-type]


def rank(number: int, args: argparse.Namespace, way: str, address: str | None, store: str, results: Any) -> None:
    """One of two ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    results.put((number, train(args, way, address)))
    dist.barrier()
    dist.destroy_process_group()


def run(args: argparse.Namespace, way: str, address: str | None) -> Outcome:
    """One of the ways to train. The losses of DDP are those of both ranks."""
    if not way.startswith("DDP"):
        return train(args, way, address)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args, way, address, f"{folder}/store", results)
        ranks = [context.Process(target=rank, args=(number, *arguments)) for number in range(2)]
        for process in ranks:
            process.start()
        outcomes = dict(results.get(timeout=600) for _ in ranks)
        for process in ranks:
            process.join()
    return outcomes[0]._replace(losses=outcomes[0].losses + outcomes[1].losses)


def attach(address: str) -> str:
    """The address of the cluster for all processes, one on this machine if it is "local"."""
    import ray

    ray.init(address=address, configure_logging=False, log_to_driver=False)
    return str(ray.get_runtime_context().gcs_address)


def main() -> None:
    """Train all ways and compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--address", default="local", help="of the cluster (default: one on this machine)")
    parser.add_argument("--workers", type=int, default=1, help="for each loader of each rank (default: %(default)s)")
    parser.add_argument("--num-cpus", type=float, default=0.5, help="of each worker (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, help="train on so many of them (default: all)")
    parser.add_argument("--batch-size", type=int, default=100, help="of all ranks together")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="to train (default: all)")
    args = parser.parse_args()
    table = Table("", "last loss", "accuracy", "images/s", "the same at every step")
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        unpack(args.folder, args.images)
        address = attach(args.address)
        for way in args.ways:
            without, there = run(args, way, None), run(args, way, address)
            same = "yes" if without.losses == there.losses else "NO"
            for name, outcome in (("", without), (", Ray", there)):
                numbers = f"{outcome.losses[-1]:.6f}", f"{outcome.accuracy:.1%}", f"{outcome.speed:,.0f}"
                table.add_row(way + name, *numbers, same)
            assert same == "yes", way
    Console().print(table)


if __name__ == "__main__":
    main()
