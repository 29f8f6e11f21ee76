"""Transformers and packed documents: batches in the form of its ``DataCollatorWithFlattening``.

packs = PackedDataset(documents, 8192, seed=0)
loader = DataLoader(packs, batch_size=4, collate_fn=flatten_packs)
trainer = PenstockTrainer(model, arguments, train_loader=loader)

One sequence of all documents of the batch, without padding; models of Transformers keep documents apart by
``position_ids``, or by the bounds in ``cu_seq_lens_q`` where FlashAttention is used. This module needs torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.datasets.packed import IGNORED
from penstock.errors import ConfigError

__all__ = ["flatten_packs"]

_NEEDED = ("input_ids", "position_ids", "document_ids")


def flatten_packs(packs: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the documents of some packs as one sequence, as models of Transformers take it.

    Args:
        packs: items of `penstock.PackedDataset`, or of a mixture of packs.

    Returns:
        ``tokens`` is the number of tokens in the packs, padding left out, and ``documents`` that of their documents;
        each piece of a document that was cut counts as one.

        * ``input_ids`` int64 (1, tokens)
        * ``labels`` int64 (1, tokens): the same tokens, not those one further: models of Transformers shift labels
          themselves. The first token of each document is -100, which no loss is for.
        * ``position_ids`` int64 (1, tokens): 0, 1, 2, ... anew with each document
        * ``cu_seq_lens_q``, ``cu_seq_lens_k`` int32 (documents + 1,): where documents begin, and the end
        * ``max_length_q``, ``max_length_k``: tokens of the longest document, an int

    Raises:
        ConfigError: the items are no packs.

    It is what ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` makes of the documents of the packs. The
    number of tokens differs from batch to batch, by the little padding that is left out.

    Models of Transformers see by ``position_ids`` that there are several documents only if they are given no
    ``attention_mask`` and make no cache. A Trainer turns the cache off; in a loop of your own, say
    ``model.config.use_cache = False``. Without it each document sees those before it, and nothing says so.

    >>> packs = PackedDataset([[1, 2, 3], [4, 5], [6]], 4, lengths=[3, 2, 1], rank=0, world_size=1)
    >>> batch = flatten_packs([packs[0], packs[1]])
    >>> batch["input_ids"].shape, batch["cu_seq_lens_q"].dtype, batch["max_length_q"]
    (torch.Size([1, 6]), torch.int32, 3)
    """
    for pack in packs:
        missing = [name for name in _NEEDED if not isinstance(pack, dict) or name not in pack]
        if missing:
            raise ConfigError(
                f"flatten_packs takes items of a PackedDataset, dicts with {', '.join(_NEEDED)}; here is a "
                f"{type(pack).__name__} without {missing[0]}: leave load= and tag= out, or collate in a function of "
                "your own"
            )
    real = torch.cat([pack["document_ids"] for pack in packs]) >= 0
    ids = torch.cat([pack["input_ids"] for pack in packs])[real]
    positions = torch.cat([pack["position_ids"] for pack in packs])[real]
    begins = torch.nonzero(positions == 0).flatten()
    bounds = torch.cat([begins, begins.new_tensor([len(ids)])])
    longest = int(bounds.diff().max()) if len(ids) else 0
    bounds = bounds.to(torch.int32)
    return {
        "input_ids": ids[None],
        "labels": ids.where(positions > 0, IGNORED)[None],
        "position_ids": positions[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
