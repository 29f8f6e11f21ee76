"""`on_error`: what happens to samples that cannot be loaded, decided sample by sample."""

from __future__ import annotations

import errno
import gc
import inspect
import multiprocessing
import pickle
import weakref
from typing import Any

import pytest
from failures_support import KEY, all_but, loads, notes, run

import penstock as ps
from penstock.errors import (
    ConfigError,
    ImageError,
)
from penstock.loader.config import LoaderConfig
from penstock.loader.messages import BatchMetrics
from penstock.loader.on_error import SKIP, Failure, OnError
from penstock.random import sample_scope


def skip_key_errors(failure: Failure) -> str:
    return "skip" if failure.error == "KeyError" else "raise"


class TestActions:
    @pytest.mark.parametrize("action", ["raise", "skip", "replace", skip_key_errors])
    def test_what_loads_is_left_alone(self, action: Any) -> None:
        keys = []

        def load_one(index: int, key: int) -> int:
            keys.append(key)
            return index * 10

        assert run(action, load_one) == (50, [])
        assert keys == [KEY]

    def test_raise_raises_the_same_error(self) -> None:
        error = LookupError("bad")

        def load_one(index: int, key: int) -> None:
            raise error

        metrics = BatchMetrics()
        with pytest.raises(LookupError) as caught:
            OnError("raise").load(load_one, 5, KEY, 100, metrics)
        assert caught.value is error
        assert (notes(error), error.__context__, metrics.failures) == ("", None, [])

    def test_skip(self) -> None:
        sample, (failure,) = run("skip", loads(5))
        assert sample is SKIP
        assert (failure.index, failure.key, failure.error, failure.attempt) == (5, KEY, "KeyError", 0)
        assert (failure.action, failure.replacement) == ("skip", None)
        assert failure.message == "'sample 5 is bad'"

    def test_replace(self) -> None:
        sample, (failure,) = run("replace", loads(5))
        assert failure.action == "replace"
        assert failure.replacement != 5
        assert sample == failure.replacement * 10

    def test_replacements_that_fail_are_replaced(self) -> None:
        first = run("replace", loads(5))[1][0].replacement
        second = run("replace", loads(5, first))[1][1].replacement
        sample, failures = run("replace", loads(5, first, second))
        assert [failure.index for failure in failures] == [5, first, second]
        assert [failure.replacement for failure in failures] == [first, second, sample // 10]
        assert [failure.attempt for failure in failures] == [0, 1, 2]
        assert {failure.key for failure in failures} == {KEY}
        assert len({5, first, second, sample // 10}) == 4

    def test_the_last_error_names_all_that_were_tried(self) -> None:
        tried = []

        def load_one(index: int, key: int) -> None:
            tried.append(index)
            raise ValueError(f"no {index}")

        with pytest.raises(ValueError, match="no ") as caught:
            run("replace", load_one, attempts=3)
        assert len(set(tried)) == len(tried) == 4
        assert str(caught.value) == f"no {tried[-1]}"
        assert caught.value.__context__ is None
        assert f"in place of 5, on_error tried {', '.join(map(str, tried[1:]))}" in notes(caught.value)

    def test_replacements_have_the_generators_of_the_place(self) -> None:
        def load_one(index: int, key: int) -> tuple[int, float]:
            with sample_scope(key):
                if index == 5:
                    ps.generator().random(3)
                    raise ValueError(index)
                return index, float(ps.generator().random())

        (index, drawn), _ = run("replace", load_one)
        assert (index, drawn) == load_one(index, KEY)

    def test_errors_do_not_chain_or_leak(self) -> None:
        """A failure is text: neither the exception nor what its frames hold stays alive."""
        kept: list[weakref.ref[Any]] = []

        class Image:
            pass

        def load_one(index: int, key: int) -> int:
            image = Image()
            kept.append(weakref.ref(image))
            if index == 5:
                raise ValueError("bad")
            return index

        gc.disable()
        try:
            for action in ("skip", "replace", skip_key_errors):
                metrics = BatchMetrics()
                try:
                    OnError(action).load(load_one, 5, KEY, 100, metrics)
                except ValueError:
                    assert action is skip_key_errors
            assert kept
            assert all(image() is None for image in kept)
        finally:
            gc.enable()


class TestCallables:
    def test_decides_for_each(self) -> None:
        assert run(skip_key_errors, loads(5))[0] is SKIP
        with pytest.raises(ImageError, match="sample 5 is bad") as caught:
            run(skip_key_errors, loads(5, error=ImageError))
        assert notes(caught.value) == ""

    def test_is_told_everything(self) -> None:
        seen: list[Failure] = []

        def decide(failure: Failure) -> str:
            seen.append(failure)
            return "replace" if failure.attempt < 2 else "skip"

        def load_one(index: int, key: int) -> None:
            error = FileNotFoundError(errno.ENOENT, "gone", f"{index}.jpg")
            error.add_note("while loading a cat")
            raise error

        sample, failures = run(decide, load_one)
        assert sample is SKIP
        assert [failure.action for failure in failures] == ["replace", "replace", "skip"]
        assert [failure.action for failure in seen] == ["", "", ""]
        assert [failure.attempt for failure in seen] == [0, 1, 2]
        assert [failure.index for failure in seen] == [failure.index for failure in failures]
        assert seen[0].error == "FileNotFoundError"
        assert seen[0].message == "[Errno 2] gone: '5.jpg'"
        assert seen[0].notes == ("while loading a cat",)
        assert "in load_one" in seen[0].traceback
        assert "while loading a cat" in seen[0].traceback

    def test_may_raise(self) -> None:
        def decide(failure: Failure) -> str:
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough") as caught:
            run(decide, loads(5))
        assert isinstance(caught.value.__context__, KeyError)

    @pytest.mark.parametrize("answer", [None, "ignore", True, 1])
    def test_other_answers(self, answer: Any) -> None:
        with pytest.raises(ConfigError, match=r"must return 'raise', 'skip' or 'replace' for sample 5 .KeyError"):
            run(lambda failure: answer, loads(5))

    def test_raise_after_replacements(self) -> None:
        decide = lambda failure: "replace" if failure.attempt == 0 else "raise"  # noqa: E731
        with pytest.raises(ValueError) as caught:
            run(decide, all_but())
        assert "in place of 5, on_error tried" in notes(caught.value)


class TestFailure:
    def failure(self, error: Exception) -> Failure:
        try:
            raise error
        except Exception as caught:
            return Failure.of(caught, 5, KEY, 0)

    def test_travels(self) -> None:
        class Unpicklable(Exception):
            def __init__(self, a: int, b: int) -> None:
                super().__init__("unpicklable")
                self.lock = multiprocessing.RLock()

        failure = self.failure(Unpicklable(1, 2))
        assert pickle.loads(pickle.dumps(failure)) == failure
        metrics = BatchMetrics()
        metrics.failures.append(failure)
        assert pickle.loads(pickle.dumps(metrics)).failures == [failure]

    def test_long_texts_are_cut_in_the_middle(self) -> None:
        failure = self.failure(ValueError("begin" + "x" * 10**6 + "end"))
        assert len(pickle.dumps(failure)) < 20_000
        assert failure.message.startswith("begin")
        assert failure.message.endswith("end")

    def test_deep_recursion(self) -> None:
        def down(n: int) -> int:
            return down(n + 1) if n % 2 else up(n + 1)

        def up(n: int) -> int:
            return down(n + 1) + 1

        sample, (failure,) = run("skip", lambda index, key: down(0))
        assert sample is SKIP
        assert failure.error == "RecursionError"
        assert len(failure.traceback) < 9000

    def test_errors_that_cannot_be_printed(self) -> None:
        class Silent(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        failure = self.failure(Silent())
        assert (failure.error, failure.message, str(failure)) == ("Silent", "", "sample 5 (Silent)")

    def test_text_is_one_line(self) -> None:
        assert str(self.failure(ValueError("a\nb"))) == "sample 5 (ValueError: a)"
        assert len(str(self.failure(ValueError("x" * 1000)))) < 250


class TestOnError:
    @pytest.mark.parametrize("value", ["raise", "skip", "replace", skip_key_errors])
    def test_of_what_users_pass(self, value: Any) -> None:
        policy = LoaderConfig(on_error=value).policy
        assert policy == (None if value == "raise" else OnError(value))
        rule = OnError("skip", attempts=3)
        assert LoaderConfig(on_error=rule).policy is rule

    @pytest.mark.parametrize("value", [None, "ignore", "", 1, True, ["skip"], {"action": "skip"}], ids=str)
    def test_of_anything_else(self, value: Any) -> None:
        with pytest.raises(ConfigError, match=r"use 'raise', 'skip', 'replace', a callable"):
            _ = LoaderConfig(on_error=value).policy

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"max_failures": -1}, "max_failures must be an integer of 0 or more"),
            ({"max_failures": 1.5}, "max_failures must be"),
            ({"max_rate": -0.1}, "max_rate must be a share"),
            ({"max_rate": 5}, "max_rate must be a share"),
            ({"max_rate": float("nan")}, "max_rate must be a share"),
            ({"min_samples": 0}, "min_samples must be an integer of 1 or more"),
            ({"min_samples": None}, "min_samples must be"),
            ({"attempts": 0}, "attempts must be an integer of 1 or more"),
            ({"attempts": None}, "attempts must be"),
        ],
        ids=str,
    )
    def test_values_that_make_no_sense(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            OnError("skip", **options)

    @pytest.mark.parametrize("options", [{"max_failures": 0}, {"max_rate": 0.0}, {"report": "bad.jsonl"}], ids=str)
    def test_limits_of_nothing(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="have no effect with action='raise'"):
            OnError("raise", **options)

    def test_arguments_are_attributes(self) -> None:
        given = {"max_failures": 3, "max_rate": 0.5, "min_samples": 7, "report": "x.jsonl", "attempts": 2}
        rule = OnError("skip", **given)  # type: ignore[arg-type]
        assert {name: getattr(rule, name) for name in inspect.signature(OnError).parameters} == {
            "action": "skip",
            **given,
        }
        assert pickle.loads(pickle.dumps(rule)) == rule
        with pytest.raises(AttributeError):
            rule.attempts = 3  # type: ignore[misc]
        with pytest.raises(TypeError):
            OnError("skip", 3)  # type: ignore[misc]
