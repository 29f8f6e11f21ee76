"""A cursor goes to JSON and back, a state to any checkpoint. What else comes in their place is refused by its name."""

from __future__ import annotations

import json
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import StateError
from penstock.plan.cursor import Cursor, check_state, pack, read_int, read_ints, read_mapping, unpack

PLAN = {"order_version": 1, "shuffle": "global", "samples": 1000, "seed": 3}
INNER = {"order": "inner", "samples": 7}

read = partial(Cursor.read, of="Sampler", plan=PLAN)
read_inner = partial(Cursor.read, of="Inner", plan=INNER)

counts = st.integers(0, (1 << 62) - 1)
plans = st.dictionaries(st.sampled_from(["order", "seed", "samples", "batches"]), st.integers() | st.text(max_size=9))
entropies = st.dictionaries(st.sampled_from(["drawn", "hash", "states"]), counts | st.text(max_size=9))


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


@given(
    epoch=counts,
    consumed=counts,
    unit=st.sampled_from(["sample", "batch", "iteration"]),
    plan=plans,
    entropy=entropies,
    inner=st.none() | st.tuples(counts, counts),
)
def test_a_cursor_comes_back(
    epoch: int, consumed: int, unit: str, plan: Any, entropy: Any, inner: tuple[int, int] | None
) -> None:
    sampler = None if inner is None else Cursor(epoch=inner[0], consumed=inner[1], plan=INNER)
    cursor = Cursor(epoch=epoch, consumed=consumed, unit=unit, plan=plan, entropy=entropy, sampler=sampler)
    state = through_json(cursor.state())
    again = Cursor.read(state, of="Sampler", plan=plan, unit=unit, sampler=None if sampler is None else read_inner)
    assert again == cursor
    assert through_json(again.state()) == state


def test_a_state_is_short() -> None:
    state = Cursor(epoch=3, consumed=640, plan=PLAN).state()
    assert state == {**PLAN, "unit": "sample", "epoch": 3, "consumed": 640}
    assert Cursor().state() == {"unit": "sample", "epoch": 0, "consumed": 0}


def test_a_cursor_does_not_change() -> None:
    cursor = Cursor(epoch=1, entropy={"drawn": 5})
    with pytest.raises(AttributeError):
        cursor.epoch = 2  # type: ignore[misc]
    cursor.state()["entropy"]["drawn"] = 6
    assert cursor.entropy == {"drawn": 5}


def test_reading_changes_no_state() -> None:
    state = Cursor(plan=PLAN, entropy={"drawn": 5}).state()
    text = json.dumps(state)
    read(state).state()["entropy"]["drawn"] = 6
    assert json.dumps(state) == text


# What is refused.

GOOD = through_json(Cursor(epoch=3, consumed=640, plan=PLAN, entropy={"drawn": 5}).state())

OTHER: dict[str, tuple[Any, ...]] = {
    "shuffle": ("block", None, 3, ["global"]),
    "samples": (1001, "1000", None),
    "seed": (4, None, "3"),
    "unit": ("batch", None),
}
"""Entries of another plan: the message has both values."""

DAMAGED: dict[str, tuple[Any, ...]] = {
    "epoch": (-1, 1.0, "3", None, True, [3], {}),
    "consumed": (-1, 640.0, "640", None, False, [640], {}),
    "entropy": (None, 3, "drawn", [], True),
}
"""Values that nothing wrote: the message has the value."""


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in OTHER for value in OTHER[field]])
def test_another_plan_is_refused_by_both_values(field: str, value: Any) -> None:
    with pytest.raises(StateError) as error:
        read({**GOOD, field: value})
    assert f" is {value!r} in the state and {GOOD[field]!r} here" in str(error.value)
    assert field in str(error.value)
    assert "this Sampler" in str(error.value)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in DAMAGED for value in DAMAGED[field]])
def test_a_damaged_field_is_refused_by_its_value(field: str, value: Any) -> None:
    with pytest.raises(StateError) as error:
        read({**GOOD, field: value})
    assert repr(field) in str(error.value)
    assert f"got {value!r}" in str(error.value)
    assert "this Sampler" in str(error.value)


@pytest.mark.parametrize("field", [*PLAN, "unit", "epoch", "consumed"])
def test_a_missing_field_is_refused_by_its_name(field: str) -> None:
    with pytest.raises(StateError, match=rf"\b{field}\b"):
        read({name: value for name, value in GOOD.items() if name != field})


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(StateError) as error:
        read({**GOOD, "shuffle": "block", "seed": 4, "samples": 9})
    for text in ("shuffle is 'block'", "seed is 4", "samples is 9 in the state and 1000 here"):
        assert text in str(error.value)


@pytest.mark.parametrize("field", ["epoch", "consumed"])
def test_counts_beyond_any_data_are_refused(field: str) -> None:
    read({**GOOD, field: (1 << 62) - 1})
    with pytest.raises(StateError, match=rf"'{field}' is {1 << 62}, which is too large"):
        read({**GOOD, field: 1 << 62})


def test_more_than_the_epoch_has_is_refused() -> None:
    assert read(GOOD, most=640).consumed == 640
    with pytest.raises(StateError, match=r"consumed 640 of 639 samples"):
        read(GOOD, most=639)


@pytest.mark.parametrize("state", [None, 3, "text", [], [("epoch", 3)], True])
def test_what_is_no_dict_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match=f"the state of a Sampler must be a dict, got {type(state).__name__}"):
        read(state)


