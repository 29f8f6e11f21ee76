"""Packed documents for Transformers: batches in the form of its ``DataCollatorWithFlattening``.

packs = PackedDataset(documents, 8192, seed=0)
loader = DataLoader(packs, batch_size=4, collate_fn=flatten_packs)
trainer = PenstockTrainer(model, arguments, train_loader=loader)

All documents of a batch form one sequence, without padding. Models of Transformers separate documents by
``position_ids``, or with FlashAttention by the bounds in ``cu_seq_lens_q``. This module needs only torch.
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
    """Return the documents of packs as one sequence, in the form that models of Transformers accept.

    Args:
        packs: items of `penstock.PackedDataset`, or of a mixture of packs.

    Returns:
        In the shapes, ``tokens`` is the number of tokens in the packs without padding, and ``documents`` the number of
        documents; each piece of a split document counts as one.

        * ``input_ids`` int64 (1, tokens) * ``labels`` int64 (1, tokens): the same tokens, not shifted: models of
        Transformers shift labels themselves. The
          first token of each document has the label -100, which the loss ignores.
        * ``position_ids`` int64 (1, tokens): 0, 1, 2, ... starting again in each document
        * ``cu_seq_lens_q``, ``cu_seq_lens_k`` int32 (documents + 1,): the starts of the documents, and the end
        * ``max_length_q``, ``max_length_k`` int: tokens of the longest document

    Raises:
        ConfigError: the items are not packs.

    The result equals ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` on the documents of the packs. The
    number of tokens varies from batch to batch, since the packs' padding is left out.

    Models of Transformers separate documents by ``position_ids`` only without an ``attention_mask`` and without a
    cache. A Trainer turns the cache off; in your own loop, set ``model.config.use_cache = False``. Otherwise each
    document attends to the documents before it, without a warning.

    >>> packs = PackedDataset([[1, 2, 3], [4, 5], [6]], 4, lengths=[3, 2, 1], rank=0, world_size=1)
    >>> batch = flatten_packs([packs[0], packs[1]])
    >>> batch["input_ids"].shape, batch["cu_seq_lens_q"].dtype, batch["max_length_q"]
    (torch.Size([1, 6]), torch.int32, 3)
    """
    for pack in packs:
        missing = [name for name in _NEEDED if not isinstance(pack, dict) or name not in pack]
        if missing:
            raise ConfigError(
                f"flatten_packs takes items of a PackedDataset, dicts with {', '.join(_NEEDED)}; this is a "
                f"{type(pack).__name__} without {missing[0]}: omit load= and tag=, or use a collate function of "
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
