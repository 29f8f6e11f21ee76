"""Words of reports and messages: `counted` adds a noun to a number, `rate_text` rounds to three digits, `kind_text` is
the type of a value with its article.
"""

from __future__ import annotations

import re

__all__ = ["counted", "kind_text", "rate_text", "with_article"]

# Names that are spoken with a vowel first, as an ImageDataset or an MDSDataset.
_VOWEL = re.compile(r"[aeioAEIO]|[uU](?!int|ni|s|RL)|[FHLMNRSX][A-Z]")
_HISSING = ("s", "x", "tch", "sh")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where needed.

    >>> counted(1, "sample"), counted(2000, "batch"), counted(0, "copy"), counted(3, "epoch")
    ('1 sample', '2,000 batches', '0 copies', '3 epochs')
    """
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("py") else f"{noun}es" if noun.endswith(_HISSING) else f"{noun}s"
    return f"{number:,} {noun}"


def kind_text(value: object) -> str:
    """Return the type of a value with its article.

    >>> kind_text([]), kind_text(0)
    ('a list', 'an int')
    """
    return with_article(type(value).__name__)


def rate_text(rate: float) -> str:
    """Return a rate with three significant digits.

    >>> rate_text(12345.6), rate_text(1.2345)
    ('12,346', '1.23')
    """
    return f"{rate:,.0f}" if rate >= 99.5 else f"{rate:.3g}"


def with_article(name: str) -> str:
    """Return the name of a type with its article.

    >>> [with_article(name) for name in ("ImageDataset", "MDSDataset", "Mixture", "uint8", "str")]
    ['an ImageDataset', 'an MDSDataset', 'a Mixture', 'a uint8', 'a str']
    """
    return f"{'an' if _VOWEL.match(name) else 'a'} {name}"
