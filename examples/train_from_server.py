"""Train on two ranks that get their samples from two metadata servers, while one server after the other is killed.

    python examples/train_from_server.py
    torchrun --nproc-per-node 2 train_from_server.py --from grpc://a:8815 grpc://b:8815

Without ``--from`` it does everything by itself: unpacks the images of examples/data, starts two servers with
``penstock serve`` and two ranks that have no list of images, only the addresses. In mid-epoch the first server is
killed (SIGKILL), started again, and then the second one is killed. At the end the samples that the ranks trained on
are counted: each of them exactly once an epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from train_ddp import join_ranks, learning_rate, normalise, small_network

ARCHIVE = Path(__file__).resolve().parent / "data" / "cifar10-small.tar.xz"
DEADLINE = 60.0  # seconds without a word from the ranks

# ------------------------------------------------------------------------------------------------------------- a rank


def train(args: argparse.Namespace) -> None:
    """One rank. It prints a JSON line for each step: its rows, and how long the ranks waited for it."""
    # Pages are small here, so that 5,000 images are enough to be in the middle of something when a server dies.
    samples = ps.RankServerDataset(
        args.servers, name="train", mini_epochs=args.mini_epochs, seed=args.seed, page_rows=64, cache_bytes=1
    )
    dataset = ps.ImageDataset(samples, size=32, row=True)
    loader = ps.DataLoader(dataset, args.batch_size // dist.get_world_size(), num_workers=args.workers)
    model = small_network()
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    steps, step, before = args.epochs * args.mini_epochs * len(loader), 0, time.perf_counter()
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        for mini_epoch in range(args.mini_epochs):
            samples.set_mini_epoch(mini_epoch)
            for images, labels, rows in loader:
                step += 1
                optimizer.param_groups[0]["lr"] = learning_rate(step, steps, 4e-3)
                loss = cross_entropy(parallel(normalise(images)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                took, before = time.perf_counter() - before, time.perf_counter()
                tell("step", step=step, steps=steps, epoch=epoch, rows=rows.tolist(), loss=loss.item(), took=took)


def tell(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, "rank": dist.get_rank(), **values}), flush=True)


# --------------------------------------------------------------------------------------------------- servers and ranks


class Server:
    """``penstock serve`` in a process of its own, always on the same port."""

    def __init__(self, number: int, meta: Path, root: Path, folder: Path) -> None:
        self.name, self.port = f"server {number}", "0"
        self.log = folder / f"server-{number}.log"
        self.command = ["serve", str(meta), "--root", str(root), "--log-level", "debug"]

    def start(self) -> None:
        command = [sys.executable, "-m", "penstock", *self.command, "--port", self.port]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def address(self) -> str:
        """Where it listens, once it does."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # "listening on grpc://127.0.0.1:43121"
        if not line:
            raise SystemExit(f"{self.name} does not start: {self.log.read_text()}")
        address = line.split()[-1]
        self.port = address.rpartition(":")[2]
        print(f"{self.name} serves {address}")
        return address

    def streams(self) -> int:
        """How often it was asked for rows, as its log says."""
        return self.log.read_text().count(" reads train")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


class Ranks:
    """Two processes that train, and what they tell, in the order in which it comes."""

    def __init__(self, arguments: list[str], folder: Path, count: int = 2) -> None:
        self.told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.processes = []
        self.logs = [folder / f"rank-{rank}.log" for rank in range(count)]
        command = [sys.executable, __file__, *arguments, "--rendezvous", str(folder / "rendezvous")]
        for rank in range(count):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            with self.logs[rank].open("wb") as log:
                process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
            self.processes.append(process)
            threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.told.put(json.loads(line))
        self.told.put({"event": "end", "code": process.wait()})

    def next(self) -> dict[str, Any]:
        """What one of them tells next. Ends the program if one has failed."""
        try:
            event = self.told.get(timeout=DEADLINE)
        except queue.Empty:
            event = {"event": "end", "code": "silence"}
        if event["event"] == "end" and event["code"] != 0:
            words = "\n".join(log.read_text()[-2000:] for log in self.logs)
            raise SystemExit(f"a rank ended with {event['code']}:\n{words}")
        return event

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


