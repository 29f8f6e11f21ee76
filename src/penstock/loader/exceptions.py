"""Errors that cross a process boundary: as a type that pickles by name, and text. Nothing unpicklable hangs a run."""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

__all__ = ["RemoteError", "describe", "rebuild"]


class RemoteError(NamedTuple):
    """An error of user code in a worker.

    Attributes:
        kind: its type, pickled (by name); empty if it has none that another process could import.
        name: name of its type.
        text: its traceback, with its message and notes.
        notes: what was added by ``add_note``.
        where: which worker.
    """

    kind: bytes
    name: str
    text: str
    notes: list[str]
    where: str


def describe(error: BaseException, where: str) -> RemoteError:
    """An error as text."""
    try:
        kind = pickle.dumps(type(error))
    except Exception:  # a type defined in a function, say; its name remains
        kind = b""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:  # its __str__ raises
        text = f"{type(error).__name__} (its text cannot be had: {type(broken).__name__})\n"
    notes = getattr(error, "__notes__", ())
    notes = [note for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []
    return RemoteError(kind, type(error).__name__, text, notes, where)


class _Text(str):
    """A message that KeyError does not print in quotes and with \\n for line ends."""

    def __repr__(self) -> str:
        return str(self)


def rebuild(remote: RemoteError) -> BaseException:
    """The error, of its own type if that can be made from a message, else a RuntimeError. The message is torch's: which
    error, where, and the worker's traceback; as a note if the type does not show its message.
    """
    message = f"Caught {remote.name} {remote.where}.\nOriginal {remote.text}"
    error: BaseException | None = None
    if remote.kind:
        try:
            made = pickle.loads(remote.kind)(_Text(message))
            error = made if isinstance(made, BaseException) else None
        except Exception:  # it takes other arguments, or cannot be imported here; the text says all there is to say
            error = None
    if error is None:
        error = RuntimeError(message)
    for note in remote.notes if _says(error, message) else (message, *remote.notes):
        error.add_note(note)
    return error


def _says(error: BaseException, message: str) -> bool:
    try:
        return message in str(error)
    except Exception:  # it has no text
        return False
