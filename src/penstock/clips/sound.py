"""`SoundPackets`: the byte ranges of a recording's packets in its file, and the packets that some samples need.

    audible samples               0 ......... 1,000 .......... 2,000 ...
    packets                    [ 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 ...        each holds some samples

Samples are counted as in a decode from the start, without the samples that an encoder adds before the first and after
the last. Packets of some codecs depend on earlier packets: these are decoded first, and their output is dropped.
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
    """The parameters that an audio decoder needs before its first packet.

    Attributes:
        codec: FFmpeg's name of the decoder: ``flac``, ``mp3float``, ``opus``, ``pcm_s16le``, ...
        extradata: parameters that a container stores outside the packets.
        rate: samples per second.
        channels: number of channels.
        layout: FFmpeg's name of the channel layout: ``mono``, ``stereo``, ``5.1``, ...
        skip: number of samples before the first audible one.
        samples: number of audible samples per channel.
        in_ranges: whether packets are byte ranges of the file. If not, FFmpeg's demuxer reads the file.
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
        at: int64 (packets,): offset of each packet in the file, in bytes.
        size: uint32 (packets,): size of each packet in bytes.
        begins: int64 (packets,): the first sample of each packet, skipped samples included.
        times: float64 (packets,): start time of each packet in seconds, if a demuxer reads the file; else empty.
    """

    at: Ints
    size: npt.NDArray[np.uint32]
    begins: Ints
    times: npt.NDArray[np.float64]

    def length(self, coding: SoundCoding) -> int:
        """Return the number of samples."""
        return coding.samples

    def digest(self, coding: SoundCoding) -> bytes:
        """Return a hash of the coding and the packets; the location of the file does not matter."""
        return digest_of(coding, self.size, self.begins)

    def packets_of(self, begin: int, end: int, codec: str) -> tuple[int, int, int]:
        """Return the packets for samples ``begin`` to ``end``: the first to decode, and the first and last that contain
        some of them."""
        first = max(0, int(np.searchsorted(self.begins, begin, side="right")) - 1)
        last = max(first, int(np.searchsorted(self.begins, end, side="left")) - 1)
        return self._from(first, codec), first, last

    def _from(self, first: int, codec: str) -> int:
        """Return the packet where decoding must begin, so that ``first`` decodes as in a decode from the start."""
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
    # A frame overlaps with the previous one, whose filters reach into the frame before that. Each frame's bit reservoir
    # is up to 511 bytes of earlier frames, without their headers, which are less than half of a frame.
    **dict.fromkeys(("mp3", "mp3float", "mp2", "mp2float", "mp1", "mp1float"), (2, 0, 2 * 511)),
    # RFC 7845: the decoder converges within 80 ms. Here twice as much.
    "opus": (2, 7_680, 0),
}
_OTHERS = (4, 0, 0)
"""The minimum to decode before a packet, by codec: packets, samples, and bytes before these packets."""
