"""One pass over the packets of a video, which finds their offsets and the display times of their frames.

It decodes few frames. Packets of MP4, MOV, Matroska, WebM, AVI and raw streams are byte ranges of the file: each is
compared with the bytes at its offset. MPEG-TS and MPEG-PS split packets, so FFmpeg's demuxer reads such files later,
too. The same holds for codecs whose decoders need more parameters than `Coding` contains.

In MP4 and MOV, the container's timestamps are the display order. Other containers may have none, or ones that FFmpeg
guesses: then the first GOPs are decoded, and if their display order differs, the whole file.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt

from penstock.clips.decoder import MAX_PIXELS, CodecDecoder
from penstock.clips.media import ByteSource, MediaFile
from penstock.clips.packets import Coding, Ints, Packets
from penstock.errors import ClipError
from penstock.storage.urls import shown

__all__ = [
    "ScanResult",
    "audio_stream",
    "demux_packets",
    "ffmpeg_message",
    "open_container",
    "packet_offset",
    "scan",
    "seek_packets",
    "video_stream",
]

_NEAR = 64  # bytes between the demuxer's position and the packet: block headers in Matroska
_MAX_PROBED = 96  # maximum number of packets that are decoded to verify timestamps
_OWN = ("av1", "h264", "hevc", "mjpeg", "mpeg1video", "mpeg2video", "mpeg4", "png", "vp8", "vp9")
"""Codecs whose decoders need only the parameters of `Coding`."""
_IN_ORDER = ("av1", "mjpeg", "png", "vp8", "vp9")
"""Codecs whose display order is their decoding order."""
_ALL_KEYS = ("dirac", "flashsv2", "h261")
"""Codecs for which containers wrongly mark all packets as key frames."""
_RANGES = ("mov", "matroska", "avi", "ivf", "h264", "hevc", "m4v", "obu", "flv", "gif", "mpegvideo")
_CHANGING = {"new_extradata", "palette", "param_change", "encryption_info"}


class ScanResult(NamedTuple):
    """The result of a scan."""

    coding: Coding
    packets: Packets


def open_container(source: ByteSource, name: str) -> Any:
    """Open a file with FFmpeg's demuxer and return the container.

    Raises:
        ClipError: the format is unknown to FFmpeg, or the file is damaged.
    """
    try:
        # A playlist must not open other files.
        options = {"protocol_whitelist": "crypto"}
        container = av.open(MediaFile(source), "r", options=options, metadata_errors="replace")
    except (av.error.FFmpegError, ValueError, UnicodeError) as error:
        raise ClipError(
            f"{shown(name)!r} cannot be opened as video or sound: {ffmpeg_message(error)} ({source.size:,} bytes)"
        ) from error
    for stream in container.streams:
        if stream.codec_context is not None:
            # More threads would not survive a fork, and freeing them in the child would block forever.
            stream.codec_context.thread_count = 1
    return container


def audio_stream(container: Any, name: str) -> Any:
    """Return the audio stream of a container.

    Raises:
        ClipError: no audio stream exists.
    """
    stream = container.streams.best("audio") or next(iter(container.streams.audio), None)
    if stream is None:
        raise ClipError(f"{shown(name)!r} has no audio stream")
    return stream


def scan(source: ByteSource, name: str) -> ScanResult:
    """Scan the packets of a file's best video stream.

    Args:
        source: the file.
        name: name of the file, for messages.

    Raises:
        ClipError: the file has no video or no frames, or is damaged.

    Costs: the whole file is read once. Memory: some hundred bytes per packet.
    """
    with contextlib.closing(open_container(source, name)) as container:
        stream = video_stream(container, name)
        found = _PacketCollector(source, name, container.format.name, stream)
        found.set_origin(container)
        try:
            for packet in demux_packets(container, stream):
                found.add(packet)
        # PyAV raises IndexError when a new stream appears in the middle of the file.
        except (av.error.FFmpegError, IndexError) as error:
            if not found.sizes:
                raise ClipError(f"{shown(name)!r} is a damaged video: {ffmpeg_message(error)}") from error
            # Keep the packets before the damage, as players do.
        found.drop_truncated()
        found.read_rotation(container)
        return found.result()


def video_stream(container: Any, name: str) -> Any:
    """Return the video stream of a container.

    Raises:
        ClipError: no video stream exists, or FFmpeg cannot decode it.
    """
    stream = container.streams.best("video") or next(iter(container.streams.video), None)
    if stream is None:
        raise ClipError(f"{shown(name)!r} has no video stream")
    if stream.codec_context is None:
        raise ClipError(f"{shown(name)!r} has video in a codec that this FFmpeg cannot decode")
    return stream


def demux_packets(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the non-empty packets of a stream, in file order."""
    for packet in container.demux(stream):
        if packet.size:
            yield packet


