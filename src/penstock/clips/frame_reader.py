"""`FrameReader`: decodes frames of a video file and reads only the bytes that they need.

Each thread keeps some files and decoders (`penstock.clips.decoder`) open for later clips.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
from av.packet import Packet

from penstock.clips.clip_index import ClipIndex
from penstock.clips.decoder import CodecDecoder, decoder_for
from penstock.clips.open_files import OpenFile, OpenFiles
from penstock.clips.packets import DecodeRange, Ints
from penstock.clips.scan import video_stream
from penstock.errors import ClipError
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["FrameReader"]

_BACKS = (0.0, 10.0, 100.0)
"""Seconds before a key frame to which to seek, one after the other until it is found."""


class FrameReader:
    """Reads frames of the files of an index.

    Args:
        index: the index of the files.
        storage: access to object stores.
        max_pixels: maximum pixels of a frame; more are an error.

    Safe in threads; a pickle contains no open files.
    """

    def __init__(self, index: ClipIndex, storage: Storage | None, max_pixels: int) -> None:
        self.index, self.max_pixels = index, max_pixels
        self._files = OpenFiles(index, storage)

    def open(self, file: int) -> OpenFile:
        """Open a file, or return it if it is open. Raises as `OpenFile` does."""
        return self._files[file]

    def frames(self, opened: OpenFile, numbers: Ints) -> list[Any]:
        """Return PyAV frames of a file, in the given order; numbers may repeat.

        Args:
            opened: the file.
            numbers: frame numbers, counted in display order.

        Raises:
            ClipError: the file is damaged, cannot be decoded, or does not match the index.
            DataFileChangedError: it was changed since it was indexed.
            StorageError: it cannot be read.
        """
        self._check_pixels(opened, opened.coding)
        packets = opened.packets
        made: dict[int, Any] = {}
        try:
            for run in packets.decode_ranges(np.unique(numbers)):
                try:
                    made |= self._decoded(opened, run)
                except (av.error.FFmpegError, ClipError):
                    # State of earlier clips in the decoder may be the reason, so retry with a new decoder.
                    opened.close()
                    made |= self._decoded(opened, run, fresh=True)
        except (av.error.FFmpegError, MemoryError) as error:
            raise ClipError(f"{shown(opened.path)!r}: frames cannot be decoded: {error}") from error
        found = [made.get(packet) for packet in packets.shown[numbers].tolist()]
        for frame, number in zip(found, numbers.tolist(), strict=True):
            if frame is None:
                raise ClipError(
                    f"{shown(opened.path)!r}: frame {number}, {packets.times[number]:.3f} s, cannot be decoded: the "
                    "file is damaged there"
                )
        return found

    def _decoded(self, opened: OpenFile, run: DecodeRange, *, fresh: bool = False) -> dict[int, Any]:
        """Decode a run and return its frames by packet number, without those that cannot be decoded."""
        begun: DecodeRange | None = run
        made: dict[int, Any] = {}
        while begun is not None and len(made) < len(run.wanted):
            if opened.coding.in_ranges:
                packets = opened.read_packets(begun.first, begun.last)
                decoder = decoder_for(opened.coding, self.max_pixels, fresh=fresh)
            else:
                packets = opened.numbered(self._demuxed(opened, begun.first), begun.first, begun.last)
                decoder = CodecDecoder.of_stream(self._stream(opened))
            made = decoder.decode(packets, set(run.wanted))
            begun, fresh = opened.packets.earlier_range(begun), True
        return made

    def _demuxed(self, opened: OpenFile, key: int) -> Iterator[Packet[Any]]:
        """Return the packets of the file from a key frame on."""
        place = opened.packets.frame_number(key) if opened.coding.by_time else -1
        time = float(opened.packets.times[place]) if place >= 0 else None
        return opened.demux_packets(key, time, _BACKS, video_stream)

    def _stream(self, opened: OpenFile) -> Any:
        """Return the video stream of an open container, after a check of the frames' size."""
        stream = video_stream(opened.container, opened.path)
        self._check_pixels(opened, stream.codec_context)
        return stream

    def _check_pixels(self, opened: OpenFile, coding: Any) -> None:
        pixels = coding.width * coding.height
        if pixels > self.max_pixels:
            raise ClipError(
                f"{shown(opened.path)!r} has frames of {pixels:,} pixels, more than max_pixels={self.max_pixels}: pass "
                "a larger max_pixels to read it"
            )
