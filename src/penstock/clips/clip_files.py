"""`ClipFiles`: a source whose rows are clips of video or audio files: ranges of frames or samples."""

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

__all__ = ["ClipFiles", "ClipLengths", "ClipRecord", "FrameRule", "Rule", "SoundRule"]

_ROUNDED = 0.0006  # seconds by which a container may round the time of a frame


class ClipLengths(NamedTuple):
    """Lengths of files and of their clips, in frames or samples at the requested rate: int64, one per file.

    Attributes:
        lengths: length of each file.
        spans: length of a clip, gaps between its frames included.
        strides: distance between the starts of consecutive clips; None: one clip per file.
    """

    lengths: Ints
    spans: Ints
    strides: Ints | None


class Rule(Protocol):
    """Decides which part of a file is a clip. Rules with equal ``repr`` yield the same rows."""

    @property
    def random_start(self) -> bool:
        """Whether the only clip of a file begins at a random position; if not, at its start."""

    def measure(self, index: ClipIndex) -> ClipLengths:
        """Return the lengths of an index's files and of their clips."""

    def span(self, index: ClipIndex, file: int) -> int | None:
        """Return the length of a file's clip in frames or samples, gaps included; None: the whole file."""

    def window(self, index: ClipIndex, file: int, start: float, end: float) -> tuple[int, int]:
        """Return the range [first, end) of frames or samples between two times of a file in seconds."""


class FrameRule(NamedTuple):
    """Decides which frames are a clip.

    Attributes:
        frames: number of frames of a clip.
        step: distance between the frames of a clip.
        stride: frames between the starts of consecutive clips; None: one clip per file.
        random_start: whether the only clip of a file begins at a random frame; if not, at the first.
    """

    frames: int
    step: int
    stride: int | None
    random_start: bool

    def measure(self, index: ClipIndex) -> ClipLengths:
        """Return the lengths of an index's files and of their clips, in frames."""
        spans = np.full(len(index), self.span(index, 0), np.int64)
        strides = None if self.stride is None else np.full(len(index), self.stride, np.int64)
        return ClipLengths(index.lengths, spans, strides)

    def span(self, index: ClipIndex, file: int) -> int:
        """Return the length of a clip in frames, gaps included."""
        return (self.frames - 1) * self.step + 1

    def window(self, index: ClipIndex, file: int, start: float, end: float) -> tuple[int, int]:
        """Return the range [first, end) of frames between two times of a file in seconds."""
        if not index.lengths[file]:
            return 0, 0
        times = index.packets(file).times
        # The given times may be exact times of frames, but the file has rounded ones: to 1 ms in Matroska.
        near = min(_ROUNDED, (times[-1] - times[0]) / (4 * len(times)))
        origin = index.coding(file).origin - near
        begin, stop = np.searchsorted(times, [origin + start, origin + end])
        return int(begin), int(stop)


class SoundRule(NamedTuple):
    """Decides which samples are a clip.

    Attributes:
        seconds: length of a clip; None: the whole file.
        rate: the requested samples per second; None: the file's own rate.
        stride: seconds between the starts of consecutive clips; None: one clip per file.
        random_start: whether the only clip of a file begins at a random sample; if not, at the first.
    """

    seconds: float | None
    rate: int | None
    stride: float | None
    random_start: bool

    def measure(self, index: ClipIndex) -> ClipLengths:
        """Return the lengths of an index's files and of their clips, in samples at the requested rate."""
        own = np.maximum(np.array([rate or 0 for rate in index.column("rate")], np.int64), 1)
        rates = own if self.rate is None else np.full(len(index), self.rate, np.int64)
        lengths = index.lengths * rates // own
        spans = lengths if self.seconds is None else _samples(self.seconds, rates)
        return ClipLengths(lengths, spans, None if self.stride is None else _samples(self.stride, rates))

    def span(self, index: ClipIndex, file: int) -> int | None:
        """Return the length of a file's clip in samples at the requested rate; None: the whole file."""
        if self.seconds is None:
            return None
        own = index.coding(file).rate if index.lengths[file] else 1
        return max(1, round(self.seconds * (self.rate or own)))

    def window(self, index: ClipIndex, file: int, start: float, end: float) -> tuple[int, int]:
        """Return the range [first, end) of samples, at the requested rate, between two times of a file in seconds."""
        length, own = int(index.lengths[file]), index.coding(file).rate if index.lengths[file] else 1
        rate = self.rate or own
        whole = length * rate // own
        return min(round(start * rate), whole), min(round(min(end, 1e9) * rate), whole)


def _samples(seconds: float, rates: Ints) -> Ints:
    samples: Ints = np.rint(seconds * rates).astype(np.int64)
    return np.maximum(samples, 1)


class ClipRecord(NamedTuple):
    """A row: a file, and the range of positions where the clip may begin.

    Attributes:
        row: its number in the source.
        path: path or URL of the file.
        file: number of the file in the index.
        first, last: the first and the last frame or sample at which the clip may begin.
        span: length of the clip, gaps included.
        end: length of the file, or the position where the clip must end.
        label: label of the file; None if there is none.
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
        index: the index of the files.
        rule: decides which parts of a file are clips.
        labels: a label per file, in order; None for no labels.

    Raises:
        ConfigError: the number of labels differs from the number of files.

    Memory: up to 32 bytes per file, independent of its length, and the labels.
    """

    fork_safe = True

    def __init__(self, index: ClipIndex, rule: Rule, labels: Sequence[Any] | None = None) -> None:
        if labels is not None and len(labels) != len(index):
            raise ConfigError(f"{len(labels)} labels for {len(index)} files: pass one label per file")
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
        """The number of frames or samples of each row, int64."""
        spans, ends = self._measures.spans, self._ends
        return np.repeat(spans, np.diff(ends, prepend=0))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the files' contents, their labels and the rule."""
        return self._prefix(len(self.index))

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether these files are the ones with this fingerprint, with further files appended."""
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
        """Return the records of the given rows, in this order."""
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
