"""One pass over the packets of a video: where they lie, when their frames are shown. Next to nothing is decoded.

Packets of MP4, MOV, Matroska, WebM, AVI and raw streams are ranges of the file: each is compared with the bytes where
it is said to be. In MPEG-TS and MPEG-PS they are cut to pieces, and such a file is read through FFmpeg's demuxer later,
too. Where a container keeps no times (AVI, raw streams), the order of frames shows by decoding all of them once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.packet import Packet

from penstock.clips.decoder import CodecDecoder, coded
from penstock.clips.media import Bytes, Media
from penstock.clips.packets import Coding, Ints, Packets
from penstock.errors import ClipError
from penstock.storage.urls import shown

__all__ = ["Scanned", "demuxed", "open_container", "range_of", "said", "scan"]

_NEAR = 64  # bytes between the position that a demuxer says and the packet: headers of blocks in Matroska
_RANGES = ("mov", "matroska", "avi", "ivf", "h264", "hevc", "m4v", "obu", "flv", "gif", "mpegvideo")
_CHANGING = {"new_extradata", "palette", "param_change", "encryption_info"}


class Scanned(NamedTuple):
    """What a pass has found."""

    coding: Coding
    packets: Packets


def open_container(source: Bytes, name: str) -> Any:
    """Return FFmpeg's demuxer of a file.

    Raises:
        ClipError: it is none that FFmpeg knows, or damaged.
    """
    try:
        return av.open(Media(source), "r", metadata_errors="replace")
    except (av.error.FFmpegError, ValueError, UnicodeError) as error:
        raise ClipError(
            f"{shown(name)!r} cannot be opened as video or sound: {said(error)} ({source.size:,} bytes)"
        ) from error


def scan(source: Bytes, name: str) -> Scanned:
    """Return where the packets of a file's first stream of video lie.

    Args:
        source: the bytes of the file.
        name: of the file, for messages.

    Raises:
        ClipError: no video, no frames in it, or a damaged one.

    Costs: all of the file is read once. Memory: 24 bytes for each packet.
    """
    with contextlib.closing(open_container(source, name)) as container:
        if not container.streams.video:
            raise ClipError(f"{shown(name)!r} has no stream of video")
        stream = container.streams.best("video") or container.streams.video[0]
        found = _Found(source, container.format.name)
        try:
            for packet in demuxed(container, stream):
                found.add(packet)
        except av.error.FFmpegError as error:
            if not found.sizes:
                raise ClipError(f"{shown(name)!r} is a damaged video: {said(error)}") from error
            # It ends here, as it does for everybody who plays it.
        found.look_at_first(container, stream)
        coding = found.coding(stream)
        return Scanned(coding, found.packets(stream, coding, name))


def demuxed(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream in which something is, in the order in which they lie in the file."""
    for packet in container.demux(stream):
        if packet.size:
            yield packet


def range_of(source: Bytes, packet: Any) -> int | None:
    """Return where a packet begins; None if it is no range of the file, or not to be decoded by itself."""
    if packet.pos is None or packet.pos < 0 or _changes(packet):
        return None
    data = source.read_at(packet.pos, packet.size + _NEAR)
    found = data.find(bytes(packet))
    return None if found < 0 else int(packet.pos) + found


class _Found:
    """The packets of a pass, one after the other."""

    def __init__(self, source: Bytes, kind: str) -> None:
        self._source = source
        self._in_ranges = any(part in _RANGES for part in kind.split(","))
        self.at: list[int] = []
        self.sizes: list[int] = []
        self.pts: list[int | None] = []
        self.keys: list[int] = []
        self._rotation = 0
        self.dropped: set[int] = set()
        """Packets that the container says are not to be shown: an edit list begins behind them."""

    def add(self, packet: Any) -> None:
        """Note a packet."""
        number = len(self.sizes)
        at = range_of(self._source, packet) if self._in_ranges else None
        self._in_ranges = at is not None
        self.at.append(at or 0)
        self.sizes.append(packet.size)
        self.pts.append(packet.pts)
        if packet.is_keyframe:
            self.keys.append(number)
        if packet.is_discard:
            self.dropped.add(number)

    def look_at_first(self, container: Any, stream: Any) -> None:
        """Note by how much frames are to be turned, which the first one says."""
        with contextlib.suppress(av.error.FFmpegError):
            container.seek(0)
            for frame in container.decode(stream):
                self._rotation = round(frame.rotation / 90) * 90 % 360
                return

    def coding(self, stream: Any) -> Coding:
        """What the decoder has to know."""
        context = stream.codec_context
        return Coding(
            codec=context.codec.canonical_name,
            extradata=bytes(context.extradata or b""),
            width=context.width,
            height=context.height,
            rotation=self._rotation,
            colour_range=int(context.color_range),
            colour_space=int(context.colorspace),
            in_ranges=self._in_ranges,
        )

    def packets(self, stream: Any, coding: Coding, name: str) -> Packets:
        """The packets, and the order of their frames."""
        numbers = np.setdiff1d(np.arange(len(self.sizes), dtype=np.int64), np.fromiter(self.dropped, np.int64))
        unit = float(stream.time_base or 1)
        if any(self.pts[number] is None for number in numbers.tolist()):
            numbers = self._decoded(coding, name)
            times: npt.NDArray[Any] = np.arange(len(numbers)) / float(stream.guessed_rate or stream.average_rate or 25)
        else:
            numbers = numbers[numbers >= (self.keys[0] if self.keys else 0)]
            pts = np.array([self.pts[number] for number in numbers.tolist()], np.int64)
            order = np.argsort(pts, kind="stable")
            numbers, times = numbers[order], pts[order] * unit
            lost = self._lost_at_first(numbers, coding)
            numbers, times = numbers[lost:], times[lost:]
        if not len(numbers):
            raise ClipError(f"{shown(name)!r} has no frame that can be decoded")
        return Packets(
            np.array(self.at, np.int64),
            np.array(self.sizes, np.uint32),
            np.array(self.keys, np.uint32),
            numbers.astype(np.uint32),
            times,
        )

    def _lost_at_first(self, numbers: Ints, coding: Coding) -> int:
        """How many frames are shown before the first key and need others before it, which there are not."""
        if not self.keys:
            return 0
        before = np.flatnonzero(numbers == self.keys[0])
        if not len(before) or not before[0] or not self._in_ranges:
            return 0
        leading = numbers[: int(before[0])]
        made = CodecDecoder(coding).decode(self._data(self.keys[0], int(leading.max())), set(leading.tolist()))
        return sum(number not in made for number in leading.tolist())

    def _decoded(self, coding: Coding, name: str) -> Ints:
        """The packets of the frames in the order in which a decoder shows them."""
        if not self._in_ranges:
            raise ClipError(
                f"{shown(name)!r} says neither when its frames are shown nor where they lie: write it as MP4"
            )
        decoder, made = CodecDecoder(coding), []
        for number, _ in decoder.frames(self._data(0, len(self.sizes) - 1)):
            made.append(number)
        return np.array(made, np.int64)

    def _data(self, first: int, last: int) -> Iterator[tuple[int, Packet[Any]]]:
        for number in range(first, last + 1):
            yield number, coded(self._source.read_at(self.at[number], self.sizes[number]))


def _changes(packet: Any) -> bool:
    """Whether a packet brings along what a decoder has to know."""
    return any(data.data_type in _CHANGING for data in packet.iter_sidedata())


def said(error: BaseException) -> str:
    """Return what FFmpeg says is wrong, in its words."""
    return getattr(error, "strerror", None) or str(error)
