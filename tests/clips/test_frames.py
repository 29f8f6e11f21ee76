"""Clips of every kind of video are the frames that one sees who decodes all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from video_cases import VIDEOS, is_made_here
from video_support import all_frames, clip_of, turned

from penstock.clips import frame_transforms
from penstock.clips.clip_index import ClipIndex
from penstock.clips.decoder import MAX_PIXELS
from penstock.clips.frame_reader import FrameReader
from penstock.clips.frame_transforms import draw_clip, planes, rgb
from penstock.clips.indexing import open_index
from penstock.images.transforms import Compose, HorizontalFlip, RandomCrop, RandomResizedCrop, Resize, ToTensor
from penstock.random import sample_scope


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, ClipIndex, list[Any]]]:
    """Makes a kind of video once; returns its path, its index, and its frames."""
    known: dict[str, tuple[Path, ClipIndex, list[Any]]] = {}

    def make(kind: str) -> tuple[Path, ClipIndex, list[Any]]:
        if kind not in known:
            folder = tmp_path_factory.mktemp("video")
            path = VIDEOS[kind](folder)
            known[kind] = path, open_index([str(path)], folder / "clips.arrow"), all_frames(path)
        return known[kind]

    return make


@pytest.mark.parametrize("kind", VIDEOS)
def test_frames_are_those_of_a_player(kind: str, made: Callable[[str], Any]) -> None:
    if not is_made_here(kind):
        pytest.skip("this FFmpeg has no encoder for it")
    _, index, expected = made(kind)
    assert index.error(0) == ""
    assert index.lengths.tolist() == [len(expected)]
    packets = index.packets(0)
    if not any(word in kind for word in ("without times", "raw", "guessed", "two times", "within")):
        assert np.allclose(packets.times, [frame.time for frame in expected], atol=1e-6)
    assert (np.diff(packets.times) > 0).all()
    rotation = index.coding(0).rotation
    generator = np.random.default_rng(0)
    for number in range(24):
        if number % 3 == 0:  # one that has nothing open
            reader = FrameReader(index, None, MAX_PIXELS)
        step, count = int(generator.integers(1, 9)), int(generator.integers(1, 9))
        first = int(generator.integers(len(expected))) if number else len(expected) - 1
        numbers = np.minimum(first + step * np.arange(count), len(expected) - 1)
        frames = reader.frames(reader.open(0), numbers)
        for frame, at in zip(frames, numbers.tolist(), strict=True):
            assert np.array_equal(rgb(frame, rotation), turned(expected[at])), (kind, numbers.tolist(), at)
        clip = draw_clip(frames, Compose([]), rotation=rotation)
        assert np.array_equal(clip.numpy(), clip_of(expected, numbers.tolist()))


@pytest.mark.parametrize("size", [(16, 16), (18, 32), (50, 48), (34, 160), (40, 24), (30, 1008)])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p"])
def test_planes_are_those_of_the_pixels(size: tuple[int, int], pix_fmt: str) -> None:
    """Of noise, which has every colour beside every other one."""
    height, width = size
    draw, seen = np.random.default_rng(0), 0
    for _ in range(20):
        frame = av.VideoFrame.from_ndarray(draw.integers(0, 256, (height * 3 // 2, width), np.uint8), format=pix_fmt)
        found = planes(frame)
        seen += found is not None
        assert found is None or np.array_equal(np.dstack(found), rgb(frame))
    assert seen in (0, 20)
    assert width % 16 == 0 or not seen


@pytest.mark.parametrize("steps", [[], [Resize((20, 24))], [RandomResizedCrop(24)], [RandomCrop(20), HorizontalFlip()]])
def test_frames_are_drawn_as_the_first_one(steps: list[Any], made: Callable[[str], Any]) -> None:
    """To choose the view once gives what the chain gives for each frame."""
    _, _, frames = made("h264")
    for number in range(6):
        with sample_scope(number):
            quick = draw_clip(frames[:5], Compose([*steps, ToTensor()]) if number % 2 else Compose(steps))
        with sample_scope(number), pytest.MonkeyPatch.context() as patch:
            patch.setattr(frame_transforms._ClipBuilder, "redraw", lambda *_: False)
            slow = draw_clip(frames[:5], Compose([*steps, ToTensor()]) if number % 2 else Compose(steps))
        assert torch.equal(quick, slow)
