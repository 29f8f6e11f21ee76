"""Packs by arithmetic: each document once, packs that are full, the inverse, and an order that is frozen."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OrderError
from penstock.order.packing import PackClasses, PackLayout, PackOrder, pack_types
from penstock.storage.class_index import ClassIndex


class Corpus:
    """Documents of these lengths, their classes, and the packs of an epoch."""

    def __init__(self, lengths: Any, capacity: int, seed: int = 0, epoch: int = 0, **options: Any) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.classes = PackClasses(capacity, np.unique(self.lengths[self.lengths >= capacity]))
        keys = self.classes.of(self.lengths)
        assert (self.classes.lengths[keys] == self.lengths).all()
        self.index = ClassIndex(keys, self.classes.count)
        self.layout = PackLayout(self.classes, self.index.starts, **options)
        self.order = PackOrder(self.layout, seed, epoch)

    def packs(self) -> list[list[tuple[int, int, int]]]:
        """Return for each pack its pieces: document, begin, length."""
        found = self.order.pieces(np.arange(len(self.order)))
        rows = self.index.rows(found.places)
        pieces = list(zip(rows.tolist(), found.begins.tolist(), found.lengths.tolist(), strict=True))
        splits = found.splits.tolist()
        return [pieces[a:b] for a, b in itertools.pairwise(splits)]


def kind(name: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if name == "bimodal":
        made = np.where(rng.random(n) < 0.7, rng.lognormal(4.5, 0.5, n), rng.lognormal(8.2, 0.4, n))
    else:
        made = rng.lognormal(*{"web": (6.2, 1.1), "chat": (5.0, 0.9), "code": (7.0, 1.3)}[name], n)
    return np.maximum(made.astype(np.int64), 1)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=80),
    st.integers(1, 17),
    st.one_of(st.none(), st.integers(1, 5)),
    st.integers(0, 5),
)
@settings(max_examples=examples(60, 500), deadline=None)
def test_every_token_of_every_document_is_in_one_pack(
    lengths: list[int], capacity: int, most: int | None, epoch: int
) -> None:
    corpus = Corpus(lengths, capacity, epoch=epoch, max_documents=most)
    had: dict[int, list[tuple[int, int]]] = {}
    where: dict[int, list[tuple[int, int]]] = {}
    for number, pack in enumerate(corpus.packs()):
        assert 0 < sum(length for _, _, length in pack) <= capacity
        assert most is None or len(pack) <= most
        for row, begin, length in pack:
            had.setdefault(row, []).append((begin, length))
            where.setdefault(row, []).append((begin, number))
    for row, length in enumerate(lengths):
        tokens = sorted(begin + i for begin, size in had.get(row, []) for i in range(size))
        assert tokens == list(range(length))
        assert all(size == capacity for begin, size in had.get(row, []) if begin + size < length)
        place = int(corpus.index.places(np.array([row]))[0])
        assert corpus.order.packs_of(place).tolist() == [number for _, number in sorted(where.get(row, []))]


@given(st.integers(0, 99), st.integers(0, 99))
@settings(max_examples=examples(20, 100))
def test_some_packs_are_those_of_all(seed: int, epoch: int) -> None:
    corpus = Corpus(kind("code", 300), 2048, seed, epoch)
    every = corpus.packs()
    some = np.random.default_rng(seed).integers(0, len(every), 7)
    found = corpus.order.pieces(some)
    for number, (a, b) in zip(some.tolist(), itertools.pairwise(found.splits), strict=True):
        assert corpus.index.rows(found.places[a:b]).tolist() == [row for row, _, _ in every[number]]


@pytest.mark.parametrize("capacity", [2048, 8192])
@pytest.mark.parametrize("name", ["web", "chat", "code", "bimodal"])
def test_packs_are_full_and_alike(name: str, capacity: int) -> None:
    """99.9 % real tokens, and packs whose mean length of a document varies less than by next-fit."""
    remainders = kind(name, 500_000) % capacity
    histogram = np.bincount(remainders[remainders > 0], minlength=capacity)
    types = pack_types(histogram, capacity)
    counts = types.packs
    sums = np.array([part.sum() for part in np.split(types.lengths, np.cumsum(types.sizes))[:-1]])
    means, used = sums / types.sizes, (sums * counts).sum()
    assert used == remainders.sum()
    assert used / (counts.sum() * capacity) > 0.999
    mean = np.average(means, weights=counts)
    spread = np.sqrt(np.average((means - mean) ** 2, weights=counts)) / mean
    assert spread < _spread_by_next_fit(remainders[remainders > 0][:20_000], capacity)


def _spread_by_next_fit(lengths: np.ndarray, capacity: int) -> float:
    packs: list[list[int]] = [[]]
    for length in lengths.tolist():
        if sum(packs[-1]) + length > capacity:
            packs.append([])
        packs[-1].append(length)
    means = np.array([np.mean(pack) for pack in packs])
    return float(means.std() / means.mean())


def test_types_that_were_found_before_make_the_same_packs() -> None:
    corpus = Corpus(kind("code", 300), 2048)
    again = PackLayout(corpus.classes, corpus.index.starts, types=corpus.layout.types)
    for known, made in zip(*(one.pieces(np.arange(len(one))) for one in (corpus.layout, again)), strict=True):
        assert known.tolist() == made.tolist()


def test_epochs_deal_documents_anew() -> None:
    first, second = (Corpus(kind("web", 200), 2048, epoch=epoch).packs() for epoch in (0, 1))
    assert len(first) == len(second)
    assert {frozenset(row for row, _, _ in pack) for pack in first} != {
        frozenset(row for row, _, _ in pack) for pack in second
    }


def test_the_order_is_frozen() -> None:
    corpus = Corpus([3, 9, 1, 1, 4, 2, 6, 2, 5, 13], 8, seed=7, epoch=2)
    packs = corpus.order.order[np.arange(len(corpus.order))]
    assert packs.tolist() == FROZEN_ORDER
    assert corpus.packs() == FROZEN


FROZEN_ORDER = [4, 3, 2, 1, 0, 5]
FROZEN = [
    [(6, 0, 6)],
    [(9, 8, 5), (7, 0, 2), (1, 8, 1)],
    [(8, 0, 5), (5, 0, 2), (2, 0, 1)],
    [(4, 0, 4), (0, 0, 3), (3, 0, 1)],
    [(1, 0, 8)],
    [(9, 0, 8)],
]


@pytest.mark.parametrize(
    ("histogram", "capacity", "options"),
    [([0, 1], 0, {}), ([0, -1], 4, {}), ([0, 0, 0, 1], 2, {}), ([[1]], 2, {}), ([0, 1], 2, {"max_documents": 0})],
)
def test_what_makes_no_packs(histogram: Any, capacity: int, options: Any) -> None:
    with pytest.raises(OrderError):
        pack_types(histogram, capacity, **options)


def test_no_documents_make_no_packs() -> None:
    assert [len(part) for part in pack_types([0, 0], 4)] == [0, 0, 0]
    corpus = Corpus([0, 0], 4)
    assert len(corpus.order) == 0
    assert corpus.packs() == []
