"""`token_batches`: how many batches a budget of tokens makes of given lengths, and how much of them is padding."""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.order import Partition
from penstock.order.length_classes import classes_of
from penstock.order.token_budget import budget_batches, most_padding
from penstock.storage.mapped import MappedFiles, look_at

__all__ = ["TokenBatches", "token_batches"]


@dataclass(frozen=True)
class TokenBatches:
    """The batches of an epoch of a `TokenBudgetBatchSampler`.

    Attributes:
        max_tokens: the budget.
        samples, tokens: in all batches; what is longer than the budget is left out.
        too_long: samples that are longer.
        classes: of lengths.
        batches: of the whole job.
        batches_rank: of each rank.
        use: the share of the budget that tokens of samples are, on average.
        padding: the share of the padded batches that is padding, at most.
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
    """Plan the batches of an epoch from the lengths alone: one pass over them, in O(1) memory; no index is made.

    Args:
        path: an ``.npy`` file with one integer a sample.
        max_tokens: the budget.
        ranks: of the job.
        remainder: what becomes of batches that do not go round, see `Partition`.
        classes: of lengths, at most.

    Raises:
        ConfigError: a budget below 1, or lengths that are no integers or negative (as an OrderError).
        DataFileError, DataFileIOError: the file cannot be read.
    """
    file = look_at(path, None)
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be 1 or more, got {max_tokens}")
    if len(file.shape) != 1:
        raise ConfigError(f"{file.path} must have one integer a sample, got shape {file.shape}")
    found = classes_of(MappedFiles([file]).array(0), max_tokens, classes)
    cut = budget_batches(found, drop_too_long=True)
    tokens = int(found.tokens[1:].sum())
    return TokenBatches(
        max_tokens=max_tokens,
        samples=int(found.samples[1:].sum()),
        tokens=tokens,
        too_long=int(found.samples[0]),
        classes=len(found) - 1,
        batches=len(cut),
        batches_rank=len(Partition(len(cut), ranks, remainder=remainder)),
        use=tokens / (len(cut) * max_tokens) if len(cut) else 0.0,
        padding=most_padding(found, cut),
    )
