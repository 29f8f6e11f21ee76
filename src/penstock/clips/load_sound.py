"""`LoadSound`: a row of clips of sound to a tensor and its label, at the rate and with the channels that are wanted."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.clips.clip_files import ClipRecord, SoundRule
from penstock.clips.sound_reading import SoundReader
from penstock.errors import ClipError, ConfigError
from penstock.random import generator
from penstock.stages import stage
from penstock.storage.urls import shown

__all__ = ["LoadSound"]

_AROUND = 256
"""Samples of the lower rate on either side of a clip that its resampling looks at: within one 24th bit of a resampling
of the whole file."""


class LoadSound:
    """``load(record) -> (audio, label)``; picklable.

    Args:
        reader: of the files' samples.
        rule: which samples are a clip.
        channels: 1: the mean of all; another number: as many as each file must have; None: as the file has them.
        transform: ``transform(audio)`` makes the first part of the item.

    Raises:
        ConfigError: a rate is wanted, and soxr is not installed.

    Attributes:
        pure: whether what it makes depends on the record and `penstock.generator` alone.
        form: shape and type of every clip; None if they differ.
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
            _soxr()  # said now, and not in a worker
        self.pure = transform is None or bool(getattr(transform, "pure", False))
        self.form: tuple[tuple[int, ...], torch.dtype] | None = None
        if transform is None and channels is not None and rule.rate is not None and rule.seconds is not None:
            self.form = (channels, max(1, round(rule.seconds * rule.rate))), torch.float32

    def __call__(self, record: ClipRecord, out: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Decode the clip of a record, into `out` if that is given, of the shape and type of `form`.

        Raises:
            ClipError, DataFileChangedError, StorageError: as `SoundReader.samples`.
        """
        self.reader.check(record.file)
        if record.first >= record.end:
            raise ClipError(f"{shown(record.path)!r} has no sound in the time of row {record.row}")
        first = record.first
        if record.last > first:
            first += int(generator().integers(record.last - first + 1))
        own = self.reader.index.coding(record.file).rate
        rate = self.rule.rate or own
        with stage("decode"):
            values = self._values(record, first, own, rate)
            values[:, record.end - first :] = 0  # behind the end of a clip that is listed
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
        """The samples of a clip: float32 (channels, samples)."""
        if rate == own or not own:
            return self._mixed(self.reader.samples(record.file, first, first + record.span), record)
        up, down = rate // gcd(rate, own), own // gcd(rate, own)
        around = _AROUND * max(1, -(-up // down))
        # Every `up` samples lie on one of the file. Nothing is before its first and behind its last, as for who
        # resamples all of it.
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
        """The channels that are wanted."""
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
