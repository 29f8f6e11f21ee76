"""What every stream promises: opened at any cursor it gives the same rest, and a cursor is JSON, small and pure."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from busy_support import HANG
from entries_support import closed
from full_run import full_only
from interpreter_support import FULL, METHODS
from shard_support import write_shards
from state_support import HubStream, PlainStream
from stream_cases import CASES, COUNTS, TOTAL, Doubled, label, mixed, nested, of_shards, of_users, send_rests, stream
from stream_conformance import (
    check_chosen_epochs,
    check_chosen_in_the_middle,
    check_every_cursor,
    check_loaded_state,
    check_purity,
    through_json,
    walk,
)

import penstock as ps
from penstock import StreamShards
from penstock.errors import ConfigError, ShardError, StateError
from penstock.plan.stream import ResumableDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*has no state_dict")

Maker = Callable[[], ResumableDataset]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_shards(tmp_path_factory.mktemp("streams"), COUNTS)


@pytest.fixture(params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(name: str, paths: list[str]) -> Maker:
    return lambda: CASES[name].make(paths)


@full_only("a stream for each cursor", but=["mixture", "mixture of users' streams", "mixture of a number"])
@pytest.mark.parametrize("epoch", [0, 3] if FULL else [3])
def test_opened_at_every_cursor_it_gives_the_same_rest(name: str, make: Maker, epoch: int) -> None:
    items = check_every_cursor(make, epoch)
    if CASES[name].whole:
        assert sorted(items) == list(range(TOTAL))


def test_a_cursor_is_pure(make: Maker) -> None:
    check_purity(make)


@full_only("as the others", but=["mixture", "mixture of users' streams", "compressed shards", "shards"])
def test_each_iteration_is_another_epoch(make: Maker) -> None:
    dataset = make()
    for epoch in (0, 1, 2):
        assert list(dataset) == list(make().open(epoch=epoch))
        assert dataset.epoch == epoch
    check_chosen_epochs(make)


@full_only("as the others", but=["mixture", "mixture of users' streams", "compressed shards", "shards"])
def test_a_loaded_state_is_used_once(make: Maker) -> None:
    check_loaded_state(make)


def test_an_epoch_chosen_in_the_middle_is_what_a_state_says(make: Maker) -> None:
    check_chosen_in_the_middle(make)


@full_only("a forkserver of its own; copies are pickled without")
def test_in_another_process(paths: list[str]) -> None:
    context = multiprocessing.get_context(METHODS[-1])
    here, there = context.Pipe(duplex=False)
    cases, expected = [], []
    for case in CASES.values():
        items, cursors = walk(case.make(paths).open(epoch=2))
        dataset = case.make(paths)
        next(iter(dataset))  # the data set travels while it is read
        cases.append((dataset, cursors[::3]))
        expected.append([items[had:] for had in range(0, len(cursors), 3)])
    process = context.Process(target=send_rests, args=(cases, there))
    process.start()
    there.close()
    assert here.recv() == expected
    process.join(HANG)


def test_a_copy_goes_on_from_a_loaded_state_and_has_no_stream(make: Maker) -> None:
    items, cursors = walk(make().open(epoch=0))
    dataset = make()
    stream = iter(dataset)
    had = [next(stream) for _ in range(5)]
    copied = pickle.loads(pickle.dumps(dataset))
    assert list(copied) == list(make().open(epoch=1)), "its first iteration is the one that comes next"
    assert had + list(stream) == items
    other = make()
    other.load_state_dict(closed(cursors[5]))
    copied = pickle.loads(pickle.dumps(other))
    assert list(copied) == items[5:]


def test_a_data_set_and_its_stream_end_with_their_last_user(make: Maker) -> None:
    gc.collect()
    gc.disable()  # a cycle would keep files open
    try:
        files = set(os.listdir("/proc/self/fd"))
        dataset = make()
        ends = weakref.ref(dataset)
        stream = iter(dataset)
        for _ in range(5):
            next(stream)
        del dataset, stream
        assert ends() is None
        assert set(os.listdir("/proc/self/fd")) == files
    finally:
        gc.enable()


def test_cursors_of_others_are_refused(name: str, make: Maker, paths: list[str]) -> None:
    cursor = walk(make().open())[1][5]
    for differs, other in CASES[name].others.items():
        dataset = other(paths)
        with pytest.raises(StateError):
            dataset.open(cursor)
            pytest.fail(differs)
        with pytest.raises(StateError):
            dataset.load_state_dict(closed(cursor))
        assert list(dataset) == list(other(paths)), "a refused state leaves no trace"


def as_worker(monkeypatch: pytest.MonkeyPatch, number: int, total: int) -> None:
    """Make this process one of torch's workers, as far as `torch.utils.data.get_worker_info` says."""
    info = types.SimpleNamespace(id=number, num_workers=total, seed=number, dataset=None)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)


