"""Group many members of a tar archive into samples at a time: the rules of `penstock.shards.grouping` in NumPy.

    for run in scan_runs(archive, "a.tar"):       # a Run: some hundreds of samples
        for sample in run.samples(archive, "a.tar"): ...

Samples and errors equal those of `group(walk(...))`, but this is several times faster. If the file changes
meanwhile, samples of the old content precede the error, and none of the new content is returned. Memory: a few MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ShardError
from penstock.shards.archive import Archive
from penstock.shards.grouping import KEY, URL, Handler, Sample, duplicate, split_name
from penstock.shards.tar import decode_name
from penstock.shards.window import Bytes, Ints, Members, scan, texts

__all__ = ["Extensions", "Run", "scan_runs"]

_PIECE = 128 << 10  # bytes of samples read together before a check of the file
_FEW = 12  # up to this many extensions, each is compared with all files at once
_GATHERED = 24  # minimum number of files grouped together
_SLASH, _DOT, _LINE, _UNDERSCORE = b"/.\n_"


class Extensions(dict[bytes, int]):
    """Numbers of extensions as spelled in names; ``names`` holds them in lower case. Grows at lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __missing__(self, raw: bytes) -> int:
        name = decode_name(raw).lower()
        if name not in self.names:
            self.names.append(name)
        number = self.names.index(name)
        if len(self) < 1 << 16:
            self[raw] = number
        return number


class Run(NamedTuple):
    """Consecutive samples of one archive.

    The files of sample ``i`` are ``files[first[i] : first[i + 1]]``; ``keys`` has a zero-padded row of bytes for each
    sample, of length ``key_lengths[i]``; ``extensions`` has a number for each file.
    """

    files: Members
    first: Ints
    keys: Bytes
    key_lengths: Ints
    extensions: Ints
    names: list[str]

    @property
    def total(self) -> int:
        """The number of samples."""
        return len(self.first) - 1

    def key_texts(self) -> list[str]:
        """Return the keys."""
        return texts(self.keys, self.key_lengths)

    def samples(self, archive: Archive, url: str) -> Iterator[Sample]:
        """Yield the samples with their data as bytes.

        Raises:
            ShardChangedError: the file has changed.
            ShardIOError: it cannot be read.

        Data that the archive holds in memory has been checked. Other data is read from the file for several samples at
        a time, and checked after that.
        """
        keys, columns = self.key_texts(), self._columns()
        data, base, limit = archive.data, archive.begin, archive.end
        if len(columns) not in (1, 2):
            yield from self._any(archive, url, keys, 0, self.total)
            return
        # Most shards have one or two files in each sample; for these, this is twice as fast.
        width, begins, ends = len(columns), self.files.offset, self.files.offset + self.files.size
        low = int(np.searchsorted(begins[::width], base))
        high = max(low, int(np.searchsorted(ends[width - 1 :: width], limit, "right")))
        yield from self._any(archive, url, keys, 0, low)
        places = (
            (array[low * width + k : high * width : width] - base).tolist()
            for k in range(width)
            for array in (begins, ends)
        )
        if width == 1:
            one = columns[0]
            for key, a, b in zip(keys[low:high], *places, strict=True):
                yield {KEY: key, URL: url, one: data[a:b]}
        else:
            one, two = columns
            for key, a, b, c, d in zip(keys[low:high], *places, strict=True):
                yield {KEY: key, URL: url, one: data[a:b], two: data[c:d]}
        yield from self._any(archive, url, keys, high, self.total)

    def _columns(self) -> list[str]:
        """Return the extensions of every sample, if all have the same in the same order; else nothing."""
        width = int(self.first[1]) if self.total else 0
        if len(self.extensions) != width * self.total or (np.diff(self.first) != width).any():
            return []
        table = self.extensions.reshape(self.total, width)
        return [] if (table != table[:1]).any() else [self.names[number] for number in self.extensions[:width].tolist()]

    def _any(self, archive: Archive, url: str, keys: list[str], low: int, high: int) -> Iterator[Sample]:
        """Yield samples of any files. Several are read together, and yielded after a check of the file."""
        if low >= high:
            return
        which = slice(int(self.first[low]), int(self.first[high]))
        names = [self.names[number] for number in self.extensions[which].tolist()]
        begins = self.files.offset[which].tolist()
        ends = (self.files.offset[which] + self.files.size[which]).tolist()
        files = zip(names, begins, ends, strict=True)
        counts = np.diff(self.first[low : high + 1]).tolist()
        read, waiting, end, limit = archive.read, [], 0, begins[0] + _PIECE if begins else 0
        for key, count in zip(keys[low:high], counts, strict=True):
            sample: Sample = {KEY: key, URL: url}
            for name, begin, end in islice(files, count):
                sample[name] = read(begin, end)
            waiting.append(sample)
            if end >= limit:
                archive.check()
                yield from waiting
                waiting, limit = [], end + _PIECE
        archive.check()
        yield from waiting


