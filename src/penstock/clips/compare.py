"""Measures how fast this library, PyAV and torchcodec read video clips from the user's files.

All return the same: uint8 (frames, 3, height, width), contiguous, from the same frames of the same files, on one
thread. PyAV and torchcodec open the file for each clip, as their datasets do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import torch

from penstock.clips.clip_files import ClipRecord, FrameRule
from penstock.clips.clip_index import VIDEO
from penstock.clips.decoder import MAX_PIXELS
from penstock.clips.frame_reader import FrameReader
from penstock.clips.indexing import open_index
from penstock.clips.load_video import LoadVideo
from penstock.errors import ClipError
from penstock.images.transforms import Compose

__all__ = ["READERS", "ComparisonResult", "by_pyav", "by_torchcodec", "compare"]

OURS = "penstock"


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a comparison.

    Attributes:
        files: number of files with enough frames.
        left_out: number of files without video, or with too few frames.
        clips_per_second: by reader, a value for each round.
        missing: readers whose library is not installed.
    """

    files: int
    left_out: int
    clips_per_second: dict[str, list[float]]
    missing: list[str]


def by_pyav(path: str, times: Sequence[float]) -> torch.Tensor:
    """Open the file, seek to the key frame before the first frame, and decode from there."""
    with av.open(path) as container:
        stream: Any = container.streams.best("video")
        stream.thread_count = 1
        unit = float(stream.time_base)
        container.seek(round(times[0] / unit), stream=stream)
        frames: list[Any] = []
        for frame in container.decode(stream):
            if len(frames) < len(times) and frame.pts * unit >= times[len(frames)] - unit / 2:
                frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == len(times):
                break
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


def by_torchcodec(path: str, numbers: Sequence[int]) -> torch.Tensor:
    """Create a decoder for the file and get the frames."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(path, num_ffmpeg_threads=1)
    clip: torch.Tensor = decoder.get_frames_at(list(numbers)).data.contiguous()
    return clip


READERS = (OURS, "pyav", "torchcodec")


def compare(
    paths: Sequence[str],
    *,
    frames: int = 16,
    step: int = 1,
    clips: int = 50,
    rounds: int = 3,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> ComparisonResult:
    """Measure all readers in turn, so that noise affects all of them alike.

    Args:
        paths: local files.
        frames, step: number and distance of a clip's frames.
        clips: number of clips per round; their random starts are the same for all readers.
        rounds: how often each reader reads all clips.
        progress: called with the number of finished rounds and of all rounds.

    Raises:
        ClipError: no file has enough frames.
    """
    index = open_index(list(paths), kind=VIDEO, progress=False)
    rule = FrameRule(frames, step, None, False)
    span = rule.span(index, 0)
    usable = np.flatnonzero(index.lengths >= span).tolist()
    if not usable:
        raise ClipError(f"none of {len(paths)} files is a video of {span} frames or more: {paths[0]}")
    draw = random.Random(0)
    places = [(file, draw.randrange(int(index.lengths[file]) - span + 1)) for file in draw.choices(usable, k=clips)]
    load = LoadVideo(FrameReader(index, None, MAX_PIXELS), rule, Compose([]))

    def ours() -> None:
        for row, (file, first) in enumerate(places):
            load(ClipRecord(row, index.path_of(file), file, first, first, span, int(index.lengths[file]), 0))

    def pyav() -> None:
        for file, first in places:
            by_pyav(index.path_of(file), index.packets(file).times[first : first + span : step].tolist())

    def torchcodec() -> None:
        for file, first in places:
            by_torchcodec(index.path_of(file), range(first, first + span, step))

    ways: dict[str, Callable[[], None]] = {OURS: ours, "pyav": pyav}
    if _has_torchcodec():
        ways["torchcodec"] = torchcodec
    speed: dict[str, list[float]] = {name: [] for name in ways}
    for done in range(rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            speed[name].append(clips / (time.perf_counter() - begun))
        progress(done + 1, rounds)
    return ComparisonResult(
        len(usable), len(index) - len(usable), speed, [name for name in READERS if name not in ways]
    )


def _has_torchcodec() -> bool:
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, OSError, RuntimeError):  # its FFmpeg is missing
        return False
    return VideoDecoder is not None
