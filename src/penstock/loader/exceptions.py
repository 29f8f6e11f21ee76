"""Transfer of exceptions between processes, as a type that pickles by name, and text. Any exception can be sent."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch._utils import KeyErrorMessage

__all__ = ["RemoteError", "describe", "rebuild"]


class RemoteError(NamedTuple):
    """An exception of user code in a worker.

    Attributes:
        kind: its type, pickled by name; empty if other processes cannot import it.
        name: name of its type.
        text: its traceback with message and notes.
        notes: notes added with ``add_note``.
        where: the worker, in words.
    """

    kind: bytes
    name: str
    text: str
    notes: list[str]
    where: str


def describe(error: BaseException, where: str, dumps: Callable[[object], bytes] = pickle.dumps) -> RemoteError:
    """Return an exception as text. ``dumps`` pickles its type."""
    try:
        kind = dumps(type(error))
    except Exception:
        kind = b""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:  # its __str__ raises
        text = f"{type(error).__name__} (its text cannot be had: {type(broken).__name__})\n"
    notes = getattr(error, "__notes__", ())
    notes = [note for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []
    return RemoteError(kind, type(error).__name__, text, notes, where)


def rebuild(remote: RemoteError) -> BaseException:
    """Return the exception with its own type if it can be created from a message, otherwise as a RuntimeError.

    The message is torch's: type, worker, and the worker's traceback. It is added as a note if the type does not show
    its message.
    """
    message = f"Caught {remote.name} {remote.where}.\nOriginal {remote.text}"
    error: object = None
    # It may take other arguments, or not be importable here; the text contains everything. KeyError prints this kind of
    # text without quotes and with real line breaks.
    with suppress(Exception):
        error = pickle.loads(remote.kind)(KeyErrorMessage(message))
    if not isinstance(error, BaseException):
        error = RuntimeError(message)
    try:
        shown = message in str(error)
    except Exception:  # it has no text
        shown = False
    for note in remote.notes if shown else (message, *remote.notes):
        error.add_note(note)
    return error
