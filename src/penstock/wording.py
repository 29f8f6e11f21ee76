"""Numbers in reports and messages: `counted` adds the noun, `rate_text` rounds to three digits."""

from __future__ import annotations

__all__ = ["counted", "rate_text"]

_HISSING = ("s", "x", "tch", "sh")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where needed.

    >>> counted(1, "sample"), counted(2000, "batch"), counted(0, "copy"), counted(3, "epoch")
    ('1 sample', '2,000 batches', '0 copies', '3 epochs')
    """
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("py") else f"{noun}es" if noun.endswith(_HISSING) else f"{noun}s"
    return f"{number:,} {noun}"


def rate_text(rate: float) -> str:
    """Return a rate with three significant digits.

    >>> rate_text(12345.6), rate_text(1.2345)
    ('12,346', '1.23')
    """
    return f"{rate:,.0f}" if rate >= 99.5 else f"{rate:.3g}"
