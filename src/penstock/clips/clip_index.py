"""`ClipIndex`: the packets of many video or audio files, in one Arrow file that all processes map.

    one row per file: name, size, version, coding, and lists of its packets: at, size, ...

The row of an unreadable file contains the error message. `penstock.clips.indexing` builds the index.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from penstock.clips.media import ByteSource
from penstock.clips.packets import Coding, Ints, Packets
from penstock.clips.sound import SoundCoding, SoundPackets
from penstock.errors import DataFileChangedError, DataFileError
from penstock.storage.files import DATA, File

__all__ = ["FILES_OF_BATCH", "INDEX_VERSION", "SOUND", "VIDEO", "ClipIndex", "Kind", "check_is_index"]

INDEX_VERSION = 4
FILES_OF_BATCH = 256
"""Rows of each record batch, so that a row's batch follows from its number."""

_TYPES: dict[str, pa.DataType] = {
    "str": pa.string(),
    "bytes": pa.binary(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
}


class Kind(NamedTuple):
    """The kind of an index: video or audio.

    Attributes:
        name: the noun for its files, for messages.
        coding: a dataclass with the parameters that a decoder needs.
        table: a named tuple of arrays with the packets of a file, and the methods `length` and `digest`.
        types: dtypes of the arrays.
        scan: the module whose ``scan`` computes both from a file's bytes.
    """

    name: str
    coding: type
    table: Any
    types: tuple[type[np.generic], ...]
    scan: str

    @property
    def schema(self) -> pa.Schema:
        """The columns of an index: name and version of each file, its coding, its packets."""
        return pa.schema(
            [
                ("name", pa.binary()),
                ("nbytes", pa.int64()),
                ("version", pa.string()),
                ("error", pa.string()),
                ("length", pa.int64()),
                ("digest", pa.binary(16)),
                *((field.name, _TYPES[str(field.type)]) for field in fields(self.coding)),
                *(
                    (name, pa.list_(pa.from_numpy_dtype(dtype)))
                    for name, dtype in zip(self.table._fields, self.types, strict=True)
                ),
            ],
            metadata={"penstock": f"{self.name} {INDEX_VERSION}"},
        )


VIDEO = Kind("videos", Coding, Packets, (np.int64, np.uint32, np.uint32, np.uint32, np.float64), "scan")
SOUND = Kind("recordings", SoundCoding, SoundPackets, (np.int64, np.uint32, np.int64, np.float64), "sound_scan")


def check_is_index(path: str | os.PathLike[str], kind: Kind) -> None:
    """Check that a file is an index of this kind, of any version.

    Raises:
        DataFileError: it is not.
    """
    try:
        with pa.memory_map(os.fspath(path)) as file:
            said = (pa.ipc.open_file(file).schema.metadata or {}).get(b"penstock", b"")
    except (pa.ArrowException, OSError):
        said = b""
    if not said.startswith(kind.name.encode() + b" "):
        raise DataFileError(f"{os.fspath(path)} is not an index of {kind.name}, so it is not overwritten")


class ClipIndex:
    """An open index of media files.

    Args:
        path: path of the index.
        kind: its kind.
        root: the prefix of all file names.
        exact: whether each file must have the version that was indexed; if False, only the size must match.
        addresses: URLs of the files, if they have signatures, which the names omit.
        rows: the row of the index for each file; None: all rows, in their order.
        identity: the expected `identity`; None accepts any.

    Raises:
        DataFileError: it is not an index, or damaged, or of another version.
        DataFileIOError: it cannot be read.
        DataFileChangedError: it has another identity.

    Memory: 8 bytes per file, and the addresses; the rest is mapped. Safe in threads; a pickle contains only the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: Kind,
        root: str,
        *,
        exact: bool = True,
        addresses: Sequence[str] | None = None,
        rows: Ints | None = None,
        identity: str | None = None,
    ) -> None:
        self.path, self.kind, self.root, self.exact = os.path.abspath(path), kind, root, exact
        self.addresses, self.rows = addresses, rows
        self._file = File(self.path, DATA)
        try:
            opened = pa.ipc.open_file(pa.py_buffer(self._file.map or b""))
            self._batches = [opened.get_batch(number) for number in range(opened.num_record_batches)]
            for batch in self._batches:
                batch.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise DataFileError(f"{self.path} is not an index of {kind.name}, or is damaged: {error}") from error
        if not opened.schema.equals(kind.schema, check_metadata=True):
            raise DataFileError(f"{self.path} is not an index of {kind.name} of this version: build it again")
        if any(len(batch) != FILES_OF_BATCH for batch in self._batches[:-1]):
            raise DataFileError(f"{self.path} is damaged: build it again")
        columns = [batch.column("length").to_numpy() for batch in self._batches]
        lengths = np.concatenate([np.zeros(0, np.int64), *columns])
        self.lengths: Ints = lengths if rows is None else lengths[rows]
        """Frames or samples of each file, int64; 0 for a file with an error."""
        if identity is not None and identity != self.identity:
            raise DataFileChangedError(f"{self.path} was built again for other files: open the dataset again")

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(ClipIndex, exact=self.exact, addresses=self.addresses, rows=self.rows, identity=self.identity)
        return made, (self.path, self.kind, self.root)

    @cached_property
    def identity(self) -> str:
        """A hash of the names, their order and the contents of the files."""
        digest = xxhash.xxh3_128()
        for name in ("name", "length", "digest"):
            digest.update(repr(self.column(name)).encode())
        return digest.hexdigest()

    def column(self, name: str) -> list[Any]:
        """Return the values of a column for all files."""
        values = [value for batch in self._batches for value in batch.column(name).to_pylist()]
        return values if self.rows is None else [values[row] for row in self.rows.tolist()]

    def path_of(self, file: int) -> str:
        """Return the path or URL of a file."""
        if self.addresses is not None:
            return self.addresses[file]
        return self.root + os.fsdecode(self._get("name", file).as_py())

    def is_unchanged(self, file: int, source: ByteSource) -> bool:
        """Return whether a file is the same as when it was indexed."""
        same = source.size == self._get("nbytes", file).as_py()
        return same and (not self.exact or source.fingerprint == self._get("version", file).as_py())

    def error(self, file: int) -> str:
        """Return the error message of a file; empty if it has none."""
        return str(self._get("error", file).as_py())

    def coding(self, file: int) -> Any:
        """Return the coding of a file."""
        return self.kind.coding(*(self._get(field.name, file).as_py() for field in fields(self.kind.coding)))

    def packets(self, file: int) -> Any:
        """Return the packets of a file, as views of the mapped index."""
        self._file.check()
        return self.kind.table(*(self._get(name, file).values.to_numpy() for name in self.kind.table._fields))

    def _get(self, name: str, file: int) -> Any:
        batch, row = divmod(file if self.rows is None else int(self.rows[file]), FILES_OF_BATCH)
        return self._batches[batch].column(name)[row]
