"""Tokens in memory-mapped files, as tables with random access: sequences of one length, or whole documents.

    file 0:  |--- sequence 0 ---|--- sequence 1 ---|-rest-|        packed: across document ends
    file 1:  |--- sequence 2 ---| ...

    with end_token=E:   a b c E d e f g h E   ->   |a b c E|d e f g|h E . .|      . is pad_token

    files = DocumentFiles("tokens")                                         output of `penstock tokenize`
    files = DocumentFiles("corpus_text_document.idx")                       a Megatron pair of .bin and .idx
    files = DocumentFiles("train.bin", dtype="uint16", end_token=50256)     nanoGPT: documents end with a token
    files.records([5, 3])                                                   two int64 tensors
    files.lengths                                                           tokens of each document

Invariant: the position of a sequence or document is arithmetic, or one row of a mapped index; memory does not depend on
their number.
"""

from __future__ import annotations

import abc
import operator
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import ConfigError, DataFileError
from penstock.manifest.indices import by_part
from penstock.order.permutation import Indices, normalise
from penstock.sources.files_source import FilesSource
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.derived import derived_array
from penstock.storage.mapped import MappedFile, MappedFiles, inspect_file
from penstock.storage.names import Urls, expand
from penstock.tokens.folder import INDEX, NAME, TokenFolder
from penstock.tokens.megatron import MegatronIndex, is_index, read_header
from penstock.wording import counted

__all__ = ["DocumentFiles", "TokenFiles"]

_SCAN = 1 << 22  # number of tokens searched at a time for document ends
_ROWS = 128  # rows gathered at a time, which fit the CPU cache until they are written out
_DOCUMENTS = 1 << 20  # documents processed at a time for their lengths

_Pair = tuple[MappedFile, MappedFile | None]  # tokens, and the index of documents; None if an end token separates them


class _Tokens(FilesSource):
    """Rows of token files. Their index is not part of a pickle: it is mapped again."""

    end_token: int | None
    token_type: np.dtype[Any]

    def _check(self, files: list[MappedFile]) -> None:
        """Check that files hold tokens, which ``token_type`` can hold, and among which ``end_token`` can be."""
        for file in files:
            kind = np.dtype(file.dtype)
            if len(file.shape) != 1 or kind.kind not in "iu":
                raise DataFileError(f"{file.path} holds {kind} of shape {file.shape}: tokens are one row of integers")
            if not np.can_cast(kind, self.token_type):
                raise ConfigError(f"{file.path} holds {kind}, which token_type={str(self.token_type)!r} cannot hold")
            if self.end_token is not None and not _holds(kind, self.end_token):
                raise ConfigError(f"{file.path} holds {kind}, in which no token is end_token={self.end_token}")

    def _document_ends(self, number: int) -> Iterator[Indices]:
        """Yield the ends of the documents of a file (the positions after ``end_token``), in ascending, non-empty
        arrays. Tokens after the last end token form a document, too.
        """
        total = self.maps.files[number].shape[0]
        for begin in range(0, total, _SCAN):
            tokens = self.maps.array(number)[begin : begin + _SCAN]
            ends = np.flatnonzero(tokens == self.end_token) + begin + 1
            if begin + _SCAN >= total and (not len(ends) or ends[-1] < total):
                ends = np.append(ends, total)
            if len(ends):
                yield ends

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_indexes", "starts", "_lengths")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up()

    @abc.abstractmethod
    def _set_up(self) -> None:
        """Set what is not part of a pickle."""


