"""Lengths of samples: the same digest and distinct values from an array, a file and a filter."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.datasets.lengths import document_lengths
from penstock.samplers.lengths import SampleLengths, distinct_in, lengths_of
from penstock.storage.class_index import digest_of


def written(path: Path, lengths: Any) -> Path:
    np.save(path, np.asarray(lengths, dtype=np.int32))
    return path


def known(lengths: SampleLengths) -> tuple[str, list[int]]:
    return lengths.digest, lengths.distinct.tolist()


LENGTHS = np.random.default_rng(0).integers(0, 300, 1000).tolist()
TRUTH = digest_of(np.array(LENGTHS)), sorted(set(LENGTHS))


@given(st.lists(st.one_of(st.integers(-3, 9), st.integers(-(1 << 40), 1 << 40)), max_size=30))
def test_the_different_lengths(lengths: list[int]) -> None:
    assert distinct_in([np.array(lengths[:9], np.int64), np.array(lengths[9:], np.int64)]).tolist() == sorted(
        set(lengths)
    )


def test_a_file_is_as_its_array(tmp_path: Path) -> None:
    path = written(tmp_path / "lengths.npy", LENGTHS)
    lengths = lengths_of(path)
    assert known(lengths) == TRUTH == known(lengths_of(LENGTHS))
    copied = pickle.dumps(lengths)
    assert len(copied) < 1000
    assert known(pickle.loads(copied)) == TRUTH


def test_a_filter_is_as_the_array_of_its_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "lengths.npy", LENGTHS)
    for rows in ([*range(0, 900, 3)], [*range(0, 900, 2), 5]):
        kept = [LENGTHS[row] for row in rows]
        for given_lengths in (path, LENGTHS):
            some = document_lengths(ps.Subset(range(1000), rows), given_lengths)
            assert known(some) == (digest_of(np.array(kept)), sorted(set(kept)))
