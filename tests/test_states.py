"""Damaged states: of every object that has one, each entry missing or replaced by all sorts of values.

Either such a state loads, or it is a `StateError` and the object goes on as if nobody had tried. A new class with a
state is one entry in `cases`; those of samplers and of WebDataset's pipelines come from their own tests.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from entries_support import closed, opened
from torch.utils.data import Dataset, IterableDataset

import penstock as ps
from penstock import wds
from penstock.errors import PenstockError, StateError
from penstock.integrations.dispatch_batches import DispatchedBatches
from penstock.plan.cursor import STATE_VERSION
from penstock.samplers import BatchSampler, RandomSampler

HERE = Path(__file__).parent
FULL = os.environ.get("PENSTOCK_TEST_FULL") == "1"
WRONG: list[Any] = [None, "x", -1, {}, 2**61]
WRONG += [1.5, [], [None], {"x": 1}, 2**80, True] if FULL else [2**80]
TAKE = 30
OPAQUE = {"snapshot"}  # what a user's object says of itself is for that object to judge


def module_of(path: str) -> Any:
    """A test module, for its cases."""
    folder = HERE / Path(path).parent
    sys.path.insert(0, str(folder))
    try:
        name = path.replace("/", "_").removesuffix(".py")
        spec = importlib.util.spec_from_file_location(name, HERE / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))


def damaged(state: Any) -> Iterator[tuple[str, Any]]:
    """All damaged states that are made of one, each with a name."""
    for value in WRONG:
        yield f"the state is {value!r}", value
    for value in [*WRONG, "{", "[1]", [], [3], [{}]]:
        yield f"the text is {value!r}", {"penstock": value}
    for name, entries in _within(opened(state), ""):
        yield name, closed(entries)


def _within(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Copies of a dict or list with one thing in it that is wrong."""
    if isinstance(state, dict):
        for key in state:
            yield (
                f"without {path}{key}",
                {other: copy.deepcopy(value) for other, value in state.items() if other != key},
            )
    if isinstance(state, list):
        yield f"{path} shorter", copy.deepcopy(state[:-1])
        yield f"{path} longer", copy.deepcopy([*state, *state[-1:]])
    for key in state if isinstance(state, dict) else range(len(state)) if isinstance(state, list) else ():
        if key in OPAQUE:
            continue
        for value in WRONG:
            if json.dumps(value) != json.dumps(state[key]):
                changed = copy.deepcopy(state)
                changed[key] = copy.deepcopy(value)
                yield f"{path}{key} is {value!r}", changed
        for name, inner in _within(state[key], f"{path}{key}."):
            changed = copy.deepcopy(state)
            changed[key] = inner
            yield name, changed


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


class Case:
    """An object with a state, and how to read it."""

    def __init__(self, make: Callable[[], Any], *, take: int = TAKE) -> None:
        self.make = make
        self.take = take

    def items(self, target: Any, count: int | None = None) -> list[str]:
        return [repr(item) for item in itertools.islice(target, self.take if count is None else count)]


class Plain(IterableDataset[int]):
    """A user's stream without a state."""

    def __iter__(self) -> Iterator[int]:
        yield from range(40)


