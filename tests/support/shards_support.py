"""Small tar shards of numbered samples, for tests of stores."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

COUNTS = [3, 0, 7, 11, 2, 6, 5]
"""Samples of each shard."""


def number(sample: dict[str, Any]) -> int:
    """Return what a sample is."""
    return int(sample["cls"])


number.pure = True  # type: ignore[attr-defined]


def write_shards(folder: Path, counts: Sequence[int] = COUNTS) -> None:
    """Write ``s-0.tar``, ``s-1.tar``, ... of so many samples, numbered through."""
    starts = np.cumsum([0, *counts])
    folder.mkdir(parents=True)
    for k, count in enumerate(counts):
        with tarfile.open(folder / f"s-{k}.tar", "w") as tar:
            for i in range(count):
                data = b"%d" % (starts[k] + i)
                info = tarfile.TarInfo(f"{k}_{i:03d}.cls")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
