"""States of users' own objects, as programs written for torchdata's StatefulDataLoader rely on them.

The same objects, with and without a state, in every executor: stop anywhere, go on in another loader.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from entries_support import opened
from full_run import full_only
from interpreter_support import FULL
from loader_support import Slow, Squares, ended, plain
from pairwise import each_value, product
from state_support import (
    AskedStream,
    BothStream,
    BufferStream,
    ChangingStream,
    CountingCollate,
    CountingMap,
    DrawingStatefulStream,
    DrawingStream,
    FailingStream,
    HubStream,
    IteratorSampler,
    IteratorStream,
    PlainStream,
    ShufflingSampler,
    StatefulBatches,
    StatefulSampler,
    StatefulStream,
    TensorMap,
    ToldStream,
    UnevenStream,
    as_they_are,
    bad_init,
)
from torch.utils.data import SubsetRandomSampler

from penstock import DataLoader
from penstock.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*has no state_dict")

N = 17
Make = Callable[[], Any]

MAPS: dict[str, Callable[..., Any]] = {
    "plain": lambda **how: DataLoader(Squares(N), batch_size=3, **how),
    "dropping": lambda **how: DataLoader(Squares(N), batch_size=3, drop_last=True, **how),
    "unbatched": lambda **how: DataLoader(Squares(5), batch_size=None, **how),
    "shuffled": lambda **how: DataLoader(
        Squares(N), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(2), **how
    ),
    "torch's sampler": lambda **how: DataLoader(
        Squares(N),
        3,
        sampler=torch.utils.data.RandomSampler(range(N), generator=torch.Generator().manual_seed(2)),
        **how,
    ),
    "weighted": lambda **how: DataLoader(
        Squares(N),
        3,
        sampler=torch.utils.data.WeightedRandomSampler([1.0] * N, 20, generator=torch.Generator().manual_seed(2)),
        **how,
    ),
    "stateful sampler": lambda **how: DataLoader(Squares(N), 3, sampler=StatefulSampler(N), **how),
    "stateful iterator": lambda **how: DataLoader(Squares(N), 3, sampler=IteratorSampler(N), **how),
    "stateful batches": lambda **how: DataLoader(Squares(N), batch_sampler=StatefulBatches(N), **how),
    "stateful": lambda **how: DataLoader(CountingMap(N), 3, **how),
    "tensors": lambda **how: DataLoader(TensorMap(N), 3, **how),
    "collate": lambda **how: DataLoader(Squares(N), 3, collate_fn=CountingCollate(), **how),
}


def over(kind: Callable[[int], Any], **how: Any) -> Any:
    return DataLoader(kind(N), **{"batch_size": 3, "collate_fn": as_they_are, **how})


STREAMS: dict[str, Callable[..., Any]] = {
    kind.__name__: partial(over, kind)
    for kind in (
        *(PlainStream, StatefulStream, IteratorStream, BothStream, HubStream, ChangingStream, UnevenStream),
        *(BufferStream, FailingStream, DrawingStream, DrawingStatefulStream),
    )
}
ALL = {**MAPS, **STREAMS}
HERE = {"inline": {"num_workers": 0}}
WORKERS = {
    "one": {"num_workers": 1},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
}
HOW: dict[str, dict[str, Any]] = {**HERE, **WORKERS}
MORE: dict[str, dict[str, Any]] = {**HOW, "one, persistent": {**WORKERS["persistent"], "num_workers": 1}}
GLOBAL = ["DrawingStream", "DrawingStatefulStream"]
"""Draw from the global generators, which are the trainer's own where there are no worker processes."""


def with_workers(names: Iterable[Any]) -> list[tuple[Any, str]]:
    """Pair each name with workers in `MORE`, which go round."""
    return each_value(names, ["two", "persistent", "one", "one, persistent"])


def inline_and_with_workers(names: Iterable[Any]) -> list[tuple[Any, str]]:
    """Pair each name with no workers, too."""
    names = list(names)
    return [*((name, "inline") for name in names), *with_workers(names)]