def test_a_cursor_is_of_one_worker(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = walk(make().open())[1][5]
    dataset = make()
    dataset.load_state_dict(closed(cursor))
    as_worker(monkeypatch, 0, 2)
    with pytest.raises(StateError, match=r"number of workers\] is "):
        iter(dataset)


def test_a_cursor_from_before_the_first_item_fits_any_worker(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make()
    dataset.load_state_dict(closed(through_json(make().open(epoch=1).cursor())))
    as_worker(monkeypatch, 0, 2)
    expected, cursors = walk(make().open(epoch=1))
    assert list(dataset) == expected
    assert list(make().open(cursors[4])) == expected[4:], "and what that worker says fits it"


def test_torchs_loader_gives_a_state_to_each_worker_and_all_refuse_it(paths: list[str]) -> None:
    dataset = of_shards(paths)
    dataset.load_state_dict(closed(walk(of_shards(paths).open())[1][5]))
    with pytest.raises(StateError, match="number of workers\\] is"):
        list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))


def test_behind_an_error_the_cursor_is_where_it_was(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5])
    whole = Path(paths[1]).read_bytes()
    Path(paths[1]).write_bytes(whole[:6000])
    dataset = StreamShards(paths, shuffle="none", load=label)
    stream = dataset.open()
    items: list[int] = []
    with pytest.raises(ShardError):
        items.extend(stream)
    assert list(stream) == []
    Path(paths[1]).write_bytes(whole)
    assert items + list(dataset.open(through_json(stream.cursor()))) == list(range(10))


# Mixtures.


def test_behind_an_error_of_a_source_the_mixture_ends_and_its_cursor_is_where_it_was(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5, 5])
    whole = Path(paths[1]).read_bytes()
    make = lambda: mixed(stream(paths[:2], shuffle="none"), stream(paths[2:]), stop=40)  # noqa: E731
    expected = list(make())
    Path(paths[1]).write_bytes(whole[:6000])
    items: list[int] = []
    under_way = make().open()
    with pytest.raises(ShardError):
        items.extend(under_way)
    assert list(under_way) == []
    assert 5 < len(items) < 40
    Path(paths[1]).write_bytes(whole)
    assert items + list(make().open(through_json(under_way.cursor()))) == expected


def test_a_data_set_given_twice_is_read_twice(paths: list[str]) -> None:
    shards = stream(paths)
    expected = list(mixed(stream(paths), stream(paths), tag=True))
    assert list(mixed(shards, shards, tag=True)) == expected
    assert [item for item, number in expected if number][:TOTAL] == list(stream(paths).open(epoch=0))


def test_a_users_data_set_that_keeps_one_position_cannot_be_given_twice() -> None:
    users = HubStream(7)
    inside = mixed(users)
    for sources in ([users, users], [inside, users], [inside, inside]):
        with pytest.raises(ConfigError, match=r"this HubStream is given as a source twice.*deepcopy"):
            mixed(*sources)
    again = mixed(users, copy.deepcopy(users), PlainStream(3))
    assert len(list(again)) > 14


def test_a_source_gives_the_items_of_its_own_iter(paths: list[str]) -> None:
    doubled = Doubled(paths, seed=4)
    found = [item for item, number in mixed(doubled, PlainStream(3), tag=True, stop=9) if not number]
    assert found == [2 * item for item in stream(paths).open(epoch=0)][: len(found)]
    assert found


