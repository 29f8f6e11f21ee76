"""`Log`: a server's log, one JSON object per line, for log collectors.

    {"time": "2026-03-01T12:00:00.123Z", "level": "info", "event": "listening", "address": "grpc://127.0.0.1:8815"}

Invariant: every line is complete ASCII JSON with bounded texts, whatever clients send. Events that clients can cause at
any rate use `Log.often`, which writes a limited number of lines a second and counts the rest.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from penstock.errors import ConfigError

__all__ = ["LEVELS", "Log", "LogHandler"]

LEVELS = ("debug", "info", "warning", "error")

_TEXT = 4000  # characters of one value
_OFTEN = 100  # lines a second from `often`


class Log:
    """Writes lines to a text file. Thread-safe.

    Args:
        file: open for writing text. If writing fails, the server continues and counts the lines as `lost`.
        level: the lowest level to write: "debug", "info", "warning" or "error".
        clock: returns monotonic seconds.

    Raises:
        ConfigError: unknown level.
    """

    def __init__(self, file: TextIO, level: str = "info", *, clock: Callable[[], float] = time.monotonic) -> None:
        if level not in LEVELS:
            raise ConfigError(f"unknown log level {level!r}: use one of {', '.join(LEVELS)}")
        self.lost = 0
        """Lines that could not be written."""
        self._file, self._least, self._clock = file, LEVELS.index(level), clock
        self._lock = threading.Lock()
        self._second = self._written = self._left_out = 0

    def write(self, level: str, event: str, **values: Any) -> None:
        """Write one line: time, level, event and the values that are not None."""
        if LEVELS.index(level) < self._least:
            return
        with self._lock:
            self._line(level, event, values)

    def often(self, level: str, event: str, **values: Any) -> None:
        """Write a line for an event of any rate: beyond 100 lines a second, events are only counted."""
        if LEVELS.index(level) < self._least:
            return
        second = int(self._clock())
        with self._lock:
            if second != self._second:
                self._tell_left_out()
                self._second, self._written = second, 0
            if self._written < _OFTEN:
                self._written += 1
                self._line(level, event, values)
            else:
                self._left_out += 1

    def close(self) -> None:
        """Write the count of omitted lines. The file stays open."""
        with self._lock:
            self._tell_left_out()

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._line("warning", "lines left out", {"lines": self._left_out})
            self._left_out = 0

    def _line(self, level: str, event: str, values: dict[str, Any]) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        record = {"time": stamp, "level": level, "event": event}
        record |= {name: _short(value) for name, value in values.items() if value is not None}
        try:
            self._file.write(json.dumps(record, default=str) + "\n")
            self._file.flush()
        except (OSError, ValueError):  # the reader of a pipe is gone, the disk is full, the file is closed
            self.lost += 1


class LogHandler(logging.Handler):
    """Writes records of Python's `logging`, with tracebacks, as lines of a `Log`."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; called by `logging`."""
        level = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
        self._log.often(level, "log", logger=record.name, text=self.format(record))


def _short(value: Any) -> Any:
    return value[: _TEXT - 1] + "…" if isinstance(value, str) and len(value) > _TEXT else value
