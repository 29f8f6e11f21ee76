"""`TokenDataset`: sequences of tokens of a fixed length for language models, out of memory-mapped files.

dataset = TokenDataset("tokens-*.bin", 2049, stride=2048, dtype="uint16", seed=0)
for batch in DataLoader(dataset, batch_size=64, num_workers=1):     # int64 (64, 2049)
    inputs, targets = batch[:, :-1], batch[:, 1:]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch

from penstock.datasets.row_cache import RowsAhead
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.shards.urls import Urls
from penstock.sources.tokens import TokenFiles
from penstock.stages import stage
from penstock.storage import Storage

__all__ = ["TokenDataset", "integers"]

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class TokenDataset(SourceDataset):
    """The sequences of one rank in one mini-epoch, as a map-style data set of exactly that length.

    Args:
        files: paths, patterns, braces (``"tokens-{000..099}.bin"``), ``::``, or a list of those. ``.npy`` files hold
            one row of integers; all others integers of ``dtype`` and nothing else. Objects in a store are copied into
            the local cache, whole, when the data set is made.
        sequence_length: tokens in a sequence.
        dtype: NumPy's type of the integers in raw files, such as "uint16", "<u2" or ``numpy.uint16``. ``.npy`` files
            say it themselves.
        stride: tokens from the beginning of a sequence to that of the next one; by default ``sequence_length``. Smaller
            by one, sequences are inputs and targets of a model that predicts the next token.
        end_token: by default sequences are packed: they run over the ends of documents, and what a file has left at its
            end, less than a sequence, is left out. With the token that ends each document, every document begins a
            sequence, long ones take several, and the last one is filled up with ``pad_token``. Where documents end is
            found in one pass over the files when they are first opened, and kept in the user's cache. The type of every
            file must be able to hold it.
        pad_token: see there; an integer that ``token_type`` can hold.
        token_type: type of the tensors: "int64", "int32", or any other that holds the files' type.
        load: ``load(tokens)`` makes the item of a tensor (sequence_length,), inside the scope of the sequence's own
            `penstock.generator`; by default an item is that tensor.
        rank, world_size, process_group, mini_epochs, group, seed, remainder, shuffle, block_size, window: see
            `penstock.RankDataset`.
        storage: how a store is reached, see `penstock.storage.Storage`.

    Raises:
        ConfigError, PartitionError: arguments that make no sense.
        DataFileIOError: a file that is missing, a folder, or that nobody may read.
        DataFileError: one that is truncated, or holds something else.
        DataFileChangedError: (on access) one that was truncated or written to since.
        ShardIOError: no file matches a pattern.

    Every sequence comes once an epoch, whatever the number of files, ranks and workers. The state is a few integers and
    loads on any number of ranks. With Penstock's loader and no ``load`` or ``collate_fn`` a batch is written in one
    copy, from the pages of the files into the memory that it is delivered in.

    Memory does not depend on the number of tokens: files are mapped, and shared by all processes of a machine.
    """

    releases_gil = True

    def __init__(
        self,
        files: Urls,
        sequence_length: int,
        *,
        dtype: npt.DTypeLike | None = None,
        stride: int | None = None,
        end_token: int | None = None,
        pad_token: int = 0,
        token_type: str = "int64",
        load: Callable[[torch.Tensor], Any] | None = None,
        storage: Storage | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        self._type = integers(token_type)
        self.tokens = TokenFiles(
            files,
            sequence_length,
            dtype=dtype,
            stride=stride,
            end_token=end_token,
            pad_token=pad_token,
            token_type=token_type,
            storage=storage,
        )
        """The sequences as they are in the files."""
        super().__init__(self.tokens, SharePlan(self.tokens, **share), load)
        self._ahead = RowsAhead()
        self.makes_batches = load is None and type(self).makes_batches

    makes_batches = True

    @property
    def sequence_length(self) -> int:
        """Tokens in a sequence."""
        return self.tokens.length

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int] | None, empty: Empty, place: MiniEpoch | None = None
    ) -> torch.Tensor:
        """The sequences at several indices, (indices, sequence_length), written into the tensor that ``empty(shape,
        dtype)`` gives. See `penstock.sources.batched.BatchedDataset`."""
        rows = self._ahead.rows(self.plan.view(place), indices)
        out = empty((len(rows), self.tokens.length), self._type)
        with stage("read"):
            self.tokens.read_into(out.numpy(), rows)
        return out


def integers(name: str) -> torch.dtype:
    """Return the type of tensors of a name; ConfigError if there are none."""
    try:
        kind = np.dtype(name)
        if kind.kind not in "iu":
            raise TypeError
        return torch.from_numpy(np.empty(0, kind)).dtype
    except (TypeError, ValueError):  # ValueError: the other byte order
        raise ConfigError(f"token_type must be a type of integers that tensors have, got {name!r}") from None
