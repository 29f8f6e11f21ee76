"""`on_error` of the loader: bad samples give the same batches in every executor, after every interruption."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from full_run import full_only
from loader_support import EXECUTORS, Stream, batches, ended, outcomes
from on_error_support import BadBatches, BadDraws, BadGlobalDraws, Lengthless, bad_load, skip_even
from pairwise import pairwise

from penstock import DataLoader, Manifest, RankDataset
from penstock.errors import ConfigError, TooManyErrors
from penstock.hashing import sample_key
from penstock.loader.on_error import OnError
from penstock.random import sample_scope

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot be loaded and was")

N = 60
BAD = [3, 4, 5, 17, 24, 25, 26, 27, 28, 29, 30, 31, 59]  # in order, all of one batch of eight is bad
HOW: dict[str, dict[str, Any]] = {name: {"executor": name, "num_workers": n} for name, n in EXECUTORS.items()}
WAYS: dict[str, dict[str, Any]] = {
    **HOW,
    "thread-5": {"executor": "thread", "num_workers": 5},
    "process-threads": {"executor": "process", "num_workers": 1, "threads_per_worker": 3},
}
ACTIONS: dict[str, Any] = {
    "skip": "skip",
    "replace": "replace",
    "callable": skip_even,
    "OnError": OnError("skip", max_rate=0.9),
}


def indices(loader: Any) -> list[list[int]]:
    return [batch[0] for batch in batches(loader)]


def flat(lists: list[list[int]]) -> list[int]:
    return [index for part in lists for index in part]


class TestOneTruth:
    def loader(self, action: str, shuffle: bool, dataset: Any = None, **options: Any) -> Any:
        dataset = BadDraws(N, BAD) if dataset is None else dataset
        return DataLoader(dataset, 8, shuffle=shuffle, seed=1, on_error=ACTIONS[action], **options)

    @full_only(
        "workers for each",
        but=[
            "thread",
            "callable-False-process",
            "callable-True-process-chunk",
            "skip-True-process",
            "replace-False-process-chunk",
        ],
    )
    @pytest.mark.parametrize(("action", "shuffle", "way"), pairwise(ACTIONS, [False, True], list(WAYS)[1:]))
    def test_in_every_executor(self, action: str, shuffle: bool, way: str) -> None:
        expected = batches(self.loader(action, shuffle))
        assert len(expected) == len(self.loader(action, shuffle)) == 8
        loader = self.loader(action, shuffle, **WAYS[way])
        assert batches(loader) == expected
        assert loader.stats()["errors"]["failed"] == len(BAD)

    @full_only("workers for each", but=["callable-True-BadBatches", "replace-True-BadGlobalDraws"])
    @pytest.mark.parametrize(
        ("action", "shuffle", "dataset"), pairwise(ACTIONS, [False, True], [BadGlobalDraws, BadBatches])
    )
    def test_of_other_data_sets(self, action: str, shuffle: bool, dataset: type[BadDraws]) -> None:
        one, two = (self.loader(action, shuffle, dataset(N, BAD), **HOW[way]) for way in ("inline", "process"))
        assert batches(one) == batches(two)

    @full_only("workers for each", but=["inline", "thread", "skip-False-process"])
    @pytest.mark.parametrize(("action", "shuffle", "way"), pairwise(ACTIONS, [False, True], HOW))
    def test_after_an_interruption(self, action: str, shuffle: bool, way: str) -> None:
        expected = batches(self.loader(action, shuffle))
        loader = self.loader(action, shuffle, **HOW[way])
        with ended(iter(loader)) as iterator:
            for _ in range(3):
                next(iterator)
            state = loader.state_dict()
        resumed = self.loader(action, shuffle, **HOW[way])
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert batches(resumed) == expected[3:]


def test_skip_leaves_out_and_goes_on() -> None:
    loader = DataLoader(BadDraws(N, BAD), 8, seed=1, on_error="skip")
    got = indices(loader)
    wanted = [[i for i in range(b, min(b + 8, N)) if i not in BAD] for b in range(0, N, 8)]
    assert wanted[3] == []
    assert got[:3] + got[4:] == wanted[:3] + wanted[4:]
    assert len(got[3]) == 1, "an empty batch gets one sample"
    assert got[3][0] not in BAD
    assert {**loader.stats()["errors"]} == {
        "samples": N,
        "failed": 13,
        "skipped": 12,
        "replaced": 1,
        "types": {"ValueError": loader.stats()["errors"]["types"]["ValueError"]},
        "unwritten": 0,
    }


def test_replace_keeps_places_and_sizes() -> None:
    got = flat(indices(DataLoader(BadDraws(N, BAD), 8, seed=1, on_error="replace")))
    assert len(got) == N
    assert [i for i, index in enumerate(got) if index != i] == BAD
    assert not set(got) & set(BAD)


@pytest.mark.parametrize("way", HOW)
@pytest.mark.parametrize("dataset", [BadDraws, BadBatches])
def test_replacements_draw_as_if_nothing_had_been_drawn(dataset: type[BadDraws], way: str) -> None:
    """A place of the order has one generator, whatever a sample that failed took from it."""
    loader = DataLoader(dataset(N, BAD), 8, seed=1, on_error="replace", **HOW[way])
    for number, (got, drawn) in enumerate(batches(loader)):
        if dataset is BadBatches and not set(range(number * 8, number * 8 + 8)) & set(BAD):
            continue  # made as a whole, with one generator
        for place, (index, value) in enumerate(zip(got, drawn, strict=True), number * 8):
            with sample_scope(sample_key(1, 0, place)):
                assert BadDraws(N, BAD)[index] == (index, value)


class TestRanks:
    """Data sets with an order of their own: a share of a manifest."""

    @pytest.mark.parametrize(("action", "way"), pairwise(["skip", "replace"], HOW))
    def test_one_truth(self, write_manifest: Callable[..., Path], action: str, way: str) -> None:
        manifest = Manifest.open(write_manifest(N))

        def loader(**options: Any) -> Any:
            data = RankDataset(manifest, rank=1, world_size=2, load=bad_load, seed=3)
            return DataLoader(data, batch_size=4, on_error=action, **options)

        expected = batches(loader())
        assert len(expected) == 8
        assert not any(row % 5 == 0 for batch in expected for row in batch[0])
        if action == "replace":
            assert [len(batch[0]) for batch in expected] == [4] * 7 + [2]
        first = loader(**HOW[way])
        with ended(iter(first)) as iterator:
            got = [next(iterator) for _ in range(3)]
            state = first.state_dict()
        resumed = loader(**HOW[way])
        resumed.load_state_dict(state)
        assert [[part.tolist() for part in batch] for batch in got] + batches(resumed) == expected


class TestErrorsThatAreNoSamples:
    @pytest.mark.parametrize("way", HOW)
    @pytest.mark.parametrize("dataset", [BadDraws, BadBatches])
    def test_are_raised(self, dataset: type[BadDraws], way: str) -> None:
        loader = DataLoader(dataset(16, [5], MemoryError), 4, seed=1, on_error="skip", **HOW[way])
        assert outcomes(loader)[1] == "MemoryError"

    @pytest.mark.parametrize("way", HOW)
    def test_of_collate_functions(self, way: str) -> None:
        loader = DataLoader(BadDraws(16, [5]), 4, seed=1, on_error="skip", collate_fn=len, **HOW[way])
        assert list(loader) == [4, 3, 4, 4]
        loader = DataLoader(BadDraws(16, [5]), 4, seed=1, on_error="skip", collate_fn=sum, **HOW[way])
        assert outcomes(loader) == ["TypeError"] * 4

    @pytest.mark.parametrize("way", HOW)
    def test_nothing_left_to_replace(self, way: str) -> None:
        loader = DataLoader(BadDraws(4, range(4)), 4, seed=1, on_error="skip", **HOW[way])
        with ended(iter(loader)) as iterator, pytest.raises(TooManyErrors, match="no sample of a batch can be loaded"):
            next(iterator)
        loader = DataLoader(BadDraws(4, range(4)), 4, seed=1, on_error="replace", **HOW[way])
        with ended(iter(loader)) as iterator, pytest.raises(ValueError, match="is bad"):
            next(iterator)


def test_a_warning_that_is_an_error_loses_no_batch() -> None:
    """Neither the next call nor a resumed run leaves the batch out in whose report it was raised."""

    def loader() -> Any:
        return DataLoader(BadDraws(N, [9]), 8, seed=1, on_error="skip")

    warned = loader()
    iterator = iter(warned)
    found = [next(iterator)]
    warnings.simplefilter("error")  # pytest puts the filters back
    with pytest.raises(UserWarning, match=r"sample 9 .* This warning appears once"):
        next(iterator)
    resumed = loader()
    resumed.load_state_dict(warned.state_dict())
    found += iterator
    assert [size for size, _ in map(_size_and_first, found)] == [8, 7, *[8] * 5, 4]
    with pytest.raises(UserWarning):
        next(again := iter(resumed))
    assert [*map(_size_and_first, again)] == [*map(_size_and_first, found[1:])]


def _size_and_first(batch: Any) -> tuple[int, int]:
    return len(batch[0]), int(batch[0][0])


@pytest.mark.parametrize("way", HOW)
class TestLimits:
    def test_raise_in_the_place_of_a_batch(self, way: str) -> None:
        rule = OnError("replace", max_failures=3)
        loader = DataLoader(BadDraws(24, [1, 2, 3, 9]), 8, seed=1, on_error=rule, **HOW[way])
        for _ in range(2):  # in each pass
            with ended(iter(loader)) as iterator:
                next(iterator)
                with pytest.raises(TooManyErrors, match=r"4 of the first 16 samples .*sample 9 \(ValueError"):
                    next(iterator)
                assert next(iterator)[0].tolist() == list(range(16, 24))

    def test_of_a_pass(self, way: str) -> None:
        rule = OnError("skip", max_rate=0.25, min_samples=8)
        loader = DataLoader(BadDraws(16, [1, 2, 9, 10]), 8, seed=1, on_error=rule, **HOW[way])
        for _ in range(3):
            assert len(batches(loader)) == 2
        assert loader.stats()["errors"]["failed"] == 12


@pytest.mark.parametrize("way", WAYS)
def test_report(tmp_path: Path, way: str) -> None:
    path = tmp_path / "bad.jsonl"
    loader = DataLoader(BadDraws(N, BAD), 8, seed=1, on_error=OnError("replace", report=path), **WAYS[way])
    loader.set_epoch(4)
    assert len(batches(loader)) == 8
    failures = [json.loads(line) for line in path.read_text().splitlines()]
    assert [failure["batch"] for failure in failures] == sorted(failure["batch"] for failure in failures)
    wanted = sorted((failure for failure in failures if failure["attempt"] == 0), key=lambda failure: failure["index"])
    assert [failure["index"] for failure in wanted] == BAD
    assert [failure["batch"] for failure in wanted] == [index // 8 for index in BAD]
    assert [failure["key"] for failure in wanted] == [sample_key(1, 4, index) for index in BAD]
    assert {(failure["epoch"], failure["rank"]) for failure in failures} == {(4, 0)}
    assert "in __getitem__" in failures[0]["traceback"]


@pytest.mark.parametrize("way", HOW)
def test_without_automatic_batching(way: str) -> None:
    data = BadDraws(6, [2])
    loader = DataLoader(data, batch_size=None, seed=1, on_error="replace", **HOW[way])
    replaced = [int(batch[0]) for batch in loader]
    assert [i for i, index in enumerate(replaced) if i != index] == [2]
    loader = DataLoader(data, batch_size=None, seed=1, on_error="skip", **HOW[way])
    skipped = [int(batch[0]) for batch in loader]
    assert [i for i, index in enumerate(skipped) if i != index] == [2], "an item cannot be left out: a batch is one"


@pytest.mark.parametrize("way", HOW)
def test_data_sets_without_a_length(way: str) -> None:
    loader = DataLoader(Lengthless(), 3, sampler=range(6), seed=1, on_error="skip", **HOW[way])  # type: ignore[arg-type]
    assert batches(loader) == [[0, 1, 2], [4, 5]]
    loader = DataLoader(Lengthless(), 3, sampler=range(6), seed=1, on_error="replace", **HOW[way])  # type: ignore[arg-type]
    with ended(iter(loader)) as iterator:
        next(iterator)
        with pytest.raises(ValueError, match="three is bad"):
            next(iterator)


def test_without_a_seed() -> None:
    torch.manual_seed(5)
    got = flat(indices(DataLoader(BadDraws(N, BAD), 8, shuffle=True, on_error="replace")))
    assert len(got) == N
    assert not set(got) & set(BAD)


class TestArguments:
    @pytest.mark.parametrize("on_error", ["ignore", None, 3], ids=str)
    def test_unknown(self, on_error: Any) -> None:
        with pytest.raises(ConfigError, match="on_error"):
            DataLoader(BadDraws(4, []), on_error=on_error)

    def test_report_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be written"):
            DataLoader(BadDraws(4, []), on_error=OnError("skip", report=tmp_path / "missing" / "bad.jsonl"))

    def test_streams_have_no_samples_to_pass_over(self) -> None:
        with pytest.raises(ConfigError, match="Stream"):
            DataLoader(Stream(4), on_error="skip")

    @pytest.mark.parametrize("on_error", ["raise", OnError("raise")], ids=["name", "OnError"])
    def test_raise_is_torchs_way(self, on_error: Any) -> None:
        loader = DataLoader(BadDraws(6, [2]), 2, seed=1, on_error=on_error)
        assert outcomes(loader)[1] == "ValueError"
        assert loader.on_error is on_error

    def test_a_warning_says_the_first(self) -> None:
        with pytest.warns(UserWarning, match=r"sample 3 \(ValueError: sample 3 is bad\) cannot be loaded and was left"):
            batches(DataLoader(BadDraws(N, BAD), 8, seed=1, on_error="skip"))
