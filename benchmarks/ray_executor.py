"""What does a Ray cluster behind the loader cost, and how does it scale? Beside torch's DataLoader and Ray Data.

    python benchmarks/ray_executor.py                 all parts, on clusters of their own on this machine
    python benchmarks/ray_executor.py cheap large     some of them

Parts: cheap (samples that take no time, 2 workers), large (batches of 9.6 MB), sleep (samples that wait for 20 ms, up
to 32 at a time), driver (what a batch costs the program itself). Ray Data is left out where pandas, which it needs, is
not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

import penstock as ps
from _common import parse, remark, smaps_rollup, spread, table
from _ray_cluster import cluster, ours
from _ray_data import Cheap, Large, Sleepy


def timed(loader: Any) -> tuple[float, float, int]:
    """Seconds to the first batch and for the others, and how many these are."""
    begin = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    first = time.perf_counter()
    count = sum(1 for _ in iterator)
    return first - begin, time.perf_counter() - first, count


def workers_memory() -> int:
    """Bytes of anonymous memory of the workers of this program's cluster."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read().startswith(b"ray::Worker"):
                total += smaps_rollup(int(pid))["Pss_Anon"]
    return total


def bare_memory(data: Any, size: int) -> int:
    """The same of two actors of Ray's alone that make some batches with torch: what no loader can save."""
    import ray

    class Actor:
        def make(self) -> None:
            from torch.utils.data import default_collate

            torch.set_num_threads(1)
            for _ in range(20):
                default_collate([data[k] for k in range(size)])

    actors = [ray.remote(Actor).remote() for _ in range(2)]
    ray.get([actor.make.remote() for actor in actors])
    memory = workers_memory()
    for actor in actors:
        ray.kill(actor)
    return memory


def cheap(repeat: int) -> None:
    """Cheap samples."""
    import ray

    data, size, rows = Cheap(20_000), 100, []
    with cluster():

        def ray_data() -> Any:
            pixels = data.pixels

            def make(batch: dict[str, Any]) -> dict[str, Any]:
                images = pixels[batch["id"] % 100].astype(np.float32) / 255
                return {"images": images[:, None], "labels": batch["id"] % 10}

            found = ray.data.range(data.n).map_batches(make, batch_size=size, concurrency=2)
            return found.iter_torch_batches(batch_size=size)

        peers: dict[str, Callable[[], Any]] = {
            "torch, 2 workers": lambda: TorchDataLoader(data, size, num_workers=2),
            "penstock process, 2": lambda: ps.DataLoader(data, size, num_workers=2),
            "penstock ray, 2": lambda: ours(data, size, 2),
        }
        if importlib.util.find_spec("pandas"):
            peers["Ray Data"] = ray_data
        memory, bare = 0, bare_memory(data, size)
        firsts: dict[str, list[float]] = {name: [] for name in peers}
        rates: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(repeat):
            for name, make in peers.items():
                loader = make()
                first, rest, count = timed(loader)
                firsts[name].append(first)
                rates[name].append(count * size / rest)
                if name == "penstock ray, 2":
                    memory = max(memory, workers_memory())
                    loader.close()
    for name in peers:
        low, middle, high = spread(rates[name], 4)
        rows.append((name, f"{min(firsts[name]):.2f}", low, middle, high))
    table(
        "cheap samples, batches of 100", ("", "first batch, s", "samples/s: min", "median", "max"), rows, peer="torch"
    )
    remark(
        f"anonymous memory of the workers: {memory / 1e6:.0f} MB; "
        f"of two Ray actors that batch with torch alone: {bare / 1e6:.0f} MB"
    )


def large(repeat: int) -> None:
    """Batches of 9.6 MB."""
    rows = []
    with cluster():
        data = Large(64 * 60)
        loaders = {
            "torch, 2 workers": TorchDataLoader(data, 64, num_workers=2),
            "penstock process, 2": ps.DataLoader(data, 64, num_workers=2),
            "penstock ray, 2": ours(data, 64, 2),
        }
        found: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(repeat):
            for name, loader in loaders.items():
                _, rest, count = timed(loader)
                found[name].append(count * 9.6e6 / rest / 1e9)
        loaders["penstock ray, 2"].close()
    for name, values in found.items():
        rows.append((name, *spread(values)))
    table("9.6 MB batches", ("", "GB/s: min", "median", "max"), rows, peer="torch")


def sleep(repeat: int) -> None:
    """Samples that take 20 ms."""
    rows = []
    single = 1 / 0.02
    for workers, threads in ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8)):
        data = Sleepy(8 * 10 * workers * threads, 0.02)
        with cluster(nodes=2, cpus=2), ours(data, 8, workers, threads_per_worker=threads) as loader:
            list(loader)  # all workers have started
            rates = []
            for _ in range(repeat):
                _, rest, count = timed(loader)
                rates.append(count * 8 / rest)
        ideal = single * workers * threads
        low, middle, high = spread(rates, 4)
        rows.append((workers, threads, workers * threads, low, middle, high, f"{np.median(rates) / ideal:.0%}"))
    columns = ("workers", "threads", "at a time", "samples/s: min", "median", "max", "of N x single")
    table("samples that wait for 20 ms, batches of 8", columns, rows)


def driver(repeat: int) -> None:
    """What a batch costs the consumer's own thread, by its processor time."""
    rows = []
    with cluster():
        for name, data, size in (("4 integers", Sleepy(4 * 1500, 0.0), 4), ("9.6 MB", Large(64 * 60), 64)):
            loader = ours(data, size, 2)
            list(loader)
            costs = []
            for _ in range(repeat):
                begin = time.thread_time()
                count = sum(1 for _ in loader)
                costs.append((time.thread_time() - begin) / count * 1e3)
            rows.append((name, *spread(costs)))
            loader.close()
    table("CPU time of the consumer's thread per batch, ms", ("batch", "min", "median", "max"), rows)


PARTS = {"cheap": cheap, "large": large, "sleep": sleep, "driver": driver}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--repeat", type=int, default=3)
    options = parse(parser, {"parts": ["large"], "repeat": 1})
    for part in options.parts:
        PARTS[part](options.repeat)


if __name__ == "__main__":
    main()
