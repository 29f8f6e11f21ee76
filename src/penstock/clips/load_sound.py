"""`LoadSound`: decodes an audio clip to a tensor with the requested rate and channels, and returns its label, too."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.clips.clip_files import ClipRecord, SoundRule
from penstock.clips.sound_reader import SoundReader
from penstock.errors import ClipError, ConfigError
from penstock.random import generator
from penstock.stages import stage
from penstock.storage.urls import shown

__all__ = ["LoadSound"]

_AROUND = 256
"""Samples (at the lower rate) on either side of a clip that resampling uses: the result differs from resampling the
whole file by at most one unit of a 24-bit sample."""


class LoadSound:
    """``load(record) -> (audio, label)``; picklable.

    Args:
        reader: reads the files' samples.
        rule: decides which samples are a clip.
        channels: 1: the mean of all channels; another number: each file must have this number; None: as in the file.
        transform: ``transform(audio)`` returns the first element of the sample.

    Raises:
        ConfigError: a rate is requested, and soxr is not installed.

    Attributes:
        pure: whether the result depends only on the record and `penstock.generator`.
        form: shape and dtype of every clip; None if they differ.
    """

    def __init__(
        self,
        reader: SoundReader,
        rule: SoundRule,
        channels: int | None,
        transform: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        self.reader, self.rule, self.channels, self.transform = reader, rule, channels, transform
        if rule.rate is not None:
            _soxr()  # raise here, not in a worker
        self.pure = transform is None or bool(getattr(transform, "pure", False))
        self.form: tuple[tuple[int, ...], torch.dtype] | None = None
        if transform is None and channels is not None and rule.rate is not None and rule.seconds is not None:
            self.form = (channels, max(1, round(rule.seconds * rule.rate))), torch.float32

    def __call__(self, record: ClipRecord, out: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Decode the clip of a record, into `out` if given, which has the shape and dtype of `form`.

        Raises:
            ClipError, DataFileChangedError, StorageError: as `SoundReader.samples`.
        """
        self.reader.check(record.file)
        if record.first >= record.end:
            raise ClipError(f"{shown(record.path)!r} has no audio in the time range of row {record.row}")
        first = record.first
        if record.last > first:
            first += int(generator().integers(record.last - first + 1))
        own = self.reader.index.coding(record.file).rate
        rate = self.rule.rate or own
        with stage("decode"):
            values = self._values(record, first, own, rate)
            values[:, record.end - first :] = 0  # after the end time of a listed clip
        audio: Any = torch.from_numpy(values)
        if out is not None:
            audio = out.copy_(audio)
        elif self.transform is not None:
            with stage("augment"):
                audio = self.transform(audio)
        if record.label is not None:
            return audio, record.label
        return audio, {"path": record.path, "seconds": first / rate, "sample_rate": rate}

    def _values(self, record: ClipRecord, first: int, own: int, rate: int) -> npt.NDArray[np.float32]:
        """Return the samples of a clip: float32 (channels, samples)."""
        if rate == own or not own:
            return self._mixed(self.reader.samples(record.file, first, first + record.span), record)
        up, down = rate // gcd(rate, own), own // gcd(rate, own)
        around = _AROUND * max(1, -(-up // down))
        # Every `up`-th output sample coincides with a sample of the file. The file's ends are not padded, so the result
        # is the same as if the whole file was resampled.
        begin = max(0, (first - around) // up * up)
        low = begin * down // up
        high = min(-(-(first + record.span + around) * down // up), int(self.reader.index.lengths[record.file]))
        values = self._mixed(self.reader.samples(record.file, low, max(low, high)), record)
        with stage("resample"):
            resampled: npt.NDArray[np.float32] = _soxr().resample(values.T, own, rate, quality="HQ").T
        part = resampled[:, first - begin : first - begin + record.span]
        made = np.zeros((part.shape[0], record.span), np.float32)
        made[:, : part.shape[1]] = part
        return made

    def _mixed(self, values: npt.NDArray[np.float32], record: ClipRecord) -> npt.NDArray[np.float32]:
        """Return the requested channels."""
        if self.channels is None or values.shape[0] == self.channels:
            return values
        if self.channels == 1:
            mean: npt.NDArray[np.float32] = values.mean(axis=0, keepdims=True, dtype=np.float32)
            return mean
        raise ClipError(f"{shown(record.path)!r} has {values.shape[0]} channels and not {self.channels}")


def _soxr() -> Any:
    try:
        import soxr
    except ImportError as error:
        raise ConfigError("sample_rate= needs the package soxr: pip install 'penstock[clips]'") from error
    return soxr
