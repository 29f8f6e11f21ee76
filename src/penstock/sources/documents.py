"""`DocumentFiles`: tokenized documents of different lengths in memory-mapped files, as a table.

    files = DocumentFiles("tokens")                                         output of `penstock tokenize`
    files = DocumentFiles("corpus_text_document.idx")                       a Megatron pair of .bin and .idx
    files = DocumentFiles("train.bin", dtype="uint16", end_token=50256)     nanoGPT: documents end with a token
    files.records([5, 3])                                                   two int64 tensors
    files.lengths                                                           tokens of each document

Invariant: the position of a document is one row of a mapped index; memory does not depend on the number of documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import ConfigError, DataFileError
from penstock.order.permutation import Indices, normalise
from penstock.sources.files_source import FilesSource
from penstock.sources.tokens import check_tokens
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.derived import derived_array
from penstock.storage.mapped import MappedFile, MappedFiles, look_at
from penstock.storage.names import Urls, expand
from penstock.tokens.folder import INDEX, NAME, TokenFolder
from penstock.tokens.megatron import MegatronIndex, is_index, read_header
from penstock.tokens.offsets import OffsetIndex, document_ends
from penstock.wording import counted

__all__ = ["DocumentFiles"]

_ROWS = 1 << 20  # documents processed at a time for their lengths


class _Pair(NamedTuple):
    """A token file, and the index of its documents; None if an end token separates them."""

    tokens: MappedFile
    at: MappedFile | None


class DocumentFiles(FilesSource):
    """The documents of concatenated token files. See `DocumentDataset` for arguments and errors."""

    def __init__(
        self,
        files: Urls,
        *,
        dtype: npt.DTypeLike | None = None,
        end_token: int | None = None,
        token_type: npt.DTypeLike = "int64",
        storage: Storage | None = None,
    ) -> None:
        self.token_type = np.dtype(token_type)
        self.end_token = end_token
        names = expand(files, storage)
        pairs = [pair for name in names for pair in self._pairs(name, dtype, storage)]
        if not pairs:
            raise DataFileError(f"{names[0]} holds no documents: its source had no rows")
        for pair in pairs:
            check_tokens(pair.tokens, self.token_type, self.end_token)
        indexes = [pair.at for pair in pairs if pair.at is not None]
        self._set_up(MappedFiles([pair.tokens for pair in pairs]), MappedFiles(indexes) if indexes else None)

    def _pairs(self, name: str, dtype: npt.DTypeLike | None, storage: Storage | None) -> Iterator[_Pair]:
        """Yield the files of a name."""
        if os.path.isdir(name):
            name = os.path.join(name, NAME)
        said = dtype is not None or self.end_token is not None
        if os.path.basename(name) == NAME or name.endswith(".idx"):
            if said:
                raise ConfigError(f"{name} says type and ends of its documents: leave dtype= and end_token= out")
            yield from _named(name, storage) if os.path.basename(name) == NAME else [_megatron(name, storage)]
        elif self.end_token is not None:
            yield _Pair(look_at(name, dtype, storage), None)
        elif name.endswith(".bin") and not said:
            yield _megatron(f"{name.removesuffix('.bin')}.idx", storage)
        elif not said and is_index(f"{name}.idx"):
            yield _megatron(f"{name}.idx", storage)
        else:
            raise ConfigError(
                f"{name}: nothing says where its documents end. Give end_token=, a folder that `penstock tokenize` "
                "wrote, or the .idx of Megatron's pair of files; or open it as sequences of one length by TokenDataset"
            )

    def _set_up(self, maps: MappedFiles, index_maps: MappedFiles | None) -> None:
        self.maps, self._index_maps = maps, index_maps
        self._indexes = [self._index(number) for number in range(len(maps.files))]
        self.starts = np.cumsum([0, *map(len, self._indexes)], dtype=np.int64)
        self._lengths: npt.NDArray[np.int32] | None = None

    def _index(self, number: int) -> OffsetIndex | MegatronIndex:
        file = self.maps.files[number]
        if self._index_maps is None:
            ends = self._ends(number)
            return OffsetIndex(file.path, lambda: ends, file.shape[0])
        where, read = self._index_maps.files[number].path, partial(self._index_maps.array, number)
        if where.endswith(INDEX["penstock"]):
            return OffsetIndex(where, read, file.shape[0])
        return MegatronIndex(where, read, file.size)

    def _ends(self, number: int) -> npt.NDArray[np.int64]:
        """Return the document offsets of a file whose documents end with a token."""
        file, end = self.maps.files[number], self.end_token
        assert end is not None

        def write(out: BinaryIO) -> None:
            out.write(np.zeros(1, np.int64).tobytes())
            for ends in document_ends(lambda a, b: self.maps.array(number)[a:b], file.shape[0], end):
                out.write(ends.tobytes())

        question = f"documents {self.maps.version(number)} {end}"
        return derived_array("tokens", question, np.int64, write, f"the index of {file.path}")

    # Properties.

    def __repr__(self) -> str:
        return f"<DocumentFiles of {counted(len(self), 'document')}: {self.maps.in_words()}>"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_indexes", "starts", "_lengths")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up(state["maps"], state["_index_maps"])

    @property
    def tokens(self) -> int:
        """The number of all tokens."""
        return sum(file.shape[0] for file in self.maps.files)

    def identity(self, files: int) -> list[str]:
        maps = [self.maps] if self._index_maps is None else [self.maps, self._index_maps]
        return [f"documents {self.end_token}", *(some.fingerprint(k) for some in maps for k in range(files))]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each document, int32 of shape (documents,), in file order; read-only.

        It is mapped from a single Megatron index, or else from a file in the user's cache, which is computed at first
        use in one pass over the indexes.

        Raises:
            DataFileError: an index that is damaged, or a document of 2**31 tokens or more.
        """
        if self._lengths is None:
            found = self._indexes[0].mapped_lengths() if len(self._indexes) == 1 else None
            if found is None:
                maps = [self.maps] if self._index_maps is None else [self.maps, self._index_maps]
                versions = [files.version(number) for files in maps for number in range(len(files.files))]
                question = f"lengths {self.end_token} {versions}"
                found = derived_array("tokens", question, np.int32, self._write_lengths, "lengths of documents")
            self._lengths = found
        return self._lengths

    def _write_lengths(self, out: BinaryIO) -> None:
        for file, index in zip(self.maps.files, self._indexes, strict=True):
            total = 0
            for begin in range(0, len(index), _ROWS):
                begins, ends = index.bounds(np.arange(begin, min(begin + _ROWS, len(index))))
                lengths = ends - begins
                if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= np.iinfo(np.int32).max:
                    raise DataFileError(f"{file.path}: a document of {lengths.min():,} or {lengths.max():,} tokens")
                total += int(lengths.sum())
                out.write(lengths.astype(np.int32).tobytes())
            if total > file.shape[0]:
                raise DataFileError(f"{file.path}: its index has {total:,} tokens, and there are {file.shape[0]:,}")

    # Reading.

    def records(self, rows: Indices) -> list[torch.Tensor]:
        """Return a tensor (tokens,) for each document.

        Raises:
            DataFileChangedError: a file was truncated or modified since it was opened.
            DataFileError: an index with invalid positions.
        """
        with stage("read"):
            rows = normalise(rows, len(self))
            found: list[torch.Tensor] = [_NONE] * len(rows)
            for number, places, local in self.by_file(rows):
                tokens = self.maps.array(number)
                begins, ends = self._indexes[number].bounds(local)
                bad = (begins < 0) | (begins > ends) | (ends > len(tokens))
                if bad.any():
                    k = int(bad.argmax())
                    raise DataFileError(
                        f"{self.maps.files[number].path}: document {local[k]} is said to be tokens {begins[k]} to "
                        f"{ends[k]} of {len(tokens)}: its index is damaged, or that of another file"
                    )
                for place, begin, end in zip(places.tolist(), begins.tolist(), ends.tolist(), strict=True):
                    found[place] = torch.from_numpy(tokens[begin:end].astype(self.token_type))
            return found


_NONE = torch.empty(0)


def _named(name: str, storage: Storage | None) -> Iterator[_Pair]:
    """Yield the files of an output folder of `penstock tokenize`."""
    folder = TokenFolder.whole(name, storage)
    for shard in folder.shards:
        path = f"{name.removesuffix(NAME)}{shard.name}"
        index = f"{path}{INDEX[folder.format]}"
        tokens = look_at(f"{path}.bin", np.dtype(folder.dtype).newbyteorder("<"), storage)
        if tokens.shape[0] != shard.tokens:
            raise DataFileError(f"{tokens.path} has {tokens.shape[0]:,} tokens, and {NAME} says {shard.tokens:,}")
        yield _Pair(tokens, look_at(index, "uint8" if folder.format == "megatron" else None, storage))


def _megatron(name: str, storage: Storage | None) -> _Pair:
    index = look_at(name, "uint8", storage)
    header = read_header(name, MappedFiles([index]).array(0))
    return _Pair(look_at(f"{name.removesuffix('.idx')}.bin", header.dtype, storage), index)
