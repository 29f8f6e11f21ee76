"""States of the user's own objects, such as samplers, datasets and iterators.

An object has a state if it has ``state_dict()`` and ``load_state_dict(state)``. A state is frozen when it is taken: it
becomes a pickle, so later changes, also to tensors, do not affect it, and it can be sent.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

from penstock.errors import StateError, escaped
from penstock.plan.reader import Plan

__all__ = ["freeze", "has_state", "load_states", "same_states", "states_of", "thaw"]


def has_state(item: Any) -> bool:
    """Return whether a user's object has a state of its own. A Penstock dataset has the cursor of its plan instead."""
    return (
        hasattr(item, "state_dict")
        and hasattr(item, "load_state_dict")
        and not isinstance(item, type)
        and not isinstance(getattr(item, "plan", None), Plan)
    )


def freeze(state: Any) -> bytes:
    """Return a copy that shares nothing with the original.

    Raises:
        Exception: it cannot be pickled.
    """
    return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)


def thaw(frozen: bytes) -> Any:
    """Return a new copy of a frozen state."""
    return pickle.loads(frozen)


def states_of(**items: Any) -> dict[str, Any]:
    """Return the current states of the objects that have one, by keyword, not frozen.

    An object that is its own ``iterator`` counts as the iterator, because its state must be loaded after ``iter()``.
    """
    states: dict[str, Any] = {}
    for name, item in items.items():
        if has_state(item) and (name == "iterator" or item is not items.get("iterator")):
            try:
                state = item.state_dict()
            except StopIteration as stop:  # it would end the batches that the state is taken with
                raise escaped(stop) from stop
            if state is not None:  # Hugging Face's is None before the first iteration
                states[name] = state
    return states


def load_states(states: Mapping[str, Any], **items: Any) -> None:
    """Load the states of the given objects, by keyword and in this order, if they have one.

    Raises:
        StateError: an object with a state has no ``load_state_dict``.
    """
    for name, item in items.items():
        if name not in states:
            continue
        if not has_state(item):
            raise StateError(
                f"the state contains one of the {name.replace('_', ' ')}, but {type(item).__name__} has no "
                "load_state_dict: resume with the same objects, or start without the state"
            )
        item.load_state_dict(states[name])


def same_states(one: Any, other: Any) -> bool:
    """Return whether two states are equal, even if one went through JSON, which turns tuples into lists."""
    try:
        return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    except (TypeError, ValueError):  # tensors and arrays
        return freeze(one) == freeze(other)
