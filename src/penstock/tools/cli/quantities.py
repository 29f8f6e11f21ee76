"""Parse numbers on the command line: ``1.28M``, ``1e12``, ``110kB``, ``2GiB``, ``1.5GB/s``; and seeds."""

from __future__ import annotations

import re
from decimal import Decimal

import typer

from penstock.errors import OrderError

__all__ = ["check_seed", "count", "size"]

_NUMBER = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:e\+?[0-9]{1,4})?)\s*([kmgtp]?)(i?)(b?)(?:/s)?", re.IGNORECASE)
_STEPS = "kmgtp"
_MOST = 10**30  # more than any realistic number


def _parse(text: str, *, of_bytes: bool) -> int:
    match = _NUMBER.fullmatch(str(text).strip())  # defaults are numbers, and are parsed as well
    if match is None or (match[4] and not of_bytes) or (match[3] and not match[2]):
        examples = "110kB, 64GiB, 1.5GB/s" if of_bytes else "1281167, 1.28M, 1e12"
        raise typer.BadParameter(f"{text!r} is not {'a size' if of_bytes else 'a number'}: write it like {examples}")
    power = _STEPS.index(match[2].lower()) + 1 if match[2] else 0
    number = Decimal(match[1].replace(",", "").replace("_", ""))
    if number > _MOST:
        raise typer.BadParameter(f"{text!r} is too large")
    scale: int = (1024 if match[3] else 1000) ** power
    value = number * scale
    if 0 < value < 1:
        raise typer.BadParameter(f"{text!r} is less than one")
    if not of_bytes and value != int(value):
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return round(value)


def count(text: str) -> int:
    """Parse a whole number, with an optional suffix k, M, G, T or P: "1.28M".

    Raises:
        BadParameter: any other text.

    >>> count("1.28M"), count("1e12")
    (1280000, 1000000000000)
    """
    return _parse(text, of_bytes=False)


def size(text: str) -> int:
    """Parse bytes, or bytes per second: "110kB", "2GiB", "1.5GB/s".

    Raises:
        BadParameter: any other text.

    >>> size("110kB"), size("2GiB")
    (110000, 2147483648)
    """
    return _parse(text, of_bytes=True)


def check_seed(value: int) -> int:
    """Return a valid seed unchanged; used as ``callback`` of options.

    Raises:
        BadParameter: a number outside the range of seeds.
    """
    from penstock.hashing import derive_key

    try:
        derive_key(value)
    except OrderError as error:
        raise typer.BadParameter(str(error)) from error
    return value
