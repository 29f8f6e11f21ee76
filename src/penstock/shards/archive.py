"""`Archive`: a whole tar archive that is read by position, with a piece of it in memory.

    archive = Archive(ShardFile("a.tar"))
    archive.hold(0, 1 << 20)                # read a piece, in the place of the one before
    header = archive.data[512:1024]         # out of the piece, which begins at byte archive.begin
    data = archive.read(9 << 20, 10 << 20)  # out of memory or out of the file
    archive.check()                         # ShardChangedError: somebody wrote to the file
    ...                                     # now what was read may be used

The file is not mapped: one that shrinks while it is read is an error, where a map of it would end the process (SIGBUS).

Promise: bytes that were read before a `check` that passes are those of the file that was opened. How soon a change of
the same size shows is up to the file's modification time, see `ShardFile.settle`.
"""

from __future__ import annotations

from penstock.shards.files import ShardFile

__all__ = ["Archive"]


class Archive:
    """An archive in a file or in memory. ``len`` is its size; slices are bytes.

    Args:
        source: an open shard, or the bytes themselves, which never change.

    The piece in memory is ``data``: the bytes from ``begin`` to before ``end``.
    """

    def __init__(self, source: ShardFile | bytes) -> None:
        self._file = None if isinstance(source, bytes) else source
        self.data = source if isinstance(source, bytes) else b""
        self.size = len(source) if isinstance(source, bytes) else source.size
        self.begin, self.end = 0, len(self.data)
        self._kept: dict[int, bytes] = {}

    @classmethod
    def of(cls, source: Archive | bytes) -> Archive:
        """The same archive, or one of these bytes."""
        return source if isinstance(source, Archive) else cls(source)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self.size)
        return self.read(begin, max(begin, end))

    def hold(self, begin: int, end: int) -> memoryview:
        """Read a piece and keep it in memory, in the place of the one before; return a view of it.

        Raises as `read` does.
        """
        if self._file is None:
            return memoryview(self.data)[begin:end]
        self.data, self.begin, self.end = b"", begin, begin  # the old piece goes before the new one comes
        self.data, self.end = self._file.read(end - begin, begin), end
        return memoryview(self.data)

    def keep(self, found: dict[int, bytes]) -> None:
        """Keep some more bytes, by their places, instead of those before."""
        self._kept = found

    def read(self, begin: int, end: int) -> bytes:
        """Bytes of the archive, out of memory if they are there.

        Raises:
            ShardChangedError: the file is shorter than it was.
            ShardIOError: the file cannot be read.
        """
        kept = self._kept.get(begin)
        if kept is not None and len(kept) == end - begin:
            return kept
        if begin >= self.begin and end <= self.end:
            return self.data[begin - self.begin : end - self.begin]
        assert self._file is not None
        return self._file.read(end - begin, begin)

    def check(self) -> None:
        """Raise `ShardChangedError` if the file was changed. Costs one fstat."""
        if self._file is not None:
            self._file.check()

    def fetch_ahead(self, begin: int, end: int) -> None:
        """Have the system read these bytes from the disk or the network, in one go, unless they are in memory."""
        if self._file is not None and not self._file.is_cached(min(end, self.size) - 1):
            self._file.fetch_ahead(begin, end)
