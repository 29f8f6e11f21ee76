"""What every stream promises, as checks of a function that makes one resumable data set after the other."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from entries_support import opened
from interpreter_support import FULL

from penstock.errors import ConfigError
from penstock.plan.stream import ResumableDataset, Stream

__all__ = [
    "check_chosen_epochs",
    "check_chosen_in_the_middle",
    "check_every_cursor",
    "check_loaded_state",
    "check_purity",
    "texts",
    "through_json",
    "walk",
]

Make = Callable[[], ResumableDataset]


def through_json(cursor: Any, most: int = 3000) -> Any:
    """Return a cursor as another process gets it. It is small."""
    text = json.dumps(cursor)
    assert len(text) < most
    return json.loads(text)


def texts(items: Any) -> list[str]:
    """Return items in a form that can be compared, arrays among them too."""
    return [repr(item) for item in items]


def walk(stream: Stream) -> tuple[list[Any], list[Any]]:
    """Return the items of a stream, and its cursors: before the first item, behind each one, and behind the end."""
    items, cursors = [], [through_json(stream.cursor())]
    for item in stream:
        items.append(item)
        cursors.append(through_json(stream.cursor()))
    return items, [*cursors, through_json(stream.cursor())]


def check_every_cursor(make: Make, epoch: int) -> list[Any]:
    """Return an epoch's items. Opened at the cursor behind any of them, or behind the end, a stream gives the rest."""
    stream = make().open(epoch=epoch)
    assert isinstance(stream, Stream)
    items, cursors = walk(stream)
    assert len(items) > 6
    assert list(stream) == []
    expected, dataset = texts(items), make()
    for had in range(0, len(cursors), 1 if FULL else 2):
        cursor = cursors[had]
        again = dataset.open(cursor)
        assert through_json(again.cursor()) == cursor
        assert texts(again) == expected[had:], had
    assert texts(dataset) == texts(make().open(epoch=0)), "open() changes nothing"
    return items


def check_purity(make: Make) -> None:
    """Asking for a cursor changes nothing, and nothing that follows changes the answer."""
    asked, plain = make().open(epoch=1), make().open(epoch=1)
    for _ in range(5):
        next(asked)
        next(plain)
        before = asked.cursor()
        kept = copy.deepcopy(before)
        assert asked.cursor() == before
    rest = texts(asked)
    assert rest == texts(plain)
    assert before == kept
    again = make().open(kept)
    empty(kept)
    assert texts(again) == rest, "what becomes of a cursor is nothing to the stream"


def empty(value: Any) -> None:
    """Empty a cursor and all that is in it."""
    if isinstance(value, dict | list):
        for inside in list(value.values()) if isinstance(value, dict) else value:
            empty(inside)
        value.clear()


def check_chosen_epochs(make: Make) -> None:
    """An epoch that is chosen is the next one. One that is none is refused, and so is one beside a cursor."""
    dataset = make()
    for _ in range(2):
        list(dataset)
    dataset.set_epoch(1)
    assert texts(dataset) == texts(make().open(epoch=1))
    with pytest.raises(ConfigError, match="not both"):
        dataset.open(dataset.open().cursor(), epoch=1)
    for wrong in (lambda: dataset.open(epoch=-1), lambda: dataset.set_epoch(-1)):
        with pytest.raises(ConfigError, match="0 or more"):
            wrong()


def check_loaded_state(make: Make) -> None:
    """A state that was loaded is used once, also if its own epoch is chosen; another epoch gives it up."""
    dataset = make()
    stream = iter(dataset)
    had = texts(next(stream) for _ in range(6))
    state = through_json(dataset.state_dict())
    assert opened(state) == through_json(stream.cursor())
    other = make()
    other.load_state_dict(state)
    other.set_epoch(0)  # programs say so before each epoch, of the one they resume in, too
    assert through_json(other.state_dict()) == state
    assert had + texts(other) == texts(make().open(epoch=0))
    following = texts(other)
    assert following == (texts(dataset) if texts(stream) else None)
    other.load_state_dict(state)
    other.set_epoch(2)  # gives it up
    assert texts(other) == texts(make().open(epoch=2))


def check_chosen_in_the_middle(make: Make) -> None:
    """A state says the epoch that was chosen since the last iterator began."""
    dataset = make()
    next(iter(dataset))
    dataset.set_epoch(5)
    other = make()
    other.load_state_dict(through_json(dataset.state_dict()))
    assert texts(other) == texts(make().open(epoch=5))
