"""`penstock.generator`: a function of (seed, epoch, position), and of nothing else."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import pytest
import scipy  # its parts are imported when they are named
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ConfigError, OrderError
from penstock.hashing import sample_key, sample_keys
from penstock.random import (
    call_in_scope,
    current_key,
    generator_from_key,
    in_sample,
    load_each,
    sample_scope,
)

T = TypeVar("T")

KEYS = st.integers(0, (1 << 64) - 1)


def test_frozen() -> None:
    """These numbers may never change: runs in progress resume with them."""
    assert sample_keys(0, 0, np.arange(3)).tolist() == [15799500027480481490, 7107967990486346908, 13482038648958647165]
    assert sample_keys(-1, 7, np.array([1 << 40])).tolist() == [15319445044305530915]
    words = generator_from_key(12345).bit_generator.random_raw(2).tolist()
    assert words == [14904967834205224590, 2402204718180673479]


@given(
    seed=st.integers(-(1 << 63), (1 << 64) - 1), epoch=st.integers(0, 1 << 40), position=st.integers(0, (1 << 62) - 1)
)
def test_one_key_is_that_of_many(seed: int, epoch: int, position: int) -> None:
    assert sample_keys(seed, epoch, np.array([position], np.int64)).tolist() == [sample_key(seed, epoch, position)]


@given(key=KEYS)
def test_scopes(key: int) -> None:
    assert not in_sample()
    with sample_scope(key):
        assert in_sample()
        assert ps.generator() is ps.generator()
        first = ps.generator().random(3).tolist()
        with sample_scope(key ^ 1):
            assert ps.generator().random(3).tolist() != first
        after = ps.generator().random(3).tolist()
    expected = generator_from_key(key).random(6).tolist()
    assert first + after == expected, "an inner scope does not disturb the outer one"
    assert not in_sample()


def test_a_scope_ends_with_an_error() -> None:
    with pytest.raises(KeyError), sample_scope(1):
        raise KeyError
    assert not in_sample()


def test_threads_have_their_own_scopes() -> None:
    found: dict[int, list[float]] = {}
    barrier = threading.Barrier(4)

    def draw(key: int) -> None:
        with sample_scope(key):
            barrier.wait()
            one = ps.generator().random()
            barrier.wait()
            found[key] = [one, ps.generator().random()]

    threads = [threading.Thread(target=draw, args=(key,)) for key in range(4)]
    with sample_scope(99):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        mine = ps.generator().random()
    assert found == {key: generator_from_key(key).random(2).tolist() for key in range(4)}
    assert mine == generator_from_key(99).random()


def in_thread(function: Callable[[], T]) -> T:
    """Return what a function returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_thread_without_a_sample_is_warned_while_another_makes_one() -> None:
    with sample_scope(1), pytest.warns(RuntimeWarning, match=r"penstock.generator\(\).spawn") as warned:
        in_thread(ps.generator)
    assert warned[0].filename.endswith("thread.py"), "of the caller, here Python's pool"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_thread(ps.generator)  # nobody makes a sample
        with sample_scope(1):
            ps.generator()
            in_thread(lambda: load_each(lambda _: ps.generator(), [0], [2]))  # it makes one itself


def draw_in_a_thread() -> None:
    warnings.simplefilter("error")
    in_thread(ps.generator)


def test_a_fork_makes_none_of_the_samples_of_its_parents_threads() -> None:
    begun, forked = threading.Event(), threading.Event()

    def make() -> None:
        with sample_scope(1):
            begun.set()
            assert forked.wait(60)

    thread = threading.Thread(target=make)
    thread.start()
    assert begun.wait(60)
    process = multiprocessing.get_context("fork").Process(target=draw_in_a_thread)
    process.start()
    forked.set()
    thread.join()
    process.join(60)
    assert process.exitcode == 0


def test_use_generator() -> None:
    mine, inner = np.random.default_rng(1), np.random.default_rng(2)
    with ps.use_generator(mine):
        assert in_sample()
        assert ps.generator() is mine
        with ps.use_generator(inner):
            assert ps.generator() is inner
        assert ps.generator() is mine
        with sample_scope(3):
            assert ps.generator().random() == generator_from_key(3).random()
        assert ps.generator() is mine
    assert not in_sample()
    with sample_scope(3):
        own = ps.generator()
        with pytest.raises(KeyError), ps.use_generator(inner):
            raise KeyError
        assert ps.generator() is own
    for other in (3, None, torch.Generator()):
        with pytest.raises(ConfigError, match=r"takes a numpy\.random\.Generator"), ps.use_generator(other):  # type: ignore[arg-type]
            pass


