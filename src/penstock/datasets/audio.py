"""`AudioDataset`: clips of recordings as rows: some seconds from anywhere in a file, straight into the batch.

clips = AudioDataset("speech", seconds=2.0, sample_rate=16_000, channels=1)        # speech/<class>/*.flac
audio, label = clips[0]                                          # float32 tensor (1, 32000), in -1 to 1; int
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Unpack

import torch

from penstock.clips.clip_files import SoundRule
from penstock.clips.clip_index import SOUND, ClipIndex
from penstock.clips.discovery import SOUND_ENDINGS
from penstock.datasets.clips import ClipDataset, check_start, clips_of
from penstock.errors import ConfigError
from penstock.plan.share_options import ShareOptions, check_share
from penstock.shards.urls import Urls
from penstock.storage import Storage

if TYPE_CHECKING:
    from penstock.clips.load_sound import LoadSound

__all__ = ["AudioDataset"]


class AudioDataset(ClipDataset):
    """Clips of the recordings of this rank, as a map-style data set.

    Args:
        files: a folder of recordings, or of folders of them, which are classes; a file, a pattern or an address in a
            store; or a list of these. Of tar archives the members, with the label of ``.cls``, or a dict of ``.json``
            and ``.txt``, beside each. Videos in a list have their sound read.
        seconds: of a clip. None: each file is one clip, as long as it is.
        sample_rate: samples per second; files of another rate are resampled (soxr, its "HQ"). None: as the file has it.
        channels: 1: the mean of all channels; another number: all of them, and each file must have so many. None: as
            the file has them.
        stride: clips begin at 0, stride, 2 * stride, ... seconds of each file. None: each file is one clip, which
            begins anywhere.
        random_start: the clip of a file begins at a sample drawn from the sample's own `penstock.generator`, another
            one in each epoch; or at the first. By default it is drawn unless there is a stride.
        clips: rows that say which part of a file is a clip: dicts, a table of Arrow, columns by name, or a source of
            dicts such as `penstock.TableFiles`; with ``path``, below ``files``, and if they are there ``start`` and
            ``end`` in seconds. What else a row holds is its label: the value of ``label``, if that is all, else a dict.
            A clip begins anywhere in this time where the whole of it fits, or at ``start``.
        labels: of the files, in their order. By default the number of the folder that a file is in.
        transform: ``transform(audio)`` makes the first part of the item of the tensor. One that draws nothing, or from
            `penstock.generator` alone, may say so by an attribute ``pure = True``.
        index: the path of the index, which is made there if it is not (`penstock clips index --sound`). It may be of
            more files than these. By default it is in the cache.
        storage: how files at remote addresses are reached.
        progress: show a bar while files are indexed: True, False, or None for several on a terminal.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`.

    Raises:
        ConfigError: arguments that make no sense, no recordings in a folder, or PyAV or soxr is not installed.
        DataFileError: ``index`` is that of other files.
        DataFileIOError: the index cannot be written.
        StorageError: a store does not answer.
        ClipError: (on access) a file that is missing, damaged, or holds no sound; it names the file.
        DataFileChangedError: (on access) a file that was changed since it was indexed.

    Items are ``(audio, label)``: a float32 tensor (channels, samples), in -1 to 1; and the label, or where there are
    none a dict of ``path``, ``seconds`` at which the clip begins, and ``sample_rate``. A file that is shorter than a
    clip is followed by silence. Samples are those of a decode from the beginning of the file, without those that an
    encoder has put before the first: exactly for PCM, FLAC, ALAC, MP3 and most AAC; Opus, and what decoders dither or
    fill with noise, begins two packets or more before the clip, and comes as near as it does from there.

    A loader with the default collate function has clips of one form (``seconds``, ``sample_rate`` and ``channels`` are
    all given) written where the batch is to be. `lengths` are the samples of each row, for batches of a budget.

    Cost: all files are read once, when they are indexed, and those in AAC and Vorbis decoded; 20 bytes of the index for
    each packet, 0.8 MB for an hour of FLAC. A clip takes its packets and a few before them, from a disk or by ranges
    from a store. Memory: 32 bytes for each file, and the samples of a clip.
    """

    releases_gil = True

    def __init__(
        self,
        files: Urls,
        *,
        seconds: float | None = None,
        sample_rate: int | None = None,
        channels: int | None = None,
        stride: float | None = None,
        random_start: bool | None = None,
        clips: Any = None,
        labels: Sequence[Any] | None = None,
        transform: Callable[[torch.Tensor], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
        storage: Storage | None = None,
        progress: bool | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share)
        rule = _rule(seconds, sample_rate, stride, random_start)
        _check_integer("channels", channels)
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform is a function of a tensor, or None, not {transform!r}")
        found = clips_of(files, clips, SOUND_ENDINGS, storage, stride=stride, labels=labels)
        loading = _loading(rule, channels, transform, storage)
        super().__init__(found, SOUND, rule, loading, labels, index, storage, progress, share)


def _rule(seconds: Any, rate: Any, stride: Any, random_start: Any) -> SoundRule:
    for name, value in {"seconds": seconds, "stride": stride}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1e9):
            raise ConfigError(f"{name} is a positive number of seconds, not {value!r}")
    _check_integer("sample_rate", rate)
    if seconds is None and (stride is not None or random_start):
        raise ConfigError("without seconds= a clip is all of its file: leave stride= and random_start= out")
    anywhere = check_start(random_start, stride)
    length, far = (None if value is None else float(value) for value in (seconds, stride))
    return SoundRule(length, None if rate is None else int(rate), far, anywhere)


def _check_integer(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
        raise ConfigError(f"{name} is a positive integer, not {value!r}")


def _loading(
    rule: SoundRule, channels: int | None, transform: Any, storage: Storage | None
) -> Callable[[ClipIndex], LoadSound]:
    """What makes a ``load`` for an index."""
    try:
        from penstock.clips.load_sound import LoadSound
        from penstock.clips.sound_reading import SoundReader
    except ImportError as error:
        raise ConfigError("clips of sound need PyAV: pip install 'penstock[clips]'") from error

    return lambda index: LoadSound(SoundReader(index, storage), rule, channels, transform)
