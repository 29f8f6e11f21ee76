"""Samples of every kind of recording are those that one hears who plays all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sound_cases import NEAR, SOUNDS
from sound_support import all_samples

from penstock.clips.clip_index import SOUND
from penstock.clips.indexing import open_index
from penstock.clips.sound_reader import SoundReader


@pytest.mark.parametrize("kind", [*SOUNDS, *NEAR])
def test_samples_are_those_of_a_player(kind: str, tmp_path: Path) -> None:
    path = (SOUNDS | NEAR)[kind](tmp_path)
    index = open_index([str(path)], tmp_path / "sounds.arrow", kind=SOUND)
    assert index.error(0) == ""
    expected = all_samples(path)
    assert index.lengths.tolist() == [expected.shape[1]]
    rate, count = index.coding(0).rate, expected.shape[1]
    generator = np.random.default_rng(0)
    for number in range(40):
        if number % 3 == 0:  # one that has nothing open
            reader: Any = SoundReader(index, None)
        begin = int(generator.integers(count)) if number else 0
        end = min(begin + int(generator.integers(1, rate)), count) if number != 1 else count
        got = reader.samples(0, begin, end)
        assert got.dtype == np.float32
        if kind in SOUNDS:
            assert np.array_equal(got, expected[:, begin:end]), (kind, begin, end)
        elif "noise" not in kind and end - begin > 1000:
            assert np.corrcoef(got.ravel(), expected[:, begin:end].ravel())[0, 1] > 0.9
        assert np.array_equal(got, reader.samples(0, begin, end))


def test_outside_there_is_silence(tmp_path: Path) -> None:
    path = SOUNDS["flac"](tmp_path)
    reader = SoundReader(open_index([str(path)], tmp_path / "sounds.arrow", kind=SOUND), None)
    expected = all_samples(path)
    count = expected.shape[1]
    got = reader.samples(0, -100, count + 100)
    assert not got[:, :100].any()
    assert not got[:, -100:].any()
    assert np.array_equal(got[:, 100:-100], expected)
    assert not reader.samples(0, count, count + 5).any()
