"""Samples that cannot be loaded, and what ``on_error`` does about them.

loader = DataLoader(data, 64, on_error="replace")                       # another sample takes the place of a bad one
loader = DataLoader(data, 64, on_error=OnError("skip", max_rate=0.01, report="bad.jsonl"))

What happens to a sample depends on its index, its key and whether it loads, never on the executor or the worker. So
with data that fail repeatably, all executors and resumed runs give the same batches. The number of batches never
changes: no rank waits for one that another rank left out.

Not every error is a sample's own. Those of `NEVER_TOLERATED` mean that the program or the machine is in trouble, and so
do a few kinds of OSError (out of memory or of file handles): they are raised whatever ``on_error`` says. So are
KeyboardInterrupt, SystemExit and all else that is no Exception.
"""

from __future__ import annotations

import errno
import operator
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final

import torch

from penstock.errors import (
    ConfigError,
    ManifestChangedError,
    ManifestIOError,
    OrderError,
    PartitionError,
    SamplerError,
    StateError,
    TooManyErrors,
)
from penstock.hashing import mix
from penstock.loader.interrupts import is_of_signal_handler

__all__ = ["NEVER_TOLERATED", "SKIP", "Failure", "LoadOne", "OnError", "is_tolerable"]

LoadOne = Callable[[Any, int], Any]
"""``load_one(index, key) -> sample``: loads one sample with the generators of its key."""

NEVER_TOLERATED: Final[tuple[type[Exception], ...]] = (
    *(MemoryError, StopIteration, StopAsyncIteration),
    *(ConfigError, OrderError, PartitionError, SamplerError, StateError, TooManyErrors),
    *(ManifestChangedError, ManifestIOError),
    torch.OutOfMemoryError,
    *([torch.AcceleratorError] if hasattr(torch, "AcceleratorError") else []),
)
"""Exceptions that no ``on_error`` deals with."""

_OF_THE_MACHINE = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_ACTIONS = ("raise", "skip", "replace")
_REPLACEMENT, _FILLING = 0x7265706C, 0x66696C6C  # what a key is mixed with: streams of their own
_LONGEST = 8192  # characters of a message or traceback: they travel with the batch


