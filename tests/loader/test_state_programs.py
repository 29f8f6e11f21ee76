"""Random programs over users' objects with states: a run that stops anywhere goes on as the one that never stopped."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from full_run import examples, full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from state_program_support import MAPS, SAMPLERS, STREAMS, TOLD, GrowingJob, Program, Stop, continued, whole

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*has no state_dict")

HERE = ["none", "counting"]
"""Collate functions that draw from none of the trainer's generators."""
LIMITS = st.lists(st.sampled_from([None, None, 0, 1, 2, 4]), min_size=1, max_size=3).map(tuple)


def check(program: Program, stop: Stop, *, later: bool = True, **how: Any) -> None:
    """From a stop the rest of its epoch follows, and the later ones.

    An epoch of which a resumed run asks for nothing is left out, with all behind it: a generator that was put back
    stands there until it is asked. So is the moment between an epoch that was left and the first batch of the next one.
    """
    if stop.asked_for_no_more or stop.behind_a_left_epoch:
        return
    later = later and 0 not in program.epochs[stop.epoch + 1 :]
    rest, behind = continued(program, stop, later=later, **how)
    where = f"{program}, stopped at batch {stop.had} of epoch {stop.epoch}{', which was over' if stop.over else ''}"
    assert rest == stop.rest, where
    assert behind == (stop.later if later else []), where


@full_only("seconds of examples for each; wrapped by what counts, as bare", but=["counting"])
@pytest.mark.parametrize("collate", HERE)
@pytest.mark.parametrize("data", STREAMS)
@settings(max_examples=examples(3, 6))
@given(epochs=LIMITS)
def test_streams_inline(data: str, collate: str, epochs: tuple[int | None, ...]) -> None:
    program = Program(data, collate=collate, epochs=epochs)
    for stop in whole(program):
        check(program, stop)


@pytest.mark.parametrize("data", TOLD)
@settings(max_examples=examples(6, 30))
@given(epochs=LIMITS, tells=st.integers(0, 3), late=st.booleans(), collate=st.sampled_from(HERE))
def test_streams_that_are_told_their_epochs(
    data: str, epochs: tuple[int | None, ...], tells: int, late: bool, collate: str
) -> None:
    program = Program(data, collate=collate, epochs=epochs, tells=tells, late=late)
    for stop in whole(program):
        # A late epoch leaves the iterator that had begun, and what its data set was then is unknown.
        if not (late and stop.had == 0 and not stop.over and stop.epoch < tells):
            check(program, stop)


@pytest.mark.parametrize("data", MAPS)
@settings(max_examples=examples(4, 8))
@given(sampler=st.sampled_from(sorted(SAMPLERS)), collate=st.sampled_from(HERE), epochs=LIMITS)
def test_map_style_data_inline(data: str, sampler: str, collate: str, epochs: tuple[int | None, ...]) -> None:
    program = Program(data, sampler, collate, epochs)
    for stop in whole(program):
        check(program, stop)


PROCESSES: list[tuple[str, str, dict[str, Any]]] = [
    ("StatefulStream", "none", {"num_workers": 2, "persistent_workers": True}),
    ("Noisy", "counting", {"num_workers": 3}),
    ("PlainStream", "counting", {"num_workers": 2, "persistent_workers": True}),
    ("Breaking", "none", {"num_workers": 2}),
    ("LargeFailing", "none", {"num_workers": 1, "persistent_workers": True}),
    ("DrawingMap", "none", {"num_workers": 2, "persistent_workers": True}),
    ("DrawingMap", "counting", {"num_workers": 3}),
    ("Squares", "drawing", {"num_workers": 2}),
    ("FailingMap", "none", {"num_workers": 2, "persistent_workers": True}),
]


@full_only("workers for each of many examples", but=["Noisy-counting", "Breaking-none", "DrawingMap-none"])
@pytest.mark.parametrize(("data", "collate", "how"), PROCESSES, ids=lambda value: str(value))
def test_processes(data: str, collate: str, how: dict[str, Any]) -> None:
    program = Program(data, collate=collate)
    stops = whole(program, **how)
    over = next(number for number, stop in enumerate(stops) if stop.over)
    persistent = "persistent_workers" in how
    for number in (0, over // 2, over, (over + len(stops)) // 2):
        # New workers are seeded for each epoch, by the generator of whoever runs it.
        check(program, stops[number], later=persistent or not (data == "DrawingMap" or collate == "drawing"), **how)


@pytest.mark.parametrize("how", [{"num_workers": 1}, {"num_workers": 1, "executor": "thread"}], ids=str)
@pytest.mark.parametrize(
    ("data", "sampler", "collate"),
    [
        ("Noisy", "none", "none"),
        ("StatefulStream", "none", "counting"),
        ("PlainStream", "none", "counting"),
        ("CountingMap", "iterator", "counting"),
    ],
)
def test_another_executor(data: str, sampler: str, collate: str, how: dict[str, Any]) -> None:
    """An epoch goes on in a worker, which gets the state of the trainer's objects."""
    program = Program(data, sampler, collate)
    stops = whole(program)
    stop = stops[3]
    assert stop.had > 0
    assert stop.rest
    assert continued(program, stop, later=False, **how)[0] == stop.rest


def test_a_state_that_all_workers_share_fits_any_number_of_them() -> None:
    """Also where each worker has drawn from generators of its own, which are left behind."""
    program = Program("DrawingMap", collate="none")
    stop = whole(program, num_workers=2)[3]
    assert stop.had == 2  # one batch of each worker
    rest, _ = continued(program, stop, later=False, num_workers=1)
    numbers = [[sample[:2] for sample in batch] for batch in rest]
    assert numbers == [[[6, 4], [7, 5], [8, 6]], [[9, 7], [10, 8], [11, 9]], [[12, 10]]]


STEPS = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 10)),
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("skip"), st.integers(0, 4)),
    st.tuples(st.just("crash"), st.sampled_from([0, 0, 1, 6]), st.booleans(), st.booleans()),
)


@settings(max_examples=examples(15, 500))
@given(world_size=st.integers(1, 2), overtaking=st.booleans(), steps=st.lists(STEPS, min_size=3, max_size=12))
def test_a_job_over_a_file_that_grows(world_size: int, overtaking: bool, steps: list[tuple[Any, ...]]) -> None:
    """Growth, states of users' objects, batches that overtake, skipped ones, and iterators that cannot begin."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as env:
        job = GrowingJob(Path(folder) / "train.txt", world_size, env, overtaking=overtaking)
        for name, *arguments in [*steps, ("take", 20), ("take", 20)]:
            getattr(job, name)(*arguments)
        job.loader.close()
