"""The log of failures: counts, limits, and the report."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, PenstockError, TooManyErrors
from penstock.loader.on_error import Failure, FailureLog, OnError

WHERE: dict[str, Any] = {"epoch": 2, "rank": 1, "batch": 7}


def failed(index: int, error: type[Exception] = KeyError, action: str = "skip", attempt: int = 0) -> Failure:
    failure = Failure.of(error(f"sample {index} is bad"), index, 1000 + index, attempt)
    return replace(failure, action=action, replacement=index + 1 if action == "replace" else None)


def log(action: str = "skip", **options: Any) -> FailureLog:
    return FailureLog(OnError(action, **options))


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_many(path: str, rank: int) -> None:
    mine = log(report=path)
    with silent():
        for number in range(100):
            mine.add([failed(rank * 1000 + number)], 8, epoch=0, rank=rank, batch=number)


class TestCounts:
    def test_nothing(self) -> None:
        empty = log()
        zeros = {"samples": 0, "failed": 0, "skipped": 0, "replaced": 0, "types": {}, "unwritten": 0}
        assert empty.counts() == zeros
        empty.add([], 64, **WHERE)
        assert empty.counts() == {**zeros, "samples": 64}

    def test_by_action_and_type(self) -> None:
        mine = log(action="replace")
        with silent():
            mine.add([failed(1), failed(2, ValueError), failed(3, action="replace")], 8, **WHERE)
            mine.add([failed(4, action="replace"), failed(5, ValueError, "replace", attempt=1)], 8, **WHERE)
        counts = mine.counts()
        assert counts == json.loads(json.dumps(counts))
        assert counts == {
            "samples": 16,
            "failed": 4,  # a replacement that failed is no sample that the order wanted
            "skipped": 2,
            "replaced": 2,
            "types": {"KeyError": 3, "ValueError": 2},
            "unwritten": 0,
        }

    def test_go_on_over_passes(self) -> None:
        mine = log()
        with silent():
            for _ in range(3):
                mine.begin()
                mine.add([failed(1)], 8, **WHERE)
        assert mine.counts()["samples"] == 24
        assert mine.counts()["failed"] == 3

    def test_of_batches_without_failures_cost_little(self) -> None:
        mine = log(max_rate=0.5)
        begin = time.thread_time()
        for _ in range(10_000):
            mine.add([], 64, epoch=0, rank=0, batch=0)
        assert (time.thread_time() - begin) / 10_000 < 20e-6  # 0.4e-6 on an idle machine


class TestLimits:
    def test_max_failures(self) -> None:
        mine = log(max_failures=2)
        with silent():
            mine.add([failed(1), failed(2)], 8, **WHERE)
        with pytest.raises(TooManyErrors) as caught:
            mine.add([failed(3, ValueError)], 8, **WHERE)
        said = str(caught.value)
        assert "3 of the first 16 samples of this epoch cannot be loaded" in said
        assert "(max_failures=2)" in said
        for part in ("sample 1 (KeyError: 'sample 1 is bad')", "sample 3 (ValueError: sample 3 is bad)"):
            assert part in said
        assert "OnError(report=...) writes all to a file" in said
        assert isinstance(caught.value, PenstockError)
        assert isinstance(caught.value, RuntimeError)

    def test_the_last_ones_are_named(self) -> None:
        with pytest.raises(TooManyErrors) as caught:
            log(max_failures=0).add([failed(index) for index in range(20)], 64, **WHERE)
        assert "sample 15 (" in str(caught.value)
        assert "sample 14 (" not in str(caught.value)

    def test_none_allowed(self) -> None:
        mine = log(max_failures=0)
        mine.add([], 8, **WHERE)
        with pytest.raises(TooManyErrors, match="1 of the first 16"):
            mine.add([failed(1)], 8, **WHERE)

    def test_max_rate(self) -> None:
        mine = log(max_rate=0.1, min_samples=100)
        with silent():
            mine.add([failed(index) for index in range(9)], 90, **WHERE)  # more than the rate, but too early
            mine.add([failed(9)], 10, **WHERE)  # 10 of 100 are allowed
        with pytest.raises(TooManyErrors, match=r"12 of the first 110 samples .*\(max_rate=0\.1\)"):
            mine.add([failed(10), failed(11)], 10, **WHERE)

    def test_max_rate_waits_for_min_samples(self) -> None:
        mine = log(max_rate=0.0, min_samples=20)
        with silent():
            mine.add([failed(1)] * 19, 19, **WHERE)
        with pytest.raises(TooManyErrors):
            mine.add([failed(1)], 1, **WHERE)

    def test_batches_without_failures_never_raise(self) -> None:
        mine = log(max_failures=0)
        with pytest.raises(TooManyErrors):
            mine.add([failed(1)], 8, **WHERE)
        mine.add([], 8, **WHERE)
        with pytest.raises(TooManyErrors):
            mine.add([failed(1)], 8, **WHERE)

    def test_are_of_one_pass(self) -> None:
        mine = log(max_failures=1)
        with silent():
            for _ in range(5):
                mine.begin()
                mine.add([failed(1)], 8, **WHERE)
        with pytest.raises(TooManyErrors, match="2 of the first 16 "):
            mine.add([failed(2)], 8, **WHERE)

    def test_replacements_that_fail_do_not_count(self) -> None:
        mine = log(action="replace", max_failures=1)
        chain = [failed(1, action="replace")] + [failed(n, action="replace", attempt=n) for n in range(1, 6)]
        with silent():
            mine.add(chain, 8, **WHERE)
        assert mine.counts()["failed"] == 1

    def test_what_exceeds_is_counted_and_reported(self, tmp_path: Path) -> None:
        mine = log(max_failures=0, report=tmp_path / "bad.jsonl")
        with pytest.raises(TooManyErrors, match=f"all are in {tmp_path}/bad.jsonl"):
            mine.add([failed(1)], 8, **WHERE)
        assert mine.counts()["failed"] == len(lines(tmp_path / "bad.jsonl")) == 1


class TestWarning:
    def test_is_given_once(self) -> None:
        mine = log()
        mine.add([], 8, **WHERE)
        with pytest.warns(UserWarning, match=r"sample 1 \(KeyError: 'sample 1 is bad'\) cannot be loaded and was left"):
            mine.add([failed(1)], 8, **WHERE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mine.add([failed(2)], 8, **WHERE)
            mine.begin()
            mine.add([failed(3)], 8, **WHERE)

    def test_says_what_was_done(self) -> None:
        with pytest.warns(UserWarning, match="was replaced"):
            log().add([failed(1, action="replace")], 8, **WHERE)

    def test_as_an_error_loses_nothing(self, tmp_path: Path) -> None:
        mine = log(report=tmp_path / "bad.jsonl")
        with warnings.catch_warnings(), pytest.raises(UserWarning):
            warnings.simplefilter("error")
            mine.add([failed(1)], 8, **WHERE)
        assert mine.counts()["failed"] == len(lines(tmp_path / "bad.jsonl")) == 1


class TestReport:
    def test_has_a_line_for_each_failure(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        mine = log(report=path)
        assert path.read_text() == ""
        failures = [failed(1), failed(2, ValueError, "replace"), failed(3, ValueError, "replace", attempt=1)]
        begin = time.time()
        with silent():
            mine.add(failures[:2], 8, **WHERE)
            assert len(lines(path)) == 2, "it is there at once"
            mine.add(failures[2:], 8, epoch=None, rank=0, batch=8)
        written = lines(path)
        assert all(begin - 1 < line.pop("time") < time.time() + 1 for line in written)
        context = [{"epoch": 2, "rank": 1, "batch": 7}] * 2 + [{"epoch": None, "rank": 0, "batch": 8}]
        expected = [{**where, **asdict(failure)} for where, failure in zip(context, failures, strict=True)]
        assert written == json.loads(json.dumps(expected))

    def test_text_of_any_kind(self, tmp_path: Path) -> None:
        mine = log(report=tmp_path / "bad.jsonl")
        text = 'line\nbreak \u2028 \u00e4 \udcff \x00 "quoted"'
        with silent():
            mine.add([replace(failed(1), message=text, index=text)], 8, **WHERE)
        content = (tmp_path / "bad.jsonl").read_bytes()
        assert content.count(b"\n") == 1
        assert json.loads(content)["message"] == json.loads(content)["index"] == text

    def test_is_appended_to(self, tmp_path: Path) -> None:
        for index in range(2):
            with silent():
                log(report=tmp_path / "bad.jsonl").add([failed(index)], 8, **WHERE)
        assert [line["index"] for line in lines(tmp_path / "bad.jsonl")] == [0, 1]

    def test_by_several_processes(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        with multiprocessing.get_context("fork").Pool(3) as pool:
            pool.starmap(write_many, [(str(path), rank) for rank in range(3)])
        assert sorted(line["index"] for line in lines(path)) == [r * 1000 + n for r in range(3) for n in range(100)]

    def test_stays_where_it_was_when_the_program_changes_its_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path)
        mine = log(report="bad.jsonl")
        monkeypatch.chdir("other")
        with silent():
            mine.add([failed(1)], 8, **WHERE)
        assert len(lines(tmp_path / "bad.jsonl")) == 1

    @pytest.mark.parametrize("place", ["missing/bad.jsonl", "."])
    def test_that_cannot_be_written_is_refused_at_once(self, tmp_path: Path, place: str) -> None:
        with pytest.raises(ConfigError, match=r"cannot be written \((No such file|Is a directory)"):
            log(report=tmp_path / place)

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
    def test_on_a_full_disk_the_run_goes_on(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.jsonl"
        mine = log(report=path)
        path.unlink()
        path.symlink_to("/dev/full")
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            for index in range(3):
                mine.add([failed(index)], 8, **WHERE)
        said = [str(warning.message) for warning in given]
        assert sum("bad.jsonl cannot be written any more: No space left" in text for text in said) == 1
        assert mine.counts()["unwritten"] == mine.counts()["failed"] == 3

    def test_keeps_no_file_open(self, tmp_path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        mine = log(report=tmp_path / "bad.jsonl")
        with silent():
            mine.add([failed(1)], 8, **WHERE)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_log_can_be_pickled(tmp_path: Path) -> None:
    """Loaders are, when a data set that holds one goes to a worker."""
    mine = log(report=tmp_path / "bad.jsonl", max_failures=2)
    with silent():
        mine.add([failed(1)], 8, **WHERE)
        other = pickle.loads(pickle.dumps(mine))
        assert other.counts() == mine.counts()
        other.add([failed(2)], 8, **WHERE)
    assert (other.counts()["failed"], mine.counts()["failed"]) == (2, 1)
    assert len(lines(tmp_path / "bad.jsonl")) == 2
