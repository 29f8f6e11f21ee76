"""Tickets: what is encoded comes back; whatever else arrives is refused in words. 25,000 inputs, in full 100,000."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_support import FULL

from penstock import errors
from penstock.errors import ServerChangedError, ServerError, TicketError
from penstock.order import ORDER_VERSION, Partition, make_order
from penstock.server.protocol import (
    Slice,
    as_numbers,
    decode,
    decode_error,
    decode_key,
    decode_prefix,
    encode,
    encode_error,
    encode_key,
    encode_prefix,
)

PLAIN = Slice(name="train", fingerprint="0123456789abcdef" * 2, samples=1000)
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


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    samples = draw(st.integers(0, 1 << 62) | st.integers(0, 100))
    world_size, mini_epochs = draw(st.integers(1, 1 << 30)), draw(st.integers(1, 1000))
    shuffle = draw(st.sampled_from(["global", "block", "none"]))
    blocks = {"block_size": draw(st.integers(1, 1 << 30)), "window": draw(st.integers(1, 1 << 30))}
    part = Slice(
        name=draw(names),
        fingerprint=draw(fingerprints),
        samples=samples,
        seed=draw(st.integers(-(1 << 63), (1 << 64) - 1)),
        epoch=draw(st.integers(0, 1 << 62)),
        shuffle=shuffle,
        world_size=world_size,
        rank=draw(st.integers(0, world_size - 1)),
        mini_epochs=mini_epochs,
        mini_epoch=draw(st.integers(0, mini_epochs - 1)),
        remainder=draw(st.sampled_from(["pad", "drop", "uneven"])),
        consumed=draw(st.integers(0, samples)),
        page_rows=draw(st.integers(1, 1 << 30)),
        **(blocks if shuffle == "block" and draw(st.booleans()) else {}),
    )
    end = draw(st.none() | st.integers(0, part.length))
    return replace(part, begin=draw(st.integers(0, part.length if end is None else end)), end=end)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 9) | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def refused_or_valid(data: bytes) -> None:
    try:
        slice_ = decode(data)
    except TicketError as error:
        said = str(error)
    else:
        said = "well"
        assert decode(encode(slice_)) == slice_
        assert 0 <= slice_.begin <= slice_.stop <= slice_.length
        if slice_.begin < slice_.stop and slice_.samples < 1 << 20 and slice_.shuffle != "block":
            [row] = slice_.rows(slice_.begin, slice_.begin + 1)
            assert 0 <= row < slice_.samples
    assert 0 < len(said) < 1000


@few
@given(slices())
def test_round_trip(slice_: Slice) -> None:
    assert decode(encode(slice_)) == slice_
    assert encode(decode(encode(slice_))) == encode(slice_)


@few
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    refused_or_valid(data)


@few
@given(st.sampled_from(sorted({*asdict(PLAIN), "version", "more"})), junk)
def test_any_value_of_any_field(name: str, value: Any) -> None:
    refused_or_valid(json.dumps({"version": 1, **asdict(PLAIN), name: value}).encode())


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
    whole = replace(PLAIN, shuffle="block", block_size=7, window=3, end=90, rank=3, world_size=5)
    for _ in range(100):
        text = bytearray(encode(whole if chance.random() < 0.5 else PLAIN))
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
        ({"samples": -1}, "samples must be from 0"),
        ({"samples": True}, "samples must be an integer"),
        ({"samples": 3.0}, "samples must be an integer"),
        ({"samples": "3"}, "samples must be an integer"),
        ({"seed": 1 << 64}, "seed must be"),
        ({"epoch": -1}, "epoch must be"),
        ({"shuffle": "globule"}, "unknown shuffle 'globule'"),
        ({"shuffle": ["global"]}, "unknown shuffle"),
        ({"block_size": 3}, "belong to shuffle='block'"),
        ({"shuffle": "block", "window": 0}, "window must be from 1"),
        ({"world_size": 0}, "world_size must be from 1"),
        ({"rank": 1}, "rank 1 is outside the world of 1"),
        ({"mini_epoch": 1}, "mini_epoch 1 is outside"),
        ({"remainder": "keep"}, "unknown remainder 'keep'"),
        ({"remainder": None}, "unknown remainder None"),
        ({"begin": 5, "end": 4}, "rows 5 to 4 were requested of a share of 1000 rows"),
        ({"end": 1001}, "rows 0 to 1001 were requested of a share of 1000 rows"),
        ({"end": 1 << 62}, "of a share of 1000"),
        ({"page_rows": 0}, "page_rows must be from 1"),
        (
            {"order_version": ORDER_VERSION + 1},
            f"order version {ORDER_VERSION + 1} was requested, but this server computes version {ORDER_VERSION}",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TicketError, match=message):
        replace(PLAIN, **changes)
    with pytest.raises(TicketError, match=message):
        decode(json.dumps({"version": 1, **asdict(PLAIN), **changes}).encode())


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
        decode(data)


def test_rows_are_those_of_order_and_partition() -> None:
    part = replace(PLAIN, seed=3, epoch=2, world_size=7, rank=5, mini_epochs=3, mini_epoch=2, consumed=21)
    partition = Partition(1000, 7, 5, mini_epochs=3, mini_epoch=2, consumed=21)
    order = make_order("global", 1000, seed=3, epoch=2)
    assert part.length == len(partition)
    assert part.rows(4, 9).tolist() == [order[partition[k] % 1000] for k in range(4, 9)]


def test_integers_of_numpy_are_integers() -> None:
    assert replace(PLAIN, rank=np.int64(0), end=np.int32(5)) == replace(PLAIN, end=5)


def test_keys() -> None:
    for name, fingerprint in [("a b/ü", PLAIN.fingerprint), (None, None), ("x", None)]:
        assert decode_key(encode_key(name, fingerprint)) == (name, fingerprint)
    assert decode_prefix(encode_prefix("x", PLAIN.fingerprint, 7)) == ("x", PLAIN.fingerprint, 7)


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


def test_row_numbers() -> None:
    assert as_numbers([]).dtype == np.int64
    assert as_numbers(np.array([3, 4], np.uint8)).tolist() == [3, 4]
    for wrong in ([1.5], ["a"], [[1]], 3):
        with pytest.raises(TypeError, match="sequence of integers"):
            as_numbers(wrong)
