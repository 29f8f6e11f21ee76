"""`Cursor`: the position of a plan's consumer. Everything that resumes saves one as its state, and loads it here.

    state_dict()              pack(entries)    {"penstock": '{"version": 3, "seed": 0, ...}'}
    load_state_dict(state)    unpack(state)    the entries: all that is passed on inside the package

Invariant: a state depends only on the samples that the *consumer* has received, not on prefetched ones. It contains
integers and short strings, and its size does not depend on the number of samples, ranks or workers. Loading it onto
other data, another order or another layout raises a `StateError` that names what differs.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.errors import ConfigError, PenstockError, StateError
from penstock.wording import counted, with_article

__all__ = [
    "STATE_ENTRY",
    "STATE_VERSION",
    "Cursor",
    "State",
    "check_state",
    "checked_epoch",
    "pack",
    "read_int",
    "read_ints",
    "read_mapping",
    "unpack",
]

STATE_VERSION = 3

STATE_ENTRY = "penstock"
"""The one entry of a packed state."""

_JSON = frozenset((str, int, float, bool, type(None)))

State = dict[str, Any]

_WORDS = {
    "samples": "the number of samples",
    "fingerprint": "the rows' fingerprint",
    "order": "the kind of order",
    "batches": "the kind of batches",
    "unit": "the unit of the count",
    "parts": "the hash of the data sets inside",
    "world": "[rank, number of ranks]",
    "where": "[rank, number of ranks, worker, number of workers]",
    "worker": "[worker, number of workers]",
    "stages": "the number of stages",
}
"""Names in messages of the entries of states that are no arguments of a constructor."""

_ABOVE = 1 << 62
"""Exclusive upper bound of all counts; no table has this many rows."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The position of a plan's consumer in one epoch.

    Attributes:
        epoch: number of the epoch, 0 or more.
        consumed: how many units of this epoch the whole job (all ranks together) has consumed.
        mini_epoch: number of the mini-epoch (sub-epoch), for datasets that have them; None if only the epoch was set.
        unit: the unit of ``consumed``: "sample", "batch" or "iteration".
        plan: identity of the plan: the order, the data, and the options that fix them. A state must match it.
        entropy: the random draw at the start of the epoch, if no seed fixes the order; else empty.
        sampler: the cursor of the inner plan, for a plan over another plan.

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

    def whole(self) -> Cursor:
        """Return the start of the epoch."""
        return Cursor(epoch=self.epoch)

    def state(self) -> State:
        """Return the cursor as entries of a state, which `read` accepts."""
        state: State = {**self.plan, "unit": self.unit, "epoch": self.epoch, "consumed": self.consumed}
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
        """Return the cursor in a state.

        Args:
            state: from `state`; for users' states, from `unpack`.
            of: class of the object that loads the state, for messages.
            plan: entries that must be equal in the state.
            unit: the unit in which the reader counts.
            most: number of units of the epoch, if it is known.
            sampler: reads the cursor of the inner plan; None without an inner plan.

        Raises:
            StateError: the state belongs to another plan, or is damaged. The message names each field and both values.
        """
        check_state(state, {**plan, "unit": unit}, of=of)
        epoch, consumed = read_int(state, "epoch", of=of), read_int(state, "consumed", of=of)
        if most is not None and consumed > most:
            raise StateError(
                f"this state of {with_article(of)} is damaged: it has consumed {consumed} of {counted(most, unit)} "
                "(consumed= in the state, and the length here). Resume from another state, or start anew without one"
            )
        inner = None if sampler is None else sampler(read_mapping(state, "sampler", of=of))
        entropy = dict(read_mapping(state, "entropy", of=of)) if "entropy" in state else {}
        return cls(epoch=epoch, consumed=consumed, unit=unit, plan=plan, entropy=entropy, sampler=inner)


def pack(entries: State) -> State:
    """Return a state as users get it: its entries and their version, as JSON text under one key.

    Any checkpoint can hold that. Of nested dicts, torch.distributed.checkpoint writes each entry by itself, and reads
    only those that the object has before it loads.

    States of the user's own objects may hold what JSON changes, such as a tuple or a tensor. Then the entries are
    stored as they are, in a tuple.
    """
    entries = {"version": STATE_VERSION, **entries}
    packed: Any = (entries,)
    with suppress(ValueError, RecursionError):  # an integer of thousands of digits; lists in lists
        if _is_json(entries):
            packed = json.dumps(entries)
    return {STATE_ENTRY: packed}


def _is_json(value: Any) -> bool:
    """Return whether JSON returns exactly this: a subclass and a tuple come back as something else."""
    if type(value) is dict:
        if not {*map(type, value)} <= {str}:
            return False
        value = value.values()
    elif type(value) is not list:
        return type(value) in _JSON
    # Most parts are numbers and strings, which need no call.
    return all(map(_is_json, [part for part in value if type(part) not in _JSON]))


