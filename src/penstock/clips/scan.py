"""One pass over the packets of a video: where they lie, when their frames are shown. Little is decoded.

Packets of MP4, MOV, Matroska, WebM, AVI and raw streams are ranges of the file: each is compared with the bytes where
it is said to be. In MPEG-TS and MPEG-PS they are cut to pieces, and such a file is read through FFmpeg's demuxer later,
too; so are codecs whose decoders have to know more than `Coding` says.

The times that a container says are the order of frames in MP4 and MOV. Others may say none, or those that FFmpeg
guesses: there the first groups are decoded, and if they are shown in another order, all of the file is.
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
from penstock.clips.media import Bytes, Media
from penstock.clips.packets import Coding, Ints, Packets
from penstock.errors import ClipError
from penstock.storage.urls import shown

__all__ = ["Scanned", "demuxed", "open_container", "range_of", "said", "scan", "sought", "sound_of", "video_of"]

_NEAR = 64  # bytes between the position that a demuxer says and the packet: headers of blocks in Matroska
_LOOKED_AT = 96  # packets at most that are decoded to see whether times are those of frames
_OWN = ("av1", "h264", "hevc", "mjpeg", "mpeg1video", "mpeg2video", "mpeg4", "png", "vp8", "vp9")
"""Codecs whose decoders have to know no more than `Coding` says."""
_IN_ORDER = ("av1", "mjpeg", "png", "vp8", "vp9")
"""Codecs of which frames are shown in the order of their packets."""
_ALL_KEYS = ("dirac", "flashsv2", "h261")
"""Codecs of which containers say that all packets are keys, and most are not."""
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
        # A playlist opens no other file.
        options = {"protocol_whitelist": "crypto"}
        container = av.open(Media(source), "r", options=options, metadata_errors="replace")
    except (av.error.FFmpegError, ValueError, UnicodeError) as error:
        raise ClipError(
            f"{shown(name)!r} cannot be opened as video or sound: {said(error)} ({source.size:,} bytes)"
        ) from error
    for stream in container.streams:
        if stream.codec_context is not None:
            # More threads would not live on in a fork, and one that frees them there waits for ever.
            stream.codec_context.thread_count = 1
    return container


def sound_of(container: Any, name: str) -> Any:
    """Return the stream of a container that is its sound.

    Raises:
        ClipError: there is none.
    """
    stream = container.streams.best("audio") or next(iter(container.streams.audio), None)
    if stream is None:
        raise ClipError(f"{shown(name)!r} has no stream of sound")
    return stream


def scan(source: Bytes, name: str) -> Scanned:
    """Return where the packets of a file's best stream of video lie.

    Args:
        source: the bytes of the file.
        name: of the file, for messages.

    Raises:
        ClipError: no video, no frames in it, or a damaged one.

    Costs: all of the file is read once. Memory: some hundred bytes for each packet.
    """
    with contextlib.closing(open_container(source, name)) as container:
        stream = video_of(container, name)
        found = _Found(source, name, container.format.name, stream)
        found.begins_at(container)
        try:
            for packet in demuxed(container, stream):
                found.add(packet)
        except (av.error.FFmpegError, IndexError) as error:  # IndexError: PyAV's, of a stream that appears on the way
            if not found.sizes:
                raise ClipError(f"{shown(name)!r} is a damaged video: {said(error)}") from error
            # It ends here, as it does for everybody who plays it.
        found.drop_torn()
        found.look_at_first(container)
        return found.scanned()


def video_of(container: Any, name: str) -> Any:
    """Return the stream of a container that is its video.

    Raises:
        ClipError: there is none, or FFmpeg cannot decode it.
    """
    stream = container.streams.best("video") or next(iter(container.streams.video), None)
    if stream is None:
        raise ClipError(f"{shown(name)!r} has no stream of video")
    if stream.codec_context is None:
        raise ClipError(f"{shown(name)!r} has a video of a codec that this FFmpeg cannot decode")
    return stream


def demuxed(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the packets of a stream in which something is, in the order in which they lie in the file."""
    for packet in container.demux(stream):
        if packet.size:
            yield packet


def sought(container: Any, stream: Any, time: float, size: int, backs: Iterable[float]) -> Iterator[Any] | None:
    """Return the packets of a stream from one on, a key; None where a demuxer does not find it.

    Args:
        container: of the stream.
        stream: that has the packet.
        time: seconds at which it is shown.
        size: bytes of it.
        backs: seconds before it at which to look: in streams without an index a demuxer lands where it can.
    """
    unit = float(stream.time_base)
    for back in backs:
        try:
            container.seek(int((time - back) / unit), stream=stream)
        except av.error.FFmpegError:  # it cannot
            return None
        rest = demuxed(container, stream)
        for packet in rest:
            if packet.is_keyframe and packet.pts is not None and packet.pts * unit == time and packet.size == size:
                return itertools.chain([packet], rest)
            if packet.dts is not None and packet.dts * unit > time:
                break
    return None


def range_of(source: Bytes, packet: Any) -> int | None:
    """Return where a packet begins; None if it is no range of the file, or not to be decoded by itself."""
    if packet.pos is None or packet.pos < 0 or _changes(packet):
        return None
    data = source.read_at(packet.pos, packet.size + _NEAR)
    found = data.find(bytes(packet))
    return None if found < 0 else int(packet.pos) + found


