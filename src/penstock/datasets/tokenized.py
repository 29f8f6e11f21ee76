"""`TokenizedDataset`: tokenize the text of any map-style dataset on the fly, one batch at a time.

text = penstock.open("fineweb-*.parquet", columns=["text"], seed=0)
tokens = TokenizedDataset(text, "tokenizer.json", append_eos="<|endoftext|>")
tokens[0]                                           # int64 tensor (tokens,)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.datasets.rows import has_rows, load_rows
from penstock.datasets.source_dataset import SourceDataset, SourceWrapper
from penstock.errors import ConfigError
from penstock.order.permutation import Indices
from penstock.plan.share import MiniEpoch
from penstock.random import in_sample, load_each
from penstock.sources.batched import BatchedDataset
from penstock.stages import stage
from penstock.tokens.tokenizer import COLUMN, IdsOf, TextTokenizer, check_column, texts_of

__all__ = ["TokenizedDataset"]


class TokenizedDataset(SourceWrapper, BatchedDataset):
    """The samples of a text dataset, as tokens.

    Args:
        source: a map-style dataset whose samples are text, or dicts with a text column: one of Penstock's, or your own,
            even a list of strings.
        tokenizer: the path of a ``tokenizer.json`` or of a folder with one, a ``tokenizers.Tokenizer``, a fast
            tokenizer of `transformers`, or any function from text to ids. Its padding and truncation are ignored.
        column: the name of the text column; ``"text"`` by default.
        max_length: truncate samples to this number of tokens, including special tokens and the end token.
        append_eos: the id or the text of a token to append to each sample.
        add_special_tokens: let the tokenizer add its special tokens. Has no effect on a function.
        as_dict: return dicts with the other columns of the sample, and ``input_ids``. By default an item is the tokens
            alone.
        load: ``load(item)`` converts the tokens, or the dict, to the item, in the scope of the sample's own
            `penstock.generator`.

    Raises:
        ConfigError: invalid arguments; `tokenizers` is not installed (``pip install 'penstock[text]'``); an unknown
            column.
        DataFileIOError, DataFileError: a ``tokenizer.json`` cannot be read; (on access) a sample has no text, or not
            the column, or text with a lone surrogate. The message names file and row.

    Items are int64 tensors (tokens,) of different lengths, so the default collate function cannot stack them: pack them
    (`penstock.PackedDataset`), or give a ``collate_fn``.

    Order, epoch, rank and state are those of a source of Penstock (``tokens.set_epoch``, ``plan`` and ``state_dict``
    are its methods). Over your own dataset, this is a plain map-style dataset.

    A batch is encoded at once, by threads of `tokenizers` unless ``TOKENIZERS_PARALLELISM=false``; in worker processes
    without them, because a parent's threads do not survive a fork.

    Cost: a megabyte of text takes 0.2 to 1 second on one core. If you read text more than once, tokenize it once with
    ``penstock tokenize``, and read the result with `DocumentDataset`.

    >>> dataset = TokenizedDataset(["ab", "abc"], lambda text: [ord(letter) for letter in text], append_eos=0)
    >>> dataset[1]
    tensor([97, 98, 99,  0])
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Any | IdsOf,
        *,
        column: str | None = None,
        max_length: int | None = None,
        append_eos: int | str | None = None,
        add_special_tokens: bool = True,
        as_dict: bool = False,
        load: Callable[[Any], Any] | None = None,
    ) -> None:
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise ConfigError(
                f"TokenizedDataset needs a dataset with __len__ and __getitem__, got {type(source).__name__}"
            )
        if load is not None and not callable(load):
            raise ConfigError(f"TokenizedDataset: load= takes a function, or None, got {load!r}")
        self.source = source
        """The dataset of the text, with its order, position and state."""
        self.column = column or COLUMN
        if getattr(source, "load", None) is None:
            check_column(getattr(getattr(source, "source", source), "columns", None), self.column)
        self.tokenizer = TextTokenizer(
            tokenizer, max_length=max_length, append_eos=append_eos, add_special_tokens=add_special_tokens
        )
        """The tokenizer, with the options given here."""
        self.as_dict = as_dict
        self.load = load

    @property
    def pure(self) -> bool:
        """Whether items depend only on their sample and `penstock.generator`."""
        parts = self.own_items, self.tokenizer.is_pure, getattr(self.source, "pure", isinstance(self.source, list))
        return not parts[0] and all(parts[1:]) and (self.load is None or bool(getattr(self.load, "pure", False)))

    def __getitem__(self, index: int) -> Any:
        return TokenizedDataset.__getitems__(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        keys = None
        if isinstance(self.source, SourceDataset) and not in_sample():
            keys = self.source.keys(indices)
        return TokenizedDataset.load_samples(self, indices, keys)

    def load_samples(
        self, indices: Sequence[int], keys: Sequence[int] | None, place: MiniEpoch | None = None
    ) -> list[Any]:
        """Return the items at several indices of the source, encoded together. See `SourceDataset.load_samples`."""
        source: Any = self.source
        if isinstance(source, BatchedDataset) and source.load_samples is not None:  # type: ignore[attr-defined]
            samples = source.load_samples(indices, keys, *(() if place is None else (place,)))  # type: ignore[attr-defined]
        else:
            samples = load_rows(source, indices, keys)
        return self._make_items(samples, keys, indices, lambda own, index: own.rows([index], place))

    @property
    def has_rows(self) -> bool:
        """Whether `load_rows` can return items by row of the text."""
        return not self.own_items and has_rows(self.source)

    def load_rows(self, rows: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        """Return the items of rows, independent of the order. See `penstock.datasets.rows.load_rows`."""
        samples = load_rows(self.source, rows, keys)
        return self._make_items(samples, keys, rows, lambda own, row: own.plan.kept(np.array([row])))

    def _make_items(
        self,
        samples: list[Any],
        keys: Sequence[int] | None,
        numbers: Sequence[int],
        row_of: Callable[[SourceDataset, int], Indices],
    ) -> list[Any]:
        """Return the items of text samples. For messages, ``row_of`` finds the row of a sample before filters."""

        def name(k: int) -> str:
            # Imported here, because only errors need it.
            from penstock.datasets.file_rows import row_name, with_an_order

            own = with_an_order(self.source)
            if own is None or not hasattr(own.source, "row_name"):
                return f"sample {numbers[k]}"
            return row_name(own, int(row_of(own, numbers[k])[0]))

        texts = texts_of(samples, self.column, name)
        with stage("tokenize"):
            items: list[Any] = [torch.from_numpy(ids) for ids in self.tokenizer.encode(texts, name=name)]
        if self.as_dict:
            for k, sample in enumerate(samples):
                others = {} if isinstance(sample, str) else sample
                kept = {column: value for column, value in others.items() if column != self.column}
                items[k] = {**kept, "input_ids": items[k]}
        return items if self.load is None else load_each(self.load, items, keys)
