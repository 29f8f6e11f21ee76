"""`token_batches`: the number of batches within a token budget for given lengths, and their padding."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError
from penstock.order import Partition
from penstock.order.length_classes import LengthClasses
from penstock.storage.mapped import MappedFiles, inspect_file

__all__ = ["TokenBatches", "token_batches"]

_CHUNK = 1 << 18


@dataclass(frozen=True)
class TokenBatches:
    """The batches of an epoch of a `TokenBudgetBatchSampler`.

    Attributes:
        max_tokens: the budget.
        samples, tokens: numbers in all batches, without samples longer than the budget.
        too_long: number of samples longer than the budget.
        classes: number of length classes.
        batches: batches of the whole job.
        batches_rank: batches of each rank.
        use: mean share of the budget that tokens of samples use.
        padding: upper limit of the share of padding in batches.
    """

    max_tokens: int
    samples: int
    tokens: int
    too_long: int
    classes: int
    batches: int
    batches_rank: int
    use: float
    padding: float


def token_batches(
    path: str | os.PathLike[str], max_tokens: int, *, ranks: int = 1, remainder: str = "pad", classes: int = 256
) -> TokenBatches:
    """Plan the batches of an epoch from lengths, in two passes and O(1) memory, without an index.

    Args:
        path: an ``.npy`` file with an integer for each sample.
        max_tokens: the budget.
        ranks: number of ranks of the job.
        remainder: how to treat batches that do not divide evenly among ranks, see `Partition`.
        classes: most length classes.

    Raises:
        ConfigError: a budget below 1, or lengths that are not integers or negative (an OrderError).
        DataFileError, DataFileIOError: the file cannot be read.
    """
    file = inspect_file(path, None)
    if max_tokens < 1 or classes < 1:
        raise ConfigError(f"max_tokens and classes must be 1 or more, got {max_tokens} and {classes}")
    if len(file.shape) != 1:
        raise ConfigError(f"{file.path} must have one integer for each sample, got shape {file.shape}")
    lengths = MappedFiles([file]).array(0)
    found = LengthClasses(lengths, max_tokens, classes)
    cut = found.batches(drop_too_long=True)
    chunks = (np.maximum(lengths[begin : begin + _CHUNK], 1) for begin in range(0, len(lengths), _CHUNK))
    tokens = sum(int(chunk[chunk <= max_tokens].sum(dtype=np.int64)) for chunk in chunks)
    # As if each batch had a sample of the greatest length of its class.
    padded = int((found.longest[1:] * cut.samples).sum())
    return TokenBatches(
        max_tokens=max_tokens,
        samples=int(found.samples[1:].sum()),
        tokens=tokens,
        too_long=int(found.samples[0]),
        classes=len(found) - 1,
        batches=len(cut),
        batches_rank=len(Partition(len(cut), ranks, remainder=remainder)),
        use=tokens / (len(cut) * max_tokens) if len(cut) else 0.0,
        padding=1 - tokens / padded if padded else 0.0,
    )
