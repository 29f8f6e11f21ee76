"""The wire protocol: requests as small JSON texts and row numbers, rows as Arrow record batches, errors as texts.

    numbers = decode_rows(encode_rows(np.array([5, 3, 5])), rows=10)
    name, fingerprint = decode_key(encode_key("train", "0" * 32))

Promises: a request contains everything that its answer depends on, so servers have no state; a decoder returns valid
values for any bytes, or raises `TicketError`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from penstock import errors
from penstock.errors import PenstockError, ServerError, TicketError
from penstock.order.permutation import MAX_N, Indices

__all__ = [
    "as_numbers",
    "decode_error",
    "decode_key",
    "decode_prefix",
    "decode_rows",
    "encode_error",
    "encode_key",
    "encode_prefix",
    "encode_rows",
]

_VERSION = 1
_MAX_REQUEST = 4096  # bytes
_MAX_TEXT = 1000  # characters of an error message, which is sent in a header


def as_numbers(indices: Any) -> Indices:
    """Return row numbers as a one-dimensional int64 array; TypeError if they are not integers."""
    array = np.asarray(indices)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"row numbers must be a sequence of integers, not {array.dtype} of shape {array.shape}")
    if array.dtype == np.uint64:
        array = np.minimum(array, np.iinfo(np.int64).max)  # outside of every dataset, and not negative
    return array.astype(np.int64, copy=False)


def encode_rows(numbers: Indices) -> pa.Buffer:
    """Return a request for rows by number, a copy of them: 8 bytes each, little-endian."""
    return pa.py_buffer(numbers.astype("<i8", copy=False).tobytes())


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


@lru_cache(maxsize=256)
def encode_key(name: str | None, fingerprint: str | None) -> bytes:
    """Return the text that names a dataset (None: the only one) and its version (None: the newest)."""
    return _dump({"name": name, "fingerprint": fingerprint})


def decode_key(data: bytes) -> tuple[str | None, str | None]:
    """Return the arguments of `encode_key`; TicketError for an invalid text."""
    found = _load(data, ["name", "fingerprint"], "command")
    name, fingerprint = found["name"], found["fingerprint"]
    _check_key("x" if name is None else name, "0" * 32 if fingerprint is None else fingerprint)
    return name, fingerprint


def encode_prefix(name: str, fingerprint: str, rows: int) -> bytes:
    """Return the request for the fingerprints that a dataset had with fewer rows."""
    return _dump({"name": name, "fingerprint": fingerprint, "rows": rows})


def decode_prefix(data: bytes) -> tuple[str, str, int]:
    """Return the arguments of `encode_prefix`; TicketError for an invalid text."""
    found = _load(data, ["name", "fingerprint", "rows"], "command")
    _check_key(found["name"], found["fingerprint"])
    rows = found["rows"]
    if type(rows) is not int:
        raise TicketError(f"rows must be an integer, got {rows!r:.80}")
    if not 0 <= rows <= MAX_N:
        raise TicketError(f"rows must be from 0 to {MAX_N}, got {rows}")
    return found["name"], found["fingerprint"], rows


def encode_error(error: PenstockError) -> bytes:
    """Return an error as its class name and message."""
    text = str(error)
    if len(text) > _MAX_TEXT:
        text = text[:_MAX_TEXT] + "..."
    return _dump({"kind": type(error).__name__, "message": text})


def decode_error(data: bytes) -> PenstockError | None:
    """Return the error of `encode_error`, or None for other data. Unknown kinds become `ServerError`."""
    try:
        found = _load(data, ["kind", "message"], "error")
    except TicketError:
        return None
    kind, message = found["kind"], found["message"]
    if not isinstance(kind, str) or not isinstance(message, str):
        return None
    if kind not in errors.__all__:
        return ServerError(f"{kind}: {message}")
    result: PenstockError = getattr(errors, kind)(message)
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


def _check_key(name: Any, fingerprint: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= 255 or not name.isprintable():
        raise TicketError(f"a dataset name has 1 to 255 printable characters, got {name!r:.80}")
    if not isinstance(fingerprint, str) or len(fingerprint) != 32 or set(fingerprint) - set("0123456789abcdef"):
        raise TicketError(f"a fingerprint has 32 hexadecimal digits, got {fingerprint!r:.80}")
