"""`Bitmap`: a filter of n rows, one bit per row, with random access from ordinals to rows and back.

    bits      n / 8 bytes; row r is bit r % 64 of word r // 64
    before    8 bytes per block of 512 rows: the number of kept rows before it
    hints     4 bytes per 512 kept rows: the block with the first of them

The ordinal of a kept row is the number of kept rows before it. A look-up goes from the hint to the block, and counts
the bits of its eight words (Jacobson, "Space-efficient static trees and graphs", FOCS 1989). The arrays may be mapped
files, so all processes of a machine share them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.order.permutation import Indices

__all__ = ["BLOCK", "Bitmap"]

BLOCK = 512
"""Rows in a block."""

_WORDS = BLOCK // 64
_HINT = 512
"""Kept rows per hint."""
_STEPS = 40
"""Up to this distance in blocks, walking from the hint is faster than a binary search."""
_CHUNK = 8192
"""Look-ups at a time, whose words fit the L2 cache."""

Words = npt.NDArray[np.uint64]


class Bitmap:
    """The rows whose bits are set, in ascending order.

    Args:
        bits: uint64 of shape (blocks * 8,), little-endian; bits after the last row are 0.
        before: int64 of shape (blocks + 1,): number of kept rows before each block, then their total.
        hints: from `hints_of`.

    Cost: no memory besides the arrays; 0.1 to 0.3 microseconds per look-up in large requests.

    >>> bits, before = Bitmap.arrays(np.array([True, False, True, True]))
    >>> bitmap = Bitmap(bits, before, Bitmap.hints_of(before))
    >>> bitmap.select(np.array([0, 1, 2])).tolist(), bitmap.rank(np.array([2, 1])).tolist()
    ([0, 2, 3], [1, -1])
    """

    def __init__(self, bits: Words, before: Indices, hints: npt.NDArray[np.uint32]) -> None:
        self._words = bits.reshape(-1, _WORDS)
        self._before = before
        self._hints = hints

    def __len__(self) -> int:
        return int(self._before[-1])

    @staticmethod
    def arrays(mask: npt.NDArray[np.bool_], before: int = 0) -> tuple[Words, Indices]:
        """Return the arrays ``bits`` and ``before`` for a mask.

        Args:
            mask: of the rows, or of a part of them. All parts except the last have a whole number of blocks.
            before: the number of kept rows in earlier parts.
        """
        blocks = -(-len(mask) // BLOCK)
        packed = np.zeros(blocks * BLOCK // 8, np.uint8)
        bits = np.packbits(mask, bitorder="little")
        packed[: len(bits)] = bits
        words = packed.view("<u8").astype(np.uint64, copy=False)
        counts = _count_bits(words).reshape(-1, _WORDS).sum(axis=1, dtype=np.int64)
        return words, before + np.concatenate([[0], np.cumsum(counts)])

    @staticmethod
    def hints_of(before: Indices) -> npt.NDArray[np.uint32]:
        """Return the block of each 512th kept row, then the last block."""
        starts = np.arange(0, int(before[-1]), _HINT)
        return np.append(before.searchsorted(starts, "right") - 1, len(before) - 2).astype(np.uint32)

    def select(self, ordinals: Indices) -> Indices:
        """Return the rows with these ordinals: int64 of the shape of ``ordinals``."""
        rows = np.empty(ordinals.size, np.int64)
        flat = ordinals.reshape(-1)
        for begin in range(0, flat.size, _CHUNK):
            rows[begin : begin + _CHUNK] = self._select(flat[begin : begin + _CHUNK])
        return rows.reshape(ordinals.shape)

    def _select(self, ordinals: Indices) -> Indices:
        block = self._blocks(ordinals)
        left = (ordinals - self._before.take(block)).astype(np.uint16)
        words = self._words.take(block, axis=0)
        number, ends, before = (np.zeros(len(block), np.uint16) for _ in range(3))
        # The loop is over the eight words of a block: an axis of eight is too short for NumPy's loops.
        for counts in np.ascontiguousarray(_count_bits(words).T)[:-1]:
            ends += counts
            full = ends <= left
            number += full
            np.copyto(before, ends, where=full)
        left -= before
        word = words.reshape(-1).take(np.arange(0, words.size, _WORDS) + number)
        return block * BLOCK + number * np.int64(64) + _select_in_word(word, left.astype(np.uint64))

    def select_one(self, ordinal: int) -> int:
        """Return the row with one ordinal. For a single look-up, Python integers are faster than arrays."""
        block = int(self._before.searchsorted(ordinal, "right")) - 1
        left = ordinal - int(self._before[block])
        words = self._words[block].tolist()
        number = 0
        while left >= (count := words[number].bit_count()):
            left -= count
            number += 1
        word = words[number]
        for _ in range(left):
            word &= word - 1
        return block * BLOCK + number * 64 + int(word & -word).bit_length() - 1

    def _blocks(self, ordinals: Indices) -> Indices:
        """Return the block of each kept row."""
        hint = ordinals // _HINT
        block = self._hints.take(hint).astype(np.int64)
        # If kept rows are sparse, their block is far from the hint.
        if int((self._hints.take(hint + 1) - block).max(initial=0)) > _STEPS:
            return self._before.searchsorted(ordinals, "right") - 1
        while (behind := self._before.take(block + 1) <= ordinals).any():
            block += behind
        return block

    def rank(self, rows: Indices) -> Indices:
        """Return the ordinals of rows, -1 for a row that is not kept: the inverse of `select`."""
        flat = rows.reshape(-1)
        ordinals = np.empty(flat.size, np.int64)
        for begin in range(0, flat.size, _CHUNK):
            ordinals[begin : begin + _CHUNK] = self._rank(flat[begin : begin + _CHUNK])
        return ordinals.reshape(rows.shape)

    def _rank(self, rows: Indices) -> Indices:
        block, inside = np.divmod(rows, BLOCK)
        number, bit = inside // 64, (inside % 64).astype(np.uint64)
        words = self._words.take(block, axis=0)
        found = self._before.take(block)
        for place, counts in enumerate(np.ascontiguousarray(_count_bits(words).T)[:-1]):
            found += counts * (place < number)
        word = words.reshape(-1).take(np.arange(0, words.size, _WORDS) + number)
        found += _count_bits(word & ((_ONE << bit) - _ONE))
        found[(word >> bit) & _ONE == 0] = -1
        return found


_ONE, _LOW8 = np.uint64(1), np.uint64(0xFF)
_M1, _M2, _M4 = (np.uint64(mask) for mask in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))
_ONES, _HIGHS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)


def _count_bits(words: Words) -> npt.NDArray[np.uint8]:
    """Return the number of bits that are set in each word."""
    # NumPy 1 has no bitwise_count.
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(words)
    return (_sums_of_bytes(words) >> np.uint64(56)).astype(np.uint8)


def _sums_of_bytes(words: Words) -> Words:
    """Return a word whose bytes count the bits that are set in the same byte and all lower ones."""
    counts = words - ((words >> np.uint64(1)) & _M1)
    counts = (counts & _M2) + ((counts >> np.uint64(2)) & _M2)
    sums: Words = ((counts + (counts >> np.uint64(4))) & _M4) * _ONES
    return sums


def _select_in_word(words: Words, left: Words) -> Indices:
    """Return the number of the set bit in each word that has ``left`` set bits below it.

    All bytes of a word are compared at once (Vigna, "Broadword implementation of rank/select queries", WEA 2008).
    """
    sums = _sums_of_bytes(words)
    full = (((left * _ONES) | _HIGHS) - sums) & _HIGHS
    shift = ((full >> np.uint64(7)) * _ONES >> np.uint64(56)) << np.uint64(3)
    inside = left - ((sums << np.uint64(8) >> shift) & _LOW8)
    byte = (words >> shift) & _LOW8
    return shift.view(np.int64) + _IN_BYTE.take((byte * np.uint64(8) + inside).view(np.int64))


def _bits_of_bytes() -> npt.NDArray[np.int64]:
    """Return the positions of the set bits of each byte, ascending: int64 of shape (256, 8)."""
    table = np.zeros((256, 8), np.int64)
    for byte in range(256):
        places = [bit for bit in range(8) if byte >> bit & 1]
        table[byte, : len(places)] = places
    return table


_IN_BYTE = _bits_of_bytes().reshape(-1)
