"""States of the user's own objects, such as samplers, datasets and iterators.

An object has a state if it has ``state_dict()`` and ``load_state_dict(state)``. A state is frozen when it is taken, so
later changes, also to tensors, do not affect it.
"""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

from penstock.errors import escaped
from penstock.plan.reader import Plan

__all__ = ["Frozen", "freeze", "has_state", "same_states", "states_of", "thaw"]

Frozen = bytes | dict[str, Any]
"""States that cannot change any more: a pickle, or a deep copy if they cannot be pickled."""


def has_state(item: Any) -> bool:
    """Return whether a user's object has a state of its own. A Penstock dataset has the cursor of its plan instead."""
    return (
        hasattr(item, "state_dict")
        and hasattr(item, "load_state_dict")
        and not isinstance(item, type)
        and not isinstance(getattr(item, "plan", None), Plan)
    )


def freeze(state: dict[str, Any]) -> Frozen:
    """Return a copy that shares nothing with the original."""
    try:
        return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
    except Exception:  # pickle and users' reducers raise any type
        # The state must be picklable only when it leaves the process.
        return copy.deepcopy(state)


def thaw(frozen: Frozen) -> dict[str, Any]:
    """Return a new copy of a frozen state."""
    state: dict[str, Any] = pickle.loads(frozen) if isinstance(frozen, bytes) else copy.deepcopy(frozen)
    return state


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


def same_states(one: Any, other: Any) -> bool:
    """Return whether two states are equal, even if one went through JSON, which turns tuples into lists."""
    try:
        return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    except (TypeError, ValueError):  # tensors and arrays
        return freeze({"state": one}) == freeze({"state": other})