def take(iterator: Any, limit: int = 10**6) -> list[Any]:
    """So many batches, errors among them as their text."""
    got: list[Any] = []
    while len(got) < limit:
        try:
            got.append(plain(next(iterator)))
        except StopIteration:
            break
        except LookupError as error:
            got.append(str(error.args[0]).splitlines()[0])
    return got


@contextmanager
def running(loader: Any) -> Iterator[Any]:
    """An iterator, whose workers end here unless they are to persist."""
    iterator = iter(loader)
    with nullcontext(iterator) if loader.persistent_workers else ended(iterator):
        yield iterator


def one_pass(loader: Any) -> list[Any]:
    with running(loader) as iterator:
        return take(iterator)


def travelled(state: Any) -> Any:
    text = json.dumps(state, default=lambda item: {"tensor": item.tolist()})
    return json.loads(text, object_hook=lambda item: torch.tensor(item["tensor"]) if "tensor" in item else item)


def record(loader: Any, passes: int) -> tuple[list[Any], list[tuple[int, int, Any]]]:
    """Batches, and (batches had, passes ended, state) before the first, after each, and after each pass."""
    seen: list[Any] = []
    states = [(0, 0, travelled(loader.state_dict()))]
    for number in range(passes):
        with running(loader) as iterator:
            while got := take(iterator, 1):
                seen += got
                states.append((len(seen), number, travelled(loader.state_dict())))
        states.append((len(seen), number + 1, travelled(loader.state_dict())))
    return seen, states


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, default=torch.Tensor.tolist) == json.dumps(other, default=torch.Tensor.tolist)


