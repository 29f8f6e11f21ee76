"""The policies of AutoAugment (Cubuk et al. 2019, arXiv 1805.09501, appendix), and their parser.

A policy has 25 pairs, one a line, of ``operation probability strength``. Strengths are 0 to 9, ``-`` means none. The
paper lists strengths even for operations without one; they have no effect and are left out, as in torchvision.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["POLICIES", "Step", "pairs_of"]


class Step(NamedTuple):
    """One operation of a pair."""

    name: str
    probability: float
    share: float
    """Strength as a share of the largest, 0 to 1."""


_IMAGENET = """
posterize 0.4 8, rotate 0.6 9
solarize 0.6 5, autocontrast 0.6 -
equalize 0.8 -, equalize 0.6 -
posterize 0.6 7, posterize 0.6 6
equalize 0.4 -, solarize 0.2 4
equalize 0.4 -, rotate 0.8 8
solarize 0.6 3, equalize 0.6 -
posterize 0.8 5, equalize 1.0 -
rotate 0.2 3, solarize 0.6 8
equalize 0.6 -, posterize 0.4 6
rotate 0.8 8, color 0.4 0
rotate 0.4 9, equalize 0.6 -
equalize 0.0 -, equalize 0.8 -
invert 0.6 -, equalize 1.0 -
color 0.6 4, contrast 1.0 8
rotate 0.8 8, color 1.0 2
color 0.8 8, solarize 0.8 7
sharpness 0.4 7, invert 0.6 -
shearx 0.6 5, equalize 1.0 -
color 0.4 0, equalize 0.6 -
equalize 0.4 -, solarize 0.2 4
solarize 0.6 5, autocontrast 0.6 -
invert 0.6 -, equalize 1.0 -
color 0.6 4, contrast 1.0 8
equalize 0.8 -, equalize 0.6 -
"""

_CIFAR10 = """
invert 0.1 -, contrast 0.2 6
rotate 0.7 2, translatex 0.3 9
sharpness 0.8 1, sharpness 0.9 3
sheary 0.5 8, translatey 0.7 9
autocontrast 0.5 -, equalize 0.9 -
sheary 0.2 7, posterize 0.3 7
color 0.4 3, brightness 0.6 7
sharpness 0.3 9, brightness 0.7 9
equalize 0.6 -, equalize 0.5 -
contrast 0.6 7, sharpness 0.6 5
color 0.7 7, translatex 0.5 8
equalize 0.3 -, autocontrast 0.4 -
translatey 0.4 3, sharpness 0.2 6
brightness 0.9 6, color 0.2 8
solarize 0.5 2, invert 0.0 -
equalize 0.2 -, autocontrast 0.6 -
equalize 0.2 -, equalize 0.6 -
color 0.9 9, equalize 0.6 -
autocontrast 0.8 -, solarize 0.2 8
brightness 0.1 3, color 0.7 0
solarize 0.4 5, autocontrast 0.9 -
translatey 0.9 9, translatey 0.7 9
autocontrast 0.9 -, solarize 0.8 3
equalize 0.8 -, invert 0.1 -
translatey 0.7 9, autocontrast 0.9 -
"""

_SVHN = """
shearx 0.9 4, invert 0.2 -
sheary 0.9 8, invert 0.7 -
equalize 0.6 -, solarize 0.6 6
invert 0.9 -, equalize 0.6 -
equalize 0.6 -, rotate 0.9 3
shearx 0.9 4, autocontrast 0.8 -
sheary 0.9 8, invert 0.4 -
sheary 0.9 5, solarize 0.2 6
invert 0.9 -, autocontrast 0.8 -
equalize 0.6 -, rotate 0.9 3
shearx 0.9 4, solarize 0.3 3
sheary 0.8 8, invert 0.7 -
equalize 0.9 -, translatey 0.6 6
invert 0.9 -, equalize 0.6 -
contrast 0.3 3, rotate 0.8 4
invert 0.8 -, translatey 0.0 2
sheary 0.7 6, solarize 0.4 8
invert 0.6 -, rotate 0.8 4
sheary 0.3 7, translatex 0.9 3
shearx 0.1 6, invert 0.6 -
solarize 0.7 2, translatey 0.6 7
sheary 0.8 4, invert 0.8 -
shearx 0.7 9, translatey 0.8 3
sheary 0.8 5, autocontrast 0.7 -
shearx 0.7 2, invert 0.1 -
"""

POLICIES = {"imagenet": _IMAGENET, "cifar10": _CIFAR10, "svhn": _SVHN}
"""Policies by the dataset on which they were searched, with torchvision's names."""


def pairs_of(policy: str) -> list[tuple[Step, Step]]:
    """Return the pairs of the policy with this name."""
    found = []
    for line in POLICIES[policy].strip().split("\n"):
        first, second = (_step(*part.split()) for part in line.split(", "))
        found.append((first, second))
    return found


def _step(name: str, probability: str, strength: str) -> Step:
    return Step(name, float(probability), 0.0 if strength == "-" else int(strength) / 9)
