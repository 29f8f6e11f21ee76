"""`SoundReader`: decodes samples of an audio file; reads few bytes besides those that they need."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
import numpy.typing as npt

from penstock.clips.clip_index import ClipIndex
from penstock.clips.open_files import OpenFile, OpenFiles
from penstock.clips.scan import audio_stream
from penstock.clips.sound_decoder import SoundDecoder, as_floats, is_known
from penstock.errors import ClipError
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["SoundReader"]

_BACKS = (0.5, 10.0)
"""Seconds before a packet to which to seek, one after the other until it is found."""


class SoundReader:
    """Reads samples of the files of an index.

    Args:
        index: the index of the files.
        storage: access to object stores.

    Safe in threads; a pickle contains no open files.
    """

    def __init__(self, index: ClipIndex, storage: Storage | None) -> None:
        self.index = index
        self._files = OpenFiles(index, storage)

    def check(self, file: int) -> None:
        """Open a file unless it is open. Raises as `OpenFile` does."""
        self._files[file]

    def samples(self, file: int, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return samples of a file: float32 (channels, end - begin), from -1 to 1. Samples outside the file are 0.

        They equal those of a decode from the start for PCM, FLAC, MP3, Vorbis and ALAC. For Opus and AAC, decoding
        begins shortly before them, so they are only nearly equal.

        Raises:
            ClipError: the file is damaged there, or does not match the index.
            DataFileChangedError: it was changed since it was indexed.
            StorageError: it cannot be read.
        """
        opened = self._files[file]
        coding = opened.coding
        made = np.zeros((coding.channels, end - begin), np.float32)
        low, high = max(begin, 0), min(end, coding.samples)
        if low >= high:
            return made
        first, wanted, last = opened.packets.packets_of(low + coding.skip, high + coding.skip, coding.codec)
        left = high - low
        before, more, had = -1, 0, 0
        try:
            for number, values in self._decoded(opened, first, last):
                # A packet may decode to several frames.
                more = more + had if number == before else 0
                before, had = number, values.shape[1]
                if number >= wanted:
                    at = int(opened.packets.begins[number]) + more - coding.skip
                    left -= _put(made, values, at - begin, low - begin, high - begin)
        except (av.error.FFmpegError, MemoryError) as error:
            raise ClipError(f"{shown(opened.path)!r}: audio cannot be decoded: {error}") from error
        if left:
            raise ClipError(
                f"{shown(opened.path)!r}: {left:,} samples between {low / coding.rate:.3f} and "
                f"{high / coding.rate:.3f} s cannot be decoded: the file is damaged there"
            )
        return made

    def _decoded(self, opened: OpenFile, first: int, last: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield (packet number, samples)."""
        if not is_known(opened.coding.codec):
            # The container's decoder may hold the state of its noise generator.
            opened.close()
        if opened.coding.in_ranges:
            packets = opened.read_packets(first, last)
        else:
            time = float(opened.packets.times[first])
            packets = opened.numbered(opened.demux_packets(first, time, _BACKS, audio_stream), first, last)
        if is_known(opened.coding.codec):
            decoder = SoundDecoder.of(opened.coding)
        else:
            decoder = SoundDecoder(audio_stream(opened.container, opened.path).codec_context)
        for number, frame in decoder.frames(packets):
            values = as_floats(frame)
            if values.shape[0] != opened.coding.channels:
                raise ClipError(f"{shown(opened.path)!r} changes its number of channels at packet {number}")
            yield number, values


def _put(out: npt.NDArray[np.float32], values: npt.NDArray[np.float32], at: int, low: int, high: int) -> int:
    """Copy the samples of positions [low, high) to ``out`` and return their number."""
    begin, end = max(at, low), min(at + int(values.shape[1]), high)
    if begin >= end:
        return 0
    out[:, begin:end] = values[:, begin - at : end - at]
    return end - begin