def seek_packets(container: Any, stream: Any, time: float, size: int, backs: Iterable[float]) -> Iterator[Any] | None:
    """Return the packets of a stream from a given key frame on; None if the demuxer does not find it.

    Args:
        container: the container of the stream.
        stream: the stream of the packet.
        time: display time of the key frame in seconds.
        size: its size in bytes.
        backs: seconds before it to which to seek, one after the other: without an index, seeks are inexact.
    """
    unit = float(stream.time_base)
    for back in backs:
        try:
            container.seek(int((time - back) / unit), stream=stream)
        except av.error.FFmpegError:  # the format does not support seeking
            return None
        rest = demux_packets(container, stream)
        for packet in rest:
            if packet.is_keyframe and packet.pts is not None and packet.pts * unit == time and packet.size == size:
                return itertools.chain([packet], rest)
            if packet.dts is not None and packet.dts * unit > time:
                break
    return None


def packet_offset(source: ByteSource, packet: Any) -> int | None:
    """Return a packet's offset in bytes; None if it is not a range of the file or cannot be decoded alone."""
    if packet.pos is None or packet.pos < 0 or _changes(packet):
        return None
    data = source.read_at(packet.pos, packet.size + _NEAR)
    found = data.find(bytes(packet))
    return None if found < 0 else int(packet.pos) + found


