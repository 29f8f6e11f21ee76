"""Random programs over every kind of data set: what a job delivers is what arithmetic says, however it is interrupted.

A program runs on several ranks in lock step. It is ended and goes on from a state in new objects, with another number
of ranks, batch size or executor; it chooses epochs and mini-epochs, breaks off, and goes on to the next epoch. The
measure is the place of every sample in the order of its epoch (`random_source_support.Job`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from dataset_support import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from random_source_support import Case, Job, N, Setup, Step, StreamCase, StreamJob, cases, streams
from source_cases import write_text

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:.*has no state_dict", "ignore:.*does not declare itself pure"
)

FULL = os.environ.get("PENSTOCK_TEST_FULL") == "1"
EVERY_RUN = settings(derandomize=not FULL, print_blob=True, max_examples=400 if FULL else 5)
"""The same programs each time; many new ones in `make test-full`, where a failure prints what repeats it."""

NAMES = [
    "text",
    "csv",
    "jsonl",
    "parquet",
    "arrow",
    "in blocks",
    "unshuffled",
    "pictures",
    "videos",
    "robots",
    "arrays",
    "labelled arrays",
    "arrays in batches",
    "tokens",
    "documents",
    "parquet table",
    "arrow table",
    "shards",
    "MDS",
    "compressed MDS",
    "server",
    "LMDB",
    "a user's source",
    "stream of rows",
    "mixture",
    "mixture with a subset",
    "somebody's",
    "concatenated",
    "tensors",
    "shards under a sampler",
    "served rows under a sampler",
]
STREAMS = [
    "shards",
    "shuffled shards",
    "mixed shards",
    "mixed streams",
    "pipeline",
    "a user's with a state",
    "a user's with stateful iterators",
    "a user's without a state",
    "a share under a sampler",
    "a share under torch's sampler",
    "mini-epochs under a sampler",
]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Case]]:
    folder = tmp_path_factory.mktemp("sources")
    write_text(folder / "train.txt", range(N))
    with serving(train=folder / "train.txt") as (address, _):
        yield cases(folder, address)


@pytest.fixture(scope="module")
def kinds_of_streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StreamCase]:
    return streams(tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, kinds: dict[str, Case]) -> Case:
    return kinds[request.param]


@pytest.fixture(scope="module", params=STREAMS)
def stream(request: pytest.FixtureRequest, kinds_of_streams: dict[str, StreamCase]) -> StreamCase:
    return kinds_of_streams[request.param]


def test_every_kind_is_here(kinds: dict[str, Case], kinds_of_streams: dict[str, StreamCase]) -> None:
    assert (list(kinds), list(kinds_of_streams)) == (NAMES, STREAMS)


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "world": st.integers(1, 3),
        "batch_size": st.integers(1, 6),
        "executor": st.sampled_from(["inline", "inline", "thread"]),
    },
)
CRASH = st.tuples(st.just("crash"), CHANGES, st.integers(0, 2), st.booleans())
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("finish")),
    CRASH,
    CRASH,
    st.tuples(st.just("leave")),
    st.tuples(st.just("set_epoch"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("set_mini_epoch"), st.integers(0, 2)),
)
PROGRAMS = st.lists(STEPS, min_size=2, max_size=10).map(lambda steps: [*steps, ("finish",), ("take", 2)])
STREAM_STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("finish")),
    CRASH,
    st.tuples(st.just("set_epoch"), st.integers(0, 3), st.booleans()),
)
SETUPS = st.builds(
    Setup,
    world=st.integers(1, 3),
    batch_size=st.integers(1, 6),
    executor=st.sampled_from(["inline", "inline", "inline", "thread"]),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
    mini_epochs=st.integers(1, 3),
    drop_last=st.booleans(),
)


@EVERY_RUN
@given(setup=SETUPS, program=PROGRAMS)
def test_a_job_delivers_what_arithmetic_says(case: Case, setup: Setup, program: list[Step]) -> None:
    Job(case, setup if case.minis else Setup(**(vars(setup) | {"mini_epochs": 1})))(program)


@EVERY_RUN
@given(
    world=st.integers(1, 3),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    program=st.lists(STREAM_STEPS, min_size=2, max_size=8).map(lambda steps: [*steps, ("finish",), ("take", 2)]),
)
def test_a_stream_goes_on_as_if_it_never_stopped(
    stream: StreamCase,
    world: int,
    batch_size: int,
    drop_last: bool,
    program: list[Step],
) -> None:
    StreamJob(stream, min(world, stream.ranks), batch_size, drop_last)(program)


SELDOM: dict[str, list[Step]] = {
    "a mini-epoch is over, and two worlds are smaller": [
        *[("take", 1)] * 2,
        ("crash", {"world": 3}, 0, False),
        ("crash", {"world": 1}, 2, True),
        ("crash", {"world": 2}, 0, False),
        ("finish",),
        ("finish",),
        ("finish",),
    ],
    "the mini-epoch of the change begins once more": [
        ("finish",),
        ("take", 1),
        ("crash", {"world": 3, "batch_size": 1}, 0, False),
        ("take", 1),
        ("leave",),
        ("set_mini_epoch", 1),
        ("finish",),
        ("finish",),
    ],
    "an epoch chosen for a data set gives a state up": [
        ("take", 1),
        ("crash", {}, 0, False),
        ("set_epoch", 2, True),
        ("finish",),
        ("finish",),
    ],
}
"""Programs by what happens in them; random ones seldom get there."""


@pytest.mark.parametrize("what", SELDOM)
@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
def test_a_job_goes_where_few_go(kinds: dict[str, Case], what: str, remainder: str) -> None:
    Job(kinds["text"], Setup(world=2, batch_size=3, remainder=remainder, mini_epochs=2))(SELDOM[what])


ALL_KINDS_OF_STEPS: list[Step] = [
    ("take", 2),
    ("crash", {"world": 1}, 1, True),
    ("take", 1),
    ("crash", {"batch_size": 3}, 0, False),
    ("finish",),
    ("take", 1),
]


@pytest.mark.parametrize("name", ["text", "arrays in batches", "compressed MDS", "mixture", "concatenated"])
def test_a_job_in_processes(kinds: dict[str, Case], name: str) -> None:
    Job(kinds[name], Setup(world=2, executor="process", remainder="uneven"))(ALL_KINDS_OF_STEPS)


@pytest.mark.parametrize("name", ["mixed shards", "a user's with a state"])
def test_a_stream_in_processes(kinds_of_streams: dict[str, StreamCase], name: str) -> None:
    StreamJob(kinds_of_streams[name], 1, 4, drop_last=False, workers=2)(ALL_KINDS_OF_STEPS)