# ---------------------------------------------------------------------------------------------------------- all of it


def unpack(folder: Path, per_class: int) -> Path:
    """Unpack the images; returns a meta file with lines ``path label``, sorted by class."""
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    lines = []
    for label, images in enumerate(sorted(path for path in (folder / "train").iterdir() if path.is_dir())):
        lines += [f"{image.relative_to(folder)} {label}\n" for image in sorted(images.glob("*.jpg"))[:per_class]]
    meta = folder / "train.txt"
    meta.write_text("".join(lines))
    return meta


def run(args: argparse.Namespace, folder: Path) -> bool:
    """Train while servers are killed; whether every sample was trained on exactly once an epoch."""
    meta = unpack(folder, args.per_class)
    with ExitStack() as stack:
        servers = [Server(number, meta, folder, folder) for number in (1, 2)]
        addresses = []
        for server in servers:
            server.start()
            stack.callback(server.kill)
            addresses.append(server.address())
        options = ("epochs", "mini_epochs", "batch_size", "seed", "workers")
        rest = [text for name in options for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
        ranks = Ranks(["--from", *addresses, *rest], folder)
        stack.callback(ranks.kill)
        seen, longest = follow(ranks, servers)
        servers[0].stop()
    samples = len(ps.Manifest.open(meta))
    good = all(seen[epoch] == dict.fromkeys(range(samples), 1) for epoch in range(args.epochs))
    print(", ".join(f"{server.name} sent {server.streams()} streams" for server in servers))
    for epoch in range(args.epochs):
        print(f"epoch {epoch + 1}: {len(seen[epoch]):,} of {samples:,} samples, {sum(seen[epoch].values()):,} times")
    print(f"longest step, a killed server included: {longest:.1f} s")
    print("each sample exactly once an epoch" if good else "WRONG: samples were lost or repeated")
    return good


def follow(ranks: Ranks, servers: list[Server]) -> tuple[dict[int, Counter[int]], float]:
    """Kill one, start it again, kill the other, and count until the ranks are done: rows by epoch, the longest step."""
    seen: dict[int, Counter[int]] = {}
    longest, running = 0.0, len(ranks.processes)
    while running:
        event = ranks.next()
        if event["event"] == "end":
            running -= 1
            continue
        step, steps = event["step"], event["steps"]
        seen.setdefault(event["epoch"], Counter()).update(event["rows"])
        if step > 1:
            longest = max(longest, event["took"])
        if event["rank"] != 0:
            continue
        if step == steps * 3 // 10:
            servers[0].kill()
            print(f"step {step} of {steps}, loss {event['loss']:.2f}: {servers[0].name} killed")
            servers[0].start()
        elif step == steps * 7 // 10:
            servers[0].address()
            servers[1].kill()
            print(f"step {step} of {steps}, loss {event['loss']:.2f}: {servers[1].name} killed")
        elif step == steps:
            print(f"step {step} of {steps}, loss {event['loss']:.2f}: done")
    return seen, longest


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on two ranks from two metadata servers, some of which die.")
    add = parser.add_argument
    add("--from", dest="servers", nargs="+", metavar="ADDRESS", help="be a rank, and train from these servers")
    add("--epochs", type=int, default=3)
    add("--mini-epochs", type=int, default=2)
    add("--batch-size", type=int, default=100, help="samples per step, over all ranks")
    add("--per-class", type=int, default=500, help="images of each class")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=0, help="data loading workers per rank")
    add("--rendezvous", type=Path, help="where RANKs of WORLD_SIZE meet without torchrun")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.servers is None:
        with tempfile.TemporaryDirectory() as folder:
            raise SystemExit(0 if run(args, Path(folder)) else 1)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    join_ranks(args.rendezvous)
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
