"""Lengths of samples: the same digest from an array, a file and a filter."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.datasets.lengths import document_lengths
from penstock.samplers.lengths import lengths_of
from penstock.storage.class_index import digest_of


def written(path: Path, lengths: Any) -> Path:
    np.save(path, np.asarray(lengths, dtype=np.int32))
    return path


LENGTHS = np.random.default_rng(0).integers(0, 300, 1000).tolist()
TRUTH = digest_of(np.array(LENGTHS))


def test_a_file_is_as_its_array(tmp_path: Path) -> None:
    path = written(tmp_path / "lengths.npy", LENGTHS)
    lengths = lengths_of(path)
    assert lengths.digest == TRUTH == lengths_of(LENGTHS).digest
    copied = pickle.dumps(lengths)
    assert len(copied) < 1000
    assert pickle.loads(copied).digest == TRUTH


def test_a_filter_is_as_the_array_of_its_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "lengths.npy", LENGTHS)
    for rows in ([*range(0, 900, 3)], [*range(0, 900, 2), 5]):
        kept = [LENGTHS[row] for row in rows]
        for given_lengths in (path, LENGTHS):
            some = document_lengths(ps.Subset(range(1000), rows), given_lengths)
            assert some.digest == digest_of(np.array(kept))
