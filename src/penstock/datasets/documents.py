"""`DocumentDataset`: tokenized documents of different lengths, in memory-mapped files.

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
from penstock.sources.tokens import DocumentFiles
from penstock.storage import Storage
from penstock.storage.names import Urls

__all__ = ["DocumentDataset"]


class DocumentDataset(SourceDataset):
    """Tokenized documents, split across ranks. A map-style dataset of one rank's documents in one mini-epoch.

    Args:
        files: a folder that ``penstock tokenize`` wrote; Megatron's files, by the name of the ``.idx`` or ``.bin`` file
            or by their common prefix; or, with ``end_token``, raw token files such as nanoGPT's, or ``.npy`` files.
            Paths, patterns, braces, ``::``, or a list of these. For a folder in a store, give the address of its
            ``tokens.json``. Objects in a store are downloaded whole into the local cache when you create the dataset.
        dtype: NumPy dtype of the integers in raw files, such as "uint16". Other files contain their dtype.
        end_token: the last token of each document, for files without an index. It stays part of the document. The ends
            of the documents are located in one pass over the files when they are first opened, and stored in the user's
            cache.
        token_type: dtype of the tensors: "int64", "int32", or any other that can hold the files' dtype.
        load: ``load(tokens)`` converts a tensor (tokens,) to the item, in the scope of the document's own
            `penstock.generator`. By default the item is the tensor.
        storage: access to object stores, see `penstock.storage.Storage`.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`.

    Raises:
        ConfigError, PartitionError: invalid arguments, or files that do not record where documents end.
        DataFileIOError: a file is missing or not readable.
        DataFileError: a folder is incomplete, or an index is damaged or belongs to other tokens.
        DataFileChangedError: (on access) a file was truncated or modified since it was opened.
        ShardIOError, StorageError: no file matches a pattern; the store reports an error.

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
        integers(token_type)
        self.documents = DocumentFiles(files, dtype=dtype, end_token=end_token, token_type=token_type, storage=storage)
        """The documents, in file order."""
        super().__init__(self.documents, SharePlan(self.documents, **share), load)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each document: int32 of shape (rows,), by row of the files, independent of order and
        rank. Mapped and read-only. See `penstock.sources.tokens.DocumentFiles.lengths`.
        """
        return self.documents.lengths
