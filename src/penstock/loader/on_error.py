"""``on_error``: handling of samples that cannot be loaded.

loader = DataLoader(data, 64, on_error="replace")                       # another sample replaces a bad one
loader = DataLoader(data, 64, on_error=OnError("skip", max_rate=0.01, report="bad.jsonl"))

The result depends only on a sample's index, its key and whether it loads, never on the executor or the worker. If
failures are repeatable, all executors and resumed runs yield the same batches. The number of batches never changes, so
no rank waits for a batch that another rank left out.

Some errors are not the fault of a sample: the types of `NEVER_TOLERATED`, and a few kinds of OSError (out of memory or
file handles), mean that the program or the machine has a problem. They are always raised, and so are KeyboardInterrupt,
SystemExit and everything else that is not an Exception.

    worker    OnError.load(...)  ->  a sample, another one, or SKIP    and a `Failure` in the metrics of the batch
    trainer   FailureLog.add(failures of a delivered batch)            counts, limits, report

Failures travel with their batch, so counts, limits and report cover delivered batches, not prefetched ones. A batch
that raises is not recorded, because its error has all details.
"""

from __future__ import annotations

import errno
import json
import operator
import os
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, Final, SupportsIndex

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

__all__ = ["NEVER_TOLERATED", "SKIP", "Failure", "FailureLog", "LoadOne", "OnError", "check_count", "is_tolerable"]

LoadOne = Callable[[Any, int], Any]
"""``load_one(index, key) -> sample``: loads a sample with its key's generators."""

NEVER_TOLERATED: Final[tuple[type[Exception], ...]] = (
    *(MemoryError, StopAsyncIteration),
    *(ConfigError, OrderError, PartitionError, SamplerError, StateError, TooManyErrors),
    *(ManifestChangedError, ManifestIOError),
    torch.OutOfMemoryError,
    *([torch.AcceleratorError] if hasattr(torch, "AcceleratorError") else []),
)
"""Exceptions that ``on_error`` never handles."""

_OF_THE_MACHINE = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_ACTIONS = ("raise", "skip", "replace")
# Mixed into a key, for independent draws.
_REPLACEMENT, _FILLING = 0x7265706C, 0x66696C6C
# Maximum number of characters of a message or traceback, since they travel with the batch.
_LONGEST = 8192


SKIP: Final = object()
"""Marks a skipped sample in a list of samples. It never leaves its process."""

_counting = threading.Lock()
"""Held while a log changes. One for all, since loaders with their logs are pickled."""


