"""`VideoDataset`: video clips, decoded from any position of a file straight into the batch.

clips = VideoDataset("videos", frames=16, step=2, size=112)       # videos/<class>/*.mp4
video, label = clips[0]                                          # uint8 tensor (16, 3, 112, 112), RGB; int
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Unpack

from penstock.clips.clip_files import FrameRule
from penstock.clips.clip_index import VIDEO, ClipIndex
from penstock.clips.discovery import VIDEO_ENDINGS
from penstock.datasets.clips import ClipDataset, check_pixels, check_start, clips_of
from penstock.errors import ConfigError
from penstock.images.transforms import Compose
from penstock.plan.share_options import ShareOptions, check_share
from penstock.storage import Storage
from penstock.storage.names import Urls

if TYPE_CHECKING:
    from penstock.clips.load_video import LoadVideo

__all__ = ["VideoDataset"]


class VideoDataset(ClipDataset):
    """Clips of video files, split across ranks; a map-style dataset.

    Args:
        files: a folder of videos, or a folder with one subfolder of videos per class; a file, a pattern or an address
            in a store; or a list of these, without classes. For tar archives: their members; the label comes from the
            ``.cls`` member of the same sample, or is a dict of its ``.json`` and ``.txt``.
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

    Cost: creating the index reads all files once; the index has 24 bytes per frame. A clip reads the groups of pictures
    that contain its frames, from a disk or with range requests from a store. Memory: 32 bytes per file, the frames of a
    clip, and some open decoders per thread.
    """

    releases_gil = True

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
        rule = _rule(frames, step, stride, random_start)
        found = clips_of(files, clips, VIDEO_ENDINGS, storage, stride=stride, labels=labels)
        how = _load_factory(rule, size, flip, transform, max_pixels, storage)
        super().__init__(found, VIDEO, rule, how, labels, index, storage, progress, share)


def _rule(frames: Any, step: Any, stride: Any, random_start: Any) -> FrameRule:
    given: dict[str, Any] = {"frames": frames, "step": step, "stride": 1 if stride is None else stride}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or not 0 < int(value) < 1 << 31:
            raise ConfigError(f"{name}= takes a positive number of frames, got {value!r}")
    anywhere = check_start(random_start, stride)
    return FrameRule(int(frames), int(step), None if stride is None else int(stride), anywhere)


def _load_factory(
    rule: FrameRule, size: Any, flip: bool, transform: Any, max_pixels: Any, storage: Storage | None
) -> Callable[[ClipIndex], LoadVideo]:
    """Return a function that creates the ``load`` for an index."""
    check_pixels(max_pixels)
    if not isinstance(flip, bool) or isinstance(size, bool):
        raise ConfigError(f"flip= takes True or False, and size= one or two integers, got {flip!r} and {size!r}")
    try:
        from penstock.clips.decoder import MAX_PIXELS
        from penstock.clips.frame_reader import FrameReader
        from penstock.clips.load_video import LoadVideo, chain_of
    except ImportError as error:
        raise ConfigError("clips of videos need PyAV: pip install 'penstock[clips]'") from error

    pixels = int(max_pixels or MAX_PIXELS)
    chain = chain_of(size, flip, transform)
    return lambda index: LoadVideo(FrameReader(index, storage, pixels), rule, chain)
