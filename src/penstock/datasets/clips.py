"""`ClipDataset`: the base class of the datasets of video and audio clips."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Protocol, cast

import torch

from penstock.clips.clip_files import ClipFiles, ClipRecord, Rule
from penstock.clips.clip_index import ClipIndex, Kind
from penstock.clips.discovery import FileList, find_files
from penstock.clips.indexing import open_index
from penstock.clips.listed_clips import ClipTable, ListedClips
from penstock.clips.packets import Ints
from penstock.datasets.source_dataset import Empty, SourceDataset, load_into
from penstock.errors import ConfigError
from penstock.manifest.classes import HasClasses
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import ShareOptions
from penstock.storage import Storage
from penstock.storage.names import Urls

__all__ = ["ClipDataset", "LoadClip", "check_pixels", "check_start", "clips_of"]


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
        found: the files, or a table of clips.
        kind: video or sound.
        rule: defines the clips of a file.
        make_load: creates ``load`` for the index of the files.
        labels: one label per file; by default their classes.
        index: the path of the index.
        storage: access to object stores.
        progress: show a progress bar while files are indexed.
        share: see `penstock.RankDataset`.

    Attributes:
        files: the clips, in the order of the files.
    """

    fills_rows = True

    def __init__(
        self,
        found: FileList | ClipTable,
        kind: Kind,
        rule: Rule,
        make_load: Callable[[ClipIndex], LoadClip],
        labels: Sequence[Any] | None,
        index: str | os.PathLike[str] | None,
        storage: Storage | None,
        progress: bool | None,
        share: ShareOptions,
        /,
    ) -> None:
        table = found if isinstance(found, ClipTable) else None
        self._classes: list[str] | None = None
        if isinstance(found, FileList) and labels is None and found.labels:
            self._classes, labels = found.classes or None, found.labels
        _check_labels(labels, len(found.paths))
        if index is not None and not isinstance(index, str | os.PathLike):
            raise ConfigError(f"index= takes the path of an index, got {index!r}")
        opened = open_index(found.paths, index, kind=kind, storage=storage, progress=progress)
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
        """Return the items at several indices, each made in the scope of its key.

        Args:
            indices: of this rank's samples.
            keys: of the samples' generators; None to use the caller's scope.
            place: the mini-epoch that the indices belong to; by default the current one.
            into: allocates the memory for the clips, if they all have one shape.
        """
        load = cast(LoadClip, self.load)
        return load_into(load, load.form, self.records(indices, place), keys, into)


def _check_labels(labels: Any, count: int) -> None:
    if labels is None:
        return
    if (
        isinstance(labels, str | bytes | Mapping)
        or not hasattr(labels, "__getitem__")
        or not hasattr(labels, "__len__")
    ):
        raise ConfigError(f"labels= takes a sequence with one label for each file, got {labels!r}")
    if len(labels) != count:
        raise ConfigError(f"{len(labels)} labels for {count} files: give one for each file, in the same order")


def clips_of(
    files: Urls, clips: Any, endings: tuple[str, ...], storage: Storage | None, **others: Any
) -> FileList | ClipTable:
    """Return the rows of a dataset: whole files, or a table of clips.

    Raises:
        ConfigError: an option is given together with ``clips=``, whose rows already define it.
    """
    if clips is None:
        return find_files(files, endings, storage)
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"{name}= is for whole files: with clips=, its rows have the time span and the label")
    if not isinstance(files, str | os.PathLike):
        raise ConfigError(
            f"with clips=, the first argument is the folder that the paths are relative to, got {files!r}"
        )
    return ClipTable(clips, files)


def check_start(random_start: Any, stride: Any) -> bool:
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
