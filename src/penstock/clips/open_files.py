"""`OpenFiles`: files of an index that are open, some for each thread, and their packets by ranges of bytes."""

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
from penstock.clips.decoder import coded
from penstock.clips.media import open_file
from penstock.clips.packets import ranges_of
from penstock.clips.scan import demuxed, open_container, sought
from penstock.errors import ClipError, DataFileChangedError, StorageChangedError
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["OpenFile", "OpenFiles"]

StreamOf = Callable[[Any, str], Any]
"""The stream of a container, which has a name for messages."""

_OPEN = 32  # files of a thread
_PIECE = 4 << 20  # bytes that are read at a time


class OpenFile:
    """A file of an index, and its bytes.

    Args:
        index: of the files.
        file: its number.
        storage: how stores are reached.

    Raises:
        ClipError: the index says what is wrong with it.
        DataFileChangedError: it was changed since it was indexed.
        StorageError: it cannot be opened.

    Attributes:
        path: or address.
        coding, packets: what the index says.
        source: the bytes.
        container: FFmpeg's demuxer, of a file that needs one, once it was opened.
    """

    def __init__(self, index: ClipIndex, file: int, storage: Storage | None) -> None:
        self.path = index.path_of(file)
        wrong = index.error(file)
        if wrong:
            raise ClipError(wrong)
        self.coding: Any = index.coding(file)
        self.packets: Any = index.packets(file)
        self.source = open_file(self.path, storage)
        if not index.is_of(file, self.source):
            raise DataFileChangedError(
                f"{shown(self.path)!r} was changed since it was indexed: open the data set again, or make the index "
                "again with: penstock clips index"
            )
        self.container: Any = None

    def coded(self, first: int, last: int) -> Iterator[tuple[int, Packet[Any]]]:
        """Yield packets ``first`` to ``last``, inclusive, with their numbers, read by ranges, some MiB at a time."""
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
            yield number, coded(memoryview(data)[place - begin : place - begin + length], key=key)

    def demuxed(self, first: int, time: float | None, backs: Sequence[float], stream_of: StreamOf) -> Iterator[Any]:
        """Return the packets from one on, by FFmpeg's demuxer, which stays open.

        Args:
            first: the number of the packet.
            time: seconds at which it is shown; None: it is not to be looked for.
            backs: seconds before it at which to look, if the file has begun then.
            stream_of: the stream that is meant.
        """
        if first and time is not None:
            container = self.container or self.reopened()
            backs = [back for back in backs if time - back > self.packets.times[0]]
            stream, size = stream_of(container, self.path), int(self.packets.size[first])
            found = sought(container, stream, time, size, backs)
            if found is not None:
                return found
        container = self.reopened()
        return itertools.islice(demuxed(container, stream_of(container, self.path)), first, None)

    def reopened(self) -> Any:
        """Return a demuxer that has read nothing yet, in place of what was open."""
        self.close()
        self.container = open_container(self.source, self.path)
        return self.container

    def close(self) -> None:
        """Close the demuxer. Left to the garbage collector, it would stay for long."""
        container, self.container = self.container, None
        if container is not None:
            container.close()

    def numbered(self, packets: Iterator[Packet[Any]], first: int, last: int) -> Iterator[tuple[int, Packet[Any]]]:
        """Yield packets ``first`` to ``last``, inclusive, that a demuxer gives, with their numbers.

        Raises:
            ClipError: they are not those of the index.
        """
        for number in range(first, last + 1):
            packet = next(packets, None)
            if packet is None or packet.size != self.packets.size[number]:
                raise ClipError(
                    f"{shown(self.path)!r} has other packets than when it was indexed: make the index again with: "
                    "penstock clips index"
                )
            yield number, packet


class OpenFiles:
    """The files of an index that were used last.

    Args:
        index: of the files.
        storage: how stores are reached.

    Safe in threads, each of which has its own, and after a fork; a pickle is a handle.
    """

    def __init__(self, index: ClipIndex, storage: Storage | None) -> None:
        self.index, self.storage = index, storage
        self._here = _Here()

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, (self.index, self.storage)

    def __getitem__(self, file: int) -> OpenFile:
        files = self._here.of_process()
        found = files.pop(file, None)
        if found is None:
            found = OpenFile(self.index, file, self.storage)
            while len(files) >= _OPEN:
                files.popitem(last=False)[1].close()
        files[file] = found
        return found


class _Here(threading.local):
    """The files that a thread has open."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.files: OrderedDict[int, OpenFile] = OrderedDict()

    def of_process(self) -> OrderedDict[int, OpenFile]:
        """Return them; descriptors and demuxers of before a fork are those of the parent, too."""
        if self.pid != os.getpid():
            self.pid, self.files = os.getpid(), OrderedDict()
        return self.files
