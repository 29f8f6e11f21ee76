"""The alias table is exact, and the draws follow it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy  # its parts are imported when they are named
import torch
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SamplerError, StateError
from penstock.samplers import WeightedRandomSampler
from penstock.samplers.draws import Hashed
from penstock.samplers.weighted import build_table


def implied(table: Any) -> np.ndarray:
    """The probabilities that a table stands for."""
    shares = table.keep.copy()
    np.add.at(shares, table.alias, 1 - table.keep)
    return shares / len(shares)


_WEIGHT = st.one_of(
    st.floats(0, 1e300, allow_nan=False), st.sampled_from([0.0, 1.0, 1e-300, 5e-324]), st.integers(0, 3).map(float)
)


@settings(deadline=None, max_examples=examples(75, 300))
@given(st.lists(_WEIGHT, min_size=1, max_size=60).filter(lambda weights: max(weights) > 0))
def test_the_table_is_the_distribution(weights: list[float]) -> None:
    array = np.array(weights)
    table = build_table(array)
    assert ((table.keep >= 0) & (table.keep <= 1)).all()
    assert ((table.alias >= 0) & (table.alias < len(array))).all()
    expected = array / array.max()
    expected /= expected.sum()
    np.testing.assert_allclose(implied(table), expected, atol=1e-13)
    never = array == 0
    assert (table.keep[never] == 0).all()
    assert not never[table.alias[table.keep < 1]].any(), "what has no weight is never drawn"


@pytest.mark.parametrize("kind", ["exponential", "zipf", "equal", "one heavy", "two values"])
def test_large_tables(kind: str) -> None:
    n = 200_000
    rng = np.random.default_rng(1)
    weights = {
        "exponential": lambda: rng.exponential(size=n),
        "zipf": lambda: 1 / np.arange(1, n + 1),
        "equal": lambda: np.full(n, 0.1),
        "one heavy": lambda: np.where(np.arange(n) == 77, 1e6, 1.0),
        "two values": lambda: rng.choice([0.5, 3.0], n),
    }[kind]()
    np.testing.assert_allclose(implied(build_table(weights)) * n, weights / weights.mean(), rtol=1e-7, atol=1e-7)


def test_draws_follow_the_weights() -> None:
    weights = np.random.default_rng(0).exponential(size=100)
    weights[:5] = 0
    sampler = WeightedRandomSampler(weights, 200_000, seed=1)
    counts = np.bincount(list(sampler), minlength=100)
    assert counts[:5].sum() == 0
    expected = weights[5:] / weights.sum() * 200_000
    assert 0.001 < scipy.stats.chisquare(counts[5:], expected).pvalue < 0.999
    # pairs of consecutive draws are independent
    halves = np.add.reduceat(weights, [0, 50]) / weights.sum()
    sides = np.array(list(sampler)) >= 50
    pairs = np.bincount(sides[::2] * 2 + sides[1::2], minlength=4)
    assert scipy.stats.chisquare(pairs, np.outer(halves, halves).ravel() * 100_000).pvalue > 0.001


def test_without_replacement_is_drawing_one_by_one() -> None:
    weights = [1.0, 2.0, 3.0, 0.0, 4.0]
    pairs = np.zeros((5, 5))
    for seed in range(examples(5_000, 20_000)):
        first, second = WeightedRandomSampler(weights, 2, False, seed=seed)
        pairs[first, second] += 1
    expected = np.zeros((5, 5))
    for a in range(5):
        for b in range(5):
            if a != b:
                expected[a, b] = weights[a] / 10 * weights[b] / (10 - weights[a])
    used = expected > 0
    assert pairs[~used].sum() == 0
    assert scipy.stats.chisquare(pairs[used], expected[used] * pairs.sum()).pvalue > 0.001


def test_without_replacement_all_and_too_many() -> None:
    assert sorted(WeightedRandomSampler([1, 2, 3], 3, False, seed=0)) == [0, 1, 2]
    with pytest.raises(SamplerError, match="only 2 of 3 weights are positive"):
        WeightedRandomSampler([1, 0, 3], 3, False)


def test_a_draw_is_a_function_of_key_and_position() -> None:
    table = build_table(np.arange(1.0, 50.0))
    positions = np.random.default_rng(0).integers(0, 1 << 40, 1000)
    draws = Hashed(9, table.draw)
    together = draws[positions]
    assert [int(draws[positions[i : i + 1]][0]) for i in range(1000)] == together.tolist()


def test_epochs_and_seeds_differ() -> None:
    sampler = WeightedRandomSampler(np.ones(1000), 50, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    other = list(WeightedRandomSampler(np.ones(1000), 50, seed=2))
    assert len({tuple(first), tuple(second), tuple(other)}) == 3


def test_golden() -> None:
    """Frozen: a state would otherwise go on with other samples."""
    assert list(WeightedRandomSampler([3, 0, 1, 4, 1, 5, 9, 2, 6], 12, seed=0)) == GOLDEN_WITH
    assert list(WeightedRandomSampler([3, 0, 1, 4, 1, 5, 9, 2, 6], 5, False, seed=0)) == GOLDEN_WITHOUT


GOLDEN_WITH = [5, 6, 5, 3, 6, 0, 6, 6, 6, 0, 6, 3]
GOLDEN_WITHOUT = [8, 6, 7, 0, 4]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "empty"),
        ([0.0, 0.0], "all 2 weights are zero"),
        ([1.0, math.nan, math.nan], r"weight 1 is nan \(2 bad of 3\)"),
        ([math.inf, 1.0], "weight 0 is inf"),
        ([1.0, -0.5], "weight 1 is -0.5"),
        ([[1.0], [2.0]], r"weights should be a 1d sequence but given weights have shape \(2, 1\)"),
    ],
)
def test_bad_weights(weights: Any, message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        WeightedRandomSampler(weights, 3)


def test_huge_weights_whose_sum_overflows() -> None:
    assert set(WeightedRandomSampler([1e308, 1e308, 0.0], 100, seed=0)) == {0, 1}


@pytest.mark.parametrize("arguments", [(0,), (-1,), (True,), (2.5,), (3, 1), (3, "yes")], ids=str)
def test_refuses_in_torchs_words(arguments: tuple[Any, ...]) -> None:
    said = []
    for kind in (torch.utils.data.WeightedRandomSampler, WeightedRandomSampler):
        with pytest.raises(ValueError) as caught:
            kind([1.0, 2.0, 3.0, 4.0], *arguments)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_seed_and_generator_contradict() -> None:
    with pytest.raises(SamplerError, match="either seed= or generator="):
        WeightedRandomSampler([1.0], 1, generator=torch.Generator(), seed=1)


def test_one_draw_from_the_global_generator_each_pass() -> None:
    torch.manual_seed(1)
    list(torch.utils.data.RandomSampler(range(3)))
    after = torch.get_rng_state()
    torch.manual_seed(1)
    sampler = WeightedRandomSampler([1.0, 2.0], 5)
    first = list(sampler)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(1)
    assert list(sampler) == first


def test_a_state_of_other_weights_is_refused() -> None:
    state = WeightedRandomSampler([1.0, 2.0], 5, seed=1).state_dict()
    with pytest.raises(StateError, match="weights is"):
        WeightedRandomSampler([1.0, 3.0], 5, seed=1).load_state_dict(state)
    with pytest.raises(StateError, match="num_samples is 5 in the state and 6 here"):
        WeightedRandomSampler([1.0, 2.0], 6, seed=1).load_state_dict(state)