class Counting(IterableDataset[int]):
    """A user's stream with a state of its own."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 40:
            self.place += 1
            yield self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Served(Dataset[Any]):
    """A user's data set that counts."""

    def __init__(self) -> None:
        self.served = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.served += 1
        return index, self.served

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.served = state["served"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest, shards, and a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = tmp_path_factory.mktemp("states")
    (where / "train.txt").write_text("".join(f"{k}.jpg {k}\n" for k in range(40)))
    (where / "shards").mkdir()
    module_of("wds/wds_support.py").write_shards(where / "shards", 4, 6)
    pq.write_table(pa.table({"label": list(range(40))}), where / "train.parquet")
    return where


def data_sets(folder: Path) -> dict[str, Case]:
    manifest = ps.Manifest.open(folder / "train.txt")
    urls = str(folder / "shards" / "{000..003}.tar")
    streams = lambda: [(ps.StreamShards(urls), 1), (Plain(), 2)]  # noqa: E731
    where = {"rank": 0, "world_size": 1}
    return {
        "RankDataset": Case(lambda: ps.RankDataset(manifest, mini_epochs=2, **where)),
        "RankDataset of two": Case(lambda: ps.RankDataset(manifest, rank=1, world_size=2)),
        "MPDataset": Case(lambda: ps.MPDataset(manifest, batch_size=4, **where)),
        "ShardDataset": Case(lambda: ps.ShardDataset(urls, **where)),
        "TableDataset": Case(lambda: ps.TableDataset(folder / "train.parquet", **where)),
        "Mixture": Case(lambda: ps.Mixture([(list(range(9)), 1), (list(range(20)), 2)], **where)),
        "Mixture of streams": Case(lambda: ps.Mixture(streams())),
        "Mixture of mixtures": Case(lambda: ps.Mixture([(ps.Mixture(streams()), 2), (Plain(), 1)])),
        "StreamShards": Case(lambda: ps.StreamShards(urls, buffer_bytes=100)),
        "WebDataset": Case(lambda: wds.WebDataset(urls, shardshuffle=True).shuffle(5).decode().batched(4)),
    }


def loaders(folder: Path) -> dict[str, Case]:
    data = list(range(40))
    manifest = ps.Manifest.open(folder / "train.txt")
    urls = str(folder / "shards" / "{000..003}.tar")
    rank = lambda: ps.RankDataset(manifest, rank=0, world_size=1, load=lambda record: record.label)  # noqa: E731
    generator = lambda: torch.Generator().manual_seed(3)  # noqa: E731
    theirs = lambda: torch.utils.data.RandomSampler(data, generator=generator())  # noqa: E731
    workers = {"num_workers": 2, "executor": "process"}
    return {
        "of a list": Case(lambda: ps.DataLoader(data, 4, shuffle=True)),
        "with a seed": Case(lambda: ps.DataLoader(data, 4, shuffle="global", seed=1)),
        "with a generator": Case(lambda: ps.DataLoader(data, 4, shuffle=True, generator=generator())),
        "with torch's sampler": Case(lambda: ps.DataLoader(data, 4, sampler=theirs())),
        "with any batches": Case(lambda: ps.DataLoader(data, batch_sampler=[[1, 2], [3], [4, 5], [6, 7]])),
        "of a rank": Case(lambda: ps.DataLoader(rank(), 4)),
        "of a rank, with a sampler": Case(
            lambda: ps.DataLoader(rank(), 4, sampler=RandomSampler(rank(), shuffle="global"))
        ),
        "of MPDataset": Case(
            lambda: ps.DataLoader(ps.MPDataset(manifest, batch_size=4, rank=0, world_size=1, load=len), 4)
        ),
        "of shards": Case(lambda: ps.DataLoader(ps.StreamShards(urls), batch_size=None)),
        "of a user's stream": Case(lambda: ps.DataLoader(Counting(), 4)),
        "of a user's data set": Case(lambda: ps.DataLoader(Served(), 4)),
        "dealt": Case(
            lambda: DispatchedBatches(
                BatchSampler(RandomSampler(data, shuffle="global"), 4, False), 1, 2, split=False, even=True
            )
        ),
        "of a stream, with workers": Case(lambda: ps.DataLoader(Counting(), 4, **workers), take=0),
        "of a data set, with workers": Case(lambda: ps.DataLoader(Served(), 4, **workers), take=0),
    }


SAMPLERS = {
    name: Case(lambda case=case: case.make(37, 1, 0), take=90)
    for name, case in module_of("samplers/conformance/test_conformance.py").CASES.items()
}
PIPELINES = module_of("wds/test_state.py").PIPELINES


def problems(case: Case) -> list[str]:
    """What goes wrong with damaged states of a case."""
    torch.default_generator.manual_seed(11)
    source = case.make()
    iterator = iter(source)
    had = [next(iterator) for _ in range(3)]
    state = through_json(source.state_dict())
    assert had
    del iterator
    found, refused = [], []
    for name, wrong in damaged(state):
        torch.default_generator.manual_seed(11)
        target = case.make()
        before = through_json(target.state_dict())
        try:
            target.load_state_dict(copy.deepcopy(wrong))
        except StateError:
            if through_json(target.state_dict()) != before:
                found.append(f"{name}: half loaded")
            refused.append(wrong)
            continue
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
            continue
        try:
            case.items(target)
        except PenstockError:  # such as of a byte at which no sample begins: that is seen when it is read
            continue
        except Exception as error:
            found.append(f"{name}: then {type(error).__name__}: {error}")
    assert refused
    if case.take:
        found += goes_on(case, refused)
    return found


def goes_on(case: Case, refused: list[Any]) -> list[str]:
    """A pass under way does not see that states were refused."""
    torch.default_generator.manual_seed(11)
    twin, target = case.make(), case.make()
    torch.default_generator.manual_seed(12)
    expected = case.items(twin)
    torch.default_generator.manual_seed(12)
    iterator = iter(target)
    items = case.items(iterator, 2)
    for wrong in refused:
        with pytest.raises(StateError):
            target.load_state_dict(copy.deepcopy(wrong))
    items += case.items(iterator, case.take - 2)
    return [] if items == expected else ["a pass under way goes on otherwise"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name: str) -> None:
    assert problems(SAMPLERS[name]) == []


DATA_SETS = ["RankDataset", "RankDataset of two", "MPDataset", "ShardDataset", "TableDataset", "Mixture"]
STREAMS = ["Mixture of streams", "Mixture of mixtures", "StreamShards", "WebDataset"]


@pytest.mark.filterwarnings("ignore:.*has no state_dict")
@pytest.mark.parametrize("name", [*DATA_SETS, *STREAMS])
def test_data_sets(folder: Path, name: str) -> None:
    assert problems(data_sets(folder)[name]) == []


@pytest.mark.filterwarnings("ignore:.*has no state_dict")
@pytest.mark.filterwarnings("ignore:.*worker processes")
def test_loaders(folder: Path) -> None:
    found = {name: problems(case) for name, case in loaders(folder).items()}
    assert not any(found.values()), found


@pytest.mark.parametrize("name", PIPELINES if FULL else ["own stage", "resampled"])
def test_pipelines(tmp_path: Path, name: str) -> None:
    urls = module_of("wds/wds_support.py").write_shards(tmp_path, 2, 4)
    assert problems(Case(lambda: PIPELINES[name](urls), take=5)) == []


def test_a_state_of_another_version_says_which_penstock_reads_it() -> None:
    sampler = RandomSampler(range(9), shuffle="global")
    state = sampler.state_dict()
    reads = rf"Penstock {ps.__version__} reads version {STATE_VERSION}"
    words = rf"version 7 of states, and {reads}\. Resume with the newer Penstock .*anew"
    with pytest.raises(StateError, match=words):
        sampler.load_state_dict(closed({**opened(state), "version": 7}))
    with pytest.raises(StateError, match=rf"version 2 of states, and {reads}\. Resume with the older Penstock"):
        sampler.load_state_dict({**opened(state), "version": 2})
    with pytest.raises(StateError, match=r"version 0 of orders, .* the older Penstock that wrote it"):
        sampler.load_state_dict(closed({**opened(state), "order_version": 0}))
    for other in ({}, opened(state), {**opened(state), "version": STATE_VERSION}, {"penstock": '{"version": null}'}):
        with pytest.raises(StateError, match="this is no state of a RandomSampler, or a damaged one: 'penstock' is"):
            sampler.load_state_dict(other)


def test_a_state_of_another_kind_is_named() -> None:
    loader = ps.DataLoader(range(20), 4, sampler=RandomSampler(range(20), shuffle="global"))
    with pytest.raises(StateError, match="this is the state of a DataLoader, not of a RandomSampler"):
        RandomSampler(range(20), shuffle="global").load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="this is the state of a sampler or a data set, not of a DataLoader"):
        loader.load_state_dict(RandomSampler(range(20), shuffle="global").state_dict())


def test_orders_of_other_kinds_are_not_taken_for_versions() -> None:
    mixture = ps.Mixture([(range(5), 1), (range(7), 2)], rank=0, world_size=1)
    sampler = ps.DistributedSampler(range(12), 1, 0, shuffle="global")
    for one, other in ((mixture, sampler), (sampler, mixture)):
        with pytest.raises(StateError, match="shuffle is") as caught:
            one.load_state_dict(other.state_dict())
        assert "version" not in str(caught.value)