def unpack(state: Any, *, of: str) -> State:
    """Return the entries in a state from `pack`, without their version, also if the state has been JSON.

    Args:
        state: the state to load.
        of: class of the object that loads the state, for messages.

    Raises:
        StateError: it is of another version, damaged, or no state of Penstock.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"the state of {with_article(of)} must be a dict, got {type(state).__name__}")
    packed = state.get(STATE_ENTRY)
    entries: Any = None
    if isinstance(packed, str):
        with suppress(ValueError, RecursionError):
            entries = json.loads(packed)
    elif isinstance(packed, list | tuple) and len(packed) == 1:
        entries = packed[0]
    elif packed is None:
        # Before version 3, the entries were those of the state itself.
        entries = state
    version = entries.get("version") if isinstance(entries, Mapping) else None
    _check_version(version, STATE_VERSION, "states", of)
    if packed is None or version != STATE_VERSION:
        raise StateError(
            f"this is no state of {with_article(of)}, or a damaged one: {STATE_ENTRY!r} is {packed!r:.60}. Load what "
            "state_dict() returned, or start anew without the state"
        )
    return {name: value for name, value in entries.items() if name != "version"}


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any], *, of: str) -> None:
    """Raise unless a state has the expected entries.

    Args:
        state: the state to load.
        expected: entries that must be present and equal.
        of: class of the object that loads the state, for the message.

    Raises:
        StateError: entries are missing or differ; the message names each one.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"the state of {with_article(of)} must be a dict, got {type(state).__name__}")
    # A loader's state has those of its sampler, stream and data set, which count.
    counts, loads = not state.keys().isdisjoint(("epoch", "consumed")), of.startswith("DataLoader")
    of_loader = not counts and not state.keys().isdisjoint(("sampler", "stream"))
    if (counts and loads) or (of_loader and not loads):
        raise StateError(
            f"this is the state of {'a DataLoader' if of_loader else 'a sampler or a data set'}, not of "
            f"{with_article(of)}: load it into an object of the class whose state_dict() returned it"
        )
    differences = [
        _WORDS.get(name, name)
        + (f" is {state[name]!r} in the state and {value!r} here" if name in state else " is missing in the state")
        for name, value in expected.items()
        if name not in state or (state[name] != value and name != "order_version")
    ]
    if not differences:
        # Not before, because each kind of order has its own versions.
        _check_version(state.get("order_version"), expected.get("order_version"), "orders", of)
    if differences:
        raise StateError(
            f"this state does not belong to this {of}: {'; '.join(differences)}. "
            "Resume with the same data and options, or start anew without the state"
        )


def _check_version(found: Any, known: int | None, what: str, of: str) -> None:
    """Raise if another version of Penstock wrote the state in another format."""
    if known is None or type(found) is not int or found == known:
        return
    from penstock import __version__

    raise StateError(
        f"this state of {with_article(of)} has version {found} of {what}, and Penstock {__version__} reads version "
        f"{known}. Resume with the {'newer' if found > known else 'older'} Penstock that wrote it, or begin the epoch "
        "anew without it"
    )


def checked_epoch(epoch: Any, error: type[PenstockError] = ConfigError) -> int:
    """Return the number of an epoch as an int.

    Raises:
        error: it is not an integer, or outside 0 to 2**62 - 1.
    """
    try:
        number = operator.index(epoch)
    except TypeError:
        raise error(f"epoch must be an integer, 0 or more, got {epoch!r}") from None
    if number < 0:
        raise error(f"epoch must be 0 or more, got {number}")
    if number >= _ABOVE:
        raise error(f"epoch must be below 2**62, got {number}")
    return number


def read_int(state: Mapping[str, Any], name: str, *, of: str, below: int = _ABOVE) -> int:
    """Return an integer from a state, from 0 to ``below`` - 1.

    Raises:
        StateError: it is missing, not an integer, or outside that range.
    """
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StateError(f"the state of this {of} needs a non-negative integer {name!r}, got {value!r}")
    if value >= below:
        raise StateError(f"the state of this {of} is damaged: {name!r} is {value}, which is too large")
    return value


def read_ints(state: Mapping[str, Any], name: str, count: int, *, of: str) -> list[int]:
    """Return a list of ``count`` integers of 0 or more from a state.

    Raises:
        StateError: the entry is missing or anything else.
    """
    values = state.get(name)
    if not isinstance(values, list | tuple) or len(values) != count or not all(map(_is_count, values)):
        raise StateError(f"the state of this {of} is damaged: it needs {count} counts under {name!r}, got {values!r}")
    return list(values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _ABOVE


def read_mapping(state: Mapping[str, Any], name: str, *, of: str) -> Mapping[str, Any]:
    """Return a dict inside a state.

    Raises:
        StateError: the entry is missing or not a dict.
    """
    value = state.get(name)
    if not isinstance(value, Mapping):
        raise StateError(
            f"the state of this {of} needs a dict {name!r}, got {value!r}: it belongs to other data, or is damaged. "
            "Resume with the same data and options, or start anew without the state"
        )
    return value
