"""Classes of lengths: in order, of equal token mass, and exact about what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OrderError
from penstock.order import length_classes
from penstock.order.length_classes import LengthClasses

LENGTHS = st.lists(st.integers(0, 30) | st.integers(0, 1 << 40), max_size=60)


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 100) | st.integers(1, 1 << 41), st.integers(1, 20))
def test_a_class_has_what_its_ends_say(lengths: list[int], limit: int, count: int) -> None:
    array = np.array(lengths, dtype=np.int64)
    classes = LengthClasses(array, limit, count)
    numbers = classes.of(array)
    assert len(classes) <= count + 1
    assert (np.diff(classes.longest[1:]) < 0).all(), "from the longest to the shortest"
    assert np.bincount(numbers, minlength=len(classes)).tolist() == classes.samples.tolist()
    shorter = np.append(classes.longest, 0)
    for length, number in zip(lengths, numbers.tolist(), strict=True):
        assert (number == 0) == (length > limit)
        if number:
            assert shorter[number + 1] < max(1, length) <= classes.longest[number] <= limit
    above = [(row, length) for row, length in enumerate(lengths) if length > limit]
    assert classes.misfit == (above[0] if above else None)
    assert classes.longest[0] == max([length for _, length in above], default=limit)


@pytest.mark.parametrize("kind", ["one hump", "two humps", "uniform"])
def test_classes_pad_less_than_those_of_equal_size_or_tokens(kind: str) -> None:
    rng = np.random.default_rng(0)
    drawn = {
        "one hump": lambda: rng.lognormal(6, 1, 50_000),
        "two humps": lambda: np.where(
            rng.random(50_000) < 0.7, rng.normal(80, 20, 50_000), rng.normal(4_000, 800, 50_000)
        ),
        "uniform": lambda: rng.uniform(1, 8_000, 50_000),
    }
    lengths = np.sort(np.clip(drawn[kind](), 1, 8_000).astype(np.uint16))
    classes = LengthClasses(lengths, 65_536, 64)
    assert len(classes) == 64 + 1
    padded = int((classes.longest * classes.samples)[1:].sum())
    for weights in (np.ones(50_000), lengths):
        shares = np.cumsum(weights) / weights.sum(dtype=np.float64)
        ends = lengths[np.searchsorted(shares, np.arange(1, 65) / 64 - 1e-9)]
        others = ends[np.searchsorted(ends, lengths)].sum(dtype=np.int64)
        assert padded - lengths.sum(dtype=np.int64) < 1.02 * (others - lengths.sum(dtype=np.int64))


def test_there_are_no_more_classes_than_lengths() -> None:
    assert len(LengthClasses(np.full(100, 10), 100, 256)) == 1 + 1
    assert len(LengthClasses(np.array([1, 7, 2, 7]), 100, 256)) == 1 + 3
    assert len(LengthClasses(np.arange(0), 100, 256)) == 1 + 1


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(1).integers(0, 500, 1_000)
    whole = LengthClasses(lengths, 400, 9)
    monkeypatch.setattr(length_classes, "_CHUNK", 70)
    found = LengthClasses(lengths, 400, 9)
    assert found.misfit == whole.misfit
    for name in ("longest", "samples"):
        assert np.array_equal(getattr(found, name), getattr(whole, name))


def test_bad_lengths_are_named() -> None:
    with pytest.raises(OrderError, match="sample 1 has length -2"):
        LengthClasses(np.array([1, -2]), 10, 4)
    with pytest.raises(OrderError, match="lengths must be integers, one per sample, got float64"):
        LengthClasses(np.array([1.5]), 10, 4)