class _Skip:
    """The type of `SKIP`; there is one in each process, also after pickling and copying."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "SKIP"

    def __reduce__(self) -> str:
        return "SKIP"


SKIP: Final = _Skip()
"""Stands in a list of samples for one that was left out."""


@dataclass(frozen=True)
class Failure:
    """One sample that could not be loaded, as plain numbers and text: it travels.

    Attributes:
        index: of the sample: an int or str as it is, anything else as its `repr`.
        key: of the sample's generators. The failures of one place in a batch have the same key.
        error: name of the exception's type.
        message: the exception's text.
        notes: what was added by `BaseException.add_note`; data sets name the file there.
        traceback: as Python prints it.
        action: "skip" or "replace"; empty while a callable ``on_error`` is being asked.
        replacement: the index that was tried next, None if there was none.
        attempt: 0 for the sample that the order wanted, 1 for the first replacement, and so on.
    """

    index: int | str
    key: int
    error: str
    message: str
    notes: tuple[str, ...]
    traceback: str
    action: str = ""
    replacement: int | None = None
    attempt: int = 0

    @classmethod
    def of(cls, error: Exception, index: Any, key: int, attempt: int) -> Failure:
        """The record of an exception. It takes some 50 us, for the traceback."""
        return cls(
            _plain(index),
            key,
            type(error).__name__,
            _shortened(_text(error)),
            tuple(_shortened(str(note)) for note in getattr(error, "__notes__", ())),
            _shortened("".join(traceback.format_exception(error))),
            attempt=attempt,
        )

    def __str__(self) -> str:
        said = self.message.partition("\n")[0][:200]
        return f"sample {self.index!r} ({self.error}: {said})" if said else f"sample {self.index!r} ({self.error})"


@dataclass(frozen=True)
class OnError:
    """What to do about a sample that cannot be loaded, for ``DataLoader(on_error=...)``.

    Args:
        action: "raise" as torch does; "skip" leaves the sample out, so that its batch is shorter; "replace" puts
            another sample in its place, drawn uniformly from the whole data set by a hash of the sample's key, and made
            with the same generator. Or a callable that is given each `Failure` and returns one of the three. It runs
            where the sample is loaded: with processes it must be picklable, and it should remember nothing.
        max_failures: how many samples of a pass may fail; one more raises `TooManyErrors`. None: any number.
        max_rate: which share of a pass's samples may fail, from 0 to 1. None: any.
        min_samples: how many samples must have been had before ``max_rate`` is looked at.
        report: a file to which each failure is appended as one line of JSON. Several ranks may write to the same one.
        attempts: how many replacements are tried for one sample before the last one's error is raised.

    A batch of which every sample was skipped gets one replacement, as an empty batch has no meaning to collate
    functions; where none can be loaded either, that raises. Indices that are no integers cannot be replaced.

    Raises:
        ConfigError: values that make no sense, or limits and a report for "raise", which tolerates nothing.
    """

    action: str | Callable[[Failure], str]
    _: KW_ONLY
    max_failures: int | None = None
    max_rate: float | None = None
    min_samples: int = 1000
    report: str | os.PathLike[str] | None = None
    attempts: int = 10

    def __post_init__(self) -> None:
        if not callable(self.action) and self.action not in _ACTIONS:
            raise ConfigError(
                f"unknown on_error {self.action!r}: use 'raise', 'skip', 'replace', a callable that returns one of "
                "them, or OnError(...)"
            )
        if self.max_failures is not None:
            _check_count("max_failures", self.max_failures, 0)
        _check_count("min_samples", self.min_samples, 1)
        _check_count("attempts", self.attempts, 1)
        if self.max_rate is not None and not 0 <= self.max_rate <= 1:
            raise ConfigError(f"max_rate is a share of the samples, from 0 to 1; got {self.max_rate}")
        if not self.tolerant and any(value is not None for value in (self.max_failures, self.max_rate, self.report)):
            raise ConfigError(
                "max_failures, max_rate and report make no sense for action='raise': the first one raises"
            )

    @classmethod
    def of(cls, value: Any) -> OnError:
        """What the user passed as ``on_error``.

        Raises:
            ConfigError: it is none of the things that may be passed.
        """
        return value if isinstance(value, cls) else cls(value)

    @property
    def tolerant(self) -> bool:
        """Whether any error is dealt with at all."""
        return self.action != "raise"

    def load(self, load_one: LoadOne, index: Any, key: int, length: int | None, metrics: Any) -> Any:
        """A sample, or `SKIP`.

        Args:
            load_one: loads it, or one in its place.
            index: of the sample.
            key: of its generators, which a replacement gets too.
            length: replacements are drawn from ``range(length)``; None where that makes no sense.
            metrics: the `BatchMetrics` to whose ``failures`` what happened is appended.

        Raises:
            Exception: what ``load_one`` raised, if that is to be raised. Once replacements were tried, it is the last
                one's error, with a note that names all of them.
        """
        if not self.tolerant:
            return load_one(index, key)
        return self._load(load_one, [index], 1, _REPLACEMENT, key, length, metrics)

    def fill(
        self, load_one: LoadOne, index: Any, key: int, length: int | None, metrics: Any, others: Sequence[Any] = ()
    ) -> Any:
        """A sample for a batch of which all were skipped, in the place of its first one.

        Args:
            load_one: as for `load`, and so is ``length``.
            index: of the batch's first sample.
            key: of the batch's first sample.
            length: see above.
            metrics: of the whole batch, so that the first sample's record says that it was replaced after all.
            others: the batch's other indices, which are not drawn.

        Raises:
            TooManyErrors: there is no other sample.
            Exception: the last replacement's error.
        """
        tried = [index, *others]
        following = _draw(tried, len(tried), _FILLING, key, length)
        if following is None:
            said = "; ".join(str(failure) for failure in metrics.failures[-3:])
            raise TooManyErrors(
                f"none of the samples of a batch can be loaded, and there is no other to take their place "
                f"(indices must be integers and others be left): {said or tried}"
            )
        _amend(metrics.failures, key, following)
        return self._load(load_one, [*tried, following], len(tried), _FILLING, key, length, metrics)

    def _load(
        self, load_one: LoadOne, tried: list[Any], wanted: int, stream: int, key: int, length: int | None, metrics: Any
    ) -> Any:
        """The last of the indices tried, of which the order ``wanted`` the first ones, or others after it."""
        while True:
            try:
                return load_one(tried[-1], key)
            except Exception as error:
                if not is_tolerable(error):
                    raise
                attempt = len(tried) - wanted
                failure = Failure.of(error, tried[-1], key, attempt)
                action = self._decide(failure)
                if action == "skip" and stream != _FILLING:
                    metrics.failures.append(replace(failure, action=action))
                    return SKIP
                following = (
                    None if action == "raise" or attempt == self.attempts else _draw(tried, wanted, stream, key, length)
                )
                if following is None:
                    if len(tried) > wanted:
                        error.add_note(_story(tried, wanted))
                    elif action != "raise":
                        error.add_note(
                            "no other sample can take its place: indices must be integers and others be left"
                        )
                    raise
                metrics.failures.append(replace(failure, action="replace", replacement=following))
                tried.append(following)

    def _decide(self, failure: Failure) -> str:
        if not callable(self.action):
            return self.action
        action = self.action(failure)
        if action not in _ACTIONS:
            raise ConfigError(f"on_error must return 'raise', 'skip' or 'replace' for {failure}, not {action!r}")
        return action


def _draw(tried: list[Any], wanted: int, stream: int, key: int, length: int | None) -> int | None:
    """A replacement, uniform on those of ``range(length)`` not tried yet; None if indices are no integers or none is
    left."""
    numbers = [number for number in map(_integer, tried) if number is not None]
    if not length or len(numbers) < len(tried):
        return None
    out = sorted({number % length for number in numbers if -length <= number < length})
    attempt = len(tried) - wanted + 1
    drawn = mix(key, stream, attempt) * (length - len(out)) >> 64
    for index in out:
        drawn += drawn >= index
    return drawn if drawn < length else None


def is_tolerable(error: BaseException) -> bool:
    """Whether an exception may be a sample's own fault."""
    if not isinstance(error, Exception) or isinstance(error, NEVER_TOLERATED) or is_of_signal_handler(error):
        return False
    return not (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE)


def _amend(failures: list[Failure], key: int, replacement: int) -> None:
    """The sample that was skipped last under a key has been replaced after all."""
    for place in reversed(range(len(failures))):
        if failures[place].key == key and failures[place].action == "skip":
            failures[place] = replace(failures[place], action="replace", replacement=replacement)
            return


def _story(tried: Sequence[Any], wanted: int) -> str:
    order = ", ".join(map(repr, tried[:wanted]))
    return f"in place of {order}, on_error tried {', '.join(map(repr, tried[wanted:]))}: none of them can be loaded"


def _plain(index: Any) -> int | str:
    if isinstance(index, str):
        return index
    number = _integer(index)
    return _shortened(repr(index)) if number is None else number


def _integer(index: Any) -> int | None:
    """NumPy's and torch's integers are integers too; an array of several is none."""
    try:
        return operator.index(index)
    except TypeError:
        return None


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a broken __str__ of the user's
        return ""


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of {least} or more, got {value!r}")
