"""Errors from workers: whatever users raise arrives as that, with the worker's traceback, or as text."""

from __future__ import annotations

import gc
import json
import pickle
import traceback
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import FULL, run
from process_support import RAISERS, Mute, Raises, TwoWords, Unspeakable

from penstock import DataLoader
from penstock.loader.exceptions import RemoteError, describe, rebuild

WHERE = "in DataLoader worker process 3"


def travel(error: BaseException) -> BaseException:
    remote = pickle.loads(pickle.dumps(describe(error, WHERE)))
    assert isinstance(remote, RemoteError)
    return rebuild(remote)


def caught(name: str) -> BaseException:
    try:
        RAISERS[name]()
    except Exception as error:
        return error
    raise AssertionError


TYPES = {
    "value": ValueError,
    "key": KeyError,
    "unicode": RuntimeError,
    "json": RuntimeError,
    "two words": RuntimeError,
    "called process": RuntimeError,
    "keyword": RuntimeError,
    "no words": RuntimeError,
    "unspeakable": Unspeakable,
    "mute": Mute,
    "unpicklable": ValueError,
    "local": RuntimeError,
    "not an error": RuntimeError,
    "group": RuntimeError,
    "chained": LookupError,
    "system": OSError,
    "file": FileNotFoundError,
    "stop": StopIteration,
    "import": ImportError,
    "assertion": AssertionError,
    "recursion": RecursionError,
    "surrogate": ValueError,
    "huge": ValueError,
    "syntax": SyntaxError,
    "attribute": AttributeError,
    "torch": RuntimeError,
}


@pytest.mark.parametrize("name", RAISERS)
def test_types_and_text(name: str) -> None:
    error = caught(name)
    ours = travel(error)
    assert type(ours) is TYPES[name]
    text = ours.__notes__[0] if name in ("unspeakable", "mute") else str(ours)
    assert text.startswith(f"Caught {type(error).__name__} {WHERE}.\nOriginal ")
    assert f"in raise_{name.replace(' ', '_')}\n" in text
    assert text in "".join(traceback.format_exception(ours))  # not in quotes
    pickle.loads(pickle.dumps(describe(ours, "elsewhere")))  # of a loader within a loader


def test_every_error_has_its_own_name_in_the_text() -> None:
    for name in RAISERS:
        assert describe(caught(name), WHERE).name == type(caught(name)).__name__


def test_key_error_prints_lines() -> None:
    text = str(travel(caught("key")))
    assert "KeyError: 'a\\nb'" in text.replace("\\\\n", "\\n")
    assert text.count("\n") > 3


def test_chained_causes_are_in_the_text() -> None:
    text = str(travel(caught("chained")))
    assert "ZeroDivisionError: division by zero" in text
    assert "The above exception was the direct cause" in text
    assert "LookupError: no such luck" in text


def test_groups_tell_all() -> None:
    text = str(travel(caught("group")))
    assert "ValueError: one" in text
    assert "TypeError: other" in text


def test_notes() -> None:
    error = caught("value")
    error.add_note("while loading sample 7")
    ours = travel(error)
    assert ours.__notes__ == ["while loading sample 7"]
    assert "while loading sample 7" in str(ours)
    assert not hasattr(travel(caught("value")), "__notes__")


@pytest.mark.parametrize("notes", [None, 5, [5, None, "good"], "abc"])
def test_notes_that_are_none(notes: Any) -> None:
    error = caught("value")
    error.__notes__ = notes
    assert isinstance(travel(error), ValueError)


def test_a_type_that_cannot_be_imported_here() -> None:
    remote = describe(ValueError("x"), WHERE)._replace(kind=b"cno_such_module\nError\n.", name="Error")
    ours = rebuild(remote)
    assert type(ours) is RuntimeError
    assert str(ours).startswith(f"Caught Error {WHERE}.")


def test_what_has_two_words_keeps_its_text() -> None:
    with pytest.raises(TwoWords):
        raise caught("two words")
    assert "first, second" in str(travel(caught("two words")))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", [name for name in RAISERS if name != "stop"])
def test_through_a_worker(name: str) -> None:
    gc.collect()  # what others have left ends here, and not in the depths of a recursion
    loader = DataLoader(Raises(name), 2, num_workers=1, executor="process")
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(TYPES[name]) as info:
        next(batches)
    if name not in ("unspeakable", "mute"):
        assert f"Caught {type(caught(name)).__name__} in DataLoader worker process 0.\n" in str(info.value)
    assert any("sample 3" in note for note in info.value.__notes__)
    assert next(batches).tolist() == [4, 5]  # and the worker goes on


@full_only("spawns workers that import everything anew; what is sent is tested without")
def test_types_of_the_main_module(tmp_path: Any) -> None:
    """A script's own errors: workers know its module by another name under spawn."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import json, sys, warnings
from penstock import DataLoader
class Own(Exception): pass
class Data:
    def __len__(self): return 4
    def __getitem__(self, index): raise Own(f"sample {index}")
if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = []
    for method in sys.argv[1:]:
        try:
            list(DataLoader(Data(), 2, num_workers=1, executor="process", multiprocessing_context=method))
        except Own as error:
            found.append(method)
    print(json.dumps(found))
"""
    )
    methods = ["fork", "spawn", "forkserver"] if FULL else ["spawn"]
    done = run([str(script), *methods], timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == methods
