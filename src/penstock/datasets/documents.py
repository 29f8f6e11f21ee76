"""`DocumentDataset`: documents of tokens, each as long as it is, out of memory-mapped files.

documents = DocumentDataset("tokens", seed=0)       # a folder that `penstock tokenize` wrote
documents[0]                                        # int64 tensor (tokens,)
documents.lengths                                   # int32 (rows,), mapped: for packing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch

from penstock.datasets.source_dataset import SourceDataset
from penstock.datasets.tokens import integers
from penstock.plan.share import SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.shards.urls import Urls
from penstock.sources.documents import DocumentFiles
from penstock.storage import Storage

__all__ = ["DocumentDataset"]


class DocumentDataset(SourceDataset):
    """The documents of one rank in one mini-epoch, as a map-style data set of exactly that length.

    Args:
        files: a folder that ``penstock tokenize`` wrote; Megatron's files, by the name of the ``.idx`` or ``.bin``, or
            by what these have in common; or, with ``end_token``, raw files of tokens such as nanoGPT's, or ``.npy``
            files. Paths, patterns, braces, ``::``, or a list of those. Of a folder in a store, name its
            ``tokens.json``; objects are copied into the local cache, whole, when the data set is made.
        dtype: NumPy's type of the integers in raw files, such as "uint16". Other files say it themselves.
        end_token: the token that ends each document, and belongs to it, where there is no index. Where documents end is
            found in one pass over the files when they are first opened, and kept in the user's cache.
        token_type: type of the tensors: "int64", "int32", or any other that holds the files' type.
        load: ``load(tokens)`` makes the item of a tensor (tokens,), inside the scope of the document's own
            `penstock.generator`; by default an item is that tensor.
        storage: how a store is reached, see `penstock.storage.Storage`.
        rank, world_size, process_group, mini_epochs, group, seed, remainder, shuffle, block_size, window: see
            `penstock.RankDataset`.

    Raises:
        ConfigError, PartitionError: arguments that make no sense, or files that do not say where documents end.
        DataFileIOError: a file that is missing, or that nobody may read.
        DataFileError: a folder that is not finished, an index that is damaged or belongs to other tokens.
        DataFileChangedError: (on access) a file that was truncated or written to since.
        ShardIOError, StorageError: no file matches a pattern; a store says no.

    Documents have different lengths, which the default collate function cannot put into one tensor: pack them, or give
    a ``collate_fn``. Empty ones are tensors of no tokens. Of Megatron's files with several sequences in a document, an
    item is the whole document.

    Memory does not depend on the number of documents or tokens: tokens and indexes are mapped, and shared by all
    processes of a machine.

    Source of Megatron's format: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.
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
        integers(token_type)
        self.documents = DocumentFiles(files, dtype=dtype, end_token=end_token, token_type=token_type, storage=storage)
        """The documents as they are in the files."""
        super().__init__(self.documents, SharePlan(self.documents, **share), load)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each document, int32 of shape (rows,), by rows of the files, whatever the order and
        the rank; mapped and read-only. See `penstock.sources.documents.DocumentFiles.lengths`."""
        return self.documents.lengths
