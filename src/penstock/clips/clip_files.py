"""`ClipFiles`: clips of files of video or sound as rows, by numbers alone: which frames or samples of which file."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from penstock.clips.clip_index import ClipIndex
from penstock.clips.packets import Ints
from penstock.errors import ConfigError
from penstock.order.permutation import Indices, normalise

__all__ = ["ClipFiles", "ClipRecord", "FrameRule", "Measures", "Rule", "SoundRule"]

_ROUNDED = 0.0006  # seconds by which the time of a frame may differ from what is meant


class Measures(NamedTuple):
    """How long files are, and their clips: int64, a number for each file.

    Attributes:
        lengths: frames, or samples at the rate that is asked for.
        spans: from the first of a clip to behind its last.
        strides: from the beginning of a clip to that of the next; None: one clip of each file.
    """

    lengths: Ints
    spans: Ints
    strides: Ints | None


class Rule(Protocol):
    """Which part of a file is a clip. Two that are equal, and have one ``repr``, make the same rows."""

    @property
    def random_start(self) -> bool:
        """Whether the one clip of a file begins anywhere in it, or at its beginning."""

    def measure(self, index: ClipIndex) -> Measures:
        """Return how long the files of an index are, and their clips."""

    def span(self, index: ClipIndex, file: int) -> int | None:
        """Return the frames or samples of a clip of a file, from the first to behind the last; None: all of it."""

    def window(self, index: ClipIndex, file: int, start: float, end: float) -> tuple[int, int]:
        """Return the first frame or sample of a file between two times in seconds, and the one behind the last."""


class FrameRule(NamedTuple):
    """Which frames are a clip.

    Attributes:
        frames: of a clip.
        step: from one frame of a clip to the next.
        stride: frames from the beginning of a clip to that of the next; None: one clip of each file.
        random_start: whether the one clip of a file begins anywhere in it, or at its first frame.
    """

    frames: int
    step: int
    stride: int | None
    random_start: bool

    def measure(self, index: ClipIndex) -> Measures:
        """Return how long the files of an index are, and their clips, in frames."""
        spans = np.full(len(index), self.span(index, 0), np.int64)
        strides = None if self.stride is None else np.full(len(index), self.stride, np.int64)
        return Measures(index.lengths, spans, strides)

    def span(self, index: ClipIndex, file: int) -> int:
        """Return the frames from the first of a clip to behind its last."""
        return (self.frames - 1) * self.step + 1

    def window(self, index: ClipIndex, file: int, start: float, end: float) -> tuple[int, int]:
        """Return the frames of a file that are shown between two times in seconds."""
        if not index.lengths[file]:
            return 0, 0
        times = index.packets(file).times
        # A time that somebody has computed may be one of a frame, which the file has rounded: to 1 ms in Matroska.
        near = min(_ROUNDED, (times[-1] - times[0]) / (4 * len(times)))
        origin = index.coding(file).origin - near
        begin, stop = np.searchsorted(times, [origin + start, origin + end])
        return int(begin), int(stop)


class SoundRule(NamedTuple):
    """Which samples are a clip.

    Attributes:
        seconds: of a clip; None: all of the file.
        rate: samples per second that are wanted; None: those of the file.
        stride: seconds from the beginning of a clip to that of the next; None: one clip of each file.
        random_start: whether the one clip of a file begins anywhere in it, or at its beginning.
    """

    seconds: float | None
    rate: int | None
    stride: float | None
    random_start: bool

    def measure(self, index: ClipIndex) -> Measures:
        """Return how long the files of an index are, and their clips, in samples at the rate that is wanted."""
        own = np.maximum(np.array([rate or 0 for rate in index.column("rate")], np.int64), 1)
        rates = own if self.rate is None else np.full(len(index), self.rate, np.int64)
        lengths = index.lengths * rates // own
        spans = lengths if self.seconds is None else _samples(self.seconds, rates)
        return Measures(lengths, spans, None if self.stride is None else _samples(self.stride, rates))

    def span(self, index: ClipIndex, file: int) -> int | None:
        """Return the samples of a clip of a file, at the rate that is wanted; None: all of it."""
        if self.seconds is None:
            return None
        own = index.coding(file).rate if index.lengths[file] else 1
        return max(1, round(self.seconds * (self.rate or own)))

    def window(self, index: ClipIndex, file: int, start: float, end: float) -> tuple[int, int]:
        """Return the samples of a file, at the rate that is wanted, between two times in seconds."""
        length, own = int(index.lengths[file]), index.coding(file).rate if index.lengths[file] else 1
        rate = self.rate or own
        whole = length * rate // own
        return min(round(start * rate), whole), min(round(min(end, 1e9) * rate), whole)


def _samples(seconds: float, rates: Ints) -> Ints:
    samples: Ints = np.rint(seconds * rates).astype(np.int64)
    return np.maximum(samples, 1)


class ClipRecord(NamedTuple):
    """A row: where a clip may begin, in which file.

    Attributes:
        row: its number among all.
        path: of the file.
        file: its number in the index.
        first, last: the first and the last frame or sample at which the clip may begin.
        span: from the first of the clip to behind its last.
        end: the length of the file, or where the clip must end.
        label: of the file; None if nobody said any.
    """

    row: int
    path: str
    file: int
    first: int
    last: int
    span: int
    end: int
    label: Any


class ClipFiles:
    """The clips of some files.

    Args:
        index: of the files.
        rule: which clips they have.
        labels: of the files, in their order; None for none.

    Raises:
        ConfigError: labels for another number of files.

    Memory: up to 32 bytes for each file, whatever their length, and the labels.
    """

    fork_safe = True

    def __init__(self, index: ClipIndex, rule: Rule, labels: Sequence[Any] | None = None) -> None:
        if labels is not None and len(labels) != len(index):
            raise ConfigError(f"{len(labels)} labels for {len(index)} files: give one for each")
        self.index, self.rule, self.labels = index, rule, labels
        self._measures = measures = rule.measure(index)
        if measures.strides is None:
            self._ends: Ints = np.arange(1, len(index) + 1)
        else:
            counts = (measures.lengths - measures.spans) // measures.strides + 1
            self._ends = np.cumsum(np.maximum(counts, 1))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __repr__(self) -> str:
        return f"<ClipFiles of {len(self):,} clips: {len(self.index):,} {self.index.kind.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ClipFiles, (self.index, self.rule, self.labels)

    @property
    def lengths(self) -> Ints:
        """The frames or samples of each row, int64."""
        spans, ends = self._measures.spans, self._ends
        return np.repeat(spans, np.diff(ends, prepend=0))

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the rows: what the files hold, their labels, and which part of them is a clip."""
        return self._prefix(len(self.index))

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether files with this fingerprint have since got more files behind them."""
        files = np.flatnonzero(self._ends == rows)
        return any(self._prefix(int(file) + 1) == fingerprint for file in files)

    def _prefix(self, files: int) -> str:
        digest = xxhash.xxh3_128(repr(self.rule).encode())
        for one in self.index.column("digest")[:files]:
            digest.update(one)
        if self.labels is not None:
            digest.update(repr([self.labels[file] for file in range(files)]).encode())
        return digest.hexdigest()

    def records(self, rows: Indices) -> list[ClipRecord]:
        """Return the records of some rows, in this order."""
        numbers = normalise(rows, len(self))
        files = np.searchsorted(self._ends, numbers, side="right")
        begins = np.where(files > 0, self._ends[files - 1], 0)
        return [
            self._record(row, file, number)
            for row, file, number in zip(numbers.tolist(), files.tolist(), (numbers - begins).tolist(), strict=True)
        ]

    def __getitem__(self, row: int) -> ClipRecord:
        return self.records(np.array([operator.index(row)]))[0]

    def _record(self, row: int, file: int, number: int) -> ClipRecord:
        lengths, spans, strides = self._measures
        end, span = int(lengths[file]), int(spans[file])
        if strides is not None:
            first = last = number * int(strides[file])
        else:
            first, last = 0, max(0, end - span) if self.rule.random_start else 0
        label = None if self.labels is None else self.labels[file]
        return ClipRecord(row, self.index.path_of(file), file, first, last, span, end, label)
