"""`WarnOnce`: a warning that is shown once per process."""

from __future__ import annotations

import threading
import warnings

__all__ = ["WarnOnce"]


class WarnOnce:
    """Issues its first warning in each process and ignores further ones."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def __reduce__(self) -> tuple[type[WarnOnce], tuple[()]]:
        return WarnOnce, ()

    def warn(self, text: str) -> None:
        """Issue a warning, unless this object has issued one before."""
        # The first caller takes the lock and never releases it.
        if self._turn.acquire(blocking=False):
            warnings.warn(text, stacklevel=3)
