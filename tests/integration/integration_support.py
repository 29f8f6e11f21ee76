"""Data sets of the integration tests, in a module that worker and rank processes can import."""

from __future__ import annotations

import os
from typing import Any

import torch
from loader_support import Range, Stream

import penstock as ps


class Noisy(Range):
    """Each item is its index and what `penstock.generator` draws for it."""

    pure = True

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, ps.generator().random()], dtype=torch.float64)


class Sized(Stream):
    def __len__(self) -> int:
        return self.n


class Share(torch.utils.data.Sampler[int]):
    """A DistributedSampler of somebody's own."""

    def __init__(self, n: int, num_replicas: int, rank: int) -> None:
        self.n, self.num_replicas, self.rank = n, num_replicas, rank

    def __len__(self) -> int:
        return len(range(self.n)[self.rank :: self.num_replicas])

    def __iter__(self) -> Any:
        return iter(range(self.n)[self.rank :: self.num_replicas])


# What ranks run: Accelerate finds them by their environment variables, and takes the process group that is there.

SIZES = (24, 22, 18, 17, 3)


def accelerator(rank: int, world: int, **options: Any) -> Any:
    from accelerate import DataLoaderConfiguration

    from penstock.integrations.accelerate import Accelerator

    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def deal(rank: int, world: int, shuffle: str | None, options: dict[str, Any]) -> Any:
    """Of data of some sizes this rank's batches; those that Accelerate makes with torch's loader of the same order;
    whether the samples are those of a single rank; how many batches our loader made.
    """
    found = {}
    prepare = accelerator(rank, world, **options).prepare
    for n in SIZES:
        make = lambda n=n: ps.DataLoader(Noisy(n), batch_size=4, shuffle=shuffle, seed=5)  # noqa: E731
        alone = {int(sample[0]): sample for batch in make() for sample in batch.tolist()}
        torchs: Any = torch.utils.data.DataLoader(Range(n), batch_size=4, sampler=list(alone))
        theirs = [batch.tolist() for batch in prepare(torchs)]
        prepared = prepare(make())
        batches = [batch.tolist() for batch in prepared]
        assert len(prepared) == len(batches)
        ours = [[int(sample[0]) for sample in batch] for batch in batches]
        same = all(sample == alone[int(sample[0])] for batch in batches for sample in batch)
        found[n] = ours, theirs, same, prepared.base_dataloader.stats()["batches"]
    return found


def begin(rank: int, world: int) -> Any:
    prepared = accelerator(rank, world).prepare(ps.DataLoader(Noisy(48), batch_size=4, shuffle="global", seed=5))
    iterator = iter(prepared)
    seen = [int(index) for _ in range(2) for index in next(iterator)[:, 0]]
    return seen, dict(prepared.state_dict())


def go_on(rank: int, world: int, state: Any) -> list[int]:
    prepared = accelerator(rank, world).prepare(ps.DataLoader(Noisy(48), batch_size=4, shuffle="global", seed=5))
    prepared.load_state_dict(state)
    return [int(index) for batch in prepared for index in batch[:, 0]]


def deal_again(rank: int, world: int, path: str, kind: str) -> list[int]:
    """This rank's rows, of a loader that is dealt to ranks before Accelerate sees it."""
    accelerate = accelerator(rank, world)
    if kind == "RankDataset":
        loader: Any = ps.DataLoader(ps.RankDataset(path, seed=1), batch_size=5)
        return [int(row) for _, _, rows in accelerate.prepare(loader) for row in rows]
    if kind == "GroupedBatchSampler":
        order = ps.RandomSampler(range(20), shuffle="global", seed=1)
        loader = ps.DataLoader(Range(20), batch_sampler=ps.GroupedBatchSampler(order, [0] * 20, 5))
    elif kind == "somebody's":
        loader = ps.DataLoader(Range(20), batch_size=5, sampler=Share(20, world, rank))
    else:
        own: Any = ps.DistributedSampler if kind == "DistributedSampler" else torch.utils.data.DistributedSampler
        loader = ps.DataLoader(Range(20), batch_size=5, sampler=own(Range(20), seed=1))
    seen = []
    for batch in accelerate.prepare(loader):
        seen += batch.tolist()
        assert len(accelerate.gather_for_metrics(batch)) == 10
    return seen


def gather(rank: int, world: int, path: str) -> dict[str, Any]:
    """Of loaders that split by themselves: the rows that `gather_for_metrics` returns in an epoch, or an error."""
    accelerate, n = accelerator(rank, world), 76
    rows = ps.RankDataset(path, seed=1, load=_row)
    groups = ps.GroupedBatchSampler(ps.RandomSampler(range(n), shuffle="global", seed=1), [0] * n, 7)
    loaders: dict[str, Any] = {
        "dataset": ps.DataLoader(rows, 4),
        "dataset, in order": ps.DataLoader(rows, 4, shuffle=False),
        "loader": ps.DataLoader(Range(n), 4, shuffle=True, seed=1, split=True),
        "loader, in order": ps.DataLoader(Range(n), 4, split=True),
        "loader, drop_last": ps.DataLoader(Range(n), 4, split=True, drop_last=True),
        "sampler": ps.DataLoader(Range(n), 4, sampler=ps.DistributedSampler(Range(n), seed=1)),
        "torch's sampler": ps.DataLoader(Range(n), 4, sampler=torch.utils.data.DistributedSampler(Range(n), seed=1)),
        "unequal": ps.DataLoader(Range(73), 4, split=True),
        "sampler over a dataset": ps.DataLoader(rows, 4, sampler=ps.RandomSampler(rows)),
        "groups": ps.DataLoader(Range(n), batch_sampler=groups),
        "nobody": ps.DataLoader(Range(n), 4, shuffle=True, seed=1),
    }
    found: dict[str, Any] = {}
    for name, loader in loaders.items():
        tensors, objects = [], []
        try:
            for batch in accelerate.prepare(loader):
                tensors += accelerate.gather_for_metrics({"rows": batch})["rows"].tolist()
                objects += accelerate.gather_for_metrics([str(row) for row in batch.tolist()], use_gather_object=True)
        except ps.errors.ConfigError as error:
            found[name] = str(error)
            continue
        assert [int(text) for text in objects] == tensors
        found[name] = sorted(tensors)
    return found


def _row(record: Any) -> int:
    return int(record.row)


def leave_to_accelerate(rank: int, world: int, kind: str) -> Any:
    """Two epochs, and whether a loader of ours made them. The ranks' global generators differ."""
    torch.manual_seed(100 + rank)
    options = {"dispatch_batches": False} if kind == "stream of every rank" else {}
    if kind.startswith("stream"):
        loader: Any = ps.DataLoader(Stream(24), batch_size=4)
    else:
        generator = torch.Generator().manual_seed(7) if kind == "generator" else None
        loader = ps.DataLoader(Range(24), batch_size=4, shuffle=True, generator=generator)
    prepared = accelerator(rank, world, **options).prepare(loader)
    epochs = [[batch.tolist() for batch in prepared] for _ in range(2)]
    return epochs, isinstance(prepared.base_dataloader, ps.DataLoader)
