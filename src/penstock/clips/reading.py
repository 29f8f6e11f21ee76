"""`FrameReader`: some frames of a file, from the bytes that they need and no others.

Files stay open from clip to clip, some of each thread, and so do decoders (`penstock.clips.decoder`).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
from av.packet import Packet

from penstock.clips.clip_index import ClipIndex
from penstock.clips.decoder import coded, decoder_for
from penstock.clips.packets import Coding, Ints, Packets, Run
from penstock.clips.scan import demuxed, open_container
from penstock.errors import ClipError, DataFileChangedError
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["FrameReader"]

_OPEN = 32  # files of a thread
_BACKS = (0.0, 10.0, 100.0)
"""Seconds before a key at which a demuxer looks for it: in streams without an index it lands where it can."""


class FrameReader:
    """Reads frames of the files of an index.

    Args:
        index: of the files.
        storage: how stores are reached.
        max_pixels: a frame of more is an error.

    Safe in threads; a pickle is a handle.
    """

    def __init__(self, index: ClipIndex, storage: Storage | None, max_pixels: int) -> None:
        self.index, self.storage, self.max_pixels = index, storage, max_pixels
        self._open = _Open()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _open=_Open())

    def frames(self, file: int, numbers: Ints) -> list[Any]:
        """Return frames of a file, PyAV's, in this order; a number may come twice.

        Args:
            file: its number in the index.
            numbers: of frames, in the order in which they are shown.

        Raises:
            ClipError: the file is damaged, or cannot be decoded; or it is not what the index says.
            DataFileChangedError: it was changed since it was indexed.
            StorageError: it cannot be read.
        """
        opened = self._opened(file)
        packets = opened.packets
        made: dict[int, Any] = {}
        try:
            for run in packets.runs(np.unique(numbers)):
                made |= self._decoded(opened, run)
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

    def _decoded(self, opened: _OpenFile, run: Run) -> dict[int, Any]:
        """The frames of a run, by their packets; those that cannot be decoded are left out."""
        begun: Run | None = run
        made: dict[int, Any] = {}
        while begun is not None and len(made) < len(run.wanted):
            made = decoder_for(opened.coding, self.max_pixels).decode(opened.read(begun), set(run.wanted))
            begun = opened.packets.earlier(begun)
        return made

    def _opened(self, file: int) -> _OpenFile:
        # Descriptors and demuxers of before a fork are those of the parent, too.
        files = self._open.of_process()
        found = files.pop(file, None)
        if found is None:
            found = _OpenFile(self.index, file, self.storage)
            while len(files) >= _OPEN:
                files.popitem(last=False)
        files[file] = found
        return found


class _Open(threading.local):
    """The files that a thread has open."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.files: OrderedDict[int, _OpenFile] = OrderedDict()

    def of_process(self) -> OrderedDict[int, _OpenFile]:
        if self.pid != os.getpid():
            self.pid, self.files = os.getpid(), OrderedDict()
        return self.files


class _OpenFile:
    """A file, and how to read it."""

    def __init__(self, index: ClipIndex, file: int, storage: Storage | None) -> None:
        self.path = index.path_of(file)
        wrong = index.error(file)
        if wrong:
            raise ClipError(wrong)
        self.coding: Coding = index.coding(file)
        self.packets: Packets = index.packets(file)
        self._source = (storage or Storage()).open(self.path)
        if not index.is_of(file, self._source):
            raise DataFileChangedError(
                f"{shown(self.path)!r} was changed since it was indexed: open the data set again, or make the index "
                "again with: penstock clips index"
            )
        self._container: Any = None

    def read(self, run: Run) -> Iterator[tuple[int, Packet[Any]]]:
        """Yield the packets of a run."""
        return self._ranges(run) if self.coding.in_ranges else self._demuxed(run)

    def _ranges(self, run: Run) -> Iterator[tuple[int, Packet[Any]]]:
        pieces = [(begin, self._source.read_at(begin, end - begin)) for begin, end in self.packets.ranges(run)]
        begins = np.array([begin for begin, _ in pieces])
        at, sizes = self.packets.at, self.packets.size
        where = np.searchsorted(begins, at[run.first : run.last + 1], side="right") - 1
        for number, piece in zip(range(run.first, run.last + 1), where.tolist(), strict=True):
            begin, data = pieces[piece]
            low, size = int(at[number]) - begin, int(sizes[number])
            yield number, coded(memoryview(data)[low : low + size])

    def _demuxed(self, run: Run) -> Iterator[tuple[int, Packet[Any]]]:
        """The same by FFmpeg's demuxer, from a key on that is found by its time."""
        packets = self._from_key(run.first)
        for number in range(run.first, run.last + 1):
            packet = next(packets, None)
            if packet is None or packet.size != self.packets.size[number]:
                raise ClipError(
                    f"{shown(self.path)!r} has other packets than when it was indexed: make the index again with: "
                    "penstock clips index"
                )
            yield number, packet

    def _from_key(self, key: int) -> Iterator[Packet[Any]]:
        """The packets of the file from a key on."""
        packets, place = self.packets, self.packets.place_of(key)
        time = float(packets.times[place]) if place >= 0 and key else packets.times[0]
        for back in _BACKS:
            if self._container is None or time - back <= packets.times[0]:
                break
            stream = self._container.streams.best("video")
            unit = float(stream.time_base)
            self._container.seek(int((time - back) / unit), stream=stream)
            rest = demuxed(self._container, stream)
            for packet in rest:
                if packet.is_keyframe and packet.pts is not None and packet.pts * unit == time:
                    return itertools.chain([packet], rest)
                if packet.dts is not None and packet.dts * unit > time:
                    break
        self._container = open_container(self._source, self.path)
        return itertools.islice(demuxed(self._container, self._container.streams.best("video")), key, None)