class _PacketCollector:
    """Collects the packets of a scan."""

    def __init__(self, source: ByteSource, name: str, kind: str, stream: Any) -> None:
        self._source, self._name, self._stream = source, name, stream
        context = stream.codec_context
        self._codec = str(context.codec.canonical_name)
        self._exact = "mov" in kind.split(",")
        # The workarounds for XviD and DivX depend on more than the tag.
        own = self._codec in _OWN and not (self._codec == "mpeg4" and not self._exact)
        self._in_ranges = own and any(part in _RANGES for part in kind.split(","))
        self.at: list[int] = []
        self.sizes: list[int] = []
        self.pts: list[int | None] = []
        self.keys: list[int] = []
        self._changed = False
        self._rotation = 0
        self._truncated = False
        self.dropped: set[int] = set()
        """Packets that the container marks as not displayed: an edit list begins after them."""

    def set_origin(self, container: Any) -> None:
        """Record the start time of the file: that of its earliest stream."""
        streams = [*container.streams.video, *container.streams.audio]
        begins = [stream.start_time * stream.time_base for stream in streams if stream.start_time is not None]
        self._origin = float(min(begins, default=0))

    def add(self, packet: Any) -> None:
        """Record a packet."""
        number = len(self.sizes)
        self._changed = self._changed or _changes(packet)
        at = packet_offset(self._source, packet) if self._in_ranges else None
        self._in_ranges = at is not None
        self.at.append(at or 0)
        self.sizes.append(packet.size)
        self.pts.append(packet.pts)
        if packet.is_keyframe:
            self.keys.append(number)
        if packet.is_discard:
            self.dropped.add(number)
        self._truncated = packet.is_corrupt

    def drop_truncated(self) -> None:
        """Remove the last packet if the file is truncated inside it."""
        if self._truncated and self._in_ranges and self.at[-1] + self.sizes[-1] >= self._source.size:
            number = len(self.sizes) - 1
            for column in (self.at, self.sizes, self.pts):
                column.pop()
            self.keys = [key for key in self.keys if key < number]
            self.dropped.discard(number)

    def read_rotation(self, container: Any) -> None:
        """Record the rotation of the first frame."""
        context = self._stream.codec_context
        if context.width * context.height > MAX_PIXELS:
            return
        with contextlib.suppress(av.error.FFmpegError):
            container.seek(0)
            for frame in container.decode(self._stream):
                self._rotation = round(frame.rotation / 90) * 90 % 360
                return

    def result(self) -> ScanResult:
        """Return the result."""
        numbers, times, by_time = self._order()
        if not len(numbers):
            raise ClipError(f"{shown(self._name)!r} has no frame that can be decoded")
        context = self._stream.codec_context
        coding = Coding(
            codec=self._codec,
            tag=context.codec_tag if self._codec == "mpeg4" else "",
            extradata=bytes(context.extradata or b""),
            width=context.width,
            height=context.height,
            rotation=self._rotation,
            colour_range=int(context.color_range),
            colour_space=int(context.colorspace),
            in_ranges=self._in_ranges,
            by_time=by_time and not self._changed,
            origin=self._origin if by_time else 0.0,
        )
        # If parameters change within the stream, or an old MPEG-4 encoder reordered frames, decode from the start.
        from_begin = (
            self._changed
            or self._codec in _ALL_KEYS
            or (self._codec == "mpeg4" and not by_time and not self._in_ranges)
        )
        keys = self.keys[:1] if from_begin else self.keys
        packets = Packets(
            np.array(self.at, np.int64),
            np.array(self.sizes, np.uint32),
            np.array(keys, np.uint32),
            numbers.astype(np.uint32),
            times,
        )
        return ScanResult(coding, packets)

    def _order(self) -> tuple[Ints, npt.NDArray[Any], bool]:
        """Return the packets of the frames in display order, their times, and whether these are the container's."""
        if any(pts is None for number, pts in enumerate(self.pts) if number not in self.dropped) or self._restarts():
            numbers = np.array(self._decoded(len(self.sizes)), np.int64)
            rate = float(self._stream.guessed_rate or self._stream.average_rate or 25)
            return numbers, np.arange(len(numbers)) / rate, False
        first = self.keys[0] if self.keys else 0
        kept = [number for number in range(first, len(self.sizes)) if number not in self.dropped]
        pts = np.array([self.pts[number] for number in kept], np.int64)
        order = np.argsort(pts, kind="stable")
        numbers = np.array(kept, np.int64)[order]
        times: npt.NDArray[Any] = pts[order] * float(self._stream.time_base or 1)
        if not self._is_doubtful(numbers, first):
            return numbers, times, True
        limit = self._end_of_groups()
        stated, seen = numbers[numbers < limit].tolist(), self._decoded(limit)
        # Frames that are displayed before the first key frame may need earlier frames, which are missing.
        lost = len(stated) - len(seen)
        if lost >= 0 and seen == stated[lost:] and first not in stated[:lost]:
            return numbers[lost:], times[lost:], True
        numbers = np.array(self._decoded(len(self.sizes)), np.int64)
        return numbers, times[: len(numbers)], False

    def _restarts(self) -> bool:
        """Return whether timestamps jump back, as in concatenated files."""
        known = [pts for number in self.keys if (pts := self.pts[number]) is not None]
        return any(later < pts for pts, later in itertools.pairwise(known))

    def _is_doubtful(self, numbers: Ints, first: int) -> bool:
        """Return whether timestamps may differ from display times, or some frames may not be displayed."""
        if not len(numbers) or self._codec in _IN_ORDER:
            return False
        return not self._exact or int(numbers[0]) != first

    def _end_of_groups(self) -> int:
        """Return the end of the first two GOPs, or of a part of them, as a packet number."""
        third = self.keys[2] if len(self.keys) > 2 else len(self.sizes)
        return min(third, _MAX_PROBED, len(self.sizes))

    def _decoded(self, limit: int) -> list[int]:
        """Decode the first packets and return their numbers in display order."""
        context = self._stream.codec_context
        if context.width * context.height > MAX_PIXELS:
            raise ClipError(
                f"{shown(self._name)!r} has frames of {context.width} x {context.height} pixels, and no reliable "
                "timestamps. To find the frames' order they must be decoded, up to 67 million pixels a frame"
            )
        with contextlib.closing(open_container(self._source, self._name)) as container:
            stream = video_stream(container, self._name)
            packets = itertools.islice(enumerate(demux_packets(container, stream)), limit)
            decoder = CodecDecoder.of_stream(stream)
            made = [number for number, _ in decoder.frames(packets, tolerant=True)]
        return [number for number in made if number is not None and 0 <= number < limit and number not in self.dropped]


def _changes(packet: Any) -> bool:
    """Return whether a packet changes the decoder's parameters."""
    return any(data.data_type in _CHANGING for data in packet.iter_sidedata())


def ffmpeg_message(error: BaseException) -> str:
    """Return FFmpeg's message of an error."""
    return getattr(error, "strerror", None) or str(error)
