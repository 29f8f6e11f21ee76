"""`FailureLog`: counts, limits and report of the failures that ``on_error`` handled.

Failures travel to the main process with their batch. So counts, limits and report cover delivered batches, not
prefetched ones. A batch that raises is not recorded here, because its error has all details.
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
    """Counts, limits and report of a loader's ``on_error``. Lives in the main process.

    Counts cover the loader's whole life. Limits cover one epoch: a dataset with ten bad images has ten in each.

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
                    f"the report {self._report} of on_error cannot be written ({error.strerror}): use a file in a "
                    "folder that exists and is writable"
                ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Reset the limits' counts at the start of an epoch iterator, also after a resume."""
        with self._lock:
            self._pass_samples = self._pass_failed = 0
            self._last: deque[Failure] = deque(maxlen=5)

    def add(self, failures: Sequence[Failure], samples: int, *, epoch: int | None, rank: int, number: int) -> None:
        """Record one batch; takes less than 1 µs if nothing failed.

        Args:
            failures: failures of its samples.
            samples: number of samples requested.
            epoch: epoch of the batch, for the report.
            rank: rank of the batch, for the report.
            number: number of the batch in its epoch, for the report.

        Raises:
            TooManyErrors: a limit is exceeded. The failures are recorded all the same.
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
                f"{failures[0]} cannot be loaded and {done}. This warning appears once: loader.stats() counts the "
                "others, OnError(report=...) writes them to a file, and OnError(max_rate=...) limits them",
                stacklevel=5,
            )

    def counts(self) -> dict[str, Any]:
        """Return counts as a JSON-serialisable dict.

        ``samples`` is the number delivered, ``failed`` the number ``skipped`` or ``replaced``. ``types`` counts all
        failures, including failed replacements, by exception type.
        """
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
        # A failed report must not end a training run.
        except OSError as error:
            if not self._unwritten:
                warnings.warn(f"the report {self._report} cannot be written any more: {error.strerror}", stacklevel=6)
            self._unwritten += len(failures)


def _append(path: str, data: bytes) -> None:
    """Append to a file with a single write, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
