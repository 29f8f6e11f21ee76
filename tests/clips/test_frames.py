"""Clips of every kind of video are the frames that one sees who decodes all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from video_cases import VIDEOS, is_made_here
from video_support import all_frames, clip_of, turned

from penstock.clips.clip_index import ClipIndex
from penstock.clips.decoder import MAX_PIXELS
from penstock.clips.indexing import open_index
from penstock.clips.pictures import draw_clip, rgb
from penstock.clips.reading import FrameReader
from penstock.images.transforms import Compose


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
    if not any(word in kind for word in ("without times", "raw", "guessed", "two times")):
        assert np.allclose(packets.times, [frame.time for frame in expected], atol=1e-6)
    assert (np.diff(packets.times) > 0).all()
    reader, rotation = FrameReader(index, None, MAX_PIXELS), index.coding(0).rotation
    generator = np.random.default_rng(0)
    for number in range(24):
        step, count = int(generator.integers(1, 9)), int(generator.integers(1, 9))
        first = int(generator.integers(len(expected))) if number else len(expected) - 1
        numbers = np.minimum(first + step * np.arange(count), len(expected) - 1)
        frames = reader.frames(reader.open(0), numbers)
        for frame, at in zip(frames, numbers.tolist(), strict=True):
            assert np.array_equal(rgb(frame, rotation), turned(expected[at])), (kind, numbers.tolist(), at)
        clip = draw_clip(frames, Compose([]), rotation=rotation)
        assert np.array_equal(clip.numpy(), clip_of(expected, numbers.tolist()))
