"""One pass over the packets of a recording, which finds their offsets and numbers of samples.

Packets of FLAC in its own files, MP3, Opus and PCM state their number of samples, so nothing is decoded. Recordings in
other codecs, such as AAC and Vorbis, are decoded once: only their decoder knows the number of samples of a packet.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any, NamedTuple

import av
import numpy as np

from penstock.clips.decoder import make_packet
from penstock.clips.media import ByteSource
from penstock.clips.packets import Ints
from penstock.clips.scan import audio_stream, demux_packets, ffmpeg_message, open_container, packet_offset
from penstock.clips.sound import SoundCoding, SoundPackets
from penstock.clips.sound_decoder import SoundDecoder, is_known, samples_of
from penstock.errors import ClipError
from penstock.storage.urls import shown

__all__ = ["SoundScanResult", "scan"]

_OPUS_FRAMES = (480, 960, 1920, 2880)  # of SILK, at 48 kHz; RFC 6716, 3.1
_SKIP = struct.Struct("<II")  # samples to skip at the start and at the end


class SoundScanResult(NamedTuple):
    """The result of a scan."""

    coding: SoundCoding
    packets: SoundPackets


def scan(source: ByteSource, name: str) -> SoundScanResult:
    """Scan the packets of a file's best audio stream.

    Args:
        source: the file.
        name: name of the file, for messages.

    Raises:
        ClipError: the file has no audio, or is damaged.

    Costs: the whole file is read once. Memory: some hundred bytes per packet.
    """
    with contextlib.closing(open_container(source, name)) as container:
        stream = audio_stream(container, name)
        found = _PacketCollector(source, stream)
        try:
            for packet in demux_packets(container, stream):
                found.add(packet)
        except (av.error.FFmpegError, IndexError) as error:  # IndexError: as in `penstock.clips.scan.scan`
            if not found.sizes:
                raise ClipError(f"{shown(name)!r} is a damaged recording: {ffmpeg_message(error)}") from error
            # Keep the packets before the damage, as players do.
        found.drop_truncated()
        counts = found.counts(name)
        return found.result(counts, name)


class _PacketCollector:
    """Collects the packets of a scan."""

    def __init__(self, source: ByteSource, stream: Any) -> None:
        self._source, self._stream, self._context = source, stream, stream.codec_context
        self._codec = str(self._context.codec.name)
        self._unit = float(stream.time_base or 1)
        self._in_ranges = is_known(self._codec)
        self.at: list[int] = []
        self.sizes: list[int] = []
        self._samples: list[int] | None = []
        """The number of samples of each packet; None once a packet does not state it."""
        self._times: list[float] = []
        self._skip, self._after = 0, 0

    def add(self, packet: Any) -> None:
        """Record a packet."""
        at = packet_offset(self._source, packet) if self._in_ranges else None
        self._in_ranges = at is not None
        for data in packet.iter_sidedata():
            if data.data_type == "skip_samples":
                begin, end = _SKIP.unpack_from(bytes(data))
                self._skip += 0 if self.sizes else begin
                self._after = end
        self.at.append(at or 0)
        self.sizes.append(packet.size)
        self._times.append((packet.pts or 0) * self._unit)
        count = self._stated_samples(packet)
        if count is None:
            self._samples = None
        elif self._samples is not None:
            self._samples.append(count)

    def _stated_samples(self, packet: Any) -> int | None:
        """Return the number of samples that a packet states; None if it states none."""
        codec, context = self._codec, self._context
        if codec.startswith("pcm_"):
            return samples_of(codec, int(packet.size), int(context.channels))
        if codec == "opus":
            return _opus_samples(bytes(packet))
        exact = self._unit * context.sample_rate
        count = float(packet.duration or 0) * exact
        if count and count.is_integer() and (codec == "flac" or codec.startswith(("mp3", "mp2"))) and exact <= 1:
            return int(count)
        return None

    def counts(self, name: str) -> list[int]:
        """Return the number of samples of each packet. Decode all packets if they do not state it."""
        if self._samples is not None:
            return self._samples
        counts, self._skip, self._after = _decoded_counts(self._source, name, len(self.sizes))
        return counts

    def drop_truncated(self) -> None:
        """Remove the last FLAC frame if it cannot be decoded, because the file is truncated inside it."""
        if self._codec != "flac" or not self._in_ranges or not self._samples:
            return
        data = self._source.read_at(self.at[-1], self.sizes[-1])
        decoder = SoundDecoder.of(self._coding(0, 0))
        if not any(frame.samples for _, frame in decoder.frames([(0, make_packet(data))])):
            self._samples.pop()
            for column in (self.at, self.sizes, self._times):
                column.pop()

    def result(self, counts: list[int], name: str) -> SoundScanResult:
        """Return the result, given the number of samples of each packet."""
        context = self._context
        total = sum(counts)
        skip = min(self._skip, total)
        samples = max(0, total - skip - self._after)
        if not samples or not context.sample_rate or not context.channels:
            raise ClipError(f"{shown(name)!r} has no audio that can be decoded")
        begins: Ints = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        times = [] if self._in_ranges else self._times
        table = SoundPackets(
            np.array(self.at, np.int64), np.array(self.sizes, np.uint32), begins, np.array(times, np.float64)
        )
        return SoundScanResult(self._coding(skip, samples), table)

    def _coding(self, skip: int, samples: int) -> SoundCoding:
        context = self._context
        return SoundCoding(
            codec=self._codec,
            extradata=bytes(context.extradata or b""),
            rate=context.sample_rate,
            channels=context.channels,
            layout=context.layout.name,
            skip=skip,
            samples=samples,
            in_ranges=self._in_ranges,
        )


def _opus_samples(data: bytes) -> int:
    """Return the number of samples of a packet at 48 kHz, from its header: RFC 6716, 3.1."""
    config, code = data[0] >> 3, data[0] & 3
    if config < 12:
        frame = _OPUS_FRAMES[config & 3]
    elif config < 16:
        frame = 480 << (config & 1)
    else:
        frame = 120 << (config & 3)
    count = 1 if code == 0 else 2 if code < 3 else data[1] & 63 if len(data) > 1 else 0
    return frame * count


def _decoded_counts(source: ByteSource, name: str, packets: int) -> tuple[list[int], int, int]:
    """Return the number of samples of each packet, and the numbers to skip at the start and at the end."""
    counts, skip, after = [0] * packets, 0, 0
    with contextlib.closing(open_container(source, name)) as container:
        stream = audio_stream(container, name)
        numbered = enumerate(demux_packets(container, stream))
        for number, frame in SoundDecoder(stream.codec_context).frames(numbered):
            begin, after = _skipped_samples(frame)
            skip += 0 if any(counts[: number + 1]) else begin
            if 0 <= number < packets:
                counts[number] += frame.samples
    return counts, skip, after


def _skipped_samples(frame: Any) -> tuple[int, int]:
    """Return the numbers of samples to skip at the start and at the end of a frame."""
    for data in frame.side_data:
        if data.type.name == "SKIP_SAMPLES":
            begin, end = _SKIP.unpack_from(bytes(data))
            return int(begin), int(end)
    return 0, 0
