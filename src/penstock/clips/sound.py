"""`SoundPackets`: where the coded pieces of a recording lie, and which of them some samples need.

    samples, as one hears them    0 ......... 1,000 .......... 2,000 ...
    packets                    [ 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 ...        each of so many samples

Samples are those of a decode from the beginning, without those that an encoder has put before the first and behind the
last. Packets of some codecs depend on those before them: these are decoded first, and what comes out is left away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.clips.packets import Ints, digest_of

__all__ = ["SoundCoding", "SoundPackets"]


@dataclass(frozen=True)
class SoundCoding:
    """What a decoder has to know before it gets a packet of sound.

    Attributes:
        codec: FFmpeg's name of the decoder: ``flac``, ``mp3float``, ``opus``, ``pcm_s16le``, ...
        extradata: parameters that a container keeps beside the packets.
        rate: samples per second.
        channels: of the sound.
        layout: FFmpeg's name of the channels: ``mono``, ``stereo``, ``5.1``, ...
        skip: samples before the first that one hears.
        samples: that one hears, of each channel.
        in_ranges: whether packets are ranges of the file. If not, it is read through FFmpeg's demuxer.
    """

    codec: str
    extradata: bytes
    rate: int
    channels: int
    layout: str
    skip: int
    samples: int
    in_ranges: bool


class SoundPackets(NamedTuple):
    """The packets of one recording.

    Attributes:
        at: int64 (packets,): bytes at which they begin.
        size: uint32 (packets,): bytes of each.
        begins: int64 (packets,): the first sample of each, counted with those that are skipped.
        times: float64 (packets,): seconds at which they begin, of a file that is read through a demuxer; else empty.
    """

    at: Ints
    size: npt.NDArray[np.uint32]
    begins: Ints
    times: npt.NDArray[np.float64]

    def length(self, coding: SoundCoding) -> int:
        """Return the number of samples."""
        return coding.samples

    def digest(self, coding: SoundCoding) -> bytes:
        """Return the identity of a recording: how it is coded, and its packets; not where it lies."""
        return digest_of(coding, self.size, self.begins)

    def packets_of(self, begin: int, end: int, codec: str) -> tuple[int, int, int]:
        """Return which packets samples ``begin`` to ``end`` need: the first to decode, the first and the last that
        have some of them."""
        first = max(0, int(np.searchsorted(self.begins, begin, side="right")) - 1)
        last = max(first, int(np.searchsorted(self.begins, end, side="left")) - 1)
        return self._from(first, codec), first, last

    def _from(self, first: int, codec: str) -> int:
        """The packet to begin with, so that this one comes out as it does in a decode from the beginning."""
        packets, samples, nbytes = _BEFORE.get(codec, _OTHERS)
        known = max(0, first - packets)
        begin = known
        while begin > 0 and (
            self.begins[first] - self.begins[begin] < samples or self.size[begin:known].sum(dtype=np.int64) < nbytes
        ):
            begin -= 1
        return begin


_BEFORE = {
    **dict.fromkeys(("flac", "alac", "wavpack", "tta"), (0, 0, 0)),
    # A frame overlaps with the one before, whose filters reach into the one before that. The bit reservoir of each is
    # up to 511 bytes of the frames before it, heads not counted, which are less than half of them.
    **dict.fromkeys(("mp3", "mp3float", "mp2", "mp2float", "mp1", "mp1float"), (2, 0, 2 * 511)),
    # RFC 7845: 80 ms until the decoder has converged. Here twice as many.
    "opus": (2, 7_680, 0),
}
_OTHERS = (4, 0, 0)
"""Of each codec how many packets and samples are decoded before a packet, and bytes before these packets, at least."""
