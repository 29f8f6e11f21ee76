"""Clusters for tests, and data sets that workers on them import by name."""

from __future__ import annotations

import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from fork_worker import setup_worker
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

import penstock as ps

STORE = 150 << 20

STARTS = 300.0
"""Seconds in which workers start, which import torch, on a machine that has other things to do."""


@contextmanager
def running_cluster(
    *, nodes: int, cpus: int, store: int = STORE, connect: bool = True, dashboard: bool = False
) -> Iterator[Any]:
    """A head without CPUs and some labelled nodes, which end with the block."""
    import ray
    from ray.cluster_utils import Cluster

    with socket.socket() as free:  # the usual one may be taken by somebody else's
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = {"num_cpus": 0, "object_store_memory": store, "include_dashboard": dashboard, "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number in range(nodes):
            add_node(cluster, number, cpus, store)
        if connect:
            ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Any, number: int, cpus: int = 2, store: int = STORE) -> Any:
    """Another node, with labels that say which."""
    labels = {"role": "loader", "number": str(number)}
    return cluster.add_node(num_cpus=cpus, object_store_memory=store, labels=labels, setup_worker_path=setup_worker())


def alive(prefix: str = "penstock") -> list[str]:
    """Names of the actors that live, by Ray's own account."""
    from ray._private.state import actors

    found = actors().values()
    return sorted(actor["Name"] for actor in found if actor["State"] != "DEAD" and actor["Name"].startswith(prefix))


def eventually(check: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def workers_of(loader: Any) -> int:
    """How many have joined."""
    return sum(node["workers"] for node in loader.stats()["nodes"].values())


def all_joined(loader: Any, count: int) -> bool:
    """Whether so many do in time; its first epoch is the next one again."""
    end = time.monotonic() + STARTS
    while workers_of(loader) < count and time.monotonic() < end:
        next(iter(loader))  # they are greeted by the consumer
    loader.set_epoch(0)
    return workers_of(loader) == count


class Numbers(Dataset[Any]):
    """Index, a draw of `penstock.generator`, and where it was made. Some take long, and one takes its worker along."""

    pure = True

    def __init__(self, n: int, *, seconds: float = 0.0, slow: dict[int, float] | None = None, size: int = 0) -> None:
        self.n = n
        self.seconds = seconds
        self.slow = slow or {}
        self.size = size

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.slow.get(index, self.seconds))
        item = {"index": index, "drawn": float(ps.generator().normal()), "pid": os.getpid()}
        if self.size:
            item["data"] = torch.from_numpy(np.full(self.size, index % 251, np.uint8))
        return item


class Deadly(Numbers):
    """``os._exit`` in the worker at some samples, the first ``times`` times."""

    def __init__(self, n: int, at: tuple[int, ...], times: int, folder: pathlib.Path) -> None:
        super().__init__(n)
        self.at, self.times, self.folder = at, times, folder

    def __getitem__(self, index: int) -> Any:
        if index in self.at:
            died = len(list(self.folder.glob(f"died-{index}-*")))
            if died < self.times:
                (self.folder / f"died-{index}-{died}").touch()
                os._exit(1)
        return super().__getitem__(index)


class TwoArguments(Exception):
    """Which cannot be made from a message."""

    def __init__(self, one: str, two: int) -> None:
        super().__init__(f"{one} {two}")


class Failing(Numbers):
    """Raises at one index."""

    def __init__(self, n: int, at: int, kind: str) -> None:
        super().__init__(n)
        self.at, self.kind = at, kind

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            if self.kind == "two":
                raise TwoArguments("broken", index)
            if self.kind == "unpicklable":
                error = ValueError(f"sample {index} is broken")
                error.handle = open(os.devnull)  # type: ignore[attr-defined]  # noqa: SIM115
                raise error
            if self.kind == "final":
                raise GeneratorExit
            raise KeyError(index)
        return super().__getitem__(index)


class Picky(Numbers):
    """Cannot be unpickled on a node once it is marked as broken."""

    broken = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "broken" in state:
            raise RuntimeError("no such table on this node")
        vars(self).update(state)


class Shares(IterableDataset[Any]):
    """Each worker its share, as torch's documentation has it."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(start, self.n, step))


class Counter(IterableDataset[Any]):
    """With a state of its own."""

    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at < self.n:
            self.at += 1
            if (self.at - 1) % step == start:
                yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Lazy(Sampler[int]):
    """Draws when it is asked, from a generator that others may see."""

    def __init__(self, n: int, generator: torch.Generator) -> None:
        self.n, self.generator = n, generator

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield int(torch.randint(self.n, (), generator=self.generator))


class Infos(Dataset[Any]):
    """What ``get_worker_info()`` and ``worker_init_fn`` leave behind."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return info.id, info.num_workers, info.seed, int(os.environ.get("RAY_TEST_INIT", -1))


def init(number: int) -> None:
    """A ``worker_init_fn``."""
    os.environ["RAY_TEST_INIT"] = str(number)


def refuse(number: int) -> None:
    """One that fails."""
    raise RuntimeError(f"worker {number} does not like it here")


def rows(batches: Any) -> list[Any]:
    """Index and draw of every sample."""
    return [pair for batch in batches for pair in zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True)]


class OverManifest(Dataset[Any]):
    """Rows of a manifest, one at a time."""

    pure = True

    def __init__(self, manifest: ps.Manifest) -> None:
        self.manifest = manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> Any:
        record = self.manifest[index]
        return record.path, record.label, record.row, os.getpid()
