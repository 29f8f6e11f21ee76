"""Settings that a program assigns to a loader's attributes count from the next ``iter()``, or are refused there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_error_support import BadDraws

import penstock as ps
from penstock.errors import ConfigError
from penstock.tools.profiling.probe import Probe


class Numbers(torch.utils.data.Dataset[int]):
    pure = True

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Released(Numbers):
    releases_gil = True


class Impure(Numbers):
    pure = False


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def rows(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:sample 5 .* was left out")
def test_on_error() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(BadDraws(8, [5]), 4, seed=1)
    with pytest.raises(ValueError, match="sample 5 is bad"):
        list(loader)
    loader.on_error = "skip"
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 6, 7]]
    assert loader.stats()["errors"]["skipped"] == 1
    loader.on_error = "raise"
    with pytest.raises(ValueError, match="sample 5 is bad"):
        list(loader)


def test_on_error_of_a_stream_is_refused() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(Stream(), 4)
    loader.on_error = "skip"
    for _ in range(2):
        with pytest.raises(ConfigError, match="on_error cannot skip a sample of Stream"):
            iter(loader)
    loader.on_error = "raise"
    assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_seed_is_refused_until_the_old_one_is_back() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(Numbers(), 4, shuffle=True, seed=1)
    expected = rows(ps.DataLoader(Numbers(), 4, shuffle=True, seed=1))
    loader.seed = 2
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"seed=2 was assigned.*use seed=1.*create another one"):
            iter(loader)
    loader.seed = 1
    assert rows(loader) == expected


def test_number_of_workers() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(Numbers(), 4, shuffle=True, seed=1)
    expected = rows(ps.DataLoader(Numbers(), 4, shuffle=True, seed=1))
    assert rows(loader) == expected
    loader.set_epoch(0)
    loader.num_workers = 2
    loader.timeout = 60
    assert loader.config.kind == "process"
    assert rows(loader) == expected
    assert (loader.stats()["executor"], loader.stats()["workers"]) == ("process", 2)
    loader.executor, loader.num_workers = "thread", 3
    loader.set_epoch(0)
    assert rows(loader) == expected
    assert (loader.stats()["executor"], loader.stats()["workers"]) == ("thread", 3)


def test_a_prefetch_factor_is_somebodys_choice() -> None:
    with ps.DataLoader(Numbers(), 4, num_workers=2) as loader:
        assert (loader.prefetch_factor, loader.config.prefetch_factor) == (2, None)
        assert (loader.config.depth, loader.config.small_batch_depth) == (4, 64)
        loader.prefetch_factor = 5
        assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert (loader.config.depth, loader.config.small_batch_depth) == (10, 10)
        loader.prefetch_factor = 2
        assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert (loader.config.depth, loader.config.small_batch_depth) == (4, 4)
    with ps.DataLoader(Numbers(), 4, num_workers=2) as loader:
        assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        loader.prefetch_factor = 2  # the value that torch reports without a choice
        loader.set_epoch(0)
        loader.reset_stats()
        assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert loader.stats()["queue"]["prefetch"] == 4
        assert loader.running_config.small_batch_depth == 4


def test_one_process_with_threads_is_not_too_many_workers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader: ps.DataLoader[Any] = ps.DataLoader(Released(), 4, num_workers=64)
    assert loader.config.single_process


def test_a_probe_makes_batches_as_the_loader_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generators that threads share
        threads: ps.DataLoader[Any] = ps.DataLoader(Impure(), 4, seed=1, executor="thread", num_workers=2)
        both: ps.DataLoader[Any] = ps.DataLoader(Impure(), 4, seed=1, num_workers=1, threads_per_worker=2)
        assigned: ps.DataLoader[Any] = ps.DataLoader(Impure(), 4, seed=1)
        assigned.executor, assigned.num_workers = "thread", 2
        for loader in (threads, both, assigned):
            assert not Probe(loader, batches=1).fetcher().seed_globals  # type: ignore[attr-defined]
    auto: ps.DataLoader[Any] = ps.DataLoader(Released(), 4, seed=1, num_workers="auto")
    config = Probe(auto, batches=1).config
    assert not config.auto_tunes
    assert (config.executor, config.num_workers) == ("auto", 1)


@pytest.mark.parametrize(("name", "value"), [("num_workers", -1), ("timeout", -1), ("prefetch_factor", -2)])
def test_negative_numbers_are_refused(name: str, value: int) -> None:
    loader = ps.DataLoader(torch.arange(8), 2)
    setattr(loader, name, value)
    with pytest.raises(ConfigError, match=f"{name}={value} was assigned: it must be 0 or more"):
        iter(loader)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("num_workers", None, "number"),
        ("num_workers", 1.5, "number"),
        ("timeout", None, "number"),
        ("timeout", "9", "number"),
        ("prefetch_factor", "2", "number"),
        ("collate_fn", None, "function"),
        ("collate_fn", 3, "function"),
        ("worker_init_fn", 3, "function"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: object, what: str) -> None:
    loader = ps.DataLoader(torch.arange(8), 2)
    setattr(loader, name, value)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{name}={value!r} was assigned: it must be a {what}"):
            iter(loader)


REFUSED = [("skip", r"call loader\.skip\(n\)"), ("dispatch", "threads_per_worker=")]


@pytest.mark.parametrize(("name", "instead"), REFUSED)
def test_what_the_constructor_refuses_cannot_be_assigned(name: str, instead: str) -> None:
    options: dict[str, Any] = {name: 2}
    with pytest.raises(ConfigError, match=f"takes no {name}=.*{instead}"):
        ps.DataLoader(Numbers(), 4, **options)
    loader: ps.DataLoader[Any] = ps.DataLoader(Numbers(), 4)
    with pytest.raises(ConfigError, match=f"takes no {name}=.*{instead}"):
        setattr(loader, name, 2)
    loader.skip(2)
    assert rows(loader) == [[8, 9, 10, 11]]