def test_each_turn_of_a_source_is_an_epoch_of_its_own(paths: list[str]) -> None:
    items = [
        item for item, number in mixed(stream(paths), PlainStream(3), tag=True, stop=80).open(epoch=2) if not number
    ]
    assert items[: 2 * TOTAL] == [item for epoch in (2, 3) for item in stream(paths).open(epoch=epoch)]


def test_sources_are_opened_and_remember_nothing(paths: list[str]) -> None:
    shards = stream(paths)
    mixture = mixed(shards, PlainStream(3), stop=9)
    mixture.set_epoch(4)
    list(mixture)
    assert shards.epoch == 0
    assert list(shards) == list(stream(paths).open(epoch=0))


def damage(cursor: Any, *path: Any, value: Any) -> Any:
    damaged = copy.deepcopy(cursor)
    inside = damaged
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return damaged


def test_states_of_something_else_are_not_called_damaged(paths: list[str]) -> None:
    """A mixture's state, or that of a loader over the data set, which is the one that a program has at hand."""
    shards = stream(paths)
    loader = ps.DataLoader(stream(paths), 4)
    next(iter(loader))
    for state in (mixed(shards, PlainStream(3)).open().cursor(), loader.state_dict()):
        with pytest.raises(StateError, match="does not belong to this StreamShards"):
            shards.open(state)


@pytest.mark.parametrize("kind", [of_shards, nested, of_users])
def test_damaged_cursors_of_mixtures_are_refused(paths: list[str], kind: Callable[[list[str]], Any]) -> None:
    mixture = kind(paths)
    _, cursors = walk(mixture.open())
    cursor = cursors[9]
    first = cursor["sources"][0]["at"]
    assert first["had"]
    wrong = [
        damage(cursor, "yielded", value=0),
        damage(cursors[0], "yielded", value=1),
        damage(cursor, "where", value=[0, 2, 0, 1]),
        damage(cursor, "sources", value=cursor["sources"][1:]),
        damage(cursor, "sources", 0, value=None),
        damage(cursor, "sources", 0, "turns", value=-1),
        damage(cursor, "sources", 0, "at", "had", value=0),
        damage(cursor, "sources", 0, "at", value={**first, "cursor": {}}),
        damage(cursor, "sources", 0, "at", value={**first, "cursor": {}, "iterator": {}}),
        damage(cursor, "sources", -1, "at", value={**cursor["sources"][-1]["at"], "had": 1, "dataset": {}}),
    ]
    for state in wrong:
        with pytest.raises(StateError):
            mixture.load_state_dict(closed(state))
            pytest.fail(str(state))
    assert list(mixture.open(cursor)) == list(kind(paths).open())[9:]


def test_a_source_that_has_become_another_one_is_noticed() -> None:
    cursor = walk(mixed(PlainStream(9), PlainStream(9)).open())[1][6]
    with (
        pytest.warns(UserWarning, match="source 0 has no state_dict"),
        pytest.raises(StateError, match="another source"),
    ):
        list(mixed(PlainStream(1), PlainStream(9)).open(cursor))


# Epochs in workers.


@pytest.mark.parametrize("persistent", [False, True])
def test_torchs_workers_begin_the_next_epoch_each_time(paths: list[str], persistent: bool) -> None:
    dataset = stream(paths)

    def passes(workers: int, count: int, *, persistent: bool = False) -> list[list[int]]:
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=None, num_workers=workers, persistent_workers=persistent
        )
        return [list(loader) for _ in range(count)]

    three = passes(2, 3, persistent=persistent)
    assert all(sorted(items) == list(range(TOTAL)) for items in three)
    assert three[0] != three[1] != three[2]
    assert dataset.epoch == 2
    assert passes(1, 1) == [list(stream(paths).open(epoch=0))], "loaders with other workers do not disturb each other"
    dataset.set_epoch(1)
    assert passes(2, 2) == three[1:]
