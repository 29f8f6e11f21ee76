"""`FrameReader`: some frames of a file, from the bytes that they need and no others.

Files stay open from clip to clip, some of each thread, and so do decoders (`penstock.clips.decoder`).
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
from penstock.clips.packets import Ints, Run
from penstock.clips.scan import video_of
from penstock.errors import ClipError
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["FrameReader"]

_BACKS = (0.0, 10.0, 100.0)
"""Seconds before a key at which it is looked for."""


class FrameReader:
    """Reads frames of the files of an index.

    Args:
        index: of the files.
        storage: how stores are reached.
        max_pixels: a frame of more is an error.

    Safe in threads; a pickle is a handle.
    """

    def __init__(self, index: ClipIndex, storage: Storage | None, max_pixels: int) -> None:
        self.index, self.max_pixels = index, max_pixels
        self._files = OpenFiles(index, storage)

    def open(self, file: int) -> OpenFile:
        """Return a file, which stays open for a while. Raises as `OpenFile` does."""
        return self._files[file]

    def frames(self, opened: OpenFile, numbers: Ints) -> list[Any]:
        """Return frames of a file, PyAV's, in this order; a number may come twice.

        Args:
            opened: the file.
            numbers: of frames, in the order in which they are shown.

        Raises:
            ClipError: the file is damaged, or cannot be decoded; or it is not what the index says.
            DataFileChangedError: it was changed since it was indexed.
            StorageError: it cannot be read.
        """
        self._check_pixels(opened, opened.coding)
        packets = opened.packets
        made: dict[int, Any] = {}
        try:
            for run in packets.runs(np.unique(numbers)):
                try:
                    made |= self._decoded(opened, run)
                except (av.error.FFmpegError, ClipError):
                    # What the decoder has kept of other clips may be the reason.
                    opened.close()
                    made |= self._decoded(opened, run, anew=True)
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

    def _decoded(self, opened: OpenFile, run: Run, *, anew: bool = False) -> dict[int, Any]:
        """The frames of a run, by their packets; those that cannot be decoded are left out."""
        begun: Run | None = run
        made: dict[int, Any] = {}
        while begun is not None and len(made) < len(run.wanted):
            if opened.coding.in_ranges:
                packets = opened.coded(begun.first, begun.last)
                decoder = decoder_for(opened.coding, self.max_pixels, anew=anew)
            else:
                packets = opened.numbered(self._demuxed(opened, begun.first), begun.first, begun.last)
                decoder = CodecDecoder.of_stream(self._stream(opened))
            made = decoder.decode(packets, set(run.wanted))
            begun, anew = opened.packets.earlier(begun), True
        return made

    def _demuxed(self, opened: OpenFile, key: int) -> Iterator[Packet[Any]]:
        """The packets of the file from a key on."""
        place = opened.packets.place_of(key) if opened.coding.by_time else -1
        time = float(opened.packets.times[place]) if place >= 0 else None
        return opened.demuxed(key, time, _BACKS, video_of)

    def _stream(self, opened: OpenFile) -> Any:
        """The stream of an open container, if its frames are no larger than they may be."""
        stream = video_of(opened.container, opened.path)
        self._check_pixels(opened, stream.codec_context)
        return stream

    def _check_pixels(self, opened: OpenFile, coding: Any) -> None:
        pixels = coding.width * coding.height
        if pixels > self.max_pixels:
            raise ClipError(
                f"{shown(opened.path)!r} has frames of {pixels:,} pixels, more than max_pixels={self.max_pixels}: give "
                "a larger one to read it"
            )
