"""The log of what ``on_error`` did: counts, limits, and the report with one line for each failure.

Failures travel to the main process with their batch, so what is counted, limited and reported is what the consumer has
had, not what was prefetched. A batch that raises takes its record along: its error says it all.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.errors import ConfigError, TooManyErrors
from penstock.loader.failures import Failure, OnError

__all__ = ["FailureLog"]


class FailureLog:
    """What a loader's ``on_error`` has dealt with: counts, the limits, the report. It lives in the main process.

    The counts are of the loader's whole life, the limits of one pass: a data set with ten bad images has ten in each.

    Raises:
        ConfigError: the report cannot be written.
    """

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error
        self._lock = threading.Lock()
        self._report = None if on_error.report is None else os.path.abspath(on_error.report)
        self._unwritten = 0
        self._samples = 0
        self._actions: Counter[str] = Counter()
        self._types: Counter[str] = Counter()
        self.begin()
        if self._report is not None:
            try:
                _append(self._report, b"")
            except OSError as error:
                raise ConfigError(
                    f"the report {self._report} of on_error cannot be written ({error.strerror}): give a file in a "
                    "folder that exists and that you may write to"
                ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A new pass begins: the limits count from zero, also after a resume."""
        with self._lock:
            self._pass_samples = self._pass_failed = 0
            self._last: deque[Failure] = deque(maxlen=5)

    def add(self, failures: Sequence[Failure], samples: int, *, epoch: int | None, rank: int, number: int) -> None:
        """Count one batch in; under a microsecond if nothing failed.

        Args:
            failures: of its samples.
            samples: how many the order wanted.
            epoch: that it belongs to, for the report, as are the others.
            rank: that it was made for.
            number: of the batch in its pass.

        Raises:
            TooManyErrors: a limit was exceeded. What failed has been counted and reported.
        """
        with self._lock:
            self._samples += samples
            self._pass_samples += samples
            if not failures:
                return
            fresh = not self._types
            for failure in failures:
                self._types[failure.error] += 1
                self._actions[failure.action] += failure.attempt == 0
                self._pass_failed += failure.attempt == 0
            self._last.extend(failures)
            self._write(failures, {"time": round(time.time(), 3), "epoch": epoch, "rank": rank, "batch": number})
            exceeded = self._exceeded()
        if exceeded:
            raise TooManyErrors(exceeded)
        if fresh:
            done = {"skip": "was left out", "replace": "was replaced"}[failures[0].action]
            warnings.warn(
                f"{failures[0]} cannot be loaded and {done}. This is said once: loader.stats() counts the others, "
                "OnError(report=...) writes them to a file, OnError(max_rate=...) limits them",
                stacklevel=5,
            )

    def counts(self) -> dict[str, Any]:
        """``samples`` had, of which ``failed`` were ``skipped`` or ``replaced``; and all failures, replacements that
        failed as well included, by ``types`` of their exceptions. JSON-able."""
        with self._lock:
            skipped, replaced = self._actions["skip"], self._actions["replace"]
            counts = {"samples": self._samples, "failed": skipped + replaced, "skipped": skipped, "replaced": replaced}
            return {**counts, "types": dict(self._types), "unwritten": self._unwritten}

    def _exceeded(self) -> str | None:
        rule, failed, samples = self.on_error, self._pass_failed, self._pass_samples
        if rule.max_failures is not None and failed > rule.max_failures:
            limit = f"max_failures={rule.max_failures}"
        elif rule.max_rate is not None and samples >= rule.min_samples and failed > rule.max_rate * samples:
            limit = f"max_rate={rule.max_rate}"
        else:
            return None
        where = f"all are in {self._report}" if self._report else "OnError(report=...) writes all to a file"
        return (
            f"{failed} of the first {samples} samples of this pass cannot be loaded, which is more than on_error "
            f"allows ({limit}). The last ones: {', '.join(map(str, self._last))}; {where}"
        )

    def _write(self, failures: Sequence[Failure], context: dict[str, Any]) -> None:
        if self._report is None:
            return
        lines = "".join(json.dumps({**context, **asdict(failure)}) + "\n" for failure in failures)
        try:
            _append(self._report, lines.encode())
        except OSError as error:  # no reason to end a training run
            if not self._unwritten:
                warnings.warn(f"the report {self._report} cannot be written any more: {error.strerror}", stacklevel=6)
            self._unwritten += len(failures)


def _append(path: str, data: bytes) -> None:
    """In one write to a file opened for appending, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
