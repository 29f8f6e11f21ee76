"""`Once`: one warning, where many things may be wrong in the same way."""

from __future__ import annotations

import threading
import warnings

__all__ = ["Once"]


class Once:
    """Gives the first warning of those that it is asked for, in each process."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def __reduce__(self) -> tuple[type[Once], tuple[()]]:
        return Once, ()

    def warn(self, text: str) -> None:
        """Warn, unless it has."""
        # Whoever takes the lock is the first, and nobody gives it back.
        if self._turn.acquire(blocking=False):
            warnings.warn(text, stacklevel=3)
