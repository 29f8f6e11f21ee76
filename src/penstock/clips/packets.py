"""`Packets`: where the coded frames of a video lie in its file, and which of them a clip needs.

    frames, as they are shown   0 1 2 3 4 5 ...     a clip is a few of these
    packets, as they are coded  0 3 1 2 4 ...       each at a byte of the file; some are keys

A frame is decoded from the last key on from which it can be. That is the last key before it among the packets, unless
the frame is shown before that key (open groups of pictures): then it is the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Coding", "Ints", "Packets", "Run", "digest_of", "ranges_of"]

Ints = npt.NDArray[np.int64]
_FAR = 1_000  # packets, of a gradual refresh at most
_WASTE = 0.15  # of the bytes of packets, at most so much more is read to make one range of several


@dataclass(frozen=True)
class Coding:
    """What a decoder has to know before it sees a packet.

    Attributes:
        codec: FFmpeg's name: ``h264``, ``hevc``, ``vp9``, ``av1``, ...
        tag: the container's name of it, where decoders look at that; else empty.
        extradata: parameters that a container keeps beside the packets.
        width, height: of the frames as they are coded, in pixels.
        rotation: degrees, counterclockwise, by which frames are to be turned to be looked at.
        colour_range, colour_space: FFmpeg's numbers, for frames that do not say themselves.
        in_ranges: whether packets are ranges of the file. If not, it is read through FFmpeg's demuxer.
        by_time: whether the demuxer finds a key by its time. If not, it begins with the file.
        origin: seconds, of the times of the packets, at which the file begins: zero for who looks at it.
    """

    codec: str
    tag: str
    extradata: bytes
    width: int
    height: int
    rotation: int
    colour_range: int
    colour_space: int
    in_ranges: bool
    by_time: bool
    origin: float


class Run(NamedTuple):
    """Packets ``first`` to ``last``, inclusive, which are decoded together, and those of them that are wanted."""

    first: int
    last: int
    wanted: list[int]


class Packets(NamedTuple):
    """The packets of one video, in the order in which they are decoded.

    Attributes:
        at: int64 (packets,): bytes at which they begin.
        size: uint32 (packets,): bytes of each.
        keys: uint32, sorted: those at which decoding can begin.
        shown: uint32 (frames,): the packet of each frame, in the order in which frames are shown.
        times: float64 (frames,): seconds at which they are shown.
    """

    at: Ints
    size: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint32]
    shown: npt.NDArray[np.uint32]
    times: npt.NDArray[np.float64]

    def length(self, coding: Coding) -> int:
        """Return the number of frames."""
        return len(self.shown)

    def digest(self, coding: Coding) -> bytes:
        """Return the identity of a video: how it is coded, its packets and their order; not where it lies."""
        return digest_of(coding, self.size, self.keys, self.shown, self.times)

    def runs(self, frames: Ints) -> list[Run]:
        """Return which packets are decoded for some frames, sorted ones without repetition."""
        if not len(frames):
            return []
        runs: list[Run] = []
        for key, packet in sorted(zip(self._keys_of(frames), self.shown[frames].tolist(), strict=True)):
            if runs and key <= runs[-1].last:
                runs[-1].wanted.append(packet)
                runs[-1] = runs[-1]._replace(last=max(runs[-1].last, packet))
            else:
                runs.append(Run(key, packet, [packet]))
        return runs

    def earlier(self, run: Run) -> Run | None:
        """Return a run that begins at the key before, or twice as far from its end; None if there is none, or not near.

        From a key of gradual refresh it takes some frames until one is whole.
        """
        if not run.first or run.last - run.first > _FAR:
            return None
        far = run.last - 2 * (run.last - run.first + 1)
        number = min(
            int(np.searchsorted(self.keys, run.first)) - 1, int(np.searchsorted(self.keys, max(far, 0), "right")) - 1
        )
        return run._replace(first=int(self.keys[number]) if number >= 0 else 0)

    def _keys_of(self, frames: Ints) -> list[int]:
        """The key from which each frame is decoded."""
        numbers = np.searchsorted(self.keys, self.shown[frames], side="right") - 1
        places: dict[int, int] = {}
        found = []
        for frame, number in zip(frames.tolist(), numbers.tolist(), strict=True):
            while number > 0:
                if number not in places:
                    places[number] = self.place_of(int(self.keys[number]))
                if places[number] <= frame:
                    break
                number -= 1
            # Before the first key the file begins in the middle of a group.
            found.append(int(self.keys[number]) if number >= 0 else 0)
        return found

    def place_of(self, key: int) -> int:
        """Return the frame that a key is; -1 for one that is not shown."""
        # Packets are shown at most some dozens of frames from where they are coded.
        near = 64
        while True:
            low, high = max(0, key - near), min(len(self.shown), key + near)
            found = np.flatnonzero(self.shown[low:high] == key)
            if len(found):
                return low + int(found[0])
            if low == 0 and high == len(self.shown):
                return -1
            near *= 8


def digest_of(coding: Any, *arrays: npt.NDArray[Any]) -> bytes:
    """Return 16 bytes that differ for files that are coded in another way, or hold other packets."""
    digest = xxhash.xxh3_128(repr(coding).encode())
    for values in arrays:
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()


def ranges_of(at: Ints, size: npt.NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Return the bytes, as (begin, end), that hold packets, and little else.

    Args:
        at: int64: bytes at which they begin.
        size: bytes of each.
    """
    order = np.argsort(at, kind="stable")
    begins, ends = at[order], np.maximum.accumulate((at + size)[order])
    gaps = np.maximum(begins[1:] - ends[:-1], 0)
    if not gaps.any():
        return [(int(begins[0]), int(ends[-1]))]
    largest = np.argsort(gaps, kind="stable")
    # Between them lie other streams, of which little is worth no request of its own.
    spare = np.cumsum(gaps[largest]) > _WASTE * int(size.sum(dtype=np.int64))
    cuts = np.sort(largest[spare & (gaps[largest] > 0)])
    firsts, lasts = np.concatenate([[0], cuts + 1]), np.concatenate([cuts, [len(begins) - 1]])
    return list(zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True))
