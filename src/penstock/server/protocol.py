"""The wire protocol: requests as small JSON texts, rows as Arrow record batches, errors as a kind and a message.

    slice_ = Slice(name="train", fingerprint=info.fingerprint, samples=info.rows, world_size=8, rank=3, seed=0, epoch=2)
    decode(encode(slice_)) == slice_

Promises: a request contains everything that its answer depends on, so servers have no state; its rows follow from the
arithmetic of `penstock.order`, which `RankDataset` uses, too; `decode` returns a valid `Slice` for any bytes, or raises
`TicketError`.
"""

from __future__ import annotations

import json
import operator
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from penstock import errors
from penstock.errors import PenstockError, ServerError, TicketError
from penstock.hashing import derive_key
from penstock.order import ORDER_VERSION, SHUFFLES, Order, Partition, make_order
from penstock.order.permutation import MAX_N, Indices
from penstock.order.shuffle import DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW
from penstock.storage.download import PIECE

__all__ = [
    "MAX_ROWS",
    "PAGE_ROWS",
    "Block",
    "Key",
    "Slice",
    "as_numbers",
    "decode",
    "decode_block",
    "decode_error",
    "decode_key",
    "decode_prefix",
    "decode_rows",
    "encode",
    "encode_block",
    "encode_error",
    "encode_key",
    "encode_prefix",
    "encode_rows",
    "is_block",
]

PAGE_ROWS = 1 << 14
"""Rows of a record batch: at this size its working set fits the CPU cache."""

MAX_ROWS = 1 << 16
"""The maximum number of rows in one request by number; the client splits longer lists."""

