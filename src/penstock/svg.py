"""Helpers for SVG plots: round axis values, and short numbers with SI units."""

from __future__ import annotations

import math

__all__ = ["short", "ticks"]


def short(value: float) -> str:
    """Return a short form of a number, with at least two digits and an SI prefix: 1234567 -> "1.23 M"."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor * 0.9995:
            return f"{value / factor:.3g} {unit}" if value < factor * 999.5 else f"{value / factor:.0f} {unit}"
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def ticks(highest: float) -> list[float]:
    """Return three to six round values, from 0 to at least ``highest``."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(step for step in (power / 5, power / 2, power, power * 2, power * 5) if highest / step <= 4)
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]
