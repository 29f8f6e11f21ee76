"""`counted`: a number with its noun, as in reports and messages."""

from __future__ import annotations

__all__ = ["counted"]

_HISSING = ("s", "x", "ch", "sh")


def counted(number: int, noun: str) -> str:
    """So many of something.

    >>> counted(1, "sample"), counted(2000, "batch"), counted(0, "copy")
    ('1 sample', '2,000 batches', '0 copies')
    """
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("py") else f"{noun}es" if noun.endswith(_HISSING) else f"{noun}s"
    return f"{number:,} {noun}"
