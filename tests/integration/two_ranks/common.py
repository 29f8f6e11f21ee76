"""What the programs of this folder share.

Each begins in an interpreter that has imported a framework, and nothing of Penstock but its name. What its cases find
they write to files.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import penstock as ps

FOLDER = Path(sys.argv[1])
KINDS = ("global", "shuffled", "share", "shards", "ours")
ROWS, BATCH, SEED = 24, 4, 3
HOW: dict[str, Any] = {"batch_size": BATCH, "seed": SEED, "num_workers": 2, "executor": "thread"}


class Rows(torch.utils.data.Dataset[int]):
    """A map-style data set as anyone writes it, which knows nothing of ranks."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


def row_of_record(record: Any) -> int:
    return int(record.row)


def rows_of(records: list[Any]) -> torch.Tensor:
    return torch.tensor([record.row for record in records])


def row_of_sample(sample: Any) -> int:
    return int(sample["__key__"])


def make(kind: str, **options: Any) -> Any:
    """A loader as a user makes it; the first one of a program imports the class."""
    how = {**HOW, **options}
    if kind == "share":
        return ps.DataLoader(ps.RankDataset(str(FOLDER / "rows.txt"), load=row_of_record, seed=SEED), **how)
    if kind == "shards":
        return ps.DataLoader(ps.ShardDataset(str(FOLDER / "rows-{0..2}.tar"), load=row_of_sample, seed=SEED), **how)
    if kind == "ours":
        how.setdefault("collate_fn", rows_of)
        return ps.DataLoader(ps.Manifest.open(str(FOLDER / "rows.txt")), shuffle="global", **how)
    if kind == "dpex":
        return ps.DpexDataLoader(Rows(), False, "auto", BATCH, True, num_workers=2)
    if kind == "shuffled":
        return ps.DataLoader(Rows(), how.pop("batch_size"), True, **how)
    return ps.DataLoader(Rows(), shuffle="global", **how)


def told(loader: Any, epochs: list[list[list[int]]]) -> dict[str, Any]:
    """What a test asks of the loader that a framework has used, and of the rows of its batches."""
    stats = loader.stats()
    return {
        "epochs": epochs,
        "class": f"{type(loader).__module__}.{type(loader).__name__}",
        "seed": loader.seed,
        "executor": loader.executor,
        "made": [stats["executor"], stats["workers"], stats["batches"]],
    }


def launch(*jobs: Mapping[str, Callable[[], Any]]) -> None:
    """Run the cases of each job on two ranks, which are forks of this interpreter and of what it has imported.

    They find each other by the environment variables that torchrun sets.
    """
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update(world, MASTER_ADDR="127.0.0.1")
    for job in jobs:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        ranks = [_start(job, rank) for rank in ("0", "1")]
        codes = [os.waitpid(rank, 0)[1] for rank in ranks]
        if any(codes):
            sys.exit(1)


def _start(job: Mapping[str, Callable[[], Any]], rank: str) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(RANK=rank, LOCAL_RANK=rank)
    try:
        run(job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run(cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run the cases one after the other. The first one imports Penstock's loader. None is told that nobody deals."""
    assert "penstock.loader" not in sys.modules
    for name, case in cases.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            write(name, case())
        assert not [each for each in said if "ranks reads all of" in str(each.message)], name


def write(name: str, found: Any) -> None:
    """Put what a case found where the test reads it."""
    (FOLDER / f"{name}.rank{os.environ['RANK']}.json").write_text(json.dumps(found))
