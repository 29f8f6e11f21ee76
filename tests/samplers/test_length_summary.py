"""`LengthSummary`: lengths of a file or a filter are read once on a machine, and again where it is another one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.datasets.lengths import document_lengths
from penstock.samplers import length_summary
from penstock.samplers.length_summary import distinct_in
from penstock.samplers.lengths import SampleLengths, lengths_of
from penstock.storage.class_index import digest_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(length_summary, "_KEPT_FROM", 10)
    return tmp_path


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


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "lengths.npy", LENGTHS)
    assert known(lengths_of(path)) == TRUTH == known(lengths_of(LENGTHS))
    assert len(list((tmp_path / "penstock" / "lengths").iterdir())) == 1
    monkeypatch.setattr(length_summary, "summary_of", None)
    again = lengths_of(path)
    assert known(again) == TRUTH
    copied = pickle.dumps(again)
    assert len(copied) < 1000
    assert known(pickle.loads(copied)) == TRUTH


@pytest.mark.parametrize("change", ["content", "size", "time"])
def test_another_file_of_that_name_is_read_anew(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "lengths.npy", LENGTHS)
    known(lengths_of(path))
    status = path.stat()
    others = {"content": [*LENGTHS[:-1], 777], "size": [*LENGTHS, 5], "time": LENGTHS}[change]
    written(path, others)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + (change == "time")))
    assert known(lengths_of(path)) == (digest_of(np.array(others)), sorted(set(others)))
    assert len(list((tmp_path / "penstock" / "lengths").iterdir())) == 1
    monkeypatch.setattr(length_summary, "summary_of", None)
    assert known(lengths_of(path))[1] == sorted(set(others))


@pytest.mark.parametrize("damage", ["empty", "half", "longer", "header", "digest", "lengths", "garbage"])
def test_a_damaged_summary_is_made_again(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path / "lengths.npy", LENGTHS)
    known(lengths_of(path))
    (kept,) = (tmp_path / "penstock" / "lengths").iterdir()
    whole = kept.read_bytes()

    def flipped(at: int) -> bytes:
        return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]

    damaged = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "longer": whole + bytes(8),
        "header": flipped(9),
        "digest": flipped(45),
        "lengths": flipped(len(whole) - 8),
        "garbage": np.random.default_rng(0).bytes(len(whole)),
    }
    kept.write_bytes(damaged[damage])
    assert known(lengths_of(path)) == TRUTH
    assert kept.read_bytes() == whole


def test_those_of_a_filter_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "lengths.npy", LENGTHS)

    def some(rows: list[int], lengths: Any = path) -> SampleLengths:
        return document_lengths(ps.Subset(range(1000), rows), lengths)

    def truth(rows: list[int], lengths: list[int] = LENGTHS) -> tuple[str, list[int]]:
        kept = [lengths[row] for row in rows]
        return digest_of(np.array(kept)), sorted(set(kept))

    first, second, other = [*range(0, 900, 3)], [*range(0, 900, 2), 5], LENGTHS[::-1]
    for rows in (first, second):
        assert known(some(rows)) == known(some(rows, LENGTHS)) == truth(rows)
    assert known(some(first, other)) == truth(first, other)
    assert len(list((tmp_path / "penstock" / "lengths").iterdir())) == 4  # of the file and of three filters
    monkeypatch.setattr(length_summary, "summary_of", None)
    again = some(second)
    assert known(again) == truth(second)
    assert known(pickle.loads(pickle.dumps(again))) == truth(second)
