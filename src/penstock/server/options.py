"""Options of a `Server`: its limits, and its observer."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError

__all__ = ["Limits", "Observer"]


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    ``streams``: concurrent calls, each with a thread; ``page_rows``: rows of one message with row numbers;
    ``message_bytes``: bytes of one record batch, unless it is a single row.
    """

    streams: int = 1024
    page_rows: int = 1 << 18
    message_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if min(self.streams, self.page_rows, self.message_bytes) < 1:
            raise ConfigError(f"limits must be positive: {self}")


class Observer:
    """Receives events of a server, and does nothing. Subclasses are called in the server's threads: they must be quick.

    ``peer`` is gRPC's text, such as ``ipv4:127.0.0.1:5000``; ``kind`` is the name of a class in `penstock.errors`, or
    ``InternalError``.
    """

    def stream_started(self, name: str, peer: str) -> None:
        """A client began to read a dataset."""

    def rows(self, name: str, count: int, nbytes: int) -> None:
        """``count`` rows were sent, in ``nbytes`` bytes."""

    def stream_ended(self, name: str, peer: str, error: str | None) -> None:
        """A stream ended; ``error`` is the reason if it ended early."""

    def error(self, name: str | None, kind: str) -> None:
        """A call failed; ``name`` is the dataset, if it is known."""
