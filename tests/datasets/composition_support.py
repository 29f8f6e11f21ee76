"""Documents that say which they are, with a draw of their item's generator; at module level, for workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from penstock import generator

__all__ = ["Draw", "DrawIds", "DrawLines", "DrawRows", "Lengthy", "length_of"]


def length_of(document: int) -> int:
    """Return the length of a document: 0 to 40, many short ones; those of two neighbours are not both 0."""
    return document * document * 7919 % 41 if document % 3 else document * 31 % 7 + document % 2


def made(document: int) -> dict[str, Any]:
    tokens = torch.arange(length_of(document)) + document * 1000
    return {"input_ids": tokens, "id": document, "draw": int(generator().integers(1 << 40))}


class Lengthy(Dataset[Any]):
    """Documents of a user's own data set."""

    pure = True

    def __init__(self, documents: list[int]) -> None:
        self.documents = documents
        self.fingerprint = f"documents {documents}"

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, row: int) -> Any:
        return made(self.documents[row])


class DrawRows:
    """Documents of rows of an array."""

    pure = True

    def __call__(self, row: Any) -> Any:
        return made(int(row))


class DrawIds:
    """Documents of rows of a table."""

    pure = True

    def __call__(self, row: Any) -> Any:
        return made(row["id"])


class DrawLines:
    """Documents of lines of a manifest."""

    pure = True

    def __call__(self, record: Any) -> Any:
        return made(record.label)


class Draw:
    """A pack with a draw of its own."""

    pure = True

    def __call__(self, pack: Any) -> Any:
        return {**pack, "draw": int(generator().integers(1 << 40))}
