"""`VideoDataset` and `AudioDataset`: clips, decoded from any position of a file straight into the batch.

clips = VideoDataset("videos", frames=16, step=2, size=112)       # videos/<class>/*.mp4
video, label = clips[0]                                          # uint8 tensor (16, 3, 112, 112), RGB; int

clips = AudioDataset("speech", seconds=2.0, sample_rate=16_000, channels=1)        # speech/<class>/*.flac
audio, label = clips[0]                                          # float32 tensor (1, 32000), in -1 to 1; int
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Protocol, Unpack, cast

import torch

from penstock.clips.clip_files import ClipFiles, ClipRecord, FrameRule, Rule, SoundRule
from penstock.clips.clip_index import SOUND, VIDEO, ClipIndex, Kind
from penstock.clips.discovery import SOUND_ENDINGS, VIDEO_ENDINGS, FileList, find_files
from penstock.clips.indexing import open_index
from penstock.clips.listed_clips import ClipTable, ListedClips
from penstock.clips.packets import Ints
from penstock.datasets.loading import chain_of
from penstock.datasets.source_dataset import Empty, SourceDataset, load_into
from penstock.errors import ConfigError
from penstock.images.transforms import Compose
from penstock.manifest.classes import HasClasses
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.storage import Storage
from penstock.storage.names import Urls

__all__ = ["AudioDataset", "ClipDataset", "LoadClip", "VideoDataset", "check_pixels"]


class LoadClip(Protocol):
    """Makes the item of a record."""

    pure: bool
    form: tuple[tuple[int, ...], torch.dtype] | None
    """Shape and dtype of every clip; None if they differ between clips."""

    def __call__(self, record: ClipRecord, out: torch.Tensor | None = None) -> Any:
        """Return the item of a record; write its clip into `out`, if given."""


class ClipDataset(HasClasses, SourceDataset):
    """Clips of files; a map-style dataset of one rank's samples.

    Args:
        files, clips, labels, index, storage, progress: see `penstock.VideoDataset`.
        stride: its value, for a message.
        rule: defines the clips of a file.
        make_load: creates ``load`` for the index of the files.
        share: see `penstock.RankDataset`.

    Attributes:
        files: the clips, in the order of the files.
    """

    fills_rows = True
    releases_gil = True

    _kind: Kind
    _endings: tuple[str, ...]

    def __init__(
        self,
        files: Urls,
        *,
        clips: Any,
        labels: Sequence[Any] | None,
        stride: Any,
        index: str | os.PathLike[str] | None,
        storage: Storage | None,
        progress: bool | None,
        rule: Rule,
        make_load: Callable[[ClipIndex], LoadClip],
        share: ShareOptions,
    ) -> None:
        self._classes: list[str] | None = None
        found: FileList | ClipTable
        if clips is None:
            found = find_files(files, self._endings, storage)
            if labels is None and found.labels:
                self._classes, labels = found.classes or None, found.labels
        else:
            for name, value in {"stride": stride, "labels": labels}.items():
                if value is not None:
                    raise ConfigError(
                        f"{name}= is for whole files: with clips=, its rows have the time span and the label"
                    )
            if not isinstance(files, str | os.PathLike):
                raise ConfigError(
                    f"with clips=, the first argument is the folder that the paths are relative to, got {files!r}"
                )
            found = ClipTable(clips, files)
        if labels is not None:
            is_list = hasattr(labels, "__getitem__") and hasattr(labels, "__len__")
            if not is_list or isinstance(labels, str | bytes | Mapping):
                raise ConfigError(f"labels= takes a sequence with one label for each file, got {labels!r}")
            if len(labels) != len(found.paths):
                raise ConfigError(
                    f"{len(labels)} labels for {len(found.paths)} files: give one for each file, in the same order"
                )
        if index is not None and not isinstance(index, str | os.PathLike):
            raise ConfigError(f"index= takes the path of an index, got {index!r}")
        opened = open_index(found.paths, index, kind=self._kind, storage=storage, progress=progress)
        table = found if isinstance(found, ClipTable) else None
        self.files = ClipFiles(opened, rule, labels) if table is None else ListedClips(opened, rule, table)
        super().__init__(self.files, SharePlan(self.files, **share), make_load(opened))

    @property
    def lengths(self) -> Ints:
        """The number of frames or samples of each row, int64 (rows,): for `penstock.TokenBudgetBatchSampler`."""
        return self.files.lengths

    def class_names(self) -> list[str] | None:
        """Return the names of the folders that are classes; None if there are no classes."""
        return self._classes

    @property
    def has_rows(self) -> bool:
        """Whether items can be loaded by row: a clip depends only on its row and key."""
        return not self.own_items

    def load_samples(
        self,
        indices: Sequence[int],
        keys: Sequence[int] | None,
        place: MiniEpoch | None = None,
        *,
        into: Empty | None = None,
    ) -> list[Any]:
        """Return the items at several indices, see `SourceDataset.load_samples`.

        ``into`` allocates the memory for the clips, if they all have one shape.
        """
        load = cast(LoadClip, self.load)
        return load_into(load, load.form, self.records(indices, place), keys, into)


class VideoDataset(ClipDataset):
    """Clips of video files, split across ranks; a map-style dataset.

    Args:
        files: a folder of videos, or with one subfolder of videos per class; a file, a pattern or an address in a
            store; or a list of these, without classes. For tar archives: their members; the label is the ``.cls``
            member of the same sample, or a dict of its ``.json`` and ``.txt``.
        frames: number of frames in a clip.
        step: take every ``step``-th frame.
        stride: clips begin at frames 0, stride, 2 * stride, ... of each file. None: each file yields one clip, at any
            position.
        random_start: whether the clip of a file begins at a random frame, drawn again in each epoch from the sample's
            own `penstock.generator`; otherwise it begins at the first frame. True by default, unless ``stride`` is
            given.
        clips: rows that define the clips: dicts, an Arrow table, columns by name, or a source of dicts such as
            `penstock.TableFiles`. A row has ``path``, relative to ``files``, and optionally ``start`` and ``end`` in
            seconds. The other columns are the label: the value of ``label`` if it is the only one, else a dict. A clip
            begins at a random position at which it fits entirely between ``start`` and ``end``, or at ``start`` (see
            ``random_start``).
        labels: one label per file, in the order of the files. By default the number of the file's class folder.
        size: (height, width), or one int for both: whole frames are resized. None keeps the file's size.
        flip: mirror the clip left to right with probability 1/2.
        transform: instead of ``size`` and ``flip``: a `penstock.images.transforms.Compose`, or a list of transforms, as
            for images. All frames of a clip get the same crop, flip and colours.
        max_pixels: raise an error for a frame with more pixels, instead of exhausting memory.
        index: the path of the index file; it is created if it does not exist (as by `penstock clips index`). It may
            cover more files than these. By default it is in the cache.
        storage: access to remote addresses.
        progress: show a progress bar while files are indexed: True, False, or None to show it for several files on a
            terminal.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`.

    Raises:
        ConfigError: invalid arguments, a folder without videos, or PyAV is not installed.
        DataFileError: ``index`` is the index of other files.
        DataFileIOError: the index cannot be written.
        StorageError: a store does not answer.
        ClipError: (on access) a file is missing, is damaged or has no video; the message names the file.
        ImageError: (on access) a transform returns different sizes for frames of one clip.
        DataFileChangedError: (on access) a file was modified since it was indexed.

    Items are ``(video, label)``. ``video`` is a contiguous uint8 tensor (frames, 3, height, width), RGB, unless the
    transform returns another dtype. ``label`` is the label; without labels it is a dict of ``path``, and of ``frame``
    and ``seconds`` at which the clip begins. A file shorter than a clip repeats its last frame. Frames are rotated as
    the file specifies, and are the frames that a player shows: frames that an edit list hides do not count.

    With the default collate function, a loader writes clips of one size directly into the batch. The content of a clip
    depends only on its record and its key: on (seed, epoch, position).

    Cost: creating the index reads all files once; it has 24 bytes per frame. A clip reads the groups of pictures that
    contain its frames. Memory: 32 bytes per file, and some open decoders per thread.
    """

    _kind, _endings = VIDEO, VIDEO_ENDINGS

    def __init__(
        self,
        files: Urls,
        *,
        frames: int = 16,
        step: int = 1,
        stride: int | None = None,
        random_start: bool | None = None,
        clips: Any = None,
        labels: Sequence[Any] | None = None,
        size: int | tuple[int, int] | None = None,
        flip: bool = False,
        transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None = None,
        max_pixels: int | None = None,
        index: str | os.PathLike[str] | None = None,
        storage: Storage | None = None,
        progress: bool | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share)
        given: dict[str, Any] = {"frames": frames, "step": step, "stride": 1 if stride is None else stride}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, Integral) or not 0 < int(value) < 1 << 31:
                raise ConfigError(f"{name}= takes a positive number of frames, got {value!r}")
        far = None if stride is None else int(stride)
        rule = FrameRule(int(frames), int(step), far, _check_start(random_start, stride))
        check_pixels(max_pixels)
        if not isinstance(flip, bool) or isinstance(size, bool):
            raise ConfigError(f"flip= takes True or False, and size= one or two integers, got {flip!r} and {size!r}")
        try:
            from penstock.clips.decoder import MAX_PIXELS
            from penstock.clips.frame_reader import FrameReader
            from penstock.clips.load_video import LoadVideo
        except ImportError as error:
            raise ConfigError("clips of videos need PyAV: pip install 'penstock[clips]'") from error
        pixels, chain = int(max_pixels or MAX_PIXELS), chain_of(size, flip, transform)
        super().__init__(
            files,
            clips=clips,
            labels=labels,
            stride=stride,
            index=index,
            storage=storage,
            progress=progress,
            rule=rule,
            make_load=lambda opened: LoadVideo(FrameReader(opened, storage, pixels), rule, chain),
            share=share,
        )


class AudioDataset(ClipDataset):
    """Clips of audio files, split across ranks; a map-style dataset.

    Args:
        files: recordings: a folder, a file, a pattern, an address in a store, or a list of these; see
            `penstock.VideoDataset`. For videos in a list, the sound track is read.
        seconds: length of a clip in seconds. None: each file is one clip of its full length.
        sample_rate: samples per second; other rates are resampled (soxr, quality "HQ"). None: the file's own rate.
        channels: 1: the mean of all channels. A larger number: all channels, and each file must have this number. None:
            the file's own channels.
        stride: clips begin at 0, stride, 2 * stride, ... seconds of each file. None: each file yields one clip, at any
            position.
        random_start: whether clips begin at random samples, see `penstock.VideoDataset`.
        clips: rows that define the clips by ``path``, ``start`` and ``end``, see `penstock.VideoDataset`.
        labels: one label per file, in the order of the files. By default the number of the file's class folder.
        transform: ``transform(audio)`` converts the tensor to the first element of the item. A transform that draws
            nothing, or only from `penstock.generator`, can declare this with an attribute ``pure = True``.
        index: the path of the index file (as by `penstock clips index --sound`), by default in the cache; like
            ``storage`` and ``progress``, see `penstock.VideoDataset`.
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

    Cost: creating the index reads all files once, and decodes AAC and Vorbis; it has 20 bytes per packet, 0.8 MB for an
    hour of FLAC. A clip reads its own packets and a few before them. Memory: 32 bytes per file.
    """

    _kind, _endings = SOUND, SOUND_ENDINGS

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
        given: dict[str, Any] = {"seconds": seconds, "stride": stride}
        for name, value in given.items():
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and (not is_number or not 0 < float(value) < 1e9):
                raise ConfigError(f"{name}= takes a positive number of seconds, got {value!r}")
        given = {"sample_rate": sample_rate, "channels": channels}
        for name, value in given.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise ConfigError(f"{name}= takes a positive integer, got {value!r}")
        if seconds is None and (stride is not None or random_start):
            raise ConfigError(
                "without seconds= a clip is a whole file: give seconds=, or leave stride= and random_start= out"
            )
        span, far = (None if value is None else float(value) for value in (seconds, stride))
        rate = None if sample_rate is None else int(sample_rate)
        rule = SoundRule(span, rate, far, _check_start(random_start, stride))
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform= takes a function of a tensor, or None, got {transform!r}")
        try:
            from penstock.clips.load_sound import LoadSound
            from penstock.clips.sound_reader import SoundReader
        except ImportError as error:
            raise ConfigError("clips of sound need PyAV: pip install 'penstock[clips]'") from error
        super().__init__(
            files,
            clips=clips,
            labels=labels,
            stride=stride,
            index=index,
            storage=storage,
            progress=progress,
            rule=rule,
            make_load=lambda opened: LoadSound(SoundReader(opened, storage), rule, channels, transform),
            share=share,
        )


def _check_start(random_start: Any, stride: Any) -> bool:
    """Return whether clips begin at a random position.

    Raises:
        ConfigError: ``random_start`` is not True or False, or is True together with ``stride=``.
    """
    if random_start is not None and not isinstance(random_start, bool):
        raise ConfigError(f"random_start= takes True or False, got {random_start!r}")
    if random_start and stride is not None:
        raise ConfigError("with stride= clips begin at fixed positions: leave it out for random_start=True")
    return stride is None and random_start is not False


def check_pixels(max_pixels: Any) -> None:
    """Check a limit of pixels per frame.

    Raises:
        ConfigError: it is not a positive integer below 2**31, FFmpeg's limit.
    """
    if max_pixels is None:
        return
    if isinstance(max_pixels, bool) or not isinstance(max_pixels, Integral) or not 0 < int(max_pixels) < 1 << 31:
        raise ConfigError(f"max_pixels= takes a positive number of pixels, below 2**31, got {max_pixels!r}")
