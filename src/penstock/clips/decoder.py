"""`CodecDecoder`: decodes packets to frames without a container. Each thread reuses its decoders for later clips.

Each packet carries its number as its timestamp, and the decoder returns the number with the frame. So each frame is
matched to its packet even if the timestamps of the file are missing, duplicate or wrong.
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

__all__ = ["MAX_PIXELS", "CodecDecoder", "decoder_for", "make_packet"]

MAX_PIXELS = 2**26
"""The default limit for the pixels of a frame: 67 million, twice as many as 8K."""

# FFmpeg's own "av1" decoder needs a GPU.
_NAMES = {"av1": "libdav1d"}
_OPEN = 4  # decoders per thread, each with its reference frames: about 50 MB for 1080p
_SKIPS = ("h264", "mpeg4", "mpeg2video")
"""Codecs whose non-reference frames may be skipped. Skipping HEVC's temporal layers changes the order of its other
frames."""


class CodecDecoder:
    """A decoder for packets with one coding.

    Args:
        coding: the parameters of the decoder.
        max_pixels: maximum pixels of a frame; more are an error.

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
        # With more threads a decoder delays frames, and threads do not survive a fork.
        context.thread_count = 1
        # If a stream does not state its reorder delay, assume the maximum of the standard.
        context.options = {"max_pixels": str(max_pixels), "strict": "1"}
        self._context = context
        self._skips = coding.codec in _SKIPS

    @classmethod
    def of_stream(cls, stream: Any) -> CodecDecoder:
        """Return a decoder that uses the codec context of a container's stream."""
        made = cls.__new__(cls)
        made._context, made._skips = stream.codec_context, False
        return made

    def frames(
        self, packets: Iterable[tuple[int, Packet[Any]]], wanted: set[int] | None = None, *, tolerant: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Yield (packet number, frame) in display order.

        Args:
            packets: (number, packet), in decoding order, from a key frame on.
            wanted: packets whose frames are needed; other frames may be missing from the output.
            tolerant: skip damaged packets.

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
        """Return the wanted frames by packet number. Raises as `frames` does."""
        return {number: frame for number, frame in self.frames(packets, wanted) if number in wanted}


def make_packet(data: bytes | memoryview, *, key: bool = True) -> Packet[Any]:
    """Return a packet with these bytes. Some decoders must know whether it is a key frame."""
    # A packet built from bytes would lack the padding at the end, which decoders read.
    packet = Packet(len(data))
    packet.update(cast(bytes, data))
    packet.is_keyframe = key
    return packet


class _Open(threading.local):
    def __init__(self) -> None:
        self.decoders: OrderedDict[tuple[Coding, int], CodecDecoder] = OrderedDict()


_open = _Open()


def decoder_for(coding: Coding, max_pixels: int, *, fresh: bool = False) -> CodecDecoder:
    """Return a decoder of this thread. The most recently used decoders stay open.

    Args:
        coding: the parameters of the decoder.
        max_pixels: the most pixels of a frame.
        fresh: always create a new decoder, because the state of the open one may be corrupt.

    Raises:
        ClipError: FFmpeg has no such decoder.
    """
    decoders, key = _open.decoders, (coding, max_pixels)
    found = decoders.pop(key, None)
    if fresh:
        found = None
    if found is None:
        found = CodecDecoder(coding, max_pixels)
        while len(decoders) >= _OPEN:
            decoders.popitem(last=False)
    decoders[key] = found
    return found
