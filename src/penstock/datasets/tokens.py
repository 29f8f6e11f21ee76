"""Tokens in memory-mapped files, for language models: `TokenDataset`, sequences of one length, and `DocumentDataset`.

dataset = TokenDataset("tokens-*.bin", 2049, stride=2048, dtype="uint16", seed=0)
for batch in DataLoader(dataset, batch_size=64, num_workers=1):     # int64 (64, 2049)
    inputs, targets = batch[:, :-1], batch[:, 1:]

documents = DocumentDataset("tokens", seed=0)       # a folder that `penstock tokenize` wrote
documents[0]                                        # int64 tensor (tokens,)
documents.lengths                                   # int32 (rows,), mapped: for packing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch

from penstock.datasets.source_dataset import Empty, SourceDataset
from penstock.errors import ConfigError
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.sources.tokens import DocumentFiles, TokenFiles
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.names import Urls

__all__ = ["DocumentDataset", "TokenDataset"]


class TokenDataset(SourceDataset):
    """Token sequences of a fixed length, split across ranks. A map-style dataset of one rank's sequences in one
    mini-epoch.

    Args:
        files: paths, patterns, braces (``"tokens-{000..099}.bin"``), ``::``, or a list of these. An ``.npy`` file holds
            a one-dimensional array of integers; any other file holds integers of ``dtype`` and nothing else. Objects in
            a store are downloaded whole into the local cache when you create the dataset.
        sequence_length: tokens in a sequence.
        dtype: NumPy dtype of the integers in raw files, such as "uint16", "<u2" or ``numpy.uint16``. ``.npy`` files
            contain their dtype.
        stride: distance in tokens between the starts of consecutive sequences; by default ``sequence_length``. With a
            stride of ``sequence_length - 1``, ``[:-1]`` and ``[1:]`` are inputs and targets of next-token prediction.
        end_token: the last token of each document. Without it, sequences run across document boundaries, and the
            incomplete sequence at the end of a file is left out. With it, each document begins a new sequence, long
            documents take several, and the last one is padded with ``pad_token``. The ends of the documents are located
            in one pass over the files when they are first opened, and stored in the user's cache. Each file's dtype
            must be able to hold this token.
        pad_token: the padding, see ``end_token``; an integer that ``token_type`` can hold.
        token_type: dtype of the tensors: "int64", "int32", or any other that can hold the files' dtype.
        load: ``load(tokens)`` converts a tensor (sequence_length,) to the item, in the scope of the sequence's own
            `penstock.generator`. By default the item is the tensor.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`.
        storage: access to object stores, see `penstock.storage.Storage`.

    Raises:
        ConfigError, PartitionError: invalid arguments.
        DataFileIOError: a file is missing, is a folder, or is not readable.
        DataFileError: a file is truncated, or contains something else.
        DataFileChangedError: (on access) a file was truncated or modified since it was opened.
        ShardIOError: no file matches a pattern.

    Each sequence occurs once per epoch, for any number of files, ranks and workers. The state has a few integers and
    loads on any number of ranks. With Penstock's loader, and without ``load`` or ``collate_fn``, a batch is written in
    one copy: from the pages of the files into the batch's memory.

    Memory use does not depend on the number of tokens: the files are mapped, and all processes of a machine share them.
    """

    releases_gil = True
    makes_batches = True

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
        self._type = _integers(token_type)
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
        """The sequences, in file order."""
        self.sequence_length = self.tokens.length
        """Tokens in a sequence."""
        super().__init__(self.tokens, SharePlan(self.tokens, **share), load)
        self.makes_batches = load is None and type(self).makes_batches

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int] | None, empty: Empty, place: MiniEpoch | None = None
    ) -> torch.Tensor:
        """Return the sequences at several indices: a tensor (indices, sequence_length) that ``empty(shape, dtype)``
        allocates. See `penstock.sources.batched.BatchedDataset`.
        """
        rows = self._rows_of_batch(indices, place)
        out = empty((len(rows), self.tokens.length), self._type)
        with stage("read"):
            self.tokens.read_into(out.numpy(), rows)
        return out


class DocumentDataset(SourceDataset):
    """Tokenized documents, split across ranks. A map-style dataset of one rank's documents in one mini-epoch.

    Args:
        files: a folder that ``penstock tokenize`` wrote; Megatron's files, by the name of the ``.idx`` or ``.bin`` file
            or by their common prefix; or, with ``end_token``, raw token files such as nanoGPT's, or ``.npy`` files.
            Paths, patterns, braces, ``::``, or a list of these. For a folder in a store, give the address of its
            ``tokens.json``. Objects in a store are downloaded whole into the local cache when you create the dataset.
        dtype: NumPy dtype of the integers in raw files, such as "uint16". Other files contain their dtype.
        end_token: the last token of each document, for files without an index. It stays part of the document.
        token_type, load, storage, rank, world_size, seed, shuffle, ...: see `TokenDataset`.

    Raises:
        ConfigError: files that do not record where documents end; and see `TokenDataset`.
        DataFileError: a folder is incomplete, or an index is damaged or belongs to other tokens.

    Documents have different lengths, so the default collate function cannot stack them: pack them
    (`penstock.PackedDataset`), or give a ``collate_fn``. An empty document is a tensor without tokens. If a document in
    Megatron's files consists of several sequences, an item is the whole document.

    Memory use does not depend on the number of documents or tokens: tokens and indexes are mapped, and all processes of
    a machine share them.

    Megatron's format is defined in `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.
    """

    releases_gil = True

    def __init__(
        self,
        files: Urls,
        *,
        dtype: npt.DTypeLike | None = None,
        end_token: int | None = None,
        token_type: str = "int64",
        load: Callable[[torch.Tensor], Any] | None = None,
        storage: Storage | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        _integers(token_type)
        self.documents = DocumentFiles(files, dtype=dtype, end_token=end_token, token_type=token_type, storage=storage)
        """The documents, in file order."""
        super().__init__(self.documents, SharePlan(self.documents, **share), load)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each document: int32 of shape (rows,), by row of the files, independent of order and
        rank. Mapped and read-only. See `penstock.sources.tokens.DocumentFiles.lengths`.
        """
        return self.documents.lengths


def _integers(name: str) -> torch.dtype:
    """Return the torch dtype of an integer type's name.

    Raises:
        ConfigError: torch has no such integer type.
    """
    try:
        kind = np.dtype(name)
        if kind.kind not in "iu":
            raise TypeError
        return torch.from_numpy(np.empty(0, kind)).dtype
    # torch raises ValueError for a non-native byte order.
    except (TypeError, ValueError):
        raise ConfigError(f"token_type= takes the name of an integer dtype of torch, got {name!r}") from None
