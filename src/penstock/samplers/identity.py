"""What data a sampler is over, and how far into it a state may stand."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from penstock.errors import StateError
from penstock.state import State, read_int

__all__ = ["check_place", "data_identity", "data_of", "fingerprint_identity", "fingerprint_of"]


def fingerprint_of(data: Any) -> str | None:
    """The fingerprint of the records behind a data set, or None where it knows of none.

    Its own, that of its ``manifest``, or those of its ``source`` (a data set of images has its records there).

    >>> fingerprint_of(range(3)) is None
    True
    """
    for owner in (data, getattr(data, "source", None)):
        for records in (owner, getattr(owner, "manifest", None)):
            fingerprint = getattr(records, "fingerprint", None)
            if isinstance(fingerprint, str):
                return fingerprint
    return None


def data_identity(data: Sized) -> State:
    """What a state says of the data: their number, and their fingerprint where there is one."""
    return {"samples": len(data), **fingerprint_identity(data)}


def fingerprint_identity(data: Any) -> State:
    """The entry of a state for `fingerprint_of`; nothing where there is none."""
    fingerprint = fingerprint_of(data)
    return {} if fingerprint is None else {"fingerprint": fingerprint}


def data_of(sampler: Any) -> Any:
    """The data set that a sampler is over, or None: torch's and ours keep it under one of two names."""
    return getattr(sampler, "dataset", getattr(sampler, "data_source", None))


def check_place(state: Mapping[str, Any], samples: int, *, of: str) -> State:
    """The state, if it stands in an epoch of so many samples.

    Raises:
        StateError: epoch or count are missing, negative, no integers, or beyond the end.
    """
    read_int(state, "epoch", of=of)
    consumed = read_int(state, "consumed", of=of)
    if consumed > samples:
        raise StateError(
            f"this state of a {of} is damaged: it has consumed {consumed} of {samples}. Resume from another state, or "
            "start anew without one"
        )
    return dict(state)