def cuts(states: list[tuple[int, int, Any]]) -> list[tuple[int, int, Any]]:
    """Return four states: after the first batch of the first pass, after its last one and after its end, and in the
    middle of the last pass.
    """
    first, last = ([state for state in states if state[1] == number] for number in (0, states[-1][1] - 1))
    return [first[:2][-1], first[-1], states[len(first)], last[len(last) // 2]]


def check(make: Make, *, passes: int = 2, everywhere: bool = True) -> None:
    """From every state the rest of the run follows, to the end of its last pass; or from those of `cuts`."""
    torch.manual_seed(0)
    seen, states = record(make(), passes)
    for count, number, state in states if everywhere else cuts(states):
        loader = make()
        torch.manual_seed(1)
        loader.load_state_dict(state)
        assert same(loader.state_dict(), state), f"state right after loading that of batch {count}"
        rest = [batch for _ in range(passes - number) for batch in one_pass(loader)]
        assert same(rest, seen[count:]), f"after batch {count} of {len(seen)}, in pass {number}"


# 2: the rest follows, for every kind of data set, sampler and executor. 1: whatever is made ahead.


@pytest.mark.parametrize("name", [name for name in ALL if name not in GLOBAL])
def test_inline(name: str) -> None:
    check(partial(ALL[name], num_workers=0), passes=3)


@full_only(
    "workers for each; inline all are run",
    but=["stateful batches-two", "StatefulStream-persistent", "torch's sampler-two", "UnevenStream-one", "tensors-one"],
)
@pytest.mark.parametrize(("name", "how"), with_workers(ALL))
def test_workers(name: str, how: str) -> None:
    passes = 1 if name in GLOBAL else 2  # a second pass has a base seed of its own, drawn by whoever resumes
    check(partial(ALL[name], executor="process", **MORE[how]), passes=passes, everywhere=False)


@pytest.mark.parametrize("name", [name for name in MAPS if name not in ("stateful", "tensors", "collate")])
def test_threads_over_map_style_data(name: str) -> None:
    check(partial(MAPS[name], executor="thread", num_workers=2))


@pytest.mark.parametrize("name", ["PlainStream", "IteratorStream", "UnevenStream"])
def test_threads_over_streams_whose_iterators_have_the_state(name: str) -> None:
    check(partial(STREAMS[name], executor="thread", num_workers=2))


BATCHES: list[Any] = [
    ["PlainStream", "StatefulStream", "IteratorStream"],
    *([(1, False), (1, True), (4, False), (4, True), (50, False), (50, True), (None, False)],),
]


@pytest.mark.parametrize(("name", "batches"), product(*BATCHES))
def test_batch_sizes(name: str, batches: tuple[int | None, bool]) -> None:
    check(cut_into(name, batches))


@full_only("workers for each; inline all are run", but=["StatefulStream-batches4", "PlainStream-batches0"])
@pytest.mark.parametrize(("name", "batches"), each_value(*BATCHES))
def test_batch_sizes_in_workers(name: str, batches: tuple[int | None, bool]) -> None:
    check(partial(cut_into(name, batches), num_workers=2), everywhere=False, passes=1)


def cut_into(name: str, batches: tuple[int | None, bool]) -> Make:
    """Return what makes a loader of this stream with a size of batches, and whether the last one is dropped."""
    size, drop_last = batches
    collate = as_they_are if size is not None else None
    return partial(STREAMS[name], batch_size=size, drop_last=drop_last, collate_fn=collate)


@pytest.mark.parametrize(("name", "ahead"), each_value(["StatefulStream", "stateful", "stateful sampler"], [30, 4, 1]))
def test_what_is_made_ahead_is_not_in_the_state(name: str, ahead: int) -> None:
    loader, states = ALL[name](num_workers=2, prefetch_factor=ahead), []
    torch.manual_seed(0)
    with running(loader) as iterator:
        for _ in range(4):
            take(iterator, 1)
            states.append(loader.state_dict())
    loader = ALL[name](num_workers=2, prefetch_factor=2)
    torch.manual_seed(0)
    with running(loader) as iterator:
        for state in states:
            take(iterator, 1)
            assert loader.state_dict() == state


@full_only("many starts of workers; test_random_programs.py has chains, too")
def test_chains_of_resumes() -> None:
    for name, how in inline_and_with_workers(["StatefulStream", "PlainStream", "stateful", "stateful sampler"]):
        make = partial(ALL[name], **MORE[how])
        whole = one_pass(make())
        state, got = None, []
        for count in (1, 0, 2, 1, 99):
            loader = make()
            if state is not None:
                loader.load_state_dict(state)
            with running(loader) as iterator:
                got += take(iterator, count)
            state = travelled(loader.state_dict())
        assert got == whole, (name, how)


# 3: loading into a used loader, the state right after, and the initial one.


@full_only("workers for each", but=["inline", "StatefulStream-persistent", "stateful-one"])
@pytest.mark.parametrize(
    ("name", "how"),
    inline_and_with_workers(
        [
            "plain",
            "shuffled",
            "stateful",
            "stateful sampler",
            "PlainStream",
            "StatefulStream",
            "IteratorStream",
            "BothStream",
        ]
    ),
)
def test_loading_into_a_used_loader(name: str, how: str) -> None:
    make = partial(ALL[name], **MORE[how])
    torch.manual_seed(0)
    seen, states = record(make(), 1)
    loader = make()
    old = iter(loader)
    take(old, 3)
    for count in (2, 0, 4):
        loader.load_state_dict(states[count][2])
        assert same(loader.state_dict(), states[count][2])
        assert one_pass(loader) == seen[count:]


def test_an_iterator_from_before_leaves_the_new_one_alone() -> None:
    for name in ("PlainStream", "IteratorStream", "stateful sampler"):
        make = partial(ALL[name], num_workers=2)
        seen, states = record(make(), 1)
        loader = make()
        old = iter(loader)
        take(old, 1)
        loader.load_state_dict(states[2][2])
        take(old, 1)
        assert loader.state_dict() == states[2][2]
        with ended(old), running(loader) as new:
            got = take(new, 1)
            take(old)
            state = loader.state_dict()
            assert got + take(new) == seen[2:]
        other = make()
        other.load_state_dict(state)
        assert one_pass(other) == seen[3:]


@full_only("workers for each", but=["<lambda>-one", "<lambda>-persistent0"])
@pytest.mark.parametrize(
    ("make", "how"),
    inline_and_with_workers(
        [
            lambda **how: DataLoader(Squares(N), 3, shuffle=True, **how),
            lambda **how: DataLoader(Squares(N), 3, sampler=torch.utils.data.RandomSampler(range(N)), **how),
            lambda **how: DataLoader(Squares(N), 3, sampler=SubsetRandomSampler(range(N)), **how),
            lambda **how: DataLoader(
                Squares(N), 3, sampler=torch.utils.data.WeightedRandomSampler([1.0] * N, N), **how
            ),
            MAPS["shuffled"],
            MAPS["torch's sampler"],
        ]
    ),
)
def test_the_initial_state_replays_the_first_epoch_in_its_random_order(make: Any, how: str) -> None:
    def reseed() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    reseed()
    undisturbed = one_pass(make(**MORE[how]))
    reseed()
    loader = make(**MORE[how])
    state = travelled(loader.state_dict())
    first = one_pass(loader)
    assert first == undisturbed, "asking changed the first epoch"
    other = make(**MORE[how])
    other.load_state_dict(state)
    assert one_pass(other) == first
    one_pass(other)
    other.load_state_dict(state)
    assert one_pass(other) == first


# 4: the end of an epoch.


@full_only("workers for each", but=["inline", "StatefulStream-two", "shuffled-two"])
@pytest.mark.parametrize(
    ("name", "how"),
    inline_and_with_workers(
        ["shuffled", "torch's sampler", "stateful sampler", "PlainStream", "StatefulStream", "HubStream", "BothStream"]
    ),
)
def test_the_last_batch_and_the_end_of_the_loop(name: str, how: str) -> None:
    make = partial(ALL[name], **MORE[how])
    loader = make()
    with running(loader) as iterator:
        count = len(take(iterator))
    loader = make()
    with running(loader) as iterator:
        take(iterator, count)
        inside = travelled(loader.state_dict())
        assert take(iterator, 1) == []
        after = travelled(loader.state_dict())
    second = one_pass(loader)
    other = make()
    other.load_state_dict(inside)
    assert one_pass(other) == []
    assert one_pass(other) == second
    other = make()
    other.load_state_dict(after)
    assert one_pass(other) == second
    assert len(second) == count


@full_only("workers for each", but=["inline", "shuffled-two", "stateful sampler-one, persistent"])
@pytest.mark.parametrize(
    ("name", "how"),
    inline_and_with_workers(["shuffled", "torch's sampler", "weighted", "stateful sampler", "StatefulStream"]),
)
def test_two_epochs_and_two_are_four(name: str, how: str) -> None:
    make = partial(ALL[name], **MORE[how])
    loader = make()
    four = [one_pass(loader) for _ in range(4)]
    loader = make()
    two = [one_pass(loader) for _ in range(2)]
    state = travelled(loader.state_dict())
    loader = make()
    loader.load_state_dict(state)
    assert two + [one_pass(loader) for _ in range(2)] == four


# 5: nothing consumed.


@full_only("workers for each", but=["inline", "stateful-persistent", "StatefulStream-two"])
@pytest.mark.parametrize(
    ("name", "how"),
    inline_and_with_workers(["plain", "stateful", "stateful sampler", "PlainStream", "StatefulStream", "BothStream"]),
)
def test_an_iterator_and_nothing_consumed(name: str, how: str) -> None:
    make = partial(ALL[name], **MORE[how])
    whole = one_pass(make())
    loader = make()
    with running(loader):
        state = travelled(loader.state_dict())
    loader = make()
    loader.load_state_dict(state)
    assert one_pass(loader) == whole


@pytest.mark.parametrize("how", HOW)
def test_iter_of_the_data_set_runs_once_for_each_worker(how: str) -> None:
    loader = DataLoader(AskedStream(N), 3, collate_fn=as_they_are, **HOW[how])
    with running(loader) as iterator:
        had = take(iterator, 2)
        state = travelled(loader.state_dict())
    loader = DataLoader(AskedStream(N), 3, collate_fn=as_they_are, **HOW[how])
    loader.load_state_dict(state)
    rest = one_pass(loader)
    assert {asked for batch in had + rest for _, asked in batch} == {1}
    assert sorted(item for batch in had + rest for item, _ in batch) == list(range(N))


# 6: what belongs to a worker.


def test_states_are_those_of_each_worker() -> None:
    loader = STREAMS["StatefulStream"](num_workers=2)
    with running(loader) as iterator:
        take(iterator, 3)
        workers = opened(loader.state_dict())["workers"]["workers"]
    assert [workers[number]["snapshot"]["dataset"]["place"] for number in "01"] == [6, 3]


def test_epochs_that_a_data_set_counts_are_restored() -> None:
    for how in ("inline", "persistent"):
        make = partial(STREAMS["StatefulStream"], **HOW[how])
        loader = make()
        one_pass(loader)
        with running(loader) as iterator:
            assert take(iterator, 1)[0][0][1] == 1
            state = travelled(loader.state_dict())
        loader = make()
        loader.load_state_dict(state)
        assert {epoch for batch in one_pass(loader) for _, epoch, _ in batch} == {1}
        assert {epoch for batch in one_pass(loader) for _, epoch, _ in batch} == {2}


@full_only("workers for each", but=["nobody-two-0", "the data set-persistent-1"])
@pytest.mark.parametrize(
    ("told", "how", "epoch"),
    [
        *[("nobody", "two", 0), ("the loader", "two", 4), ("the data set", "two", 4)],
        *[("nobody", "persistent", 1), ("the loader", "persistent", 4), ("the data set", "persistent", 1)],
    ],
)
def test_a_worker_that_has_delivered_nothing_goes_on_in_the_epoch_of_the_others(
    told: str, how: str, epoch: int
) -> None:
    """In the second pass, of which only worker 0 has delivered a batch. Workers that stay count passes, and hear only
    what the loader is told.
    """
    loader = over(ToldStream, **HOW[how])
    one_pass(loader)
    if told != "nobody":
        (loader if told == "the loader" else loader.dataset).set_epoch(4)
    with running(loader) as iterator:
        take(iterator, 1)
        state = travelled(loader.state_dict())
        rest = take(iterator)
    assert {seen for batch in rest for _, seen, _ in batch} == {epoch}
    loader = over(ToldStream, **HOW[how])
    loader.load_state_dict(state)
    assert one_pass(loader) == rest


# 7: a state handed out never changes.


@full_only("workers for each", but=["inline", "stateful-persistent", "StatefulStream-one"])
@pytest.mark.parametrize(
    ("name", "how"),
    inline_and_with_workers(["tensors", "stateful", "StatefulStream", "ChangingStream", "stateful sampler"]),
)
def test_a_state_never_changes(name: str, how: str) -> None:
    loader = ALL[name](**MORE[how])
    with running(loader) as iterator:
        take(iterator, 2)
        state = loader.state_dict()
        before = json.dumps(state, default=torch.Tensor.tolist)
        take(iterator, 2)
        assert json.dumps(state, default=torch.Tensor.tolist) == before
    loader = ALL[name](**MORE[how])
    loader.load_state_dict(state)
    one_pass(loader)
    assert json.dumps(state, default=torch.Tensor.tolist) == before, name


@pytest.mark.parametrize("how", HOW)
def test_keys_come_and_go(how: str) -> None:
    loader = STREAMS["ChangingStream"](**HOW[how])
    with running(loader) as iterator:
        for _ in range(4):
            take(iterator, 1)
            workers = opened(loader.state_dict())["workers"]["workers"]
            for own in (workers[number]["snapshot"]["dataset"] for number in workers):
                assert [key for key in own if key.startswith("at ")] == [f"at {own['place']}"]
                assert own["text"] == "x" * own["place"]


# 8: another number of workers.


def test_another_number_of_workers() -> None:
    for name, workers in each_value(["plain", "shuffled", "stateful sampler"], [0, 1, 3]):
        seen, states = record(MAPS[name](num_workers=2), 1)
        loader = MAPS[name](num_workers=workers)
        loader.load_state_dict(states[2][2])
        assert one_pass(loader) == seen[2:]
    for name in ("StatefulStream", "PlainStream"):
        _, states = record(STREAMS[name](num_workers=2), 1)
        for workers in (0, 1, 3):
            loader = STREAMS[name](num_workers=workers)
            with pytest.raises(AssertionError, match="workers"):
                loader.load_state_dict(states[2][2])
            with pytest.raises(StateError):
                loader.load_state_dict(states[2][2])


# 9: plain samplers.


def test_plain_samplers_leave_the_callers_generator_alone() -> None:
    def make() -> Any:
        return DataLoader(Squares(N), 3, sampler=torch.utils.data.RandomSampler(range(N)))

    seen, states = record(make(), 1)
    loader = make()
    loader.load_state_dict(states[2][2])
    iterator = iter(loader)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    assert take(iterator) == seen[2:]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_that_draws_another_order_goes_on_with_a_warning() -> None:
    loader = DataLoader(Squares(N), 3, sampler=ShufflingSampler(N, False))
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"ShufflingSampler has no state_dict.*draws 6 samples again"):
        assert len(one_pass(loader)) == 4  # of 6 batches


def test_a_plain_stream_is_skipped_aloud() -> None:
    loader = STREAMS["PlainStream"]()
    iterator = iter(loader)
    take(iterator, 2)
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="first 2 batches"):
        iter(loader)


