"""The output folder of ``penstock tokenize``: shards of tokens, and their description ``tokens.json``.

    tokens/tokens.json               source, options, and the finished shards
    tokens/tokens-00000.bin          the concatenated tokens of all documents, little-endian
    tokens/tokens-00000.idx.npy      first token of each document, and the number of tokens: int64 (documents + 1,)

or, in Megatron's format, ``tokens-00000.bin`` and ``tokens-00000.idx`` (see `penstock.tokens.megatron`).

Document i is row i of the source, empty rows included. Files not listed in ``tokens.json`` are unfinished. Each
finished shard appears atomically. Only the documents and the maximum size decide where a shard ends, so the same
documents always produce the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import DataFileError, DataFileIOError
from penstock.storage import Storage, is_remote, read_object, write_atomically
from penstock.storage.urls import is_inside
from penstock.tokens.megatron import write_index

__all__ = ["INDEX", "NAME", "TokenFolder", "TokenShard", "TokenShardWriter"]

NAME = "tokens.json"
INDEX = {"penstock": ".idx.npy", "megatron": ".idx"}
"""The extension of an index, by format."""

_VERSION = 1


@dataclass(frozen=True)
class TokenShard:
    """One file of tokens and its index.

    Attributes:
        name: the name without extensions.
        documents, tokens: numbers of documents and tokens in it.
        checksum: xxh3_128 of the token file and the index.
    """

    name: str
    documents: int
    tokens: int
    checksum: tuple[str, str]


@dataclass
class TokenFolder:
    """The contents of ``tokens.json``.

    Attributes:
        format: ``"penstock"`` or ``"megatron"``.
        dtype: the NumPy dtype of the tokens, such as ``"uint16"``.
        rows: number of rows in the source, which is the number of documents.
        options: everything else that the tokens depend on, such as fingerprints of source and tokenizer.
        shards: the finished shards.
        complete: whether all shards are finished.
    """

    format: str
    dtype: str
    rows: int
    options: dict[str, Any]
    shards: list[TokenShard] = field(default_factory=list)
    complete: bool = False

    @property
    def documents(self) -> int:
        """The number of documents in the finished shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """The number of tokens in the finished shards."""
        return sum(shard.tokens for shard in self.shards)

    @classmethod
    def whole(cls, name: str, storage: Storage | None = None) -> TokenFolder:
        """Return the ``tokens.json`` of a finished folder. DataFileError if it is not; other errors as `read`."""
        found = cls.read(name, storage)
        if not found.complete:
            raise DataFileError(
                f"{name}: {found.documents:,} of {found.rows:,} rows are tokenized. Run `penstock tokenize` with the "
                "same options again, which goes on there"
            )
        return found

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokens.json``, replacing an existing one atomically."""
        content = {"version": _VERSION, **asdict(self)}
        with write_atomically(Path(folder) / NAME) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")

    @classmethod
    def read(cls, name: str, storage: Storage | None = None) -> TokenFolder:
        """Return the contents of a ``tokens.json``.

        Raises:
            DataFileIOError, StorageError: it cannot be read.
            DataFileError: it is damaged or another file.
        """
        try:
            content = read_object(name, storage=storage) if is_remote(name) else Path(name).read_bytes()
        except OSError as error:
            if is_remote(name):
                raise
            raise DataFileIOError(f"cannot read {name}: {error.strerror}") from error
        try:
            found = json.loads(content)
            version = found.pop("version")
            if version == _VERSION:
                shards = [
                    TokenShard(**{**shard, "checksum": tuple(shard["checksum"])}) for shard in found.pop("shards")
                ]
                for shard in shards:
                    if not is_inside(shard.name):
                        raise ValueError(f"the shard {shard.name!r} is not a file within its folder")
                return cls(**found, shards=shards)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DataFileError(f"{name} is damaged, or not what `penstock tokenize` writes: {error}") from error
        raise DataFileError(f"{name} is of version {version!r}, and this Penstock knows {_VERSION}")


class TokenShardWriter:
    """Writes documents after those already in a folder; a finished shard is added to ``folder`` and ``tokens.json``.

    ``most`` is the largest number of tokens in a shard; a longer document gets its own shard.

    Memory: eight bytes for each document of the current shard, and the size of its index when it is finished.
    """

    def __init__(self, where: Path, folder: TokenFolder, most: int) -> None:
        self._where, self._folder, self._most = where, folder, most
        self._dtype = np.dtype(folder.dtype).newbyteorder("<")
        self._stack = contextlib.ExitStack()
        self._out: BinaryIO | None = None

    def write(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
        """Write documents, concatenated in ``tokens``, as the folder's token type."""
        ends = np.cumsum(lengths)
        begin = start = 0
        while begin < len(lengths):
            if self._out is None:
                self._name, self._tokens = f"tokens-{len(self._folder.shards):05d}", 0
                self._lengths: list[npt.NDArray[np.int64]] = []
                self._hash = xxhash.xxh3_128()
                self._out = self._stack.enter_context(write_atomically(self._where / f"{self._name}.bin"))
            stop = int(ends.searchsorted(start + self._most - self._tokens, "right"))
            if stop <= begin and self._lengths:
                self._finish_shard()
                continue
            stop = max(stop, begin + 1)
            end = int(ends[stop - 1])
            data = tokens[start:end].astype(self._dtype, copy=False).tobytes()
            self._out.write(data)
            self._hash.update(data)
            self._tokens += end - start
            self._lengths.append(lengths[begin:stop])
            begin, start = stop, end

    def _finish_shard(self) -> None:
        self._stack.close()
        self._out = None
        lengths, index = np.concatenate(self._lengths), io.BytesIO()
        if self._folder.format == "megatron":
            write_index(index, self._dtype, lengths)
        else:
            offsets = np.zeros(len(lengths) + 1, "<i8")
            np.cumsum(lengths, out=offsets[1:])
            np.lib.format.write_array(index, offsets)
        with write_atomically(self._where / f"{self._name}{INDEX[self._folder.format]}") as out:
            out.write(index.getbuffer())
        checksums = self._hash.hexdigest(), xxhash.xxh3_128_hexdigest(index.getbuffer())
        self._folder.shards.append(TokenShard(self._name, len(lengths), self._tokens, checksums))
        self._folder.write(self._where)

    def finish(self) -> None:
        """Finish the last shard, and mark the folder as complete."""
        if self._out is not None:
            self._finish_shard()
        self._folder.complete = True
        self._folder.write(self._where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None:
            # As an error of its block, this removes the unfinished token file.
            self._stack.__exit__(GeneratorExit, GeneratorExit(), None)