@pytest.mark.parametrize("value", [None, 3, "text", []])
def test_a_damaged_inner_cursor_is_refused(value: Any) -> None:
    good = through_json(Cursor(plan=PLAN, sampler=Cursor(plan=INNER, epoch=2)).state())
    assert read(good, sampler=read_inner).sampler == Cursor(plan=INNER, epoch=2)
    with pytest.raises(StateError) as error:
        read({**good, "sampler": value}, sampler=read_inner)
    assert f"needs a dict 'sampler', got {value!r}" in str(error.value)
    with pytest.raises(StateError, match="needs a dict 'sampler', got None"):
        read(GOOD, sampler=read_inner)
    with pytest.raises(StateError, match=r"this Inner.*'epoch', got -1"):
        read({**good, "sampler": {**good["sampler"], "epoch": -1}}, sampler=read_inner)


@pytest.mark.parametrize(("version", "way"), [(0, "older"), (99, "newer")])
def test_a_state_of_another_order_says_which_penstock_reads_it(version: int, way: str) -> None:
    with pytest.raises(StateError, match=rf"version {version} of .*Resume with the {way} Penstock that wrote it"):
        read({**GOOD, "order_version": version})


# What users get.


class Place(NamedTuple):
    """Something that JSON would change."""

    shard: int
    byte: int


JSON = [{}, GOOD, {"user": {"": [None, True, 1, -0.0, 1e300, 2**70, "\udc80ü", [], {}], "nan": float("nan")}}]
OTHERS: list[Any] = [
    *((1, 2), {3: "x"}, {1.5}, b"x", Place(1, 2), OrderedDict(a=1), Counter("ab"), np.float64(1.5), np.arange(3)),
    *(torch.arange(3), Path("a"), 1j),
]


@pytest.mark.parametrize("entries", JSON)
def test_a_state_is_text_under_one_key(entries: dict[str, Any]) -> None:
    state = pack(entries)
    assert list(state) == ["penstock"]
    assert state["penstock"].startswith('{"version": 3')
    state["mine"] = 1  # a subclass may add entries
    assert repr(unpack(through_json(state), of="Sampler")) == repr(entries)


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_what_json_would_change_is_kept_as_it_is(value: Any) -> None:
    state = {**GOOD, "user": [{"deep": value}]}
    for copied in (pack(state), pickle.loads(pickle.dumps(pack(state)))):
        assert list(copied) == ["penstock"]
        found = unpack(copied, of="Sampler")["user"][0]["deep"]
        assert (type(found), repr(found)) == (type(value), repr(value))


@pytest.mark.parametrize("value", [(1, 2), {3: "x"}, Place(1, 2), Counter("ab")], ids=repr)
def test_what_json_may_change_may_still_become_json(value: Any) -> None:
    state = {**GOOD, "user": value}
    assert unpack(through_json(pack(state)), of="Sampler") == through_json(state)


@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "sampler", "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=4,
        ),
    )
)
def test_damage_of_any_kind_is_a_state_error_or_harmless(damage: dict[str, Any]) -> None:
    try:
        cursor = read({**GOOD, **damage}, most=1000)
    except StateError:
        return
    assert type(cursor.epoch) is type(cursor.consumed) is int
    assert cursor.epoch >= 0
    assert 0 <= cursor.consumed <= 1000
    assert cursor.plan == PLAN


# The parts that others use too.


def test_check_state_takes_further_entries() -> None:
    check_state({"a": 1, "b": 2}, {"a": 1}, of="thing")
    with pytest.raises(StateError, match="b is missing"):
        check_state({"a": 1}, {"a": 1, "b": 2}, of="thing")


def test_integers_lists_and_dicts() -> None:
    state: Mapping[str, Any] = {"n": 5, "list": [1, 2], "dict": {"a": 1}}
    assert read_int(state, "n", of="thing", below=6) == 5
    assert read_ints(state, "list", 2, of="thing") == [1, 2]
    assert read_mapping(state, "dict", of="thing") == {"a": 1}
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: read_int(state, "n", of="thing", below=5), "'n' is 5, which is too large"),
        (lambda: read_int(state, "m", of="thing"), "'m', got None"),
        (lambda: read_ints(state, "list", 3, of="thing"), r"3 counts under 'list', got \[1, 2\]"),
        (lambda: read_ints({"list": [1, True]}, "list", 2, of="thing"), r"got \[1, True\]"),
        (lambda: read_ints({"list": [1, -2]}, "list", 2, of="thing"), r"got \[1, -2\]"),
        (lambda: read_ints({"list": "ab"}, "list", 2, of="thing"), "got 'ab'"),
        (lambda: read_mapping(state, "list", of="thing"), r"a dict 'list', got \[1, 2\]"),
    ]
    for call, message in refused:
        with pytest.raises(StateError, match=message):
            call()


def test_a_state_of_another_sampler_is_refused_by_its_fields() -> None:
    """Through public names: the message is what a user sees."""
    sampler = ps.RandomSampler(range(9), shuffle="global", seed=1)
    state = sampler.state_dict()
    with pytest.raises(
        StateError, match=r"the number of samples is 9 in the state and 10 here; seed is 1 in the state and 2 here"
    ):
        ps.RandomSampler(range(10), shuffle="global", seed=2).load_state_dict(state)
