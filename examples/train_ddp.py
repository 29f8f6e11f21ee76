"""Train a small network on any number of ranks, be killed at any moment, go on with any other number of ranks.

    python train_ddp.py --meta train.txt --test-meta test.txt --root images
    torchrun --nproc-per-node 2 train_ddp.py --meta train.txt --test-meta test.txt --root images --checkpoint run.pt

Kill it, then start it again with ``--resume`` and as many ranks as you like. A meta file has one line per image,
``path label``. The batch size is that of the whole job and each rank takes its share, so that one rank and two ranks
train on the same batches in the same order.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

# Imported before ranks join: later it would keep their group, whose threads can then abort a process that ends.
import torch.distributed.nn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

# ---------------------------------------------------------------------------------------------------------------- data


def train_loader(args: argparse.Namespace) -> Any:
    """This rank's batches: images uint8 (N, 3, 32, 32), labels int64 (N,), rows int64 (N,)."""
    # The row number tells which samples a step was made of; the log counts them.
    dataset = ps.ImageDataset(ps.Manifest.open(args.meta, root=args.root), size=32, row=True)
    batch_size = args.batch_size // dist.get_world_size()
    if args.shuffle == "torch":  # for comparison: torch's sampler and torch's loader; one rank, cannot be resumed
        order = torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(args.seed))
        return torch.utils.data.DataLoader(dataset, batch_size, sampler=order, num_workers=args.workers)
    sampler = ps.DistributedSampler(dataset, shuffle=args.shuffle, seed=args.seed)
    return ps.DataLoader(dataset, batch_size, sampler=sampler, num_workers=args.workers)


def test_loader(args: argparse.Namespace) -> ps.DataLoader:
    """Every test image on exactly one rank: ``uneven`` repeats none to give the ranks equally many."""
    dataset = ps.ImageDataset(ps.Manifest.open(args.test_meta, root=args.root), size=32)
    sampler = ps.DistributedSampler(dataset, shuffle=False, remainder="uneven")
    return ps.DataLoader(dataset, batch_size=250, sampler=sampler)


# --------------------------------------------------------------------------------------------------------------- model


def small_network(classes: int = 10) -> nn.Module:
    """Some 35,000 parameters for 32 x 32 images; about 55 % on CIFAR-10 after five epochs of 5,000 images.

    GroupNorm does not mix the samples of a batch: a batch gives the same gradient on one rank and split over two.
    """
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 4, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, classes)),
    )


def normalise(images: Tensor) -> Tensor:
    """uint8 pixels to floats around 0."""
    return images.to(torch.float32, memory_format=torch.channels_last).sub_(120).div_(64)


def learning_rate(step: int, steps: int, highest: float) -> float:
    """A short warm-up, then straight down to a tenth."""
    return highest * min(1.0, step / 20) * (1.0 - 0.9 * step / steps)


@torch.no_grad()
def evaluate(model: nn.Module, loader: ps.DataLoader) -> tuple[float, int]:
    """Accuracy on the test set, and how many images it was measured on, over all ranks."""
    totals = torch.zeros(2, dtype=torch.int64)
    for images, labels in loader:
        hits = model(normalise(images)).argmax(1) == labels
        totals += torch.tensor([int(hits.sum()), len(labels)])
    dist.all_reduce(totals)
    right, count = totals.tolist()
    return right / count, count


# ------------------------------------------------------------------------------------------------------------ training


