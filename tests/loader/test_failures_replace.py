"""`on_error`: which sample takes a bad one's place, and which errors are a sample's own."""

from __future__ import annotations

import errno
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from failures_support import KEY, Load, all_but, loads, notes, run
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import (
    ConfigError,
    ImageError,
    ManifestChangedError,
    ManifestError,
    ManifestIOError,
    OrderError,
    PartitionError,
    PenstockError,
    SamplerError,
    StateError,
    TooManyErrors,
)
from penstock.loader.messages import BatchMetrics
from penstock.loader.on_error import SKIP, Failure, OnError, is_tolerable


class TestDraws:
    """Which sample takes a bad one's place."""

    @given(st.integers(0, 2**64 - 1), st.integers(2, 40), st.data())
    def test_never_one_that_failed(self, key: int, length: int, data: st.DataObject) -> None:
        index = data.draw(st.integers(-length, length - 1))
        tried = []

        def load_one(index: int, key: int) -> None:
            tried.append(index % length)
            raise ValueError

        with pytest.raises(ValueError):
            run("replace", load_one, index, key, length, attempts=1000)
        assert sorted(tried) == list(range(length))

    def test_the_same_for_ever(self) -> None:
        """The draws are part of what a seed means."""
        tried = []

        def load_one(index: int, key: int) -> None:
            tried.append(index)
            raise ValueError

        for key in (0, KEY):
            with pytest.raises(ValueError):
                run("replace", load_one, 5, key, 10**6, attempts=3)
        assert tried == [5, 373982, 112395, 111088, 5, 103416, 619138, 306554]

    def test_depend_on_the_key_alone(self) -> None:
        chosen = {run("replace", loads(5), key=key)[1][0].replacement for key in range(200)}
        assert len(chosen) > 70
        assert run("replace", loads(5))[1][0].replacement == run("replace", loads(5))[1][0].replacement

    def test_are_uniform(self) -> None:
        n = 1800
        counts = Counter(run("replace", loads(3), 3, key, 10)[1][0].replacement for key in range(n))
        assert sorted(counts) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
        expected = n / 9
        assert sum((count - expected) ** 2 / expected for count in counts.values()) < 26.1  # chi-square, 8 df, 0.1 %

    @pytest.mark.parametrize("index", [np.int64(5), np.uint8(5), torch.tensor(5)], ids=["int64", "uint8", "tensor"])
    def test_integers_of_all_kinds(self, index: Any) -> None:
        sample, (failure,) = run("replace", loads(5), index)
        assert sample == run("replace", loads(5))[0]
        assert type(failure.index) is int
        assert failure.index == 5

    def test_an_index_outside_the_data_set(self) -> None:
        tried = []

        def load_one(index: int, key: int) -> int:
            tried.append(index)
            return [0, 1, 2][index]

        for index in (3, -4, 10**30):
            assert run("replace", load_one, index, length=3)[0] in range(3)
        assert len(tried) == 6

    @pytest.mark.parametrize(
        ("index", "length"),
        [(0, 1), (0, None), (0, 0), ("name", 100), ((5, 224), 100), (np.arange(4), 100), ([1, 2], 100), (5.0, 100)],
        ids=str,
    )
    def test_nothing_to_draw(self, index: Any, length: int | None) -> None:
        def load_one(index: Any, key: int) -> None:
            raise KeyError("bad")

        with pytest.raises(KeyError, match="bad") as caught:
            run("replace", load_one, index, length=length)
        assert "it cannot be replaced" in notes(caught.value)

    @pytest.mark.parametrize("index", ["name", (5, 224), [1, 2]], ids=str)
    def test_anything_can_be_skipped(self, index: Any) -> None:
        def load_one(index: Any, key: int) -> None:
            raise KeyError("bad")

        sample, (failure,) = run("skip", load_one, index)
        assert sample is SKIP
        assert failure.index == (index if isinstance(index, str) else repr(index))


