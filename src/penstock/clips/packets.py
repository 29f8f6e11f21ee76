"""`Packets`: the byte ranges of a video's packets in its file, and the packets that a clip needs.

    frames in display order    0 1 2 3 4 5 ...     a clip is some of these
    packets in decoding order  0 3 1 2 4 ...       each begins at a byte of the file; some are key frames

A frame is decoded from the nearest key frame before it in decoding order. If the frame is displayed before that key
frame (an open GOP), decoding begins at the previous key frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Coding", "DecodeRange", "Ints", "Packets", "digest_of", "ranges_of"]

Ints = npt.NDArray[np.int64]
_FAR = 1_000  # maximum number of packets of a gradual decoder refresh
# The extra bytes that may be read to merge ranges, as a fraction of the bytes of the packets.
_WASTE = 0.15


@dataclass(frozen=True)
class Coding:
    """The parameters that a decoder needs before its first packet.

    Attributes:
        codec: FFmpeg's name: ``h264``, ``hevc``, ``vp9``, ``av1``, ...
        tag: the container's name of the codec, if the decoder uses it; else empty.
        extradata: parameters that a container stores outside the packets.
        width, height: size of the coded frames, in pixels.
        rotation: degrees, counterclockwise, by which frames must be turned for display.
        colour_range, colour_space: FFmpeg's numbers, for frames that do not specify them.
        in_ranges: whether packets are byte ranges of the file. If not, FFmpeg's demuxer reads the file.
        by_time: whether the demuxer can seek to a key frame by its time. If not, it reads from the start.
        origin: timestamp in seconds at which the file starts: time zero for viewers.
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


class DecodeRange(NamedTuple):
    """Packets ``first`` to ``last``, inclusive, which are decoded together, and the wanted ones among them."""

    first: int
    last: int
    wanted: list[int]


class Packets(NamedTuple):
    """The packets of one video, in decoding order.

    Attributes:
        at: int64 (packets,): offset of each packet in the file, in bytes.
        size: uint32 (packets,): size of each packet in bytes.
        keys: uint32, sorted: the packets at which decoding can begin.
        shown: uint32 (frames,): the packet of each frame, in display order.
        times: float64 (frames,): display time of each frame, in seconds.
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
        """Return a hash of the coding, the packets and their order; the location of the file does not matter."""
        return digest_of(coding, self.size, self.keys, self.shown, self.times)

    def decode_ranges(self, frames: Ints) -> list[DecodeRange]:
        """Return the packets to decode for some frames, which are sorted and unique."""
        if not len(frames):
            return []
        decode_ranges: list[DecodeRange] = []
        for key, packet in sorted(zip(self._key_frames(frames), self.shown[frames].tolist(), strict=True)):
            if decode_ranges and key <= decode_ranges[-1].last:
                decode_ranges[-1].wanted.append(packet)
                decode_ranges[-1] = decode_ranges[-1]._replace(last=max(decode_ranges[-1].last, packet))
            else:
                decode_ranges.append(DecodeRange(key, packet, [packet]))
        return decode_ranges

    def earlier_range(self, run: DecodeRange) -> DecodeRange | None:
        """Return a run that begins at an earlier key frame, at least twice as long; None if none is near enough.

        With a gradual decoder refresh, the first frames after a key frame are incomplete.
        """
        if not run.first or run.last - run.first > _FAR:
            return None
        far = run.last - 2 * (run.last - run.first + 1)
        number = min(
            int(np.searchsorted(self.keys, run.first)) - 1, int(np.searchsorted(self.keys, max(far, 0), "right")) - 1
        )
        return run._replace(first=int(self.keys[number]) if number >= 0 else 0)

    def _key_frames(self, frames: Ints) -> list[int]:
        """Return the key frame from which each frame is decoded."""
        numbers = np.searchsorted(self.keys, self.shown[frames], side="right") - 1
        places: dict[int, int] = {}
        found = []
        for frame, number in zip(frames.tolist(), numbers.tolist(), strict=True):
            while number > 0:
                if number not in places:
                    places[number] = self.frame_number(int(self.keys[number]))
                if places[number] <= frame:
                    break
                number -= 1
            # The file begins in the middle of a GOP.
            found.append(int(self.keys[number]) if number >= 0 else 0)
        return found

    def frame_number(self, key: int) -> int:
        """Return the frame number of a key frame; -1 if it is not displayed."""
        # Display order and decoding order differ by some dozens of frames at most.
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
    """Return a 16-byte hash of the coding and the packets."""
    digest = xxhash.xxh3_128(repr(coding).encode())
    for values in arrays:
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()


def ranges_of(at: Ints, size: npt.NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Return byte ranges (begin, end) that contain all packets and few other bytes.

    Args:
        at: int64: offset of each packet in the file.
        size: size of each packet in bytes.
    """
    order = np.argsort(at, kind="stable")
    begins, ends = at[order], np.maximum.accumulate((at + size)[order])
    gaps = np.maximum(begins[1:] - ends[:-1], 0)
    if not gaps.any():
        return [(int(begins[0]), int(ends[-1]))]
    largest = np.argsort(gaps, kind="stable")
    # Gaps contain other streams. Reading a small gap costs less than another request.
    spare = np.cumsum(gaps[largest]) > _WASTE * int(size.sum(dtype=np.int64))
    cuts = np.sort(largest[spare & (gaps[largest] > 0)])
    firsts, lasts = np.concatenate([[0], cuts + 1]), np.concatenate([cuts, [len(begins) - 1]])
    return list(zip(begins[firsts].tolist(), ends[lasts].tolist(), strict=True))
