"""`Once`: one warning, where many things may be wrong in the same way."""

from __future__ import annotations

import warnings

__all__ = ["Once"]


class Once:
    """Gives the first warning of those that it is asked for, in each process."""

    def __init__(self) -> None:
        self._given = False

    def warn(self, text: str) -> None:
        """Warn, unless it has."""
        if not self._given:
            self._given = True
            warnings.warn(text, stacklevel=3)
