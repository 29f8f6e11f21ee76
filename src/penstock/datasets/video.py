"""`VideoDataset`: clips of videos as rows: some frames from anywhere in a file, straight into the batch.

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
from penstock.shards.urls import Urls
from penstock.storage import Storage

if TYPE_CHECKING:
    from penstock.clips.load_video import LoadVideo

__all__ = ["VideoDataset"]


class VideoDataset(ClipDataset):
    """Clips of the files of video of this rank, as a map-style data set.

    Args:
        files: a folder of videos, or of folders of them, which are classes; a file, a pattern or an address in a store;
            or a list of these, without classes. Of tar archives the members, with the label of ``.cls``, or a dict of
            ``.json`` and ``.txt``, beside each.
        frames: of a clip.
        step: take every so manieth frame.
        stride: clips begin at frames 0, stride, 2 * stride, ... of each file. None: each file is one clip, which begins
            anywhere.
        random_start: the clip of a file begins at a frame drawn from the sample's own `penstock.generator`, another one
            in each epoch; or at the first. By default it is drawn unless there is a stride.
        clips: rows that say which part of a file is a clip: dicts, a table of Arrow, columns by name, or a source of
            dicts such as `penstock.TableFiles`; with ``path``, below ``files``, and if they are there ``start`` and
            ``end`` in seconds. What else a row holds is its label: the value of ``label``, if that is all, else a dict.
            A clip begins anywhere in this time where the whole of it fits, or at ``start``.
        labels: of the files, in their order. By default the number of the folder that a file is in.
        size: (height, width), or one int for both: frames are resized as a whole. None keeps that of the file.
        flip: mirror the clip left to right with probability 1/2.
        transform: instead of ``size`` and ``flip``: a `penstock.images.transforms.Compose`, or a list of steps, as for
            images. All frames of a clip get the same crop, the same flip, the same colours.
        max_pixels: a frame of more is an error instead of a full memory.
        index: the path of the index, which is made there if it is not (`penstock clips index`). It may be of
            more files than these. By default it is in the cache.
        storage: how files at remote addresses are reached.
        progress: show a bar while files are indexed: True, False, or None for several on a terminal.
        rank, world_size, seed, shuffle, ...: see `penstock.RankDataset`.

    Raises:
        ConfigError: arguments that make no sense, no videos in a folder, or PyAV is not installed.
        DataFileError: ``index`` is that of other files.
        DataFileIOError: the index cannot be written.
        StorageError: a store does not answer.
        ClipError: (on access) a file that is missing, damaged, or holds no video; it names the file.
        ImageError: (on access) a transform that makes frames of one clip of different sizes.
        DataFileChangedError: (on access) a file that was changed since it was indexed.

    Items are ``(video, label)``: a uint8 tensor (frames, 3, height, width), RGB, contiguous, of another type where the
    transform says so; and the label, or where there are none a dict of ``path``, ``frame`` and ``seconds`` at which the
    clip begins. A file that is shorter than a clip repeats its last frame. Frames are turned as the file says, and they
    are those that a player shows: what an edit list hides is no frame.

    A loader with the default collate function has clips that all become the same size written where the batch is to be.
    What a clip becomes depends on its record and key alone: on (seed, epoch, position).

    Cost: all files are read once, when they are indexed; 24 bytes of the index for each frame. A clip takes the groups
    of pictures that hold its frames, from a disk or by ranges from a store. Memory: 32 bytes for each file, the frames
    of a clip, and some open decoders for each thread.
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
        how = _loading(rule, size, flip, transform, max_pixels, storage)
        super().__init__(found, VIDEO, rule, how, labels, index, storage, progress, share)


def _rule(frames: Any, step: Any, stride: Any, random_start: Any) -> FrameRule:
    given: dict[str, Any] = {"frames": frames, "step": step, "stride": 1 if stride is None else stride}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or not 0 < int(value) < 1 << 31:
            raise ConfigError(f"{name} is a positive number of frames, not {value!r}")
    anywhere = check_start(random_start, stride)
    return FrameRule(int(frames), int(step), None if stride is None else int(stride), anywhere)


def _loading(
    rule: FrameRule, size: Any, flip: bool, transform: Any, max_pixels: Any, storage: Storage | None
) -> Callable[[ClipIndex], LoadVideo]:
    """What makes a ``load`` for an index."""
    check_pixels(max_pixels)
    if not isinstance(flip, bool) or isinstance(size, bool):
        raise ConfigError(f"flip is True or False, and size a number of pixels or two, not {flip!r} and {size!r}")
    try:
        from penstock.clips.decoder import MAX_PIXELS
        from penstock.clips.load_video import LoadVideo, chain_of
        from penstock.clips.reading import FrameReader
    except ImportError as error:
        raise ConfigError("clips of videos need PyAV: pip install 'penstock[clips]'") from error

    pixels = int(max_pixels or MAX_PIXELS)
    chain = chain_of(size, flip, transform)
    return lambda index: LoadVideo(FrameReader(index, storage, pixels), rule, chain)