def save(path: Path, **parts: Any) -> None:
    """Replace the checkpoint in one go: whoever is killed meanwhile leaves the old one whole."""
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        torch.save({name: part if isinstance(part, int) else part.state_dict() for name, part in parts.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def train(args: argparse.Namespace, log: Log) -> None:
    loader, tests = train_loader(args), test_loader(args)
    model = small_network()
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if args.resume and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # a few integers, from however many ranks
    first, steps_per_epoch = step, -(-len(loader.dataset) // args.batch_size)
    parallel = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    log.start(step, steps_per_epoch)
    for epoch in range(getattr(loader, "epoch", 0), args.epochs):
        if isinstance(loader, ps.DataLoader):
            loader.set_epoch(epoch)  # the epoch of a state just loaded keeps its position
        for images, labels, rows in log.timed(loader):
            step += 1
            optimizer.param_groups[0]["lr"] = learning_rate(step, args.epochs * steps_per_epoch, args.learning_rate)
            scores = parallel(normalise(images))
            loss = cross_entropy(scores, labels)
            # Logged before backward(), where ranks wait for each other's gradients: so no rank gets to a checkpoint
            # of this step before all of them have logged it. A sample counts as trained if its step is in the
            # checkpoint that the next job resumes from; later lines are of work that was lost, and is done again.
            log.step(epoch, step, loss.item(), (scores.argmax(1) == labels).float().mean().item(), rows.tolist())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.checkpoint and step % args.checkpoint_every == 0 and dist.get_rank() == 0:
                save(args.checkpoint, step=step, model=model, optimizer=optimizer, loader=loader)
            if step - first == args.stop_after:
                os.kill(os.getpid(), signal.SIGKILL)  # as a preempted machine goes: no handler, no farewell
        log.epoch(epoch, step, *evaluate(model, tests))


class Log:
    """What a rank reports: JSON lines in ``FILE.rankR``, and on rank 0 a progress bar and a line per epoch.

    A line is handed to the system at once, so that no kill can take it back.
    """

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.file: TextIO | None = None
        if args.metrics is not None:
            self.file = Path(f"{args.metrics}.rank{rank}").open("w", buffering=1)  # noqa: SIM115, close() does
        self.console = Console(quiet=args.quiet or rank > 0, highlight=False)
        text = TextColumn("{task.fields[numbers]}")
        columns = (TextColumn("{task.description}"), BarColumn(8), MofNCompleteColumn(), text)
        shown = self.console.is_terminal and not self.console.quiet
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not shown)
        self.bar = self.progress.add_task("starting", numbers="")
        self.args, self.numbers, self.steps_per_epoch = args, "", 1
        self.steps, self.seconds, self.waited = 0, 0.0, 0.0  # of this process

    def write(self, event: str, **values: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps({"event": event, **values}) + "\n")

    def start(self, step: int, steps_per_epoch: int) -> None:
        self.write("start", step=step, rank=dist.get_rank(), world=dist.get_world_size())
        self.steps_per_epoch = steps_per_epoch
        self.progress.update(self.bar, total=steps_per_epoch)
        self.progress.start()

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; measures how long the training takes, and how much of that it waits for a batch."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            self.waited += time.perf_counter() - start
            yield batch
            self.seconds += time.perf_counter() - start
            self.steps += 1

    def step(self, epoch: int, step: int, loss: float, accuracy: float, rows: list[int]) -> None:
        memory = private_memory() if step % 10 == 0 else None
        times = {"seconds": self.seconds, "waited": self.waited, "memory": memory}
        self.write("step", step=step, epoch=epoch, loss=loss, rows=rows, **times)
        self.numbers = f"loss {loss:.3f}"
        if self.steps:
            speed, waiting = self.steps * self.args.batch_size / self.seconds, self.waited / self.seconds
            self.numbers += f", {speed:,.0f} samples/s, waiting {waiting:.1%}"
        done = (step - 1) % self.steps_per_epoch + 1
        numbers = f"{self.numbers}, accuracy {accuracy:.0%}"
        self.progress.update(self.bar, description=self.name(epoch), completed=done, numbers=numbers)

    def epoch(self, epoch: int, step: int, accuracy: float, images: int) -> None:
        self.write("epoch", epoch=epoch, step=step, accuracy=accuracy, images=images)
        numbers = f"{self.numbers}, " if self.steps else ""  # resumed at the very end of an epoch: nothing measured
        self.console.print(f"{self.name(epoch)}: {numbers}test accuracy {accuracy:.1%}")

    def name(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self.args.epochs}"

    def close(self) -> None:
        self.progress.stop()
        if self.file is not None:
            self.file.close()


def private_memory() -> int | None:
    """Bytes that belong to this process alone and to no file; None where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes.get("Pss_Anon", sizes["Anonymous"])


# ---------------------------------------------------------------------------------------------------------------- main


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on images, on any number of ranks.")
    add = parser.add_argument
    add("--meta", type=Path, required=True, help="training images, one per line: path label")
    add("--test-meta", type=Path, required=True, help="test images, in the same form")
    add("--root", type=Path, required=True, help="the folder that the paths start from")
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=100, help="samples per step, over all ranks")
    add("--learning-rate", type=float, default=4e-3)
    add("--seed", type=int, default=0, help="of the order and of the first weights")
    add("--shuffle", choices=("global", "block", "none", "torch"), default="global")
    add("--workers", type=int, default=0, help="data loading workers per rank")
    add("--checkpoint", type=Path, help="where to save, and what to resume from")
    add("--checkpoint-every", type=int, default=10, metavar="STEPS")
    add("--resume", action="store_true", help="go on from the checkpoint, if there is one yet")
    add("--metrics", type=Path, metavar="FILE", help="log every step of rank R to FILE.rankR")
    add("--stop-after", type=int, default=0, metavar="STEPS", help="be killed (SIGKILL) after so many steps")
    add("--rendezvous", type=Path, metavar="FILE", help="where RANKs of WORLD_SIZE meet without torchrun")
    add("--quiet", action="store_true", help="print nothing")
    args = parser.parse_args(arguments)
    if args.checkpoint is None and args.resume:
        parser.error("--resume needs --checkpoint FILE")
    if args.shuffle == "torch" and (args.checkpoint or int(os.environ.get("WORLD_SIZE", 1)) > 1):
        parser.error("--shuffle torch is for one rank, and has no state for a checkpoint")
    if args.batch_size % int(os.environ.get("WORLD_SIZE", 1)):
        parser.error(f"{os.environ['WORLD_SIZE']} ranks cannot share batches of {args.batch_size} equally")
    return args


def join_ranks(rendezvous: Path | None) -> int:
    """Meet the other ranks: by torchrun, by RANK, WORLD_SIZE and a file, or alone."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rendezvous is not None:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous.resolve()}", rank=rank, world_size=world)
    elif world > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return rank


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # ranks share the cores of a machine
    torch.manual_seed(args.seed)
    log = Log(args, join_ranks(args.rendezvous))
    try:
        train(args, log)
    finally:
        log.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
