"""The folder that ``penstock tokenize`` writes: shards of tokens, and ``tokens.json``, which says what is in them.

    tokens/tokens.json               what was tokenized and how, and the shards that are finished
    tokens/tokens-00000.bin          the tokens of all documents, one behind the other, little-endian
    tokens/tokens-00000.idx.npy      first token of each document, and the number of tokens: int64 (documents + 1,)

or, in Megatron's format, ``tokens-00000.bin`` and ``tokens-00000.idx`` (see `penstock.tokens.megatron`).

Document i is row i of the source, empty ones included. What ``tokens.json`` does not name is not there yet.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import DataFileError, DataFileIOError
from penstock.storage import Storage, is_remote, read_object, write_atomically

__all__ = ["INDEX", "NAME", "Shard", "TokenFolder"]

NAME = "tokens.json"
INDEX = {"penstock": ".idx.npy", "megatron": ".idx"}
"""The ending of an index, by format."""

_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """One file of tokens and its index.

    Attributes:
        name: without endings.
        documents, tokens: in it.
        checksum: xxh3_128 of the file of tokens, and of the index.
    """

    name: str
    documents: int
    tokens: int
    checksum: tuple[str, str]


@dataclass
class TokenFolder:
    """What ``tokens.json`` says.

    Attributes:
        format: ``"penstock"`` or ``"megatron"``.
        dtype: NumPy's name of the tokens' type, such as ``"uint16"``.
        rows: of the source, which are as many documents.
        options: what else the tokens follow from, by name: fingerprints of source and tokenizer among them.
        shards: those that are finished.
        complete: whether they are all.
    """

    format: str
    dtype: str
    rows: int
    options: dict[str, Any]
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False

    @property
    def documents(self) -> int:
        """Documents in the shards that are finished."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in them."""
        return sum(shard.tokens for shard in self.shards)

    @classmethod
    def whole(cls, name: str, storage: Storage | None = None) -> TokenFolder:
        """Return what the ``tokens.json`` of a finished folder says.

        Raises:
            DataFileError: it is not finished. And what `read` raises.
        """
        found = cls.read(name, storage)
        if not found.complete:
            raise DataFileError(
                f"{name}: {found.documents:,} of {found.rows:,} rows are tokenized. Run `penstock tokenize` with the "
                "same options again, which goes on there"
            )
        return found

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write it, in place of the one that is there.

        Raises:
            OSError: of the disk.
        """
        content = {"version": _VERSION, **asdict(self)}
        with write_atomically(Path(folder) / NAME) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")

    @classmethod
    def read(cls, name: str, storage: Storage | None = None) -> TokenFolder:
        """Return what a ``tokens.json`` says.

        Raises:
            DataFileIOError, StorageError: it cannot be read.
            DataFileError: it holds something else.
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
                shards = [Shard(**{**shard, "checksum": tuple(shard["checksum"])}) for shard in found.pop("shards")]
                return cls(**found, shards=shards)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise DataFileError(f"{name} is damaged, or not what `penstock tokenize` writes: {error}") from error
        raise DataFileError(f"{name} is of version {version!r}, and this Penstock knows {_VERSION}")