def scan_runs(
    archive: Archive,
    url: str,
    *,
    start: int = 0,
    require_end: bool = True,
    handler: Handler | None = None,
    extensions: Extensions | None = None,
    select: Callable[[str], bool] | None = None,
) -> Iterator[Run]:
    """Yield all samples of an archive in order.

    Args:
        archive: the archive.
        url: its name, for messages.
        start: the first header byte of the first sample.
        require_end: see `walk`.
        handler: decides about a repeated extension: True skips the second file, False ends.
        extensions: numbers to use for extensions.
        select: returns whether to use the file with a name.

    Raises:
        TruncatedShardError, ShardError: as from `walk` and `group`. Complete samples precede the error.
    """
    known = Extensions() if extensions is None else extensions
    waiting: list[Members] = []
    held = 0  # files of the sample that may continue, from earlier windows
    scanned = scan(archive, url, start=start, require_end=require_end)
    ended, error = False, None
    while not ended:
        try:
            files = next(scanned).files()
            if select is not None:
                files = files.take(np.array([*map(select, texts(files.names, files.lengths))], bool))
            waiting.append(files)
        except StopIteration:
            ended = True
        except Exception as caught:
            ended, error = True, caught
        # A few files are not worth a call, and one huge sample must not be grouped again for every window.
        if not ended and sum(part.total for part in waiting) < max(2 * held, _GATHERED):
            continue
        run = _group(Members.join(waiting), known)
        # The last sample may continue in the next window, or in the unreadable rest.
        whole = run.total if ended and error is None else max(0, run.total - 1)
        waiting = [run.files.take(slice(int(run.first[whole]), None))]
        held = waiting[0].total
        run, repeated = _without_repeated(_part(run, whole), url, handler)
        if run.total:
            yield run
        if repeated is not None and handler is not None:
            return
        if repeated is not None:
            raise repeated
    if error is not None:
        raise error


def _group(files: Members, known: Extensions) -> Run:
    """Return files grouped into samples; other members are ignored."""
    names, lengths = files.names, files.lengths
    rows, width = names.shape
    columns = np.arange(width)
    is_dot = names == _DOT
    is_slash = names == _SLASH
    if is_slash.any():
        base = width - is_slash[:, ::-1].argmax(1)
        base[~is_slash.any(1)] = 0
        is_dot &= columns >= base[:, None]
    else:
        base = np.zeros(rows, np.int64)
    dot = is_dot.argmax(1)
    keep = is_dot.any(1)
    if rows:
        odd = (keep & (dot == base)) | (names[:, 0] == _UNDERSCORE) | (names == _LINE).any(1)
        for row in np.flatnonzero(odd).tolist():
            parts = split_name(decode_name(files.name(row)))
            keep[row] = parts is not None
            if parts is not None:
                dot[row] = len(parts[0].encode("utf-8", "surrogateescape"))
    if not keep.all():
        files, dot, lengths = files.take(keep), dot[keep], lengths[keep]
        names, rows = files.names, files.total
    keys = names * (columns < dot[:, None])
    keys = np.ascontiguousarray(keys[:, : int(dot.max(initial=0)) + 1])
    texts = keys.view(f"S{keys.shape[1]}").ravel()
    new = np.ones(rows + 1, bool)
    new[1:-1] = (texts[1:] != texts[:-1]) | (dot[1:] != dot[:-1])
    first = np.flatnonzero(new)
    return Run(files, first, keys[first[:-1]], dot[first[:-1]], _numbers(names, dot, lengths, known), known.names)


def _numbers(names: Bytes, dot: Ints, lengths: Ints, known: Extensions) -> Ints:
    """Return the numbers of the extensions."""
    longest = max(1, int((lengths - dot).max(initial=1)) - 1)
    places = dot[:, None] + np.arange(1, longest + 1)
    # Rows are padded with zeros, and the last column is all zeros.
    raw = np.take_along_axis(names, np.minimum(places, names.shape[1] - 1), 1)
    texts = raw.view(f"S{longest}").ravel()
    result = np.full(len(raw), -1, np.int64)
    for _ in range(_FEW):
        if (result >= 0).all():
            return result
        row = int(result.argmin())
        result[texts == texts[row]] = known[bytes(texts[row])]
    return np.fromiter(map(known.__getitem__, texts.tolist()), np.int64, len(raw))


def _part(run: Run, count: int) -> Run:
    """Return the first samples of a run."""
    stop = int(run.first[count])
    return run._replace(
        files=run.files.take(slice(stop)),
        first=run.first[: count + 1],
        keys=run.keys[:count],
        key_lengths=run.key_lengths[:count],
        extensions=run.extensions[:stop],
    )


def _without_repeated(run: Run, url: str, handler: Handler | None) -> tuple[Run, ShardError | None]:
    """Return the run without files of repeated extensions, and the error after it: where the handler ends the shard."""
    number = np.sort(np.repeat(np.arange(run.total), np.diff(run.first)) * len(run.names) + run.extensions)
    if KEY not in run.names and URL not in run.names and not (number[1:] == number[:-1]).any():
        return run, None
    keep = np.ones(run.files.total, bool)
    for sample in range(run.total):
        seen = {KEY: 0, URL: 0}
        for row in range(int(run.first[sample]), int(run.first[sample + 1])):
            extension = run.names[run.extensions[row]]
            if extension not in seen:
                seen[extension] = 0
                continue
            error = duplicate(decode_name(run.files.name(row)), extension, seen, url, int(run.files.header[row]))
            if handler is None or not handler(error):
                part = _part(run, sample)
                return _with(part, keep[: part.files.total]), error
            keep[row] = False
    return _with(run, keep), None


def _with(run: Run, keep: npt.NDArray[np.bool_]) -> Run:
    """Return the run with some of its files."""
    before = np.concatenate([[0], np.cumsum(keep)])
    return run._replace(files=run.files.take(keep), first=before[run.first], extensions=run.extensions[keep])