# 10: errors at the beginning.


@pytest.mark.parametrize("name", ["plain", "PlainStream", "StatefulStream"])
def test_errors_of_worker_init_come_with_their_type(name: str) -> None:
    loader = ALL[name](num_workers=2, worker_init_fn=bad_init)
    with pytest.raises(ValueError, match="cannot start"):
        next(iter(loader))


# 11: batches that overtake others.


def test_batches_out_of_order_are_neither_lost_nor_had_twice() -> None:
    def make() -> Any:
        return DataLoader(Slow(N, {0: 0.6}), 2, num_workers=2, in_order=False)

    loader = make()
    with running(loader) as iterator:
        had = take(iterator, 4)
        state = travelled(loader.state_dict())
    assert had[0][0] != 0
    loader = make()
    loader.load_state_dict(state)
    assert sorted(itertools.chain.from_iterable(had + one_pass(loader))) == [index * index for index in range(N)]


@pytest.mark.parametrize("name", ["PlainStream", "StatefulStream"])
def test_streams_out_of_order(name: str) -> None:
    make = partial(STREAMS[name], num_workers=2, in_order=False)
    loader = make()
    with running(loader) as iterator:
        had = take(iterator, 3)
        state = travelled(loader.state_dict())
    loader = make()
    loader.load_state_dict(state)
    rest = one_pass(loader)
    items = [item if isinstance(item, int) else item[0] for batch in had + rest for item in batch]
    assert sorted(items) == list(range(N))


