"""A keyed permutation of ``64**digits`` places to slots that spreads neighbours evenly and can count.

The binary digits of a place are reversed, so that its last digit chooses one half of the slots (van der Corput). Each
digit is also shuffled: for each aligned run of ``2**i`` places, a hash of (key, run) decides whether its two halves
swap. So the slots of a run are evenly spaced, one in each of ``2**i`` equal parts of all slots, and the part of a place
is random.

Because slots are evenly spaced, a division counts the slots of a run below a bound. All places before a given place are
a few runs, one per digit. So `rank` counts how many of them have slots below a bound without looking at each.

The 63 bits of one hash shuffle six binary digits. The bits form a binary tree of six levels, used in two halves: seven
bits for the first three digits, and, depending on these digits, seven other bits for the next three. The tables cover
all trees of seven bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.hashing import mix, mix_array, splitmix64
from penstock.order.permutation import Indices

__all__ = ["DIGIT_BITS", "DigitShuffle", "find_in", "rank", "ranks", "slot_of", "slots_of"]

DIGIT_BITS = 6
"""Number of binary digits that one hash shuffles."""


class DigitShuffle:
    """The permutations of all blocks, for one key.

    Args:
        key: 64-bit key.
        digits: the largest number of base-64 digits of a place; at most ten, so that slots fit 64 bits.

    A block is identified by its first position, and its places are counted from there. Each block has its own
    permutation. A *path* describes the image of one place: for each octal digit, from the highest, the tree that
    shuffles it and the digit itself, as one index of the tables.
    """

    def __init__(self, key: int, digits: int) -> None:
        self._keys = [mix(key, level) for level in range(digits)]

    # These take a Python int or a uint64 array.

    def path(self, place: Any, begin: Any, digits: int) -> list[Any]:
        """Return the path of a place in a block of ``digits`` digits.

        With the number of all places as ``place``, `rank` of the path counts over the whole block.
        """
        path = []
        for level in range(digits - 1, -1, -1):
            word = self.word(place, begin, level)
            upper = place >> (DIGIT_BITS * level + 3) & 7
            path.append((word & 127) << 3 | upper)
            path.append((word >> 7 * upper + 7 & 127) << 3 | place >> (DIGIT_BITS * level) & 7)
        return path

    def word(self, place: Any, begin: Any, level: int) -> Any:
        """Return the hash that shuffles one digit of a place. Places with the same higher digits share it."""
        shift = DIGIT_BITS * (level + 1)
        run = (begin >> shift) + (place >> shift)
        return splitmix64(self._keys[level] ^ run) if isinstance(run, int) else mix_array(self._keys[level], run)


def _make_tables() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    tree, digit = np.arange(128)[:, None], np.arange(8)[None, :]
    first = digit >> 2 ^ tree & 1
    second = digit >> 1 & 1 ^ tree >> (1 + (digit >> 2)) & 1
    third = digit & 1 ^ tree >> (3 + (digit >> 1)) & 1
    slot = first | second << 1 | third << 2
    below = (slot[:, :, None] < np.arange(8)).astype(np.int64)
    return slot.ravel(), (np.cumsum(below, axis=1) - below).ravel()


_SLOTS, _BELOWS = _make_tables()
# Reading single integers is faster from lists than from arrays.
_SLOT: list[int] = _SLOTS.tolist()
"""The slot's digit, by tree and digit of the place."""
_BELOW: list[int] = _BELOWS.tolist()
"""The number of smaller digits whose slot digit is below a bound, by tree, digit and bound (0 to 7)."""


def slot_of(path: list[int]) -> int:
    """Return the slot at the end of a path."""
    slot = 0
    for step, state in enumerate(path):
        slot |= _SLOT[state] << (3 * step)
    return slot


def slots_of(path: list[Indices]) -> Indices:
    """Return the slots at the ends of paths, for int64 arrays."""
    slots = _SLOTS.take(path[0])
    for step, states in enumerate(path[1:], 1):
        slots |= _SLOTS.take(states) << (3 * step)
    return slots


def rank(path: list[int], bound: int) -> int:
    """Return the number of places before the path's place whose slots are below a bound.

    If a run has ``bound`` slots below the bound, each of its eight parts has an eighth of them. The remainder of the
    division goes to the parts whose slots come first.
    """
    found = 0
    for state in path:
        eighth, rest = bound >> 3, bound & 7
        found += (state & 7) * eighth + _BELOW[state << 3 | rest]
        bound = eighth + (_SLOT[state] < rest)
    return found


def ranks(path: list[Indices], bounds: Indices) -> Indices:
    """Return the results of `rank` for int64 arrays."""
    found = np.zeros_like(bounds)
    for states in path:
        eighths, rest = bounds >> 3, bounds & 7
        found += (states & 7) * eighths
        found += _BELOWS.take(states << 3 | rest)
        bounds = eighths + (_SLOTS.take(states) < rest)
    return found


def find_in(shuffle: DigitShuffle, before: int, slots: tuple[int, int], begin: int, digits: int) -> int:
    """Return the place in a block that has its slot in the range ``slots``, and ``before`` such places before it."""
    place, (low, high) = 0, slots
    for level in range(digits - 1, -1, -1):
        word = shuffle.word(place, begin, level)
        upper, before, low, high = _descend(word & 127, before, low, high)
        lower, before, low, high = _descend(word >> 7 * upper + 7 & 127, before, low, high)
        place |= (upper << 3 | lower) << (DIGIT_BITS * level)
    return place


def _descend(tree: int, before: int, low: int, high: int) -> tuple[int, int, int, int]:
    """Return the part (one of eight) of a run with the place, and ``before``, ``low``, ``high`` in that part."""
    for digit in range(8):
        slot = _SLOT[tree << 3 | digit]
        begin, end = (low >> 3) + (slot < low & 7), (high >> 3) + (slot < high & 7)
        if before < end - begin:
            return digit, before, begin, end
        before -= end - begin
    raise AssertionError("a run has fewer places than its block counted")
