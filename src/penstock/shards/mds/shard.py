"""An MDS shard: a file of offsets and samples.

    uint32 n | n + 1 uint32 offsets from the start of the file | a JSON header | sample 0 | sample 1 | ...

A sample is the uint32 sizes of its variable-size columns, then the values of all columns. The file is mapped; opening
it reads only the offsets, and a sample costs one copy of its bytes.

Promise: a file that contradicts its index or header, or a sample that contradicts its sizes, raises `ShardError`, or
`TruncatedShardError` if bytes are missing, which names shard, sample and column.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import ConfigError, ShardError, TruncatedShardError
from penstock.shards.mds.encodings import Decoder, make_decoder
from penstock.shards.mds.index import Columns, ShardInfo
from penstock.storage import File

__all__ = ["MDSShard", "Reader"]


class Reader:
    """Decodes the bytes of a sample into a dict of columns: all, or ``names``. Other options: see `MDSFolder`.

    Raises:
        ConfigError: a column that does not exist or must not be read.
    """

    def __init__(self, columns: Columns, names: Sequence[str] | None, *, images: str, allow_pickle: bool) -> None:
        self.columns = columns
        missing = sorted(set(names or ()) - set(columns.names))
        if missing:
            raise ConfigError(f"no column {missing[0]!r}: the columns are {', '.join(map(repr, columns.names))}")
        self._variable = sum(size is None for size in columns.sizes)
        self._sizes = struct.Struct(f"<{self._variable}I")
        self._fixed = self._sizes.size + sum(size or 0 for size in columns.sizes)
        self._steps: list[tuple[str, int | None, Decoder | None]] = []
        for name, encoding, size in zip(*columns, strict=True):
            decode = None
            if names is None or name in names:
                try:
                    decode = make_decoder(encoding, images=images, allow_pickle=allow_pickle)
                except ConfigError as error:
                    raise ConfigError(
                        f"column {name!r} has encoding {encoding}: {error}, or choose others with columns="
                    ) from None
            self._steps.append((name, size, decode))

    def read(self, data: bytes) -> dict[str, Any]:
        """Return the sample in these bytes; `ShardError` names the column if they are invalid."""
        if len(data) < self._sizes.size:
            raise ShardError(f"it has {len(data)} bytes, too few for the sizes of {self._variable} columns")
        sizes = self._sizes.unpack_from(data)
        if self._fixed + sum(sizes) != len(data):
            raise ShardError(f"its columns take {self._fixed + sum(sizes)} bytes, but it has {len(data)}")
        variable = iter(sizes)
        sample, begin = {}, self._sizes.size
        for name, size, decode in self._steps:
            end = begin + (next(variable) if size is None else size)
            if decode is not None:
                try:
                    sample[name] = decode(data[begin:end])
                except Exception as error:  # decoding libraries may raise anything
                    raise ShardError(f"column {name!r} cannot be decoded: {error}") from error
            begin = end
        return sample


class MDSShard:
    """An open, uncompressed shard: samples by number. Safe in threads and after a fork.

    Raises:
        ShardError: the file does not match its index entry, or its header is damaged.

    Memory: 4 bytes a sample, in mapped pages that all processes share.
    """

    def __init__(self, file: File, info: ShardInfo, reader: Reader) -> None:
        self.path, self.file, self._reader = file.path, file, reader
        size, count = file.size, info.samples
        if size < info.raw.size:
            raise TruncatedShardError(
                f"{self.path} ends at byte {size}, but has {info.raw.size} bytes in the index: copy it again"
            )
        begin = 4 + 4 * (count + 1)
        if size > info.raw.size or size < begin:
            raise ShardError(
                f"{self.path} has {size} bytes for {count} samples, but {info.raw.size} in the index: index and shard "
                "do not belong together"
            )
        assert file.map is not None
        self._offsets = offsets = np.frombuffer(file.map, "<u4", count + 1, 4)
        (found,) = struct.unpack_from("<I", file.map)
        if found != count:
            raise ShardError(f"{self.path} has {found} samples, but {count} in the index")
        first, last = int(offsets[0]), int(offsets[-1])
        if first < begin or last != size:
            raise ShardError(
                f"{self.path} has samples from byte {first} to {last}, but they must begin at {begin} or later and end "
                f"at {size}, its end"
            )
        wrong = np.flatnonzero(offsets[1:] < offsets[:-1])
        if wrong.size:
            raise ShardError(f"{self.path}, sample {int(wrong[0])}: it ends before it begins")
        if first > begin:
            self._check_columns(file.map[begin:first], info.columns)

    def _check_columns(self, header: bytes, columns: Columns) -> None:
        """Check the columns in the header: different columns would give wrong values."""
        try:
            found = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise ShardError(f"{self.path} has a damaged header: {error}") from None
        names = ("column_names", "column_encodings", "column_sizes")
        expected = [list(values) for values in columns]
        if not isinstance(found, dict) or [found.get(name) for name in names] != expected:
            raise ShardError(f"{self.path} has other columns than the index: they do not belong together")

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a decoded sample; `ShardError` if it is damaged or the file has changed."""
        self.file.check()
        assert self.file.map is not None
        data = self.file.map[int(self._offsets[number]) : int(self._offsets[number + 1])]
        try:
            return self._reader.read(data)
        except ShardError as error:
            raise ShardError(f"{self.path}, sample {number}: {error}") from error.__cause__