class TokenFiles(_Tokens):
    """The sequences of concatenated token files. See `TokenDataset` for arguments and errors."""

    def __init__(
        self,
        files: Urls,
        sequence_length: int,
        *,
        dtype: npt.DTypeLike | None = None,
        stride: int | None = None,
        end_token: int | None = None,
        pad_token: int = 0,
        token_type: npt.DTypeLike = "int64",
        storage: Storage | None = None,
    ) -> None:
        self.length = operator.index(sequence_length)
        self.stride = self.length if stride is None else operator.index(stride)
        self.end_token = None if end_token is None else _token("end_token", end_token)
        self.pad_token = _token("pad_token", pad_token)
        self.token_type = np.dtype(token_type)
        if not _holds(self.token_type, self.pad_token):
            raise ConfigError(f"pad_token={self.pad_token} is none that token_type={str(self.token_type)!r} can hold")
        kind = None if dtype is None else _integers(dtype)
        if self.length < 1 or self.stride < 1:
            raise ConfigError(f"sequence_length and stride must be positive, got {self.length} and {self.stride}")
        if end_token is not None and stride is not None:
            raise ConfigError("stride= is for packed sequences: with end_token= they begin where documents do")
        found = [inspect_file(name, kind, storage) for name in expand(files, storage)]
        self._check(found)
        self.maps = MappedFiles(found)
        self._set_up()
        if not len(self):
            raise DataFileError(f"{found[0].path}: too few tokens for one sequence of {self.length}")

    def _set_up(self) -> None:
        files = self.maps.files
        if self.end_token is None:
            counts = [max(0, (file.shape[0] - self.length) // self.stride + 1) for file in files]
        else:
            self._indexes = [self._index(number) for number in range(len(files))]
            counts = list(map(len, self._indexes))
        self.starts = np.cumsum([0, *counts], dtype=np.int64)

    def __repr__(self) -> str:
        return f"<TokenFiles of {counted(len(self), 'sequence')} of {self.length}: {self.maps.in_words()}>"

    def identity(self, files: int) -> list[str]:
        return [str((self.length, self.stride, self.end_token, self.pad_token)), *super().identity(files)]

    # Reading.

    def records(self, rows: Indices) -> list[torch.Tensor]:
        """Return a tensor (length,) for each sequence."""
        with stage("read"):
            out = np.empty((len(rows), self.length), self.token_type)
            self.read_into(out, normalise(rows, len(self)))
            return list(torch.from_numpy(out))

    def read_into(self, out: npt.NDArray[Any], rows: Indices) -> None:
        """Write sequences into an array of shape (rows, length), with one copy from the file's pages."""
        for number, places, local in by_part(self.starts, rows):
            tokens = self.maps.array(number)
            if self.end_token is not None:
                for place, (begin, end) in zip(places.tolist(), self._indexes[number][local].tolist(), strict=True):
                    row, size = out[place], end - begin
                    row[:size] = tokens[begin:end]
                    row[size:] = self.pad_token
                continue
            shape = int(self.starts[number + 1] - self.starts[number]), self.length
            strides = self.stride * tokens.itemsize, tokens.itemsize
            sequences = np.lib.stride_tricks.as_strided(tokens, shape, strides, writeable=False)
            for begin in range(0, len(local), _ROWS):
                part = slice(begin, begin + _ROWS)
                out[part if len(places) == len(out) else places[part]] = sequences[local[part]]

    # Documents.

    def _index(self, number: int) -> Indices:
        """Return first and end token of each sequence of a file, of shape (sequences, 2): a derived array."""

        def write(out: BinaryIO) -> None:
            start = 0
            for ends in self._document_ends(number):
                out.write(_sequences(start, ends, self.length).tobytes())
                start = int(ends[-1])

        question = f"sequences {self.maps.version(number)} {self.length} {self.end_token}"
        what = f"the index of {self.maps.files[number].path}"
        return derived_array("tokens", question, np.int64, write, what).reshape(-1, 2)


def _sequences(start: int, ends: Indices, length: int) -> Indices:
    """Return the sequences of consecutive documents: the first begins at ``start``, they end at ``ends``."""
    starts = np.concatenate([[start], ends[:-1]])
    counts = -(-(ends - starts) // length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # within its document
    begin = np.repeat(starts, counts) + number * length
    return np.stack([begin, np.minimum(begin + length, np.repeat(ends, counts))], axis=1)


def _token(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {value!r}") from None


def _holds(kind: np.dtype[Any], token: int) -> bool:
    return int(np.iinfo(kind).min) <= token <= int(np.iinfo(kind).max)


def _integers(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the dtype of raw files."""
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        kind = None
    if kind is None or kind.kind not in "iu":
        raise ConfigError(
            f"dtype must be one of NumPy's types of integers, such as 'uint16', '<u2' or numpy.uint16, got {dtype!r}"
        )
    return kind


class OffsetIndex:
    """The position of each document in a token file.

    Args:
        path: path of the index, for messages.
        read: returns the mapped offsets, int64 of shape (documents + 1,).
        tokens: the number of tokens in the file.
    """

    def __init__(self, path: str, read: Callable[[], npt.NDArray[np.int64]], tokens: int) -> None:
        self._read = read
        offsets = read()
        if offsets.ndim != 1 or offsets.dtype != np.int64 or not len(offsets) or offsets[0] != 0:
            raise DataFileError(f"{path} is no index of documents: it holds {offsets.dtype} of shape {offsets.shape}")
        if offsets[-1] != tokens:
            raise DataFileError(
                f"{path}: its last document ends at token {offsets[-1]:,}, and the file has {tokens:,} tokens: one of "
                "them is truncated, or of another pair"
            )

    def __len__(self) -> int:
        return len(self._read()) - 1

    def bounds(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return first and end token of documents."""
        offsets = self._read()
        return offsets[rows], offsets[rows + 1]


class DocumentFiles(_Tokens):
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
        tokens, indexes = [pair[0] for pair in pairs], [pair[1] for pair in pairs if pair[1] is not None]
        self._check(tokens)
        self.maps, self._index_maps = MappedFiles(tokens), MappedFiles(indexes) if indexes else None
        self._set_up()

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
            yield inspect_file(name, dtype, storage), None
        elif name.endswith(".bin") and not said:
            yield _megatron(f"{name.removesuffix('.bin')}.idx", storage)
        elif not said and is_index(f"{name}.idx"):
            yield _megatron(f"{name}.idx", storage)
        else:
            raise ConfigError(
                f"{name}: nothing says where its documents end. Give end_token=, a folder that `penstock tokenize` "
                "wrote, or the .idx of Megatron's pair of files; or open it as sequences of one length by TokenDataset"
            )

    def _set_up(self) -> None:
        self._indexes = [self._index(number) for number in range(len(self.maps.files))]
        self.starts = np.cumsum([0, *map(len, self._indexes)], dtype=np.int64)
        self._lengths: npt.NDArray[np.int32] | None = None

    def _index(self, number: int) -> OffsetIndex | MegatronIndex:
        file = self.maps.files[number]
        if self._index_maps is not None:
            where, read = self._index_maps.files[number].path, partial(self._index_maps.array, number)
            if where.endswith(INDEX["penstock"]):
                return OffsetIndex(where, read, file.shape[0])
            return MegatronIndex(where, read, file.size)

        def write(out: BinaryIO) -> None:
            out.write(bytes(8))
            for ends in self._document_ends(number):
                out.write(ends.tobytes())

        question = f"documents {self.maps.version(number)} {self.end_token}"
        offsets = derived_array("tokens", question, np.int64, write, f"the index of {file.path}")
        return OffsetIndex(file.path, lambda: offsets, file.shape[0])

    # Properties.

    def __repr__(self) -> str:
        return f"<DocumentFiles of {counted(len(self), 'document')}: {self.maps.in_words()}>"

    @property
    def tokens(self) -> int:
        """The number of all tokens."""
        return sum(file.shape[0] for file in self.maps.files)

    def identity(self, files: int) -> list[str]:
        return [f"documents {self.end_token}", *super().identity(files)]

    @property
    def all_maps(self) -> list[MappedFiles]:
        return [self.maps] if self._index_maps is None else [self.maps, self._index_maps]

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each document, int32 of shape (documents,), in file order; read-only.

        It is mapped from a single Megatron index, or else from a file in the user's cache, which is computed at first
        use in one pass over the indexes.

        Raises:
            DataFileError: an index that is damaged, or a document of 2**31 tokens or more.
        """
        if self._lengths is None:
            first, *others = self._indexes
            found = first.mapped_lengths() if isinstance(first, MegatronIndex) and not others else None
            if found is None:
                question = f"lengths {self.end_token} {self.version}"
                found = derived_array("tokens", question, np.int32, self._write_lengths, "lengths of documents")
            self._lengths = found
        return self._lengths

    def _write_lengths(self, out: BinaryIO) -> None:
        for file, index in zip(self.maps.files, self._indexes, strict=True):
            total = 0
            for begin in range(0, len(index), _DOCUMENTS):
                begins, ends = index.bounds(np.arange(begin, min(begin + _DOCUMENTS, len(index))))
                lengths = ends - begins
                if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= np.iinfo(np.int32).max:
                    raise DataFileError(f"{file.path}: a document of {lengths.min():,} or {lengths.max():,} tokens")
                total += int(lengths.sum())
                out.write(lengths.astype(np.int32).tobytes())
            if total > file.shape[0]:
                raise DataFileError(f"{file.path}: its index has {total:,} tokens, and there are {file.shape[0]:,}")

    # Reading.

    def records(self, rows: Indices) -> list[torch.Tensor]:
        """Return a tensor (tokens,) for each document."""
        with stage("read"):
            rows = normalise(rows, len(self))
            found: list[torch.Tensor] = [_NONE] * len(rows)
            for number, places, local in by_part(self.starts, rows):
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
        tokens = inspect_file(f"{path}.bin", np.dtype(folder.dtype).newbyteorder("<"), storage)
        if tokens.shape[0] != shard.tokens:
            raise DataFileError(f"{tokens.path} has {tokens.shape[0]:,} tokens, and {NAME} says {shard.tokens:,}")
        yield tokens, inspect_file(index, "uint8" if folder.format == "megatron" else None, storage)


def _megatron(name: str, storage: Storage | None) -> _Pair:
    index = inspect_file(name, "uint8", storage)
    header = read_header(name, MappedFiles([index]).array(0))
    return inspect_file(f"{name.removesuffix('.idx')}.bin", header.dtype, storage), index
