"""The work of a tokenizing worker: turn rows of the source into tokens, in any process or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.datasets.file_rows import file_rows, row_name
from penstock.datasets.rows import load_rows
from penstock.errors import DataFileError
from penstock.plan.source import Source
from penstock.tokens.texts import texts_of
from penstock.tokens.tokenizer import TextTokenizer

__all__ = ["Encoded", "Work"]


class Encoded(NamedTuple):
    """Documents: their concatenated tokens, the number of tokens in each, and the total number of characters."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    characters: int


class Work:
    """Tokenizes rows of a source; picklable if the source is.

    Args:
        source: a `Source`, or a map-style dataset.
        column: name of the text column.
        tokenizer: encodes the texts.
        dtype: NumPy name of the tokens' type.
    """

    def __init__(self, source: Any, column: str, tokenizer: TextTokenizer, dtype: str) -> None:
        self._source = source
        self._column = column
        self._tokenizer = tokenizer
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def texts(self, rows: Sequence[int]) -> list[str]:
        """Return the texts of these rows."""
        if isinstance(self._source, Source):
            samples = self._source.records(np.asarray(rows))
        else:
            samples = load_rows(self._source, rows, None)
        return texts_of(samples, self._column, lambda place: self._name(rows[place]))

    def _name(self, row: int) -> str:
        """Return file and row of a row before filters, for messages."""
        return row_name(self._source, int(file_rows(self._source, np.array([row]))[0]))

    def encode(self, start: int, stop: int) -> Encoded:
        """Return the tokens of rows ``start`` to ``stop - 1``.

        Raises:
            DataFileError: a row without text, or a token that the type cannot hold. The message names file and row.
        """
        texts = self.texts(range(start, stop))
        # There is a worker for each core already, so the tokenizer starts no threads.
        documents = self._tokenizer.encode(texts, threads=False, name=lambda place: self._name(start + place))
        lengths = np.array([len(document) for document in documents], np.int64)
        tokens = np.concatenate([np.empty(0, np.int64), *documents])
        limits = np.iinfo(self._dtype)
        if len(tokens) and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            k = int(((tokens < limits.min) | (tokens > limits.max)).argmax())
            name = self._name(start + int(np.cumsum(lengths).searchsorted(k, "right")))
            raise DataFileError(
                f"{name} has the token {tokens[k]}, which {self._dtype} cannot hold: use a larger dtype="
            )
        return Encoded(tokens.astype(self._dtype), lengths, sum(map(len, texts)))