def test_two_threads_never_use_one_generator() -> None:
    def use(generator: np.random.Generator) -> float:
        with ps.use_generator(generator):
            return ps.generator().random()

    with sample_scope(1):
        own = ps.generator()
        with pytest.raises(ConfigError, match="in use in another thread"):
            in_thread(lambda: use(own))
        (child,) = own.spawn(1)
        drawn = in_thread(lambda: use(child))
        assert use(own) == generator_from_key(1).random()
    assert drawn == generator_from_key(1).spawn(1)[0].random()
    in_thread(lambda: use(own))  # its sample is over


def test_samples_are_independent() -> None:
    """First draws over positions, epochs and seeds are uniform, and neighbours are not correlated."""
    for keys in (
        sample_keys(0, 0, np.arange(4000)).tolist(),
        [key for epoch in range(4000) for key in sample_keys(0, epoch, np.zeros(1, np.int64)).tolist()],
        [key for seed in range(4000) for key in sample_keys(seed, 0, np.zeros(1, np.int64)).tolist()],
    ):
        assert len(set(keys)) == 4000
        drawn = np.array([generator_from_key(key).random() for key in keys])
        assert scipy.stats.chisquare(np.histogram(drawn, 50, (0, 1))[0]).pvalue > 1e-4
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.07


def test_seed_and_epoch_are_no_sum() -> None:
    positions = np.arange(1000)
    assert not set(sample_keys(1, 0, positions).tolist()) & set(sample_keys(0, 1, positions).tolist())


def test_outside_of_samples_it_follows_torchs_global_generator() -> None:
    torch.manual_seed(1)
    first, second = ps.generator().random(), ps.generator().random()
    torch.manual_seed(1)
    assert [ps.generator().random(), ps.generator().random()] == [first, second]
    assert first != second
    legacy = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    with sample_scope(1):
        before = torch.get_rng_state()
        ps.generator().random()
        assert torch.equal(before, torch.get_rng_state()), "inside of samples torch's is left alone"
    assert np.array_equal(legacy, np.random.get_state()[1])  # type: ignore[index]


@pytest.mark.parametrize("place", range(7))
def test_a_scope_ends_wherever_a_signal_comes(place: int) -> None:
    """A handler runs where a function begins, among other places."""
    calls = itertools.count()

    def trace(frame: Any, event: str, arg: Any) -> None:
        if frame.f_code.co_filename == sample_scope.__exit__.__code__.co_filename and next(calls) == place:
            raise KeyboardInterrupt

    def in_another(_: None) -> None:
        with sample_scope(7):
            pass

    with sample_scope(5):
        for key, load in ((None, in_another), (6, lambda _: current_key())):
            sys.settrace(trace)
            with suppress(KeyboardInterrupt):
                call_in_scope(key, load, None)
            sys.settrace(None)
            assert current_key() == 5
    assert not in_sample()
    assert next(calls) > place


def test_generators_travel_and_have_children() -> None:
    for travel in (copy.deepcopy, lambda generator: pickle.loads(pickle.dumps(generator))):
        generator = generator_from_key(3)
        generator.random()
        assert travel(generator).random() == generator.random()
    children = [child.random() for child in generator_from_key(3).spawn(4)]
    halves = generator_from_key(3)
    assert [child.random() for _ in range(2) for child in halves.spawn(2)] == children
    assert len({*children, generator_from_key(3).random()}) == 5


def test_load_each() -> None:
    draw = lambda record: (record, ps.generator().random())  # noqa: E731
    assert load_each(draw, ["a", "b"], [1, 2]) == [
        ("a", generator_from_key(1).random()),
        ("b", generator_from_key(2).random()),
    ]
    with sample_scope(5):
        both = generator_from_key(5).random(2).tolist()
        assert load_each(draw, ["a", "b"], None) == [("a", both[0]), ("b", both[1])]
    with pytest.raises(ValueError, match="zip"):
        load_each(draw, ["a", "b"], [1])


@pytest.mark.parametrize(("seed", "epoch"), [(1 << 64, 0), (-(1 << 63) - 1, 0), (0, -1)])
def test_bad_input(seed: int, epoch: int) -> None:
    with pytest.raises(OrderError):
        sample_keys(seed, epoch, np.arange(2))
