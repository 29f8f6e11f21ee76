"""`OpenFiles`: the most recently used files of an index, open per thread, and reading of their packets."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from av.packet import Packet

from penstock.clips.clip_index import ClipIndex
from penstock.clips.decoder import make_packet
from penstock.clips.media import open_file
from penstock.clips.packets import ranges_of
from penstock.clips.scan import demux_packets, open_container, seek_packets
from penstock.errors import ClipError, DataFileChangedError, StorageChangedError
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["OpenFile", "OpenFiles"]

StreamOf = Callable[[Any, str], Any]
"""``stream_of(container, name)`` returns the stream to read; ``name`` is for messages."""

_OPEN = 32  # open files per thread
_PIECE = 4 << 20  # bytes that are read at a time


class OpenFile:
    """An open file of an index.

    Args:
        index: the index of the files.
        file: number of the file in the index.
        storage: access to object stores.

    Raises:
        ClipError: the index has recorded an error for this file.
        DataFileChangedError: it was changed since it was indexed.
        StorageError: it cannot be opened.

    Attributes:
        path: path or URL.
        coding, packets: the coding and packets from the index.
        source: the bytes.
        container: FFmpeg's demuxer, once it is open; None for files that do not need it.
    """

    def __init__(self, index: ClipIndex, file: int, storage: Storage | None) -> None:
        self.path = index.path_of(file)
        wrong = index.error(file)
        if wrong:
            raise ClipError(wrong)
        self.coding: Any = index.coding(file)
        self.packets: Any = index.packets(file)
        self.source = open_file(self.path, storage)
        if not index.is_unchanged(file, self.source):
            raise DataFileChangedError(
                f"{shown(self.path)!r} was changed since it was indexed: open the dataset again, or rebuild the index "
                "with: penstock clips index"
            )
        self.container: Any = None

    def read_packets(self, first: int, last: int) -> Iterator[tuple[int, Packet[Any]]]:
        """Yield (number, packet) for packets ``first`` to ``last``, inclusive, read in ranges of some MiB."""
        sizes = np.cumsum(self.packets.size[first : last + 1], dtype=np.int64)
        cuts = np.flatnonzero(np.diff(sizes // _PIECE)) + 1
        for begin, end in itertools.pairwise([0, *cuts.tolist(), len(sizes)]):
            yield from self._piece(first + begin, first + end)

    def _piece(self, first: int, end: int) -> Iterator[tuple[int, Packet[Any]]]:
        at, size = self.packets.at[first:end], self.packets.size[first:end]
        try:
            pieces = [(begin, self.source.read_at(begin, stop - begin)) for begin, stop in ranges_of(at, size)]
        except StorageChangedError as error:
            raise DataFileChangedError(str(error)) from error
        keys = getattr(self.packets, "keys", None)
        where = np.searchsorted([begin for begin, _ in pieces], at, side="right") - 1
        is_key = np.full(len(at), keys is None)
        if keys is not None:
            low, high = np.searchsorted(keys, [first, end])
            is_key[keys[low:high] - first] = True
        rows = zip(where.tolist(), at.tolist(), size.tolist(), is_key.tolist(), strict=True)
        for number, (piece, place, length, key) in enumerate(rows, first):
            begin, data = pieces[piece]
            yield number, make_packet(memoryview(data)[place - begin : place - begin + length], key=key)

    def demux_packets(
        self, first: int, time: float | None, backs: Sequence[float], stream_of: StreamOf
    ) -> Iterator[Any]:
        """Return the packets from ``first`` on, from FFmpeg's demuxer, which stays open.

        Args:
            first: number of the packet.
            time: display time of the packet in seconds; None: read from the start instead of seeking.
            backs: seconds before it to which to seek; those before the start of the file are skipped.
            stream_of: returns the stream of the container.
        """
        if first and time is not None:
            container = self.container or self.reopened()
            backs = [back for back in backs if time - back > self.packets.times[0]]
            stream, size = stream_of(container, self.path), int(self.packets.size[first])
            found = seek_packets(container, stream, time, size, backs)
            if found is not None:
                return found
        container = self.reopened()
        return itertools.islice(demux_packets(container, stream_of(container, self.path)), first, None)

    def reopened(self) -> Any:
        """Close the open demuxer, if any, and return a new one at the start of the file."""
        self.close()
        self.container = open_container(self.source, self.path)
        return self.container

    def close(self) -> None:
        """Close the demuxer. The garbage collector would free it much later."""
        container, self.container = self.container, None
        if container is not None:
            container.close()

    def numbered(self, packets: Iterator[Packet[Any]], first: int, last: int) -> Iterator[tuple[int, Packet[Any]]]:
        """Yield (number, packet) for the demuxer's packets ``first`` to ``last``, inclusive.

        Raises:
            ClipError: they differ from the packets of the index.
        """
        for number in range(first, last + 1):
            packet = next(packets, None)
            if packet is None or packet.size != self.packets.size[number]:
                raise ClipError(
                    f"{shown(self.path)!r} has other packets than when it was indexed: rebuild the index with: "
                    "penstock clips index"
                )
            yield number, packet


class OpenFiles:
    """The most recently used files of an index.

    Args:
        index: the index of the files.
        storage: access to object stores.

    Safe in threads, because each has its own files, and after a fork. A pickle contains no open files.
    """

    def __init__(self, index: ClipIndex, storage: Storage | None) -> None:
        self.index, self.storage = index, storage
        self._thread_files = _ThreadFiles()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self.index, self.storage)

    def __getitem__(self, file: int) -> OpenFile:
        files = self._thread_files.of_process()
        found = files.pop(file, None)
        if found is None:
            found = OpenFile(self.index, file, self.storage)
            while len(files) >= _OPEN:
                files.popitem(last=False)[1].close()
        files[file] = found
        return found


class _ThreadFiles(threading.local):
    """The open files of a thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.files: OrderedDict[int, OpenFile] = OrderedDict()

    def of_process(self) -> OrderedDict[int, OpenFile]:
        """Return the files; none after a fork, because the parent uses the same descriptors and demuxers."""
        if self.pid != os.getpid():
            self.pid, self.files = os.getpid(), OrderedDict()
        return self.files
