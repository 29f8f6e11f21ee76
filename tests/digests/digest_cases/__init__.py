"""The cases whose digests are kept, by group; public names of penstock only."""

from __future__ import annotations

import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from .data import Sources
from .hashing import digest
from .loaders import loaders, torch_loaders
from .mixtures import mixture_cases
from .passes import batch_cases, key_cases, tail_cases
from .resumed import resumed_cases, torch_resumed_cases
from .samplers import order_cases, torch_order_cases
from .shares import dataset_cases

__all__ = ["GROUPS", "compute"]

GROUPS: dict[str, Callable[[Sources], dict[str, Callable[[], Any]]]] = {
    "orders": lambda sources: order_cases(),
    "items": dataset_cases,
    "batches": lambda sources: batch_cases(loaders(sources)),
    "keys": lambda sources: key_cases(loaders(sources), ("own", "again", "python", "numpy", "collated")),
    "tails": lambda sources: {**tail_cases(loaders(sources)), **resumed_cases(sources)},
    "mixtures": lambda sources: mixture_cases(),
    "torch orders": lambda sources: torch_order_cases(),
    "torch batches": lambda sources: batch_cases(torch_loaders()),
    "torch keys": lambda sources: {
        **key_cases(torch_loaders(), ("own", "again")),
        **key_cases(loaders(sources), ("torch",)),
    },
    "torch tails": lambda sources: {**tail_cases(torch_loaders()), **torch_resumed_cases()},
}
"""What begins with "torch" holds for the recorded version of torch alone: its generators make the order."""


@contextmanager
def _place() -> Iterator[Path]:
    """Give a folder for sources and caches, on the one rank of a world of one, with the generators put back after."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, XDG_CACHE_HOME=folder),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
    ):
        warnings.simplefilter("ignore")
        for name in "RANK", "WORLD_SIZE":
            os.environ.pop(name, None)
        yield Path(folder)


def compute(group: str, every: int = 1) -> dict[str, str]:
    """Return the digest of each case of a group, or of every so many, by the case's name."""
    found: dict[str, str] = {}
    with _place() as folder:
        for name, case in itertools.islice(GROUPS[group](Sources(folder)).items(), 0, None, every):
            try:
                found[name] = digest(case())
            except Exception as error:
                error.add_note(f"in case {name!r} of group {group!r}")
                raise
    return found
