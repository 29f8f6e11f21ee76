"""The suite that every loader and data set with a place goes through: stop anywhere, go on anywhere.

Each check takes a function that makes the thing anew, so nothing is carried over but the state, as JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from leak_support import assert_nothing_more, left
from loader_support import plain

from penstock import DataLoader
from penstock.errors import WorkerError

Make = Callable[[], Any]
MakeRank = Callable[[int, int], Any]


def travelled(state: Any) -> Any:
    """A state after a trip through JSON, which has to be small and may not change it."""
    text = json.dumps(state)
    assert len(text) < 1000, f"a state of {len(text)} bytes"
    assert json.loads(text) == state
    return json.loads(text)


def record(loader: Any, passes: int) -> tuple[list[Any], list[Any], dict[int, Any]]:
    """Batches of some passes, the state before the first and after each, and by count the state after each pass."""
    seen: list[Any] = []
    states = [travelled(loader.state_dict())]
    ends: dict[int, Any] = {}
    for _ in range(passes):
        for batch in loader:
            seen.append(plain(batch))
            states.append(travelled(loader.state_dict()))
        ends[len(seen)] = travelled(loader.state_dict())
    return seen, states, ends


def go_on(loader: Any, count: int, passes: int) -> list[Any]:
    """The next ``count`` batches, over as many passes as it takes (``passes`` and one at most)."""
    rest: list[Any] = []
    for _ in range(passes + 1):
        if len(rest) == count:
            break
        for batch in loader:
            rest.append(plain(batch))
            if len(rest) == count:
                break
    return rest


def check_resume(
    make: Make, *, passes: int = 3, positions: Iterable[int] | None = None, other: Make | None = None
) -> None:
    """A new object that loads the state after batch k gives batches k, k + 1, ... of the uninterrupted run."""
    seen, states, ends = record(make(), passes)
    assert len(states) == len(seen) + 1
    assert len(seen) >= passes, "a check of nothing"
    for k in range(len(states)) if positions is None else positions:
        loader = (other or make)()
        loader.load_state_dict(states[k])
        assert travelled(loader.state_dict()) == states[k], f"state right after loading that of batch {k}"
        assert go_on(loader, len(seen) - k, passes) == seen[k:], f"resumed after batch {k}"
    for k, state in list(ends.items())[:-1]:
        loader = make()
        loader.load_state_dict(state)
        assert go_on(loader, len(seen) - k, passes) == seen[k:], f"resumed between passes, after batch {k}"


def check_end_of_pass(make: Make) -> None:
    """After the last batch: inside the loop there is nothing left, after the loop a whole pass."""
    loader = make()
    inside = None
    first = 0
    for _ in loader:
        first += 1
        inside = travelled(loader.state_dict())
    after = travelled(loader.state_dict())
    second = [plain(batch) for batch in loader]
    again = make()
    again.load_state_dict(inside)
    assert [plain(batch) for batch in again] == []
    assert [plain(batch) for batch in again] == second
    again = make()
    again.load_state_dict(after)
    assert [plain(batch) for batch in again] == second
    assert first > 0


def check_load_into_used(make: Make, *, old_goes_on: bool = True) -> None:
    """Loading takes effect at the next ``iter()``, whatever the loader has done; the old iterator harms nothing: it
    goes on, or (``old_goes_on=False``, persistent workers) it raises.
    """
    loader = make()
    seen, states, _ = record(make(), 2)
    old = iter(loader)
    assert [plain(next(old)), plain(next(old))] == seen[:2]
    loader.load_state_dict(states[1])
    assert travelled(loader.state_dict()) == states[1]
    new = iter(loader)
    got = [plain(next(new))]
    if old_goes_on:
        assert (
            seen[:2] + [plain(batch) for batch in old] == record(make(), 1)[0]
        )  # and must not end the new one's epoch
    else:
        with pytest.raises(RuntimeError, match="newer iterator"):
            next(old)
    got += [plain(batch) for batch in new]
    got += go_on(loader, len(seen) - 1 - len(got), 2)
    assert got == seen[1:]


def check_close(make: Make) -> None:
    """`close()` ends every pass that is held, with its threads and processes; whoever asks for more is told so, a pass
    that was over stays over, and the next one begins anew.
    """
    before = left()
    loader = make()
    whole = list(over := iter(loader))
    held = [iter(loader) for _ in range(2)]
    expected = [plain(next(iterator)) for iterator in held[-1:]]  # persistent workers make the last one's alone
    state = travelled(loader.state_dict())
    for _ in range(2):
        loader.close()
        for iterator in held * 2:
            with pytest.raises(WorkerError, match="its DataLoader was closed"):
                next(iterator)
        assert next(over, None) is None
        assert_nothing_more((before[0], left()[1], *before[2:]))
    assert travelled(loader.state_dict()) == state
    again = make()
    again.load_state_dict(state)
    assert len(expected + [plain(batch) for batch in again]) == len(whole)
    assert len([plain(batch) for batch in loader]) == len(whole)
    loader.close()


def check_chain(make: Make, stops: list[int]) -> None:
    """States of resumed runs resume as well."""
    passes = 2
    seen, states, _ = record(make(), passes)
    state, done = states[0], 0
    for stop in stops:
        loader = make()
        loader.load_state_dict(state)
        got = go_on(loader, stop, passes)
        assert got == seen[done : done + stop]
        state, done = travelled(loader.state_dict()), done + stop
    assert done <= len(seen)


def check_elastic(
    make: MakeRank, rows_of: Callable[[Any], list[int]], n: int, stages: list[tuple[int, int]], *, padded: bool = True
) -> None:
    """Stages of (world size, batches of every rank before the stop), the last to the end of the epoch.

    Every row is had at least once, and repeats are fewer than the ranks (times mini-epochs) that ended the epoch.
    """
    state, had = None, Counter[int]()
    for number, (world, count) in enumerate(stages):
        loaders = [make(rank, world) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        last = number == len(stages) - 1
        state = _advance(loaders, None if last else count, rows_of, had)
    assert sorted(had) == list(range(n)), f"lost: {sorted(set(range(n)) - set(had))}"
    repeats = sum(had.values()) - n
    assert repeats == 0 if not padded else repeats < max(world for world, _ in stages) * _parts(loaders[0])


def _advance(loaders: list[Any], count: int | None, rows_of: Callable[[Any], list[int]], had: Counter[int]) -> Any:
    left = count
    while loaders[0].epoch == 0 and (left is None or left > 0):
        iterators = [iter(loader) for loader in loaders]
        while left is None or left > 0:
            got = [next(iterator, None) for iterator in iterators]
            if got[0] is None:
                break
            for batch in got:
                had.update(rows_of(batch) if batch is not None else [])
            left = None if left is None else left - 1
    return travelled(loaders[0].state_dict())


def _parts(loader: DataLoader[Any]) -> int:
    return int(getattr(loader.dataset, "mini_epochs", 1))
