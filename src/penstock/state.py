"""States: small JSON-serialisable dicts, and the one check that refuses a state of something else.

Invariant: a state is a pure function of what the *consumer* has received. It holds integers and short strings, its
size does not depend on the number of samples, ranks or workers, and loading it onto other data, another order or
another layout is a `StateError` that names every difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import StateError

__all__ = ["STATE_VERSION", "State", "check_state", "read_int"]

STATE_VERSION = 1

State = dict[str, Any]


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any], *, of: str) -> None:
    """Compare what a state says with what its reader is.

    Args:
        state: the state to be loaded.
        expected: entries that must be present and equal.
        of: what is being loaded, for the message.

    Raises:
        StateError: entries are missing or differ; the message names each one.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"the state of a {of} is a dict, got {type(state).__name__}")
    differences = [
        f"{name} is {state[name]!r} in the state and {value!r} here" if name in state else f"{name} is missing"
        for name, value in expected.items()
        if name not in state or state[name] != value
    ]
    if differences:
        raise StateError(
            f"this state does not belong to this {of}: {'; '.join(differences)}. "
            "Resume with the same data and options, or start anew without the state"
        )


def read_int(state: Mapping[str, Any], name: str, *, of: str) -> int:
    """A count of 0 or more from a state; `StateError` if it is missing, negative or no integer."""
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StateError(f"the state of this {of} needs a non-negative integer {name!r}, got {value!r}")
    return value
