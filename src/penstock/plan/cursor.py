"""`Cursor`: where the consumer of a plan is. It is the one state of everything that resumes, and here is its one check.

Invariant: a state is a pure function of what the *consumer* has received. It holds integers and short strings, its
size does not depend on the number of samples, ranks or workers, and loading it onto other data, another order or
another layout is a `StateError` that names every difference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.errors import ConfigError, PenstockError, StateError
from penstock.wording import counted

__all__ = [
    "STATE_VERSION",
    "Cursor",
    "State",
    "check_state",
    "checked_epoch",
    "read_int",
    "read_ints",
    "read_mapping",
]

STATE_VERSION = 2

State = dict[str, Any]

_VERSIONS = {"version": "states", "order_version": "orders"}
"""Entries that say which version of something a state is of."""

_ABOVE = 1 << 62
"""No count of ours gets this far: no table has so many rows."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where the consumer of a plan is, in one of its epochs.

    Attributes:
        epoch: of the plan, 0 or more.
        consumed: how much the whole job, all ranks together, has had of this epoch.
        mini_epoch: the part of the epoch, for data sets that cut it into parts; None where the epoch alone was named.
        unit: what is counted: "sample", "batch" or "iteration".
        plan: what the counts belong to: the order, the data, and the options that fix them.
        entropy: what the beginning of the epoch drew, where no seed fixes the order; else empty.
        sampler: the cursor of the plan inside, where one plan counts over another.

    >>> Cursor(epoch=3, consumed=640, plan={"shuffle": "global", "samples": 1000}).state()["consumed"]
    640
    """

    epoch: int = 0
    consumed: int = 0
    mini_epoch: int | None = None
    unit: str = "sample"
    plan: State = field(default_factory=dict)
    entropy: State = field(default_factory=dict)
    sampler: Cursor | None = None

    @property
    def data(self) -> str | None:
        """Identity of the data, where it is another one than that of the data now."""
        return None

    def state(self) -> State:
        """Return the cursor as a JSON-serialisable dict, which `read` takes back."""
        state: State = {"version": STATE_VERSION, **self.plan, "unit": self.unit}
        state |= {"epoch": self.epoch, "consumed": self.consumed}
        if self.entropy:
            state["entropy"] = dict(self.entropy)
        if self.sampler is not None:
            state["sampler"] = self.sampler.state()
        return state

    @classmethod
    def read(
        cls,
        state: Mapping[str, Any],
        *,
        of: str,
        plan: State,
        unit: str = "sample",
        most: int | None = None,
        sampler: Callable[[Mapping[str, Any]], Cursor] | None = None,
    ) -> Self:
        """Return the cursor that a state holds.

        Args:
            state: from `state`.
            of: whose state it is, for messages.
            plan: what the state must agree with, entry by entry.
            unit: that the reader counts.
            most: how much the epoch has, if that is known.
            sampler: reads the cursor of the plan inside; None where there is no plan inside.

        Raises:
            StateError: the state is of another plan, or damaged. The message names each field and both values.
        """
        check_state(state, {"version": STATE_VERSION, **plan, "unit": unit}, of=of)
        epoch, consumed = read_int(state, "epoch", of=of), read_int(state, "consumed", of=of)
        if most is not None and consumed > most:
            raise StateError(
                f"this state of a {of} is damaged: it has consumed {consumed} of {counted(most, unit)} (consumed= in "
                "the state, and the length here). Resume from another state, or start anew without one"
            )
        inner = None if sampler is None else sampler(read_mapping(state, "sampler", of=of))
        entropy = dict(read_mapping(state, "entropy", of=of)) if "entropy" in state else {}
        return cls(epoch=epoch, consumed=consumed, unit=unit, plan=plan, entropy=entropy, sampler=inner)


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
    for name, what in _VERSIONS.items():
        _check_version(state.get(name), expected.get(name), what, of)
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


def _check_version(found: Any, known: int | None, what: str, of: str) -> None:
    """Refuse a state that another Penstock wrote: neither data nor options can make it fit."""
    if known is None or type(found) is not int or found == known:
        return
    from penstock import __version__

    raise StateError(
        f"this state of a {of} has version {found} of {what}, and Penstock {__version__} reads version {known}. Resume "
        f"with the {'newer' if found > known else 'older'} Penstock that wrote it, or begin the epoch anew without it"
    )


def checked_epoch(epoch: Any, error: type[PenstockError] = ConfigError) -> int:
    """Return the number of an epoch as an int.

    Raises:
        error: it is no integer, negative, or more than a state may hold.
    """
    try:
        number = operator.index(epoch)
    except TypeError:
        raise error(f"epoch must be an integer of 0 or more, got {epoch!r}") from None
    if number < 0:
        raise error(f"epoch must be 0 or more, got {number}")
    if number >= _ABOVE:
        raise error(f"epoch must be below 2**62, as in states, got {number}")
    return number


def read_int(state: Mapping[str, Any], name: str, *, of: str, below: int = _ABOVE) -> int:
    """Return an integer of 0 or more, and less than ``below``, from a state.

    Raises:
        StateError: it is missing, no integer, or outside that range.
    """
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StateError(f"the state of this {of} needs a non-negative integer {name!r}, got {value!r}")
    if value >= below:
        raise StateError(f"the state of this {of} is damaged: {name!r} is {value}, which is more than there can be")
    return value


def read_ints(state: Mapping[str, Any], name: str, count: int, *, of: str) -> list[int]:
    """Return a list of ``count`` integers of 0 or more from a state; StateError if it is anything else."""
    values = state.get(name)
    if not isinstance(values, list | tuple) or len(values) != count or not all(map(_is_count, values)):
        raise StateError(f"the state of this {of} is damaged: it needs {count} counts under {name!r}, got {values!r}")
    return list(values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _ABOVE


def read_mapping(state: Mapping[str, Any], name: str, *, of: str) -> Mapping[str, Any]:
    """Return the state of something inside from a state; StateError if it is missing or no dict."""
    value = state.get(name)
    if not isinstance(value, Mapping):
        raise StateError(
            f"the state of this {of} needs a dict {name!r}, got {value!r}: it is of other data, or damaged. Resume "
            "with the same data and options, or start anew without the state"
        )
    return value