@dataclass(frozen=True)
class Failure:
    """A sample that could not be loaded, as plain numbers and text, so that it can be sent to other processes.

    Attributes:
        index: index of the sample: an int or str unchanged, anything else as its `repr`.
        key: key of the sample's generators. All failures at one position of a batch have the same key.
        error: name of the exception's type.
        message: text of the exception.
        notes: notes added with `BaseException.add_note`; datasets name the file there.
        traceback: formatted traceback.
        action: "skip" or "replace"; empty while a callable ``on_error`` decides.
        replacement: index tried next; None if none was tried.
        attempt: 0 for the original sample, 1 for its first replacement, and so on.
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
        """Return the record of an exception. Takes about 50 µs, for the traceback."""
        number = index if isinstance(index, str) else _integer(index)
        try:
            message = str(error)
        # The user's __str__ may fail.
        except Exception:
            message = ""
        return cls(
            _shortened(repr(index)) if number is None else number,
            key,
            type(error).__name__,
            _shortened(message),
            tuple(_shortened(str(note)) for note in getattr(error, "__notes__", ())),
            _shortened("".join(traceback.format_exception(error))),
            attempt=attempt,
        )

    def __str__(self) -> str:
        said = self.message.partition("\n")[0][:200]
        return f"sample {self.index!r} ({self.error}: {said})" if said else f"sample {self.index!r} ({self.error})"


@dataclass(frozen=True)
class OnError:
    """Policy for samples that cannot be loaded, for ``DataLoader(on_error=...)``.

    Args:
        action: "raise" as in torch; "skip" to leave the sample out, which makes its batch shorter; "replace" to load
            another sample, drawn uniformly from the whole dataset by a hash of the sample's key, with the same
            generator. Or a callable that takes a `Failure` and returns one of the three. It runs where the sample is
            loaded: for worker processes it must be picklable, and it should keep no state. It may be called twice for a
            sample, since a batch whose transforms first draw from a global generator is made again.
        max_failures: maximum number of failed samples in an epoch; one more raises `TooManyErrors`. None: no limit.
        max_rate: maximum share of failed samples in an epoch, from 0 to 1. None: no limit.
        min_samples: number of delivered samples before ``max_rate`` is checked.
        report: file to which each failure is appended as one line of JSON. Several ranks may share it.
        attempts: maximum number of replacements for one sample; then the error of the last one is raised.

    If all samples of a batch are skipped, one replacement is loaded, because collate functions cannot handle an empty
    batch; if none loads, that raises. Samples whose index is not an integer cannot be replaced.

    Raises:
        ConfigError: invalid values, or limits or a report with "raise", which tolerates no failure.
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
            check_count("max_failures", self.max_failures, 0)
        check_count("min_samples", self.min_samples)
        check_count("attempts", self.attempts)
        if self.max_rate is not None and not 0 <= self.max_rate <= 1:
            raise ConfigError(f"max_rate must be a share of the samples, from 0 to 1; got {self.max_rate}")
        limits = self.max_failures, self.max_rate, self.report
        if self.action == "raise" and any(value is not None for value in limits):
            raise ConfigError(
                "max_failures, max_rate and report have no effect with action='raise': the first failure raises"
            )

    def load(
        self, load_one: LoadOne, index: Any, key: int, length: int | None, metrics: Any, skipped: Sequence[Any] = ()
    ) -> Any:
        """Return a sample, or `SKIP`.

        Args:
            load_one: loads a sample or a replacement.
            index: index of the sample.
            key: key of its generators, used for a replacement too.
            length: replacements are drawn from ``range(length)``; None if indices are not such numbers.
            metrics: the `BatchMetrics` whose ``failures`` record the failure.
            skipped: indices of samples that this one replaces, because all were skipped; see `fill`.

        Raises:
            Exception: the error of ``load_one``, if the policy raises it. After replacements it is the error of the
                last one, with a note that names all of them.
        """
        tried, wanted, stream = [*skipped, index], len(skipped) or 1, _FILLING if skipped else _REPLACEMENT
        while True:
            try:
                return load_one(tried[-1], key)
            except Exception as error:
                if not is_tolerable(error):
                    raise
                attempt = len(tried) - wanted
                failure = Failure.of(error, tried[-1], key, attempt)
                action = self.action(failure) if callable(self.action) else self.action
                if action not in _ACTIONS:
                    raise ConfigError(
                        f"on_error must return 'raise', 'skip' or 'replace' for {failure}, not {action!r}"
                    ) from error
                if action == "skip" and not skipped:
                    metrics.failures.append(replace(failure, action=action))
                    return SKIP
                replaces = action != "raise" and attempt < self.attempts
                following = _draw(tried, wanted, stream, key, length) if replaces else None
                if following is None:
                    if attempt:
                        first, others = ", ".join(map(repr, tried[:wanted])), ", ".join(map(repr, tried[wanted:]))
                        error.add_note(f"in place of {first}, on_error tried {others}: none of them can be loaded")
                    elif action != "raise":
                        error.add_note("it cannot be replaced: its index is not an integer, or no other index is left")
                    raise
                metrics.failures.append(replace(failure, action="replace", replacement=following))
                tried.append(following)

    def fill(self, load_one: LoadOne, indices: Sequence[Any], key: int, length: int | None, metrics: Any) -> Any:
        """Return a replacement for the first sample of a batch whose samples were all skipped.

        Args:
            load_one, length: as in `load`.
            indices: the batch's indices, which are not drawn.
            key: key of the batch's first sample.
            metrics: metrics of the whole batch; the first sample's record changes to "replace".

        Raises:
            TooManyErrors: there is no other sample.
            Exception: the error of the last replacement.
        """
        failures, following = metrics.failures, _draw(indices, len(indices), _FILLING, key, length)
        if following is None:
            said = "; ".join(map(str, failures[-3:]))
            raise TooManyErrors(
                f"no sample of a batch can be loaded, and no other index is left to replace one "
                f"(only integer indices can be replaced): {said or indices}"
            )
        for place in reversed(range(len(failures))):
            if failures[place].key == key and failures[place].action == "skip":
                failures[place] = replace(failures[place], action="replace", replacement=following)
                break
        return self.load(load_one, following, key, length, metrics, indices)


