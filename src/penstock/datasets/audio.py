"""`AudioDataset`: audio clips, decoded from any position of a file straight into the batch.

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
from penstock.storage import Storage
from penstock.storage.names import Urls

if TYPE_CHECKING:
    from penstock.clips.load_sound import LoadSound

__all__ = ["AudioDataset"]


class AudioDataset(ClipDataset):
    """Clips of audio files, split across ranks; a map-style dataset.

    Args:
        files: a folder of recordings, or a folder with one subfolder of recordings per class; a file, a pattern or an
            address in a store; or a list of these. For tar archives: their members; the label comes from the ``.cls``
            member of the same sample, or is a dict of its ``.json`` and ``.txt``. For videos in a list, the sound track
            is read.
        seconds: length of a clip in seconds. None: each file is one clip of its full length.
        sample_rate: samples per second; other rates are resampled (soxr, quality "HQ"). None: the file's own rate.
        channels: 1: the mean of all channels. A larger number: all channels, and each file must have this number. None:
            the file's own channels.
        stride: clips begin at 0, stride, 2 * stride, ... seconds of each file. None: each file yields one clip, at any
            position.
        random_start: whether the clip of a file begins at a random sample, drawn again in each epoch from the sample's
            own `penstock.generator`; otherwise it begins at the first sample. True by default, unless ``stride`` is
            given.
        clips: rows that define the clips: dicts, an Arrow table, columns by name, or a source of dicts such as
            `penstock.TableFiles`. A row has ``path``, relative to ``files``, and optionally ``start`` and ``end`` in
            seconds. The other columns are the label: the value of ``label`` if it is the only one, else a dict. A clip
            begins at a random position at which it fits entirely between ``start`` and ``end``, or at ``start`` (see
            ``random_start``).
        labels: one label per file, in the order of the files. By default the number of the file's class folder.
        transform: ``transform(audio)`` converts the tensor to the first element of the item. A transform that draws
            nothing, or only from `penstock.generator`, can declare this with an attribute ``pure = True``.
        index: the path of the index file; it is created if it does not exist (as by `penstock clips index --sound`). It
            may cover more files than these. By default it is in the cache.
        storage: access to remote addresses.
        progress: show a progress bar while files are indexed: True, False, or None to show it for several files on a
            terminal.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`.

    Raises:
        ConfigError: invalid arguments, a folder without recordings, or PyAV or soxr is not installed.
        DataFileError: ``index`` is the index of other files.
        DataFileIOError: the index cannot be written.
        StorageError: a store does not answer.
        ClipError: (on access) a file is missing, is damaged or has no sound; the message names the file.
        DataFileChangedError: (on access) a file was modified since it was indexed.

    Items are ``(audio, label)``. ``audio`` is a float32 tensor (channels, samples) with values from -1 to 1. ``label``
    is the label; without labels it is a dict of ``path``, ``seconds`` (the start of the clip in the file) and
    ``sample_rate``. A file shorter than a clip is padded with silence. The samples are equal to a decode from the
    beginning of the file, without the encoder's priming samples. This is exact for PCM, FLAC, ALAC, MP3 and most AAC.
    For Opus, and for decoders that dither or fill with noise, decoding begins two or more packets before the clip, and
    the samples are as close as this allows.

    With the default collate function, a loader writes clips of one shape (``seconds``, ``sample_rate`` and ``channels``
    are all given) directly into the batch. `lengths` is the number of samples of each row, for batches with a budget.

    Cost: creating the index reads all files once, and decodes AAC and Vorbis; the index has 20 bytes per packet, 0.8 MB
    for an hour of FLAC. A clip reads its own packets and a few before them, from a disk or with range requests from a
    store. Memory: 32 bytes per file, and the samples of a clip.
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
            raise ConfigError(f"transform= takes a function of a tensor, or None, got {transform!r}")
        found = clips_of(files, clips, SOUND_ENDINGS, storage, stride=stride, labels=labels)
        make_load = _load_factory(rule, channels, transform, storage)
        super().__init__(found, SOUND, rule, make_load, labels, index, storage, progress, share)


def _rule(seconds: Any, rate: Any, stride: Any, random_start: Any) -> SoundRule:
    for name, value in {"seconds": seconds, "stride": stride}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1e9):
            raise ConfigError(f"{name}= takes a positive number of seconds, got {value!r}")
    _check_integer("sample_rate", rate)
    if seconds is None and (stride is not None or random_start):
        raise ConfigError(
            "without seconds= a clip is a whole file: give seconds=, or leave stride= and random_start= out"
        )
    anywhere = check_start(random_start, stride)
    length, far = (None if value is None else float(value) for value in (seconds, stride))
    return SoundRule(length, None if rate is None else int(rate), far, anywhere)


def _check_integer(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
        raise ConfigError(f"{name}= takes a positive integer, got {value!r}")


def _load_factory(
    rule: SoundRule, channels: int | None, transform: Any, storage: Storage | None
) -> Callable[[ClipIndex], LoadSound]:
    """Return a function that creates the ``load`` for an index."""
    try:
        from penstock.clips.load_sound import LoadSound
        from penstock.clips.sound_reader import SoundReader
    except ImportError as error:
        raise ConfigError("clips of sound need PyAV: pip install 'penstock[clips]'") from error

    return lambda index: LoadSound(SoundReader(index, storage), rule, channels, transform)
