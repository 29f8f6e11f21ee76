"""Keep for ``PENSTOCK_TEST_FULL=1`` what takes long, where something quicker shows the same.

A test, or all of its cases but some, which are named by their ids::

    @full_only("a process for each; inline has all", but=["StatefulStream-two", "tensors-one"])
    @pytest.mark.parametrize(...)
    def test_workers(...): ...

and examples of Hypothesis: ``@settings(max_examples=examples(4, 60))``. CONTRIBUTING.md lists who does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from interpreter_support import FULL


def full_only(reason: str, *, but: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Keep a test, or a class of tests, for a full run, except some cases.

    Args:
        reason: why it takes long, or what shows the same in less time.
        but: cases that are always run: their ids, or parts of them between dashes (``process`` stands for
            ``process-1`` and ``first-process``).
    """
    assert not isinstance(but, str)
    return pytest.mark.full_only(f"{reason}; PENSTOCK_TEST_FULL=1", tuple(but))


def examples(few: int, every: int) -> int:
    """Return how many examples of Hypothesis a test has: `every` in a full run."""
    return every if FULL else few


def keep_for_full(items: Iterable[pytest.Item]) -> None:
    """Skip what `full_only` keeps, unless this is a full run.

    Raises:
        pytest.UsageError: none of a test's cases has an id that it names: they have changed.
    """
    cases, found = Counter[str](), Counter[str]()
    for item in items:
        test, _, case = item.nodeid.rstrip("]").partition("[")
        for mark in item.iter_markers("full_only"):
            reason, but = mark.args
            runs = any(f"-{part}-" in f"-{case}-" for part in but)
            if not (FULL or runs):
                item.add_marker(pytest.mark.skip(reason))
            if but:
                cases[test] += 1
                found[test] += runs
    # One case alone may have been selected by its id.
    if changed := [test for test in cases if cases[test] > 1 and not found[test]]:
        raise pytest.UsageError(f"full_only names no case of {', '.join(changed)}")