class _Found:
    """The packets of a pass, one after the other."""

    def __init__(self, source: Bytes, name: str, kind: str, stream: Any) -> None:
        self._source, self._name, self._stream = source, name, stream
        context = stream.codec_context
        self._codec = str(context.codec.canonical_name)
        self._exact = "mov" in kind.split(",")
        # XviD's and DivX's own way with blocks follows from more than the tag.
        own = self._codec in _OWN and not (self._codec == "mpeg4" and not self._exact)
        self._in_ranges = own and any(part in _RANGES for part in kind.split(","))
        self.at: list[int] = []
        self.sizes: list[int] = []
        self.pts: list[int | None] = []
        self.keys: list[int] = []
        self._changed = False
        self._rotation = 0
        self._torn = False
        self.dropped: set[int] = set()
        """Packets that the container says are not to be shown: an edit list begins behind them."""

    def begins_at(self, container: Any) -> None:
        """Note when the file begins: with the first of its streams."""
        streams = [*container.streams.video, *container.streams.audio]
        begins = [stream.start_time * stream.time_base for stream in streams if stream.start_time is not None]
        self._origin = float(min(begins, default=0))

    def add(self, packet: Any) -> None:
        """Note a packet."""
        number = len(self.sizes)
        self._changed = self._changed or _changes(packet)
        at = range_of(self._source, packet) if self._in_ranges else None
        self._in_ranges = at is not None
        self.at.append(at or 0)
        self.sizes.append(packet.size)
        self.pts.append(packet.pts)
        if packet.is_keyframe:
            self.keys.append(number)
        if packet.is_discard:
            self.dropped.add(number)
        self._torn = packet.is_corrupt

    def drop_torn(self) -> None:
        """Leave out the last packet if the file ends in it."""
        if self._torn and self._in_ranges and self.at[-1] + self.sizes[-1] >= self._source.size:
            number = len(self.sizes) - 1
            for column in (self.at, self.sizes, self.pts):
                column.pop()
            self.keys = [key for key in self.keys if key < number]
            self.dropped.discard(number)

    def look_at_first(self, container: Any) -> None:
        """Note by how much frames are to be turned, which the first one says."""
        context = self._stream.codec_context
        if context.width * context.height > MAX_PIXELS:
            return
        with contextlib.suppress(av.error.FFmpegError):
            container.seek(0)
            for frame in container.decode(self._stream):
                self._rotation = round(frame.rotation / 90) * 90 % 360
                return

    def scanned(self) -> Scanned:
        """What was found."""
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
        # What changes on the way is known to who has decoded all before it; so is what old encoders of MPEG-4 move.
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
        return Scanned(coding, packets)

    def _order(self) -> tuple[Ints, npt.NDArray[Any], bool]:
        """The packets of the frames in the order in which they are shown, their times, and whether these are the
        container's."""
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
        said, seen = numbers[numbers < limit].tolist(), self._decoded(limit)
        # Frames that are shown before the first key may need others before it, which there are not.
        lost = len(said) - len(seen)
        if lost >= 0 and seen == said[lost:] and first not in said[:lost]:
            return numbers[lost:], times[lost:], True
        numbers = np.array(self._decoded(len(self.sizes)), np.int64)
        return numbers, times[: len(numbers)], False

    def _restarts(self) -> bool:
        """Whether times go back: files were put behind each other."""
        known = [pts for number in self.keys if (pts := self.pts[number]) is not None]
        return any(later < pts for pts, later in itertools.pairwise(known))

    def _is_doubtful(self, numbers: Ints, first: int) -> bool:
        """Whether the times may not be those at which frames are shown, or not all frames be shown."""
        if not len(numbers) or self._codec in _IN_ORDER:
            return False
        return not self._exact or int(numbers[0]) != first

    def _end_of_groups(self) -> int:
        """Behind the last packet of the first two groups, or of a part of them."""
        third = self.keys[2] if len(self.keys) > 2 else len(self.sizes)
        return min(third, _LOOKED_AT, len(self.sizes))

    def _decoded(self, limit: int) -> list[int]:
        """The first packets in the order in which a decoder shows their frames."""
        context = self._stream.codec_context
        if context.width * context.height > MAX_PIXELS:
            raise ClipError(
                f"{shown(self._name)!r} has frames of {context.width} x {context.height} pixels, and does not say in "
                "which order they are shown: no more than 67 million are decoded for that"
            )
        with contextlib.closing(open_container(self._source, self._name)) as container:
            stream = video_of(container, self._name)
            packets = itertools.islice(enumerate(demuxed(container, stream)), limit)
            decoder = CodecDecoder.of_stream(stream)
            made = [number for number, _ in decoder.frames(packets, tolerant=True)]
        return [number for number in made if number is not None and 0 <= number < limit and number not in self.dropped]


def _changes(packet: Any) -> bool:
    """Whether a packet brings along what a decoder has to know."""
    return any(data.data_type in _CHANGING for data in packet.iter_sidedata())


def said(error: BaseException) -> str:
    """Return what FFmpeg says is wrong, in its words."""
    return getattr(error, "strerror", None) or str(error)