# 12: others.


@full_only("workers for each", but=["inline"])
@pytest.mark.parametrize("how", HOW if FULL else ["inline", "two"])
def test_hugging_face(how: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"row": list(range(40))})

    def make() -> Any:
        stream = rows.to_iterable_dataset(num_shards=4).map(double)  # its shuffle buffer is not in its state
        return DataLoader(stream, 3, **HOW[how])

    def epochs(loader: Any) -> Iterator[Any]:
        for epoch in range(loader.epoch, 3):
            loader.set_epoch(epoch)  # without it theirs begins every pass at the state that was loaded
            with running(loader) as iterator:
                while got := take(iterator, 1):
                    yield got, travelled(loader.state_dict())

    check(make, passes=1, everywhere=how == "inline")
    seen = list(epochs(make()))
    for count in range(0, len(seen), 5 if how == "inline" else 19):
        loader = make()
        loader.load_state_dict(seen[count][1])
        assert [batch for batch, _ in epochs(loader)] == [batch for batch, _ in seen[count + 1 :]], count


def double(row: dict[str, int]) -> dict[str, int]:
    return {"double": 2 * row["row"]}


def test_beside_a_loader_of_torchs() -> None:
    """Both with workers, in threads of one process."""
    results: dict[str, Any] = {}

    def run(name: str, loader: Any) -> None:
        results[name] = one_pass(loader)

    loaders = {
        "ours": STREAMS["StatefulStream"](num_workers=2),
        "torch's": torch.utils.data.DataLoader(StatefulStream(N), 3, num_workers=2, collate_fn=as_they_are),
    }
    threads = [threading.Thread(target=run, args=item) for item in loaders.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["ours"] == results["torch's"] == one_pass(loaders["torch's"])