_VERSION = 1
_MAX_REQUEST = 4096  # bytes
_MAX_COUNT = 1 << 30  # for ranks, mini-epochs, block sizes: products of two fit 64 bits
_MAX_TEXT = 1000  # characters of an error message, which is sent in a header


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rows ``begin`` to ``end`` of one rank's share of one mini-epoch, with everything that they depend on.

    Args:
        name, fingerprint: the dataset and its version.
        samples: rows of the epoch: all rows of the dataset, or the rows that it had when a resumed epoch began.
        seed, epoch, shuffle, block_size, window: as for `penstock.order.make_order`; the sizes for ``"block"`` only.
        world_size, rank, mini_epochs, mini_epoch, remainder, consumed: as for `penstock.order.Partition`.
        begin, end: rows of the share; None is its end.
        page_rows: rows of a record batch, except for the last one and for long rows.
        order_version: the version of the order's arithmetic.

    Raises:
        TicketError: a value of a wrong type or outside its range.

    >>> part = Slice(name="train", fingerprint="0" * 32, samples=10, shuffle="none", world_size=4, rank=1)
    >>> part.length, part.rows(0, part.length).tolist()
    (3, [1, 5, 9])
    """

    name: str
    fingerprint: str
    samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: str = "global"
    block_size: int | None = None
    window: int | None = None
    world_size: int = 1
    rank: int = 0
    mini_epochs: int = 1
    mini_epoch: int = 0
    remainder: str = "pad"
    consumed: int = 0
    begin: int = 0
    end: int | None = None
    page_rows: int = PAGE_ROWS
    order_version: int = ORDER_VERSION

    def __post_init__(self) -> None:
        _check_key(self.name, self.fingerprint)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            object.__setattr__(self, name, _integer(name, value, low, high))
        if self.order_version != ORDER_VERSION:
            raise TicketError(
                f"order version {self.order_version} was requested, but this server computes version {ORDER_VERSION}"
            )
        if not isinstance(self.shuffle, str) or self.shuffle not in SHUFFLES:
            raise TicketError(f"unknown shuffle {self.shuffle!r:.80}: use one of {', '.join(map(repr, SHUFFLES))}")
        if self.shuffle != "block" and (self.block_size is not None or self.window is not None):
            raise TicketError(f"block_size and window belong to shuffle='block', not to {self.shuffle!r}")
        try:
            derive_key(self.seed, self.epoch)
            length = len(self.partition)
        except (PenstockError, TypeError) as error:
            raise TicketError(str(error)) from None
        if not self.begin <= self.stop <= length:
            raise TicketError(f"rows {self.begin} to {self.stop} were requested of a share of {length} rows")

    @cached_property
    def partition(self) -> Partition:
        """The positions of the rank's share."""
        return Partition(
            self.samples,
            self.world_size,
            self.rank,
            mini_epochs=self.mini_epochs,
            mini_epoch=self.mini_epoch,
            remainder=self.remainder,
            consumed=self.consumed,
        )

    @cached_property
    def order(self) -> Order:
        """The row at each position."""
        block_size = DEFAULT_BLOCK_SIZE if self.block_size is None else self.block_size
        window = DEFAULT_WINDOW if self.window is None else self.window
        return make_order(
            self.shuffle, self.samples, seed=self.seed, epoch=self.epoch, block_size=block_size, window=window
        )

    @property
    def length(self) -> int:
        """The number of rows of the whole share."""
        return len(self.partition)

    @property
    def stop(self) -> int:
        """``end`` as a number."""
        return self.length if self.end is None else self.end

    def rows(self, begin: int, end: int) -> Indices:
        """Return the dataset's rows at positions ``begin`` to ``end`` of the share: int64 of shape (end - begin,)."""
        positions = self.partition.positions(begin, end)
        if len(positions) and positions[-1] >= self.samples:  # padding
            positions %= self.samples
        return self.order[positions]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Bytes ``begin`` to ``end`` of a copy in a cache, within one of its hashed blocks of 4 MiB.

    Args:
        copy: the name of the copy, a hash of URL and version: see `penstock.storage.Cache.key`.
        begin, end: in bytes.

    Raises:
        TicketError: a value of a wrong type or outside its range.
    """

    copy: str
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not _is_hexadecimal(self.copy):
            raise TicketError(f"the name of a copy has 32 hexadecimal digits, got {self.copy!r:.80}")
        _integer("begin", self.begin, 0, MAX_N)
        _integer("end", self.end, self.begin + 1, (self.begin // PIECE + 1) * PIECE)


_BLOCK = [field.name for field in fields(Block)]

Key = tuple[str | None, str | None]
"""Name and fingerprint of a dataset; None means the only dataset, and its newest version."""

_OPTIONAL = ("block_size", "window", "end")
_RANGES = {
    "samples": (0, MAX_N),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "epoch": (0, MAX_N),
    "block_size": (1, _MAX_COUNT),
    "window": (1, _MAX_COUNT),
    "world_size": (1, _MAX_COUNT),
    "rank": (0, _MAX_COUNT),
    "mini_epochs": (1, _MAX_COUNT),
    "mini_epoch": (0, _MAX_COUNT),
    "consumed": (0, MAX_N),
    "begin": (0, MAX_N),
    "end": (0, MAX_N),
    "page_rows": (1, _MAX_COUNT),
    "order_version": (0, _MAX_COUNT),
}
_FIELDS = [field.name for field in fields(Slice)]


def encode(slice_: Slice) -> bytes:
    """Return the ticket for a slice."""
    return _dump(asdict(slice_))


def decode(data: bytes) -> Slice:
    """Return the slice of a ticket.

    Raises:
        TicketError: the ticket is invalid; the message names the problem.
    """
    return Slice(**_load(data, _FIELDS, "ticket"))


def encode_block(block: Block) -> bytes:
    """Return the ticket for a block."""
    return _dump(asdict(block))


def is_block(data: bytes) -> bool:
    """Return whether a ticket is for a block, and not for a slice."""
    return data.startswith(b'{"version":1,"copy":')


def decode_block(data: bytes) -> Block:
    """Return the block of a ticket.

    Raises:
        TicketError: the ticket is invalid; the message names the problem.
    """
    return Block(**_load(data, _BLOCK, "ticket"))


def as_numbers(indices: Any) -> Indices:
    """Return row numbers as a one-dimensional int64 array; TypeError if they are not integers."""
    array = np.asarray(indices)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"row numbers must be a sequence of integers, not {array.dtype} of shape {array.shape}")
    if array.dtype == np.uint64:
        array = np.minimum(array, np.iinfo(np.int64).max)  # outside of every dataset, and not negative
    return array.astype(np.int64, copy=False)


@lru_cache(maxsize=256)
def encode_key(name: str | None, fingerprint: str | None) -> bytes:
    """Return the text that names a dataset, or one of its versions."""
    return _dump({"name": name, "fingerprint": fingerprint})


def decode_key(data: bytes) -> Key:
    """Return the arguments of `encode_key`; TicketError for an invalid text."""
    found = _load(data, ["name", "fingerprint"], "command")
    name, fingerprint = found["name"], found["fingerprint"]
    _check_key("x" if name is None else name, "0" * 32 if fingerprint is None else fingerprint)
    return name, fingerprint


def encode_rows(numbers: Indices) -> pa.Buffer:
    """Return a request for rows by number: 8 bytes each, little-endian."""
    return pa.py_buffer(np.ascontiguousarray(numbers, "<i8"))


def decode_rows(request: pa.Buffer | None, rows: int) -> Indices:
    """Return the argument of `encode_rows`; TicketError for invalid data, and for numbers outside ``[0, rows)``."""
    if request is None or request.size % 8:
        size = "none" if request is None else f"{request.size} bytes"
        raise TicketError(f"a request for rows needs 8 bytes of metadata for each row, but this one has {size} bytes")
    numbers = np.frombuffer(request, "<i8")
    if len(numbers) and int(np.maximum.reduce(numbers.view("<u8"))) >= rows:  # unsigned, so negative numbers are huge
        low, high = int(numbers.min()), int(numbers.max())
        raise TicketError(f"row {low if low < 0 else high} was requested of {rows} rows")
    return numbers


def encode_prefix(name: str, fingerprint: str, rows: int) -> bytes:
    """Return the request for the fingerprints that a dataset had with fewer rows."""
    return _dump({"name": name, "fingerprint": fingerprint, "rows": rows})


def decode_prefix(data: bytes) -> tuple[str, str, int]:
    """Return the arguments of `encode_prefix`; TicketError for an invalid text."""
    found = _load(data, ["name", "fingerprint", "rows"], "command")
    _check_key(found["name"], found["fingerprint"])
    return found["name"], found["fingerprint"], _integer("rows", found["rows"], 0, MAX_N)


def encode_error(error: PenstockError) -> bytes:
    """Return an error as its class name and message."""
    text = str(error)
    return _dump(
        {"kind": type(error).__name__, "message": text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."}
    )


def decode_error(data: bytes) -> PenstockError | None:
    """Return the error of `encode_error`, or None for other data. Unknown kinds become `ServerError`."""
    try:
        found = _load(data, ["kind", "message"], "error")
    except TicketError:
        return None
    if not isinstance(found["kind"], str) or not isinstance(found["message"], str):
        return None
    kind = getattr(errors, found["kind"], None) if found["kind"] in errors.__all__ else None
    if kind is None:
        return ServerError(f"{found['kind']}: {found['message']}")
    result: PenstockError = kind(found["message"])
    return result


def _dump(values: dict[str, Any]) -> bytes:
    return json.dumps({"version": _VERSION, **values}, separators=(",", ":")).encode("ascii")


def _load(data: bytes, names: list[str], what: str) -> dict[str, Any]:
    """Return the values of a JSON object with exactly these names; TicketError for other data."""
    if len(data) > _MAX_REQUEST:
        raise TicketError(f"this {what} has {len(data)} bytes, more than the limit of {_MAX_REQUEST}")
    try:
        found = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TicketError(f"this {what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise TicketError(f"this {what} is not a JSON object")
    version = found.pop("version", None)
    if version != _VERSION or type(version) is not int:
        raise TicketError(f"this {what} has version {version!r:.80}, but this server speaks version {_VERSION}")
    if wrong := sorted(found.keys() ^ names):
        verb = "has no" if wrong[0] in names else "has an unknown"
        raise TicketError(f"this {what} {verb} {wrong[0]!r:.80}; it takes {', '.join(names)}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool | float | str) or not hasattr(value, "__index__"):
        raise TicketError(f"{name} must be an integer, got {value!r:.80}")
    number = operator.index(value)
    if not low <= number <= high:
        raise TicketError(f"{name} must be from {low} to {high}, got {number}")
    return number


def _check_key(name: Any, fingerprint: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 255 or not name.isprintable():
        raise TicketError(f"a dataset name has 1 to 255 printable characters, got {name!r:.80}")
    if not _is_hexadecimal(fingerprint):
        raise TicketError(f"a fingerprint has 32 hexadecimal digits, got {fingerprint!r:.80}")


def _is_hexadecimal(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 32 and not set(text) - _HEX


_HEX = frozenset("0123456789abcdef")
