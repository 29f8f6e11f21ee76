"""`CodecDecoder`: packets to frames, without a container; and those of a thread, which stay open from clip to clip.

A packet is given to the decoder with its number in place of a time, and the frame comes back with it: so frames are
known by their packets, whatever their times are, missing, doubled or wrong.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import av
from av.codec.context import CodecContext
from av.packet import Packet

from penstock.clips.packets import Coding
from penstock.errors import ClipError

__all__ = ["MAX_PIXELS", "CodecDecoder", "coded", "decoder_for"]

MAX_PIXELS = 2**26
"""Of a frame that is decoded unless another limit is given: 67 million, twice those of 8K."""

_NAMES = {"av1": "libdav1d"}  # what FFmpeg calls av1 decodes on graphics cards alone
_OPEN = 4  # decoders of a thread, each with its frames of reference: 1080p about 50 MB
_SKIPS = ("h264", "mpeg4", "mpeg2video")
"""Codecs of which frames that no other one needs are passed over. Those of HEVC's temporal layers would be, too, but
its decoder then shows others at another place."""


class CodecDecoder:
    """A decoder of packets that are coded in one way.

    Args:
        coding: what it has to know.
        max_pixels: of a frame; more are an error.

    Raises:
        ClipError: FFmpeg has no such decoder.
    """

    def __init__(self, coding: Coding, max_pixels: int = MAX_PIXELS) -> None:
        try:
            context: Any = CodecContext.create(_NAMES.get(coding.codec, coding.codec), "r")
        except (av.error.FFmpegError, ValueError) as error:
            raise ClipError(f"this FFmpeg cannot decode {coding.codec}: {error}") from error
        context.extradata = coding.extradata or None
        if coding.tag:
            context.codec_tag = coding.tag
        context.width, context.height = coding.width, coding.height
        context.color_range, context.colorspace = coding.colour_range, coding.colour_space
        # With more threads a decoder holds frames back, and they do not live on in a fork.
        context.thread_count = 1
        # Streams that do not say how many frames are held back for their order: as many as the standard allows.
        context.options = {"max_pixels": str(max_pixels), "strict": "1"}
        self._context = context
        self._skips = coding.codec in _SKIPS

    @classmethod
    def of_stream(cls, stream: Any) -> CodecDecoder:
        """Return the decoder that a container has for a stream of its own."""
        made = cls.__new__(cls)
        made._context, made._skips = stream.codec_context, False
        return made

    def frames(
        self, packets: Iterable[tuple[int, Packet[Any]]], wanted: set[int] | None = None, *, tolerant: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Yield the frames of packets, each with the packet's number, in the order in which they are shown.

        Args:
            packets: (number, packet), in the order of decoding, beginning with a key.
            wanted: frames of others are not shown, and not decoded where no other one needs them.
            tolerant: go on behind packets that are damaged.

        Raises:
            av.error.FFmpegError: damaged data.
        """
        context = self._context
        context.flush_buffers()
        for number, packet in packets:
            packet.pts = packet.dts = number
            if self._skips and wanted is not None:
                context.skip_frame = "DEFAULT" if number in wanted else "NONREF"
            try:
                made = context.decode(packet)
            except av.error.InvalidDataError:
                if not tolerant:
                    raise
                continue
            for frame in made:
                yield frame.pts, frame
        for frame in context.decode(None):
            yield frame.pts, frame

    def decode(self, packets: Iterable[tuple[int, Packet[Any]]], wanted: set[int]) -> dict[int, Any]:
        """Return the wanted frames of packets by their numbers. Raises as `frames` does."""
        return {number: frame for number, frame in self.frames(packets, wanted) if number in wanted}


def coded(data: bytes | memoryview, *, key: bool = True) -> Packet[Any]:
    """Return a packet of these bytes. Some decoders have to know whether it is a key."""
    # One made of bytes would lack the padding behind them, which decoders read.
    packet = Packet(len(data))
    packet.update(cast(bytes, data))
    packet.is_keyframe = key
    return packet


class _Open(threading.local):
    def __init__(self) -> None:
        self.decoders: OrderedDict[tuple[Coding, int], CodecDecoder] = OrderedDict()


_open = _Open()


def decoder_for(coding: Coding, max_pixels: int, *, anew: bool = False) -> CodecDecoder:
    """Return a decoder of this thread, which stays open until some others were needed since.

    Args:
        coding: of the packets.
        max_pixels: of a frame.
        anew: make a new one: what one has kept of the clips before is in doubt.

    Raises:
        ClipError: FFmpeg has no such decoder.
    """
    decoders, key = _open.decoders, (coding, max_pixels)
    found = decoders.pop(key, None)
    if anew:
        found = None
    if found is None:
        found = CodecDecoder(coding, max_pixels)
        while len(decoders) >= _OPEN:
            decoders.popitem(last=False)
    decoders[key] = found
    return found
