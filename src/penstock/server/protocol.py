"""What crosses the wire: requests as small JSON texts, rows as Arrow record batches, errors as a kind and a message.

    slice_ = Slice(name="train", fingerprint=info.fingerprint, samples=info.rows, world_size=8, rank=3, seed=0, epoch=2)
    decode(encode(slice_)) == slice_

Promises: a request says everything that its answer depends on, so servers keep no state; its rows follow from the
arithmetic of `penstock.order`, which `RankDataset` uses too; whatever bytes arrive, `decode` gives a valid `Slice` or
raises `TicketError`.
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
"""Rows of a record batch: at this size what a page touches still fits the processor's cache."""

MAX_ROWS = 1 << 16
"""Rows that the client asks for by number in one request; it cuts longer lists."""

_VERSION = 1
_MAX_REQUEST = 4096  # bytes
_MAX_COUNT = 1 << 30  # ranks, mini-epochs, block sizes: products of two still fit 64 bits
_MAX_TEXT = 1000  # characters of an error message: it travels in a header


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rows ``begin`` to ``end`` of one rank's share of one mini-epoch: everything that they depend on.

    Args:
        name, fingerprint: the data set and its version.
        samples: rows of the epoch; all of the data set, or those that it had when a resumed epoch began.
        seed, epoch, shuffle, block_size, window: as for `penstock.order.make_order`; the sizes for ``"block"`` only.
        world_size, rank, mini_epochs, mini_epoch, remainder, consumed: as for `penstock.order.Partition`.
        begin, end: rows of the share; None is its end.
        page_rows: rows of a record batch, the last one and those of long rows excepted.
        order_version: of the arithmetic.

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
            raise TicketError(f"the order of version {self.order_version} is asked for, and this is {ORDER_VERSION}")
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
            raise TicketError(f"rows {self.begin} to {self.stop} are asked for of a share of {length}")

    @cached_property
    def partition(self) -> Partition:
        """Which positions the rank's share has."""
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
        """Which row stands at a position."""
        block_size = DEFAULT_BLOCK_SIZE if self.block_size is None else self.block_size
        window = DEFAULT_WINDOW if self.window is None else self.window
        return make_order(
            self.shuffle, self.samples, seed=self.seed, epoch=self.epoch, block_size=block_size, window=window
        )

    @property
    def length(self) -> int:
        """Rows of the whole share."""
        return len(self.partition)

    @property
    def stop(self) -> int:
        """``end`` as a number."""
        return self.length if self.end is None else self.end

    def rows(self, begin: int, end: int) -> Indices:
        """Rows of the data set that stand at ``begin`` to ``end`` of the share: int64 of shape (end - begin,)."""
        positions = self.partition.positions(begin, end)
        if len(positions) and positions[-1] >= self.samples:  # padding
            positions %= self.samples
        return self.order[positions]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Bytes ``begin`` to ``end`` of a copy in a cache, all of them of one of the blocks of 4 MiB that it has hashes of.

    Args:
        copy: the name of the copy, which is a hash of address and version: see `penstock.storage.Cache.key`.
        begin, end: in bytes.

    Raises:
        TicketError: a value of a wrong type or outside its range.
    """

    copy: str
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not _is_hexadecimal(self.copy):
            raise TicketError(f"the name of a copy is 32 hexadecimal digits, got {self.copy!r:.80}")
        _integer("begin", self.begin, 0, MAX_N)
        _integer("end", self.end, self.begin + 1, (self.begin // PIECE + 1) * PIECE)


_BLOCK = [field.name for field in fields(Block)]

Key = tuple[str | None, str | None]
"""Name and fingerprint of a data set; None is the only one, and the newest version."""

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
    """The ticket for a slice."""
    return _dump(asdict(slice_))


def decode(data: bytes) -> Slice:
    """The slice of a ticket.

    Raises:
        TicketError: anything but a valid ticket; the message says what is wrong.
    """
    return Slice(**_load(data, _FIELDS, "ticket"))


def encode_block(block: Block) -> bytes:
    """Return the ticket for a block."""
    return _dump(asdict(block))


def is_block(data: bytes) -> bool:
    """Return whether a ticket is for a block, and not for a slice."""
    return data.startswith(b'{"version":1,"copy":')


def decode_block(data: bytes) -> Block:
    """Return what `encode_block` was given.

    Raises:
        TicketError: anything but a valid ticket; the message says what is wrong.
    """
    return Block(**_load(data, _BLOCK, "ticket"))


def as_numbers(indices: Any) -> Indices:
    """Row numbers as an int64 array of one dimension. TypeError for anything but integers."""
    array = np.asarray(indices)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"rows are asked for by a sequence of integers, not {array.dtype} of shape {array.shape}")
    if array.dtype == np.uint64:
        array = np.minimum(array, np.iinfo(np.int64).max)  # outside of every data set, and not negative
    return array.astype(np.int64, copy=False)


@lru_cache(maxsize=256)
def encode_key(name: str | None, fingerprint: str | None) -> bytes:
    """The text that names a data set, or a version of it."""
    return _dump({"name": name, "fingerprint": fingerprint})


def decode_key(data: bytes) -> Key:
    """What `encode_key` was given. TicketError for anything else."""
    found = _load(data, ["name", "fingerprint"], "command")
    name, fingerprint = found["name"], found["fingerprint"]
    _check_key("x" if name is None else name, "0" * 32 if fingerprint is None else fingerprint)
    return name, fingerprint


def encode_rows(numbers: Indices) -> pa.Buffer:
    """A request for rows by number: 8 bytes each, little-endian."""
    return pa.py_buffer(np.ascontiguousarray(numbers, "<i8"))


def decode_rows(request: pa.Buffer | None, rows: int) -> Indices:
    """What `encode_rows` was given. TicketError for anything else, and for numbers outside ``[0, rows)``."""
    if request is None or request.size % 8:
        size = "none" if request is None else f"{request.size} bytes"
        raise TicketError(f"a request for rows has metadata of 8 bytes for each of them, and this has {size}")
    numbers = np.frombuffer(request, "<i8")
    if len(numbers) and int(np.maximum.reduce(numbers.view("<u8"))) >= rows:  # without a sign negative ones are huge
        low, high = int(numbers.min()), int(numbers.max())
        raise TicketError(f"row {low if low < 0 else high} is asked for, and there are {rows}")
    return numbers


def encode_prefix(name: str, fingerprint: str, rows: int) -> bytes:
    """The text that asks for what a data set was called when it had fewer rows."""
    return _dump({"name": name, "fingerprint": fingerprint, "rows": rows})


def decode_prefix(data: bytes) -> tuple[str, str, int]:
    """What `encode_prefix` was given. TicketError for anything else."""
    found = _load(data, ["name", "fingerprint", "rows"], "command")
    _check_key(found["name"], found["fingerprint"])
    return found["name"], found["fingerprint"], _integer("rows", found["rows"], 0, MAX_N)


def encode_error(error: PenstockError) -> bytes:
    """An error as a kind, which is the name of its class, and a message."""
    text = str(error)
    return _dump(
        {"kind": type(error).__name__, "message": text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."}
    )


def decode_error(data: bytes) -> PenstockError | None:
    """What `encode_error` was given, or None for anything else. Kinds unknown here are a `ServerError`."""
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
    """The values of a JSON object with exactly these names. TicketError for anything else."""
    if len(data) > _MAX_REQUEST:
        raise TicketError(f"this {what} has {len(data)} bytes, and no {what} has more than {_MAX_REQUEST}")
    try:
        found = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TicketError(f"this {what} is not JSON of ours: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise TicketError(f"this {what} is not a JSON object")
    version = found.pop("version", None)
    if version != _VERSION or type(version) is not int:
        raise TicketError(f"this {what} is of version {version!r:.80}, and this server speaks version {_VERSION}")
    if wrong := sorted(found.keys() ^ names):
        verb = "has no" if wrong[0] in names else "has an unknown"
        raise TicketError(f"this {what} {verb} {wrong[0]!r:.80}; it takes {', '.join(names)}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool | float | str) or not hasattr(value, "__index__"):
        raise TicketError(f"{name} must be an integer, got {value!r:.80}")
    number = operator.index(value)
    if not low <= number <= high:
        raise TicketError(f"{name} must be from {low} to {high}, got {number}")
    return number


def _check_key(name: Any, fingerprint: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 255 or not name.isprintable():
        raise TicketError(f"the name of a data set is 1 to 255 printable characters, got {name!r:.80}")
    if not _is_hexadecimal(fingerprint):
        raise TicketError(f"a fingerprint is 32 hexadecimal digits, got {fingerprint!r:.80}")


def _is_hexadecimal(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 32 and not set(text) - _HEX


_HEX = frozenset("0123456789abcdef")
