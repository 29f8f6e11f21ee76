"""One MDS shard: a file of samples behind their offsets.

    uint32 n | n + 1 uint32 offsets from the start of the file | a JSON header | sample 0 | sample 1 | ...

A sample is the uint32 sizes of its columns of variable size, then the values of all columns. The file is mapped, and
opening it reads the offsets alone; a sample costs one copy of its bytes.

Promise: a file that does not agree with its index, with its own header, or (a sample) with its own sizes is a
`ShardError`, or `TruncatedShardError` where bytes are missing, that names shard, sample and column.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.errors import (
    ConfigError,
    ManifestChangedError,
    ManifestIOError,
    ShardChangedError,
    ShardError,
    ShardIOError,
    TruncatedShardError,
)
from penstock.shards.mds.encodings import Decoder, make_decoder
from penstock.shards.mds.index import Columns, ShardInfo
from penstock.storage import SourceFile

__all__ = ["Reader", "Shard", "shard_errors"]


@contextmanager
def shard_errors() -> Iterator[None]:
    """What goes wrong with a file in the block becomes an error of shards."""
    try:
        yield
    except ManifestChangedError as error:
        raise ShardChangedError(str(error).replace("Open the manifest again", "Open the shards again")) from None
    except ManifestIOError as error:
        raised = ShardIOError(str(error))
        raised.errno = error.errno
        raise raised from error


class Reader:
    """From the bytes of a sample to a dict of its columns.

    Args:
        columns: of the shard.
        names: which of them to read; None for all. Others are skipped, and not decoded.
        images, allow_pickle: see `make_decoder`.

    Raises:
        ConfigError: a column that is not there, or one that may not be read.
    """

    def __init__(self, columns: Columns, names: Sequence[str] | None, *, images: str, allow_pickle: bool) -> None:
        self.columns = columns
        missing = sorted(set(names or ()) - set(columns.names))
        if missing:
            raise ConfigError(f"there is no column {missing[0]!r}: there are {', '.join(map(repr, columns.names))}")
        self._variable = sum(size is None for size in columns.sizes)
        self._sizes = struct.Struct(f"<{self._variable}I")
        self._fixed = self._sizes.size + sum(size or 0 for size in columns.sizes)
        self._steps: list[tuple[str, int | None, Decoder | None]] = []
        for name, encoding, size in zip(*columns, strict=True):
            wanted = names is None or name in names
            self._steps.append((name, size, _decoder(name, encoding, images, allow_pickle) if wanted else None))

    def read(self, data: bytes) -> dict[str, Any]:
        """The sample in these bytes.

        Raises:
            ShardError: they are no such sample. The message names the column.
        """
        if len(data) < self._sizes.size:
            raise ShardError(f"it has {len(data)} bytes, too few for the sizes of {self._variable} columns")
        sizes = self._sizes.unpack_from(data)
        if self._fixed + sum(sizes) != len(data):
            raise ShardError(f"its columns take {self._fixed + sum(sizes)} bytes, and it has {len(data)}")
        variable = iter(sizes)
        sample, begin = {}, self._sizes.size
        for name, size, decode in self._steps:
            end = begin + (next(variable) if size is None else size)
            if decode is not None:
                try:
                    sample[name] = decode(data[begin:end])
                except Exception as error:  # of any library that decodes
                    raise ShardError(f"column {name!r} cannot be decoded: {error}") from error
            begin = end
        return sample


@lru_cache(maxsize=1024)
def _decoder(name: str, encoding: str, images: str, allow_pickle: bool) -> Decoder:
    try:
        return make_decoder(encoding, images=images, allow_pickle=allow_pickle)
    except ConfigError as error:
        raise ConfigError(f"column {name!r} has encoding {encoding}: {error}, or choose others with columns=") from None


class Shard:
    """An open shard: samples by their numbers in it. Safe in threads and after a fork.

    Args:
        file: an open one, not compressed.
        info: what the index says of it.
        reader: of its columns.

    Raises:
        ShardError: it is not the file that the index describes, or its header is damaged.

    Memory: 4 bytes a sample, of mapped pages that all processes share.
    """

    def __init__(self, file: SourceFile, info: ShardInfo, reader: Reader) -> None:
        self.path, self.file = file.path, file
        self._reader = reader
        self._check_size(info)
        assert self.file.map is not None
        self._offsets = np.frombuffer(self.file.map, "<u4", info.samples + 1, 4)
        self._check_header(info)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read(self, number: int) -> bytes:
        """The bytes of a sample.

        Raises:
            ShardChangedError: the file was changed since it was opened.
        """
        with shard_errors():
            self.file.check()
        assert self.file.map is not None
        return self.file.map[int(self._offsets[number]) : int(self._offsets[number + 1])]

    def __getitem__(self, number: int) -> dict[str, Any]:
        """A sample, decoded.

        Raises:
            ShardError: it is damaged.
            ShardChangedError: the file was changed since it was opened.
        """
        data = self.read(number)
        try:
            return self._reader.read(data)
        except ShardError as error:
            raise ShardError(f"{self.path}, sample {number}: {error}") from error.__cause__

    def _check_size(self, info: ShardInfo) -> None:
        size = self.file.size
        if size < info.raw.size:
            raise TruncatedShardError(
                f"{self.path} ends at byte {size}, and the index says that it has {info.raw.size}: copy it again"
            )
        if size > info.raw.size or size < 4 + 4 * (info.samples + 1):
            raise ShardError(
                f"{self.path} has {size} bytes for {info.samples} samples, and the index says {info.raw.size}: index "
                "and shard are not of one writing"
            )

    def _check_header(self, info: ShardInfo) -> None:
        assert self.file.map is not None
        (count,) = struct.unpack_from("<I", self.file.map)
        if count != info.samples:
            raise ShardError(f"{self.path} has {count} samples, and the index says {info.samples}")
        offsets, begin = self._offsets, 4 + 4 * (count + 1)
        first, last = int(offsets[0]), int(offsets[-1])
        if first < begin or last != self.file.size:
            raise ShardError(
                f"{self.path} has samples from byte {first} to {last}, and they have to be from {begin} or later to "
                f"{self.file.size}, its end"
            )
        wrong = np.flatnonzero(offsets[1:] < offsets[:-1])
        if wrong.size:
            raise ShardError(f"{self.path}, sample {int(wrong[0])}: it ends before it begins")
        header = self.file.map[begin:first]
        if header:
            self._check_columns(header, info.columns)

    def _check_columns(self, header: bytes, columns: Columns) -> None:
        """The header says the columns once more: another list would give other values."""
        try:
            found = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise ShardError(f"{self.path} has a damaged header: {error}") from None
        names = ("column_names", "column_encodings", "column_sizes")
        expected = [list(values) for values in columns]
        if not isinstance(found, Mapping) or [found.get(name) for name in names] != expected:
            raise ShardError(f"{self.path} has other columns than the index says: they are not of one writing")
