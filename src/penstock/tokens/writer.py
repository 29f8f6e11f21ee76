"""`ShardWriter`: write tokenized documents into shards. Each finished shard appears atomically.

Only the documents and the maximum size decide where a shard ends, so the same documents always produce the same bytes.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.storage import write_atomically
from penstock.tokens.folder import INDEX, Shard, TokenFolder
from penstock.tokens.megatron import write_index

__all__ = ["ShardWriter"]


class ShardWriter:
    """Writes documents after those already in a folder.

    Args:
        where: path of the folder.
        folder: its contents. When a shard is finished, it is added here and ``tokens.json`` is written.
        most: largest number of tokens in a shard; a longer document gets its own shard.

    Memory: eight bytes for each document of the current shard, and the size of its index when it is finished.
    """

    def __init__(self, where: Path, folder: TokenFolder, most: int) -> None:
        self._where = where
        self._folder = folder
        self._most = most
        self._dtype = np.dtype(folder.dtype).newbyteorder("<")
        self._file: _Shard | None = None

    def write(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        """Write documents, concatenated in ``tokens``, as the folder's token type.

        Raises:
            OSError: the disk fails or is full.
        """
        ends = np.cumsum(lengths)
        begin = start = 0
        while begin < len(lengths):
            if self._file is None:
                name = f"tokens-{len(self._folder.shards):05d}"
                self._file = _Shard(self._where, name, self._folder.format, self._dtype)
            stop = int(ends.searchsorted(start + self._most - self._file.tokens, "right"))
            if stop <= begin and self._file.documents:
                self._finish()
                continue
            stop = max(stop, begin + 1)
            end = int(ends[stop - 1])
            self._file.write(tokens[start:end], lengths[begin:stop])
            begin, start = stop, end

    def _finish(self) -> None:
        if self._file is not None:
            self._folder.shards.append(self._file.finish())
            self._file = None
            self._folder.write(self._where)

    def finish(self) -> None:
        """Finish the last shard, and mark the folder as complete."""
        self._finish()
        self._folder.complete = True
        self._folder.write(self._where)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            # As an error of its block, this removes the unfinished token file.
            self._file.stack.__exit__(GeneratorExit, GeneratorExit(), None)


class _Shard:
    """A shard that is being written."""

    def __init__(self, where: Path, name: str, format: str, dtype: np.dtype[Any]) -> None:
        self.name, self.tokens, self.documents = name, 0, 0
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._format, self._dtype = format, dtype
        self._index = where / f"{name}{INDEX[format]}"
        self.stack = contextlib.ExitStack()
        self._out = self.stack.enter_context(write_atomically(where / f"{name}.bin"))
        self._hash = xxhash.xxh3_128()

    def write(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._out.write(data)
        self._hash.update(data)
        self.tokens += len(tokens)
        self.documents += len(lengths)
        self._lengths.append(lengths)

    def finish(self) -> Shard:
        self.stack.close()
        lengths, index = np.concatenate(self._lengths), io.BytesIO()
        if self._format == "megatron":
            write_index(index, self._dtype, lengths)
        else:
            offsets = np.zeros(len(lengths) + 1, "<i8")
            np.cumsum(lengths, out=offsets[1:])
            np.lib.format.write_array(index, offsets)
        with write_atomically(self._index) as out:
            out.write(index.getbuffer())
        checksums = self._hash.hexdigest(), xxhash.xxh3_128_hexdigest(index.getbuffer())
        return Shard(self.name, len(lengths), self.tokens, checksums)
