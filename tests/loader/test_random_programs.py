"""Random programs: a run that is interrupted sees the same batches as the run that never stopped.

A program sets epochs, iterates, breaks off and begins again. Its interruptions are crashes with a resume in new
objects, evaluation passes over the same sampler, iteration by hand, copies, and questions. The measure is the same
program without them, and for torch's own samplers torch's loader too.

Left out is what no state can tell: an epoch set in mid-pass for the pass after, and what a pass of chance would have
drawn of which no batch was had.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import pytest
import torch
from entries_support import opened
from hypothesis import given, settings
from hypothesis import strategies as st
from random_program_support import LOADERS_SEED, N, Run, Setup, Step, TorchRun, kinds, loader_of, order_of, torchs_parts

import penstock as ps

pytestmark = pytest.mark.filterwarnings("ignore:.*starts a second time")

FULL = os.environ.get("PENSTOCK_TEST_FULL") == "1"
EXAMPLES = 1500 if FULL else 40
EVERY_RUN = settings(derandomize=not FULL, print_blob=True)
"""The same programs each time; new ones in `make test-full`, where a failure prints what repeats it."""


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("rows") / "meta.txt"
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(N)))
    return kinds(ps.Manifest.open(path))


NAMES = sorted(kinds(None))
EPOCH = st.integers(0, 4)
COURSE = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("begin")),
    st.tuples(st.just("finish")),
    st.tuples(st.just("leave")),
    st.tuples(st.just("set_epoch"), EPOCH),
    st.tuples(st.just("set_subject_epoch"), EPOCH),
    st.tuples(st.just("set_mini_epoch"), st.integers(0, 2)),
)
STOPS = st.one_of(
    st.tuples(st.just("crash"), st.just({}), st.booleans()),
    st.tuples(st.just("crash"), st.just({}), st.booleans()),
    st.tuples(st.just("state")),
    st.tuples(st.just("look")),
    st.tuples(st.just("evaluate"), st.integers(1, 9)),
    st.tuples(st.just("walk"), st.integers(1, 9)),
    st.tuples(st.just("copy"), st.sampled_from(["deepcopy", "pickle"])),
)
PROCESS_STEPS: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.just("finish")),
    st.tuples(st.just("leave")),
    st.tuples(st.just("crash"), st.just({}), st.booleans()),
    st.tuples(st.just("state")),
)
PROGRAMS = st.lists(st.one_of(COURSE, STOPS), min_size=2, max_size=14).map(
    lambda steps: [*steps, ("finish",), ("take", 2)]
)


@st.composite
def setups(draw: st.DrawFn, name: str, executors: list[str]) -> Setup:
    world = draw(st.integers(1, 3))
    remainders = ["pad", "drop"] if name.startswith("torch") else ["pad", "drop", "uneven"]
    return Setup(
        batch_size=draw(st.integers(1, 7)),
        world=world,
        rank=draw(st.integers(0, world - 1)),
        executor=draw(st.sampled_from(executors)),
        seed=draw(st.sampled_from([None, 5])) if name.startswith(LOADERS_SEED) else None,
        remainder=draw(st.sampled_from(remainders)),
        drop_last=draw(st.booleans()),
    )


@settings(EVERY_RUN, max_examples=(4 if FULL else 2) * EXAMPLES)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_an_interrupted_program_is_one_that_never_stopped(makers: Any, data: st.DataObject, name: str) -> None:
    setup = data.draw(setups(name, ["inline", "inline", "inline", "thread"]), label="setup")
    program: list[Step] = data.draw(PROGRAMS, label="program")
    expected = Run(makers[name], setup, stops=False)(program)
    assert Run(makers[name], setup, stops=True)(program) == expected


@settings(EVERY_RUN, max_examples=100 if FULL else 3)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_a_program_is_interrupted_in_processes(makers: Any, data: st.DataObject, name: str) -> None:
    setup = data.draw(setups(name, ["process"]), label="setup")
    program: list[Step] = data.draw(st.lists(PROCESS_STEPS, min_size=2, max_size=6), label="program")
    expected = Run(makers[name], setup, stops=False)([*program, ("finish",)])
    assert Run(makers[name], setup, stops=True)([*program, ("finish",)]) == expected


TORCHS_OWN = [
    "torch-random",
    "torch-random-generator",
    "torch-random-many",
    "torch-distributed",
    "torch-distributed-none",
    "torch-subset",
    "torch-subset-generator",
    "torch-weighted",
    "torch-weighted-generator",
    "torch-sequential",
    "list",
    "batch-list",
    "shuffle",
    "shuffle-generator",
    "no-shuffle",
]
LIKE_TORCHS = [
    "distributed-True",
    "distributed-False",
    "random",
    "random-generator",
    "random-generator-many",
    "random-many",
    "random-replacement",
    "sequential",
    "batch-unseeded",
]
UNDER_TORCH = st.lists(
    COURSE.filter(lambda step: step[0] not in ("set_epoch", "set_mini_epoch")), min_size=2, max_size=14
)


def under_torch(makers: Any, name: str, setup: Setup, program: list[Step]) -> None:
    parts = makers[name](setup) if name in TORCHS_OWN else torchs_parts(name, setup)
    expected = TorchRun(parts, setup)([*program, ("finish",), ("take", 2)])
    ours = Run(makers[name], setup, stops=False)
    ours.by_chance = False
    assert order_of(ours([*program, ("finish",), ("take", 2)])) == order_of(expected)


@settings(EVERY_RUN, max_examples=EXAMPLES)
@given(data=st.data(), name=st.sampled_from([*TORCHS_OWN, *LIKE_TORCHS]))
def test_a_program_with_torchs_samplers_sees_what_torchs_loader_gives(
    makers: Any, data: st.DataObject, name: str
) -> None:
    setup = data.draw(setups(name, ["inline"]), label="setup")
    remainder = "pad" if setup.remainder == "uneven" else setup.remainder
    setup = Setup(**(vars(setup) | {"seed": None, "remainder": remainder}))
    program = data.draw(UNDER_TORCH, label="program")
    if "distributed" not in name:  # torch's others take no epoch
        program = [step for step in program if step[0] != "set_subject_epoch"]
    under_torch(makers, name, setup, program)


OF_SAMPLES = [
    *(f"distributed-{shuffle}" for shuffle in (True, False, "global", "block", "none")),
    "batch",
    "torch-distributed",
    "rank-dataset",
    "rank-dataset-block",
    "mp-dataset",
]
OF_BATCHES = [
    *("grouped", "grouped-torch", "grouped-first", "grouped-class", "grouped-random", "grouped-repeated"),
    "token-budget",
]


def stream_of(make: Any, setup: Setup, epoch: int, *, samples: bool) -> list[Any]:
    """Return the samples, or batches, of a whole epoch of one rank, by one loader."""
    parts = make(setup)
    loader = loader_of(parts, setup)
    (parts.subject if hasattr(parts.subject, "num_replicas") else loader).set_epoch(epoch)
    batches = list(itertools.islice(loader, 4 * N))
    return [sample for batch in batches for sample in batch] if samples else batches


class Job:
    """All ranks of a job in lock step, which is stopped and goes on with other ranks, batch sizes and executors.

    Args:
        make: makes the parts of one rank's loader.
        setup: of the job; its rank, world, batch size and executor change.
        stream: all samples of the epoch, or its batches.
        samples: whether samples are counted.
        bare: whether draws are left out: those of torch's rules are each rank's own.
    """

    def __init__(self, make: Any, setup: Setup, stream: list[Any], *, samples: bool, bare: bool) -> None:
        self.make, self.setup, self.stream, self.samples, self.bare = make, setup, stream, samples, bare
        self.consumed = 0
        self.state: Any = None

    def stage(self, world: int, batch_size: int, executor: str, steps: int | None, saver: int) -> None:
        """Go on from the last state for so many batches of each rank (None: to the end), and save."""
        size = batch_size if self.samples else 1
        left = (len(self.stream) - self.consumed) // world // size
        # An epoch of ``remainder="drop"`` that was had to its end has no rest, on however few ranks.
        ends = self.setup.remainder == "drop" and left * size == (len(self.stream) - self.consumed) // world
        if steps is not None and left < ends + (self.setup.remainder == "drop"):
            return
        steps = None if steps is None else min(steps, left - ends)
        found, states = [], []
        for rank in range(world):
            changes = {"world": world, "rank": rank, "batch_size": batch_size, "executor": executor}
            setup = Setup(**(vars(self.setup) | changes))
            with loader_of(self.make(setup), setup) as loader:
                if self.state is not None:
                    loader.load_state_dict(self.state)
                batches = list(itertools.islice(loader, steps))
                states.append(json.loads(json.dumps(loader.state_dict())))
            found.append([sample for batch in batches for sample in batch] if self.samples else batches)
        self._check(found, world, whole=steps is None)
        self.state = states[saver % world]
        if steps is not None:
            assert all(opened(state)["sampler"] == opened(self.state)["sampler"] for state in states)
            self.consumed += steps * size * world

    def _check(self, found: list[list[Any]], world: int, *, whole: bool) -> None:
        n = len(self.stream)
        for rank, units in enumerate(found):
            for number, unit in enumerate(units):
                position = self.consumed + number * world + rank
                expected = self.stream[position % n]
                if position < n and not self.bare:
                    assert unit == expected, f"position {position}"
                else:
                    assert self._index(unit) == self._index(expected), f"position {position}"
        if whole:
            left = n - self.consumed
            counts = {
                "pad": [-(-left // world)] * world,
                "drop": [left // world] * world,
                "uneven": [max(0, -(-(left - rank) // world)) for rank in range(world)],
            }
            assert [len(units) for units in found] == counts[self.setup.remainder]

    def _index(self, unit: Any) -> Any:
        return unit[0] if self.samples else [index for index, _ in unit]


@settings(EVERY_RUN, max_examples=EXAMPLES)
@given(data=st.data(), name=st.sampled_from([*OF_SAMPLES, *OF_BATCHES]))
def test_a_job_that_changes_its_size_sees_every_sample_once(makers: Any, data: st.DataObject, name: str) -> None:
    samples = name in OF_SAMPLES
    remainders = ["pad", "drop"] if name == "torch-distributed" else ["pad", "drop", "uneven"]
    if name in ("grouped-random", "grouped-repeated"):
        remainders = ["pad"]
    size = data.draw(st.integers(1, 7), label="batch size")
    setup = Setup(batch_size=size, remainder=data.draw(st.sampled_from(remainders), label="remainder"))
    whole = Setup(batch_size=size, remainder="pad")
    job = Job(
        makers[name],
        setup,
        stream_of(makers[name], whole, 0, samples=samples),
        samples=samples,
        bare=name.endswith(("True", "False")) or "torch" in name,
    )
    sizes = st.integers(1, 7) if samples else st.just(size)
    stages = st.tuples(
        st.integers(1, 4), sizes, st.sampled_from(["inline", "inline", "thread"]), st.integers(0, 4), st.integers(0, 3)
    )
    for stage in data.draw(st.lists(stages, max_size=4), label="stages"):
        job.stage(*stage)
    world, batch_size, executor, _, saver = data.draw(stages, label="last stage")
    job.stage(world, batch_size, executor, None, saver)


BY_CHANCE = [
    name
    for name in NAMES
    if name.startswith(("random", "weighted", "torch", "shuffle", "sequential", "no-shuffle", "list"))
]


@settings(EVERY_RUN, max_examples=EXAMPLES)
@given(data=st.data(), name=st.sampled_from(BY_CHANCE))
def test_a_resume_with_another_batch_size_goes_on_at_the_same_sample(
    makers: Any, data: st.DataObject, name: str
) -> None:
    setup = data.draw(setups(name, ["inline"]), label="setup")
    setup = Setup(**(vars(setup) | {"drop_last": False, "world": 1, "rank": 0}))
    # Of somebody else's sampler the draws go by batches.
    bare = name == "list"
    torch.manual_seed(1)
    stream = [sample for batch in loader_of(makers[name](setup), setup) for sample in batch]
    torch.manual_seed(1)
    seen: list[Any] = []
    state: Any = None
    for size, steps in data.draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4)), max_size=4), label="stages"):
        changed = Setup(**(vars(setup) | {"batch_size": size}))
        loader = loader_of(makers[name](changed), changed)
        if state is not None:
            loader.load_state_dict(state)
        seen += [sample for batch in itertools.islice(loader, steps) for sample in batch]
        state = json.loads(json.dumps(loader.state_dict()))
        if len(seen) == len(stream):
            break
    if state is None or len(seen) < len(stream):
        loader = loader_of(makers[name](setup), setup)
        if state is not None:
            loader.load_state_dict(state)
        seen += [sample for batch in loader for sample in batch]
    assert (order_of([seen]) if bare else seen) == (order_of([stream]) if bare else stream)
