"""Lengths of documents, as corpora of some kinds have them, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DRAWN", "write_lengths"]

DRAWN: dict[str, Callable[[Any, int], Any]] = {
    "web": lambda rng, n: rng.lognormal(6.2, 1.1, n),
    "chat": lambda rng, n: rng.lognormal(5.0, 0.9, n),
    "code": lambda rng, n: rng.lognormal(7.0, 1.3, n),
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.7, rng.lognormal(4.5, 0.5, n), rng.lognormal(8.2, 0.4, n)),
}


def write_lengths(path: Path, kind: str, n: int, *, longest: int, dtype: npt.DTypeLike) -> None:
    """Write lengths as an ``.npy`` file, a block at a time."""
    out = np.lib.format.open_memmap(path, "w+", dtype, (n,))
    rng, block = np.random.default_rng(1), 1 << 20
    for a in range(0, n, block):
        out[a : a + block] = np.clip(DRAWN[kind](rng, min(block, n - a)), 1, longest)
    out.flush()
