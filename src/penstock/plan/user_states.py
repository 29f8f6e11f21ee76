"""States of the user's own objects, such as samplers, data sets and iterators.

An object takes part if it has ``state_dict()`` and ``load_state_dict(state)``. A state is frozen where it is taken, so
nothing changes it afterwards, tensors included.
"""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

from penstock.plan.reader import Plan

__all__ = ["Frozen", "freeze", "has_state", "same_states", "states_of", "thaw"]

Frozen = bytes | dict[str, Any]
"""States that nothing changes any more: pickled; a deep copy where they hold what cannot be pickled."""


def has_state(item: Any) -> bool:
    """Return whether an object of the user's takes part. One whose order is a plan of ours has its cursor instead."""
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
    except Exception:  # pickle and reducers raise what they like; only what leaves the process has to be picklable
        return copy.deepcopy(state)


def thaw(frozen: Frozen) -> dict[str, Any]:
    """Return what was frozen, as a new copy each time."""
    state: dict[str, Any] = pickle.loads(frozen) if isinstance(frozen, bytes) else copy.deepcopy(frozen)
    return state


def states_of(**items: Any) -> dict[str, Any]:
    """Return the states of those that have one right now, by the names given, not yet frozen.

    An object that is its own ``iterator`` counts as that, since it is to be put back after ``iter()``.
    """
    states: dict[str, Any] = {}
    for name, item in items.items():
        if has_state(item) and (name == "iterator" or item is not items.get("iterator")):
            state = item.state_dict()
            if state is not None:  # such as Hugging Face's before the first iteration
                states[name] = state
    return states


def same_states(one: Any, other: Any) -> bool:
    """Return whether two states are equal. One may have travelled as JSON, which makes lists of tuples."""
    try:
        return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    except (TypeError, ValueError):  # tensors and arrays
        return freeze({"state": one}) == freeze({"state": other})
