"""Tickets: what is encoded comes back; whatever else arrives is refused in words. 25,000 inputs, in full 100,000."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_support import FULL

from penstock import errors
from penstock.errors import ServerChangedError, ServerError, TicketError
from penstock.server.protocol import (
    as_numbers,
    decode_error,
    decode_key,
    decode_prefix,
    decode_rows,
    encode_error,
    encode_key,
    encode_prefix,
    encode_rows,
)

FINGERPRINT = "0123456789abcdef" * 2
PREFIX = {"name": "train", "fingerprint": FINGERPRINT, "rows": 1000}
few = settings(max_examples=1000 if FULL else 100, deadline=None, database=None)
PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b":",
    b",",
    b"-",
    b"0",
    b"9" * 30,
    b"e9",
    b".5",
    b"null",
    b"true",
    b'""',
    b"\\ud800",
    b"NaN",
]
names = st.text(min_size=1, max_size=20).filter(str.isprintable)
fingerprints = st.text("0123456789abcdef", min_size=32, max_size=32)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 9) | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def refused_or_valid(data: bytes) -> None:
    """Each decoder returns what its encoder takes, or says why not."""
    for decode, encode in (
        (decode_key, lambda found: encode_key(*found)),
        (decode_prefix, lambda found: encode_prefix(*found)),
    ):
        try:
            found = decode(data)
        except TicketError as error:
            said = str(error)
        else:
            said = "well"
            assert decode(encode(found)) == found  # type: ignore[no-untyped-call]
        assert 0 < len(said) < 1000


@few
@given(names, fingerprints, st.integers(0, 1 << 62))
def test_round_trip(name: str, fingerprint: str, number: int) -> None:
    assert decode_key(encode_key(name, fingerprint)) == (name, fingerprint)
    assert decode_prefix(encode_prefix(name, fingerprint, number)) == (name, fingerprint, number)


@few
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    refused_or_valid(data)


@few
@given(st.sampled_from(["version", *PREFIX, "more"]), junk)
def test_any_value_of_any_field(name: str, value: Any) -> None:
    refused_or_valid(json.dumps({"version": 1, **PREFIX, name: value}).encode())


@few
@given(junk)
def test_any_json_is_refused(value: Any) -> None:
    data = json.dumps(value).encode()
    refused_or_valid(data)
    for parse in (decode_key, decode_prefix):
        with pytest.raises(TicketError):
            parse(data)
    found = decode_error(data)
    assert found is None or isinstance(found, errors.PenstockError)


@settings(few, max_examples=960 if FULL else 96)
@given(st.integers(0, 1 << 64))
def test_damaged_tickets(seed: int) -> None:
    """100 tickets an example, each damaged in one to four places: hypothesis draws the seeds, which is much faster."""
    chance = random.Random(seed)
    good = [encode_prefix(*PREFIX.values()), encode_key("train", FINGERPRINT)]  # type: ignore[arg-type]
    for _ in range(100):
        text = bytearray(chance.choice(good))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text))
            piece = chance.choice(PIECES) if chance.random() < 0.5 else chance.randbytes(chance.randint(1, 4))
            text[at : at + chance.choice([0, len(piece), 1, 20])] = piece
        refused_or_valid(bytes(text))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"name": ""}, "dataset name"),
        ({"name": "a\nb"}, "dataset name"),
        ({"name": "\ud800"}, "dataset name"),
        ({"name": "x" * 256}, "dataset name"),
        ({"fingerprint": "0" * 31}, "32 hexadecimal digits"),
        ({"fingerprint": "Z" * 32}, "32 hexadecimal digits"),
        ({"rows": -1}, "rows must be from 0"),
        ({"rows": True}, "rows must be an integer"),
        ({"rows": 3.0}, "rows must be an integer"),
        ({"rows": "3"}, "rows must be an integer"),
        ({"rows": 1 << 70}, "rows must be from 0"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TicketError, match=message):
        decode_prefix(json.dumps({"version": 1, **PREFIX, **changes}).encode())


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 4000, "not valid JSON"),
        (b"1" * 4000, "not a JSON object|not valid JSON"),
        (b" " * 5000, "5000 bytes"),
        (b"null", "not a JSON object"),
        (b'{"version": 1, "version": 1}', "occurs twice"),
        (b'{"version": 2}', "version 2"),
        (b'{"version": true}', "version True"),
        (b'{"version": 1, "name": NaN}', "NaN is not a number"),
        (b'{"version": 1, "nothing": 0}', "has (no|an unknown)"),
    ],
)
def test_bytes_that_are_no_ticket(data: bytes, message: str) -> None:
    with pytest.raises(TicketError, match=message):
        decode_key(data)


def test_keys() -> None:
    for name, fingerprint in [("a b/ü", FINGERPRINT), (None, None), ("x", None)]:
        assert decode_key(encode_key(name, fingerprint)) == (name, fingerprint)


def test_errors_cross_as_kind_and_message() -> None:
    back = decode_error(encode_error(ServerChangedError("ü: other data")))
    assert type(back) is ServerChangedError
    assert str(back) == "ü: other data"
    assert len(str(decode_error(encode_error(TicketError("x" * 9000))))) < 1100
    unknown = decode_error(b'{"version":1,"kind":"NewError","message":"m"}')
    assert type(unknown) is ServerError
    assert str(unknown) == "NewError: m"


def test_odd_errors() -> None:
    for data in (
        b"",
        b"no json",
        b'{"version":1,"kind":3,"message":"m"}',
        b'{"version":1,"kind":"TicketError","message":3}',
    ):
        assert decode_error(data) is None


@pytest.mark.parametrize("numbers", [[], [3, 1, 3], [9]])
def test_rows(numbers: list[int]) -> None:
    assert decode_rows(encode_rows(np.array(numbers, np.int64)), 10).tolist() == numbers


@pytest.mark.parametrize(
    "request_, message",
    [
        (None, "none"),
        (b"1234567", "7 bytes"),
        (b"\xff" * 8, "row -1 was"),
        (b"\n" + b"\0" * 7, "row 10 was requested of 10"),
    ],
)
def test_requests_for_rows_are_checked(request_: bytes | None, message: str) -> None:
    with pytest.raises(TicketError, match=message):
        decode_rows(None if request_ is None else pa.py_buffer(request_), 10)


def test_row_numbers() -> None:
    assert as_numbers([]).dtype == np.int64
    assert as_numbers(np.array([3, 4], np.uint8)).tolist() == [3, 4]
    for wrong in ([1.5], ["a"], [[1]], 3):
        with pytest.raises(TypeError, match="sequence of integers"):
            as_numbers(wrong)
