"""Documents whose tokens say which document they are of, and where they stand in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

__all__ = ["Documents", "spans", "tokens_of"]

_WIDTH = 1000


class Documents(Dataset[Any]):
    """Token ``i`` of document ``d`` is ``d * 1000 + i``."""

    pure = True

    def __init__(self, lengths: Any, base: int = 0) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.base = base
        self.fingerprint = f"documents {base} {self.lengths.tolist()}"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.arange(int(self.lengths[row])) + (self.base + row) * _WIDTH


def spans(pack: dict[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return the pieces in a pack, as document, first token and length, from the tokens alone."""
    ids = pack["document_ids"]
    found = []
    for number in range(int(ids.max()) + 1):
        tokens = pack["input_ids"][ids == number]
        first = int(tokens[0])
        assert tokens.tolist() == list(range(first, first + len(tokens)))
        found.append((first // _WIDTH, first % _WIDTH, len(tokens)))
    return found


def tokens_of(packs: list[dict[str, torch.Tensor]]) -> list[int]:
    """Return all real tokens, sorted."""
    return sorted(token for pack in packs for token in pack["input_ids"][pack["document_ids"] >= 0].tolist())