class TestFilling:
    """A batch of which all samples were skipped."""

    def fill(self, action: Any, load_one: Load, indices: list[Any], length: int | None = 100, **options: Any) -> Any:
        rule, metrics = OnError(action, **options), BatchMetrics()
        keys = range(KEY, KEY + len(indices))
        for index, key in zip(indices, keys, strict=True):
            assert rule.load(load_one, index, key, length, metrics) is SKIP
        self.failures = metrics.failures
        return rule.fill(load_one, indices, KEY, length, metrics)

    def test_gets_one_sample(self) -> None:
        sample = self.fill("skip", loads(*range(8)), list(range(8)))
        assert sample >= 80
        assert [failure.index for failure in self.failures] == list(range(8))
        assert [failure.action for failure in self.failures] == ["replace"] + ["skip"] * 7
        assert self.failures[0].replacement == sample // 10
        assert self.failures[0].attempt == 0

    def test_gets_none_of_the_batch(self) -> None:
        assert self.fill("skip", all_but(7), [0, 1, 2, 3, 4, 5, 6, 8, 9], 10) == 70

    def test_goes_on_until_one_loads(self) -> None:
        sample = self.fill("skip", all_but(77), [1, 2], attempts=1000)
        assert sample == 770
        drawn = self.failures[2:]
        assert [failure.attempt for failure in drawn] == list(range(1, len(drawn) + 1))
        assert {failure.action for failure in drawn} == {"replace"}
        assert {failure.key for failure in drawn} == {KEY}
        chain = [self.failures[0], *drawn]
        assert [failure.replacement for failure in chain] == [*(failure.index for failure in drawn), 77]

    def test_until_enough_were_tried(self) -> None:
        with pytest.raises(ValueError) as caught:
            self.fill("skip", all_but(), [1, 2], attempts=4)
        assert "in place of 1, 2, on_error tried " in notes(caught.value)
        assert notes(caught.value).count(",") == 2 + 3
        assert len(self.failures) == 2 + 3

    def test_is_a_stream_of_its_own(self) -> None:
        """Otherwise a callable's replacement that failed would be drawn again."""
        sample = self.fill("skip", loads(5), [5])
        assert sample != run("replace", loads(5))[0]

    @pytest.mark.parametrize(("indices", "length"), [(["a", "b"], 100), ([0, 1], 2), ([0], None)], ids=str)
    def test_nothing_to_draw(self, indices: list[Any], length: int | None) -> None:
        with pytest.raises(TooManyErrors, match=r"no sample of a batch .* 'bad'") as caught:

            def load_one(index: Any, key: int) -> None:
                raise KeyError("bad")

            self.fill("skip", load_one, indices, length)
        assert isinstance(caught.value, PenstockError)
        assert isinstance(caught.value, RuntimeError)
        assert {failure.action for failure in self.failures} == {"skip"}

    def test_asks_the_callable_whose_skip_has_no_effect(self) -> None:
        seen: list[Failure] = []

        def decide(failure: Failure) -> str:
            seen.append(failure)
            return "skip"

        assert self.fill(decide, all_but(77), [1, 2], attempts=1000) == 770
        assert len(seen) == len(self.failures)

    def test_the_callable_may_raise_the_error(self) -> None:
        decide = lambda failure: "raise" if failure.attempt else "skip"  # noqa: E731
        with pytest.raises(ValueError) as caught:
            self.fill(decide, all_but(), [1, 2])
        assert notes(caught.value).startswith("in place of 1, 2, on_error tried ")

    def test_fatal_errors_are_raised_at_once(self) -> None:
        def load_one(index: int, key: int) -> None:
            raise MemoryError if index > 2 else ValueError

        with pytest.raises(MemoryError):
            self.fill("skip", load_one, [1, 2])


FATAL = [
    MemoryError(),
    StopAsyncIteration(),
    KeyboardInterrupt(),
    SystemExit(1),
    GeneratorExit(),
    torch.OutOfMemoryError("CUDA out of memory"),
    OSError(errno.EMFILE, "too many open files"),
    OSError(errno.ENFILE, "too many open files"),
    OSError(errno.ENOMEM, "no memory"),
    ConfigError("c"),
    OrderError("o"),
    PartitionError("p"),
    SamplerError("s"),
    StateError("s"),
    TooManyErrors("of a loader inside"),
    ManifestChangedError("m"),
    ManifestIOError("m"),
]
OF_A_SAMPLE = [
    FileNotFoundError(errno.ENOENT, "gone"),
    OSError("image file is truncated"),
    OSError(errno.EIO, "disk"),
    ImageError("i"),
    ManifestError("m"),
    ValueError("v"),
    RuntimeError("r"),
    AssertionError("a"),
    IndexError("i"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    TimeoutError("t"),
    StopIteration(),
]


def name(error: BaseException) -> str:
    return f"{type(error).__name__} {getattr(error, 'errno', None)}"


class TestWhichErrors:
    @pytest.mark.parametrize("error", FATAL, ids=name)
    @pytest.mark.parametrize("action", ["skip", "replace", lambda failure: "skip"])
    def test_of_the_program_are_raised(self, error: BaseException, action: Any) -> None:
        def load_one(index: int, key: int) -> None:
            raise error

        metrics = BatchMetrics()
        with pytest.raises(type(error)) as caught:
            OnError(action).load(load_one, 5, KEY, 100, metrics)
        assert caught.value is error
        assert metrics.failures == []
        assert not is_tolerable(error)

    @pytest.mark.parametrize("error", OF_A_SAMPLE, ids=name)
    def test_of_a_sample_are_dealt_with(self, error: Exception) -> None:
        def load_one(index: int, key: int) -> None:
            raise error

        assert is_tolerable(error)
        sample, (failure,) = run("skip", load_one)
        assert sample is SKIP
        assert failure.error == type(error).__name__

    def test_of_a_replacement(self) -> None:
        def load_one(index: int, key: int) -> None:
            raise ValueError if index == 5 else MemoryError

        with pytest.raises(MemoryError):
            run("replace", load_one)
