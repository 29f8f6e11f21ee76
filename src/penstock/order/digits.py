"""A keyed permutation of ``64**digits`` places to slots that spreads neighbours evenly, and that counts.

The binary digits of a place are turned around, so that its last one decides which half of the slots it gets (van der
Corput), and each is shuffled: whether the two halves of an aligned run of ``2**i`` places change sides is a bit that a
hash of (key, run) draws. So the slots of a run are evenly spaced, one in each of its ``2**i`` equal parts; and which
part a place gets is random.

Since they are evenly spaced, a division says how many slots of a run are below a bound. The places before a place are
some runs, one for each digit. So `rank` counts those of them whose slots are below a bound without looking at any.

Six binary digits are shuffled by the 63 bits of one hash. They are a binary tree of six levels, used in two halves:
seven bits for three digits, and by what these are seven others for the next three. Tables have all trees of seven bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.hashing import mix, mix_array, splitmix64
from penstock.order.permutation import Indices

__all__ = ["DIGIT_BITS", "DigitShuffle", "find_in", "rank", "ranks", "slot_of", "slots_of"]

DIGIT_BITS = 6
"""Binary digits of a place that one hash shuffles."""


class DigitShuffle:
    """The permutations of all blocks, for one key.

    Args:
        key: 64-bit key.
        digits: the most digits in base 64 of a place; ten, for slots to fit 64 bits.

    A block begins at a position, which tells its permutation from that of other blocks, and its places are counted from
    there. A *path* is what the permutation does with one place: for each octal digit from the highest on the tree that
    shuffles it and the digit itself, as an index of the tables.
    """

    def __init__(self, key: int, digits: int) -> None:
        self._keys = [mix(key, level) for level in range(digits)]

    # For a Python int or a uint64 array alike.

    def path(self, place: Any, begin: Any, digits: int) -> list[Any]:
        """Return the path of a place in a block of so many digits; that of all its places for the one behind them."""
        path = []
        for level in range(digits - 1, -1, -1):
            word = self.word(place, begin, level)
            upper = place >> (DIGIT_BITS * level + 3) & 7
            path.append((word & 127) << 3 | upper)
            path.append((word >> 7 * upper + 7 & 127) << 3 | place >> (DIGIT_BITS * level) & 7)
        return path

    def word(self, place: Any, begin: Any, level: int) -> Any:
        """Return the hash that shuffles a digit of a place, the same for all places with the same digits above it."""
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
# Python's integers are faster out of lists.
_SLOT: list[int] = _SLOTS.tolist()
"""By tree and digit: the digit of the slot."""
_BELOW: list[int] = _BELOWS.tolist()
"""By tree, digit and a bound from 0 to 7: how many smaller digits have a digit of the slot below the bound."""


def slot_of(path: list[int]) -> int:
    """Return the slot at the end of a path."""
    slot = 0
    for step, state in enumerate(path):
        slot |= _SLOT[state] << (3 * step)
    return slot


def slots_of(path: list[Indices]) -> Indices:
    """Return the same for int64 arrays."""
    slots = _SLOTS.take(path[0])
    for step, states in enumerate(path[1:], 1):
        slots |= _SLOTS.take(states) << (3 * step)
    return slots


def rank(path: list[int], bound: int) -> int:
    """Return how many places before that of a path have slots below a bound.

    Of a run with ``bound`` slots below it each of the eight parts has an eighth, rounded up if its own slots come early
    enough among those of the run.
    """
    found = 0
    for state in path:
        eighth, rest = bound >> 3, bound & 7
        found += (state & 7) * eighth + _BELOW[state << 3 | rest]
        bound = eighth + (_SLOT[state] < rest)
    return found


def ranks(path: list[Indices], bounds: Indices) -> Indices:
    """Return the same for int64 arrays."""
    found = np.zeros_like(bounds)
    for states in path:
        eighths, rest = bounds >> 3, bounds & 7
        found += (states & 7) * eighths
        found += _BELOWS.take(states << 3 | rest)
        bounds = eighths + (_SLOTS.take(states) < rest)
    return found


def find_in(shuffle: DigitShuffle, before: int, slots: tuple[int, int], begin: int, digits: int) -> int:
    """Return the place in a block that has a slot from the first of ``slots`` to below the second, with so many such
    places before it."""
    place, (low, high) = 0, slots
    for level in range(digits - 1, -1, -1):
        word = shuffle.word(place, begin, level)
        upper, before, low, high = _descend(word & 127, before, low, high)
        lower, before, low, high = _descend(word >> 7 * upper + 7 & 127, before, low, high)
        place |= (upper << 3 | lower) << (DIGIT_BITS * level)
    return place


def _descend(tree: int, before: int, low: int, high: int) -> tuple[int, int, int, int]:
    """Return the part of a run that has the place with so many before it, and those numbers inside of the part."""
    for digit in range(8):
        slot = _SLOT[tree << 3 | digit]
        begin, end = (low >> 3) + (slot < low & 7), (high >> 3) + (slot < high & 7)
        if before < end - begin:
            return digit, before, begin, end
        before -= end - begin
    raise AssertionError("a run has fewer places than its block counted")