class FailureLog:
    """Counts, limits and report of a loader's ``on_error``. Lives in the main process.

    Counts cover the loader's whole life. Limits cover one epoch: a dataset with ten bad images has ten in each.

    Raises:
        ConfigError: the report cannot be written.
    """

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error
        self._report = None if on_error.report is None else os.path.abspath(on_error.report)
        self._unwritten = 0
        self._samples = 0
        self._actions: Counter[str] = Counter()
        self._types: Counter[str] = Counter()
        self.begin()
        try:
            self._write("")
        except OSError as error:
            raise ConfigError(
                f"the report {self._report} of on_error cannot be written ({error.strerror}): use a file in a folder "
                "that exists and is writable"
            ) from error

    def begin(self) -> None:
        """Begin to count for the limits: at the start of an epoch iterator, also after a resume."""
        with _counting:
            self._before = self._samples, self._actions.total()
            self._last: deque[Failure] = deque(maxlen=5)

    def add(self, failures: Sequence[Failure], samples: int, **where: int | None) -> None:
        """Record one batch; takes less than 1 µs if nothing failed.

        Args:
            failures: failures of its samples.
            samples: number of samples requested.
            where: epoch, rank, and the number of the batch in its epoch, for the report.

        Raises:
            TooManyErrors: a limit is exceeded. The failures are recorded all the same.
        """
        with _counting:
            self._samples += samples
            if not failures:
                return
            fresh, context = not self._types, {"time": round(time.time(), 3), **where}
            self._types.update(failure.error for failure in failures)
            self._actions.update(failure.action for failure in failures if not failure.attempt)
            self._last.extend(failures)
            try:
                self._write("".join(json.dumps({**context, **asdict(failure)}) + "\n" for failure in failures))
            # A failed report must not end a training run.
            except OSError as error:
                if not self._unwritten:
                    warnings.warn(
                        f"the report {self._report} cannot be written any more: {error.strerror}", stacklevel=5
                    )
                self._unwritten += len(failures)
            rule, limit = self.on_error, None
            among, failed = self._samples - self._before[0], self._actions.total() - self._before[1]
            if rule.max_failures is not None and failed > rule.max_failures:
                limit = f"max_failures={rule.max_failures}"
            elif rule.max_rate is not None and among >= rule.min_samples and failed > rule.max_rate * among:
                limit = f"max_rate={rule.max_rate}"
            if limit is not None:
                listed = f"all are in {self._report}" if self._report else "OnError(report=...) writes all to a file"
                raise TooManyErrors(
                    f"{failed} of the first {among} samples of this epoch cannot be loaded, which is more than "
                    f"on_error allows ({limit}). The last ones: {', '.join(map(str, self._last))}; {listed}"
                )
        if fresh:
            done = {"skip": "was left out", "replace": "was replaced"}[failures[0].action]
            warnings.warn(
                f"{failures[0]} cannot be loaded and {done}. This warning appears once: loader.stats() counts the "
                "others, OnError(report=...) writes them to a file, and OnError(max_rate=...) limits them",
                stacklevel=5,
            )

    def counts(self) -> dict[str, Any]:
        """Return counts as a JSON-serialisable dict.

        ``samples`` is the number delivered, ``failed`` the number ``skipped`` or ``replaced``. ``types`` counts all
        failures, including failed replacements, by exception type.
        """
        with _counting:
            skipped, replaced = self._actions["skip"], self._actions["replace"]
            counts = {"samples": self._samples, "failed": skipped + replaced, "skipped": skipped, "replaced": replaced}
            return {**counts, "types": dict(self._types), "unwritten": self._unwritten}

    def _write(self, text: str) -> None:
        """Append to the report with a single write, so that lines of several processes do not mix."""
        data = text.encode()
        if self._report is not None:
            with open(self._report, "ab", buffering=0) as file:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_tolerable(error: BaseException) -> bool:
    """Return whether an exception may be the fault of a sample."""
    if not isinstance(error, Exception) or isinstance(error, NEVER_TOLERATED):
        return False
    return not (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE)


def _draw(tried: Sequence[Any], wanted: int, stream: int, key: int, length: int | None) -> int | None:
    """Return a replacement, drawn uniformly from the untried indices of ``range(length)``.

    None if indices are not integers or none is left.
    """
    numbers = [number for number in map(_integer, tried) if number is not None]
    if not length or len(numbers) < len(tried):
        return None
    out = sorted({number % length for number in numbers if -length <= number < length})
    attempt = len(tried) - wanted + 1
    drawn = mix(key, stream, attempt) * (length - len(out)) >> 64
    for index in out:
        drawn += drawn >= index
    return drawn if drawn < length else None


def _integer(index: Any) -> int | None:
    """Return an index as an int, also from NumPy and torch; None if it is not one integer, such as a longer array."""
    try:
        return operator.index(index)
    except TypeError:
        return None


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse a value that is not an integer of at least ``least``."""
    if not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise ConfigError(f"{name} must be an integer of {least} or more, got {value!r}")
