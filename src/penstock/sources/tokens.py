"""`TokenFiles`: fixed-length sequences in memory-mapped token files, as a table with random access.

    file 0:  |--- sequence 0 ---|--- sequence 1 ---|-rest-|        packed: across document ends
    file 1:  |--- sequence 2 ---| ...

    with end_token=E:   a b c E d e f g h E   ->   |a b c E|d e f g|h E . .|      . is pad_token

Invariant: the position of a sequence is arithmetic, or one row of a mapped index; memory does not depend on their
number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from penstock.errors import ConfigError, DataFileError
from penstock.order.permutation import Indices, normalise
from penstock.sources.files_source import FilesSource
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.derived import derived_array
from penstock.storage.mapped import MappedFile, MappedFiles, look_at
from penstock.storage.names import Urls, expand
from penstock.tokens.offsets import document_ends
from penstock.wording import counted

__all__ = ["TokenFiles", "check_tokens"]

_ROWS = 128  # rows gathered at a time, which fit the CPU cache until they are written out


class TokenFiles(FilesSource):
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
        names: Iterable[str] = expand(files, storage)
        found = [look_at(name, kind, storage) for name in names]
        for file in found:
            check_tokens(file, self.token_type, self.end_token)
        self._set_up(MappedFiles(found))
        if not len(self):
            raise DataFileError(f"{self.maps.files[0].path}: too few tokens for one sequence of {self.length}")

    def _set_up(self, maps: MappedFiles) -> None:
        self.maps, files = maps, maps.files
        if self.end_token is None:
            counts = [max(0, (file.shape[0] - self.length) // self.stride + 1) for file in files]
        else:
            self._indexes = [self._index(number) for number in range(len(files))]
            counts = list(map(len, self._indexes))
        self.starts = np.cumsum([0, *counts], dtype=np.int64)

    def __repr__(self) -> str:
        return f"<TokenFiles of {counted(len(self), 'sequence')} of {self.length}: {self.maps.in_words()}>"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_indexes", "starts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up(state["maps"])

    # Identity.

    def identity(self, files: int) -> list[str]:
        return [str((self.length, self.stride, self.end_token, self.pad_token)), *super().identity(files)]

    # Reading.

    def read(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return sequences as an array of shape (rows, length)."""
        out = np.empty((len(rows), self.length), self.token_type)
        self.read_into(out, rows)
        return out

    def records(self, rows: Indices) -> list[torch.Tensor]:
        """Return a tensor (length,) for each sequence."""
        with stage("read"):
            return list(torch.from_numpy(self.read(normalise(rows, len(self)))))

    def read_into(self, out: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> None:
        """Write sequences into an array of shape (rows, length), with one copy from the file's pages.

        Raises:
            DataFileChangedError: a file was truncated or modified since it was opened.
        """
        for number, places, local in self.by_file(rows):
            if self.end_token is None:
                self._write_packed(out, places, number, local)
            else:
                self._write_documents(out, places, number, local)

    def _write_packed(
        self, out: npt.NDArray[Any], places: npt.NDArray[np.int64], number: int, local: npt.NDArray[np.int64]
    ) -> None:
        tokens, count = self.maps.array(number), int(self.starts[number + 1] - self.starts[number])
        shape, strides = (count, self.length), (self.stride * tokens.itemsize, tokens.itemsize)
        rows = np.lib.stride_tricks.as_strided(tokens, shape, strides, writeable=False)
        for begin in range(0, len(local), _ROWS):
            end = begin + _ROWS
            if len(places) == len(out):
                out[begin:end] = rows[local[begin:end]]
            else:
                out[places[begin:end]] = rows[local[begin:end]]

    def _write_documents(
        self, out: npt.NDArray[Any], places: npt.NDArray[np.int64], number: int, local: npt.NDArray[np.int64]
    ) -> None:
        tokens, index = self.maps.array(number), self._indexes[number]
        for place, (begin, end) in zip(places.tolist(), index[local].tolist(), strict=True):
            row, size = out[place], end - begin
            row[:size] = tokens[begin:end]
            row[size:] = self.pad_token

    # Documents.

    def _index(self, number: int) -> npt.NDArray[np.int64]:
        """Return first and end token of each sequence of a file, of shape (sequences, 2): a derived array."""
        question = f"sequences {self.maps.version(number)} {self.length} {self.end_token}"
        write, what = partial(self._write_index, number), f"the index of {self.maps.files[number].path}"
        return derived_array("tokens", question, np.int64, write, what).reshape(-1, 2)

    def _write_index(self, number: int, out: BinaryIO) -> None:
        total, open_at = self.maps.files[number].shape[0], 0
        assert self.end_token is not None
        for ends in document_ends(lambda a, b: self.maps.array(number)[a:b], total, self.end_token):
            out.write(self._cut(open_at, ends).tobytes())
            open_at = int(ends[-1])

    def _cut(self, start: int, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sequences of consecutive documents: the first begins at ``start``, they end at ``ends``."""
        starts = np.concatenate([[start], ends[:-1]])
        counts = -(-(ends - starts) // self.length)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # within its document
        begin = np.repeat(starts, counts) + number * self.length
        return np.stack([begin, np.minimum(begin + self.length, np.repeat(ends, counts))], axis=1)


def check_tokens(file: MappedFile, token_type: np.dtype[Any], end_token: int | None) -> None:
    """Check that a file holds tokens.

    Raises:
        DataFileError: it holds something else than one row of integers.
        ConfigError: ``token_type`` cannot hold its tokens, or its type cannot hold ``end_token``.
    """
    kind = np.dtype(file.dtype)
    if len(file.shape) != 1 or kind.kind not in "iu":
        raise DataFileError(f"{file.path} holds {kind} of shape {file.shape}: tokens are one row of integers")
    if not np.can_cast(kind, token_type):
        raise ConfigError(f"{file.path} holds {kind}, which token_type={str(token_type)!r} cannot hold")
    if end_token is not None and not _holds(kind, end_token):
        raise ConfigError(f"{file.path} holds {kind}, in which no token is end_token={end_token}")


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
