"""What every plan promises to its readers, whatever it is a plan of.

A new plan is one entry in `plan_cases.CASES`; everything below then applies to it. What samplers promise to those who
iterate them by themselves is in tests/samplers/conformance.
"""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from entries_support import closed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreter_support import FULL
from plan_cases import BATCHES, CASES, SAMPLES, Case, N, Told

from penstock.errors import SamplerError, StateError
from penstock.manifest import Manifest
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import BatchEpochPlan, EpochPlan
from penstock.plan.reader import Draws, Plan, PlanReader
from penstock.samplers import RandomSampler

TAKE = 90  # more than any finite case has; of the endless ones, so many
WORLD = 3


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    path = tmp_path_factory.mktemp("plans") / "rows.txt"
    path.write_text("".join(f"{row}.jpg {row % 5}\n" for row in range(N)))
    return Manifest.open(path)


class Maker:
    """Makes plans of one case, all alike."""

    def __init__(self, name: str, manifest: Manifest) -> None:
        self.name, self.case = name, CASES[name]
        self._manifest = manifest

    def __call__(self, world: int = 1, rank: int = 0) -> Told:
        return self.case.make(self._manifest, world, rank)

    def reader(self, **options: Any) -> PlanReader[Any]:
        return PlanReader(self().plan, **options)

    def loaded(self, state: Any) -> PlanReader[Any]:
        """Return a reader in another process, which goes on from a state."""
        torch.default_generator.manual_seed(77)
        reader = self.reader()
        reader.choose(reader.plan.read(through_json(state)), loaded=True)
        return reader


def these(cases: dict[str, Case], **wanted: Any) -> pytest.MarkDecorator:
    """Return the mark that has a test run for those cases of which the attributes are as wanted."""
    names = [name for name, case in cases.items() if all(getattr(case, key) in wanted[key] for key in wanted)]
    return pytest.mark.parametrize("make", names, indirect=True)


@pytest.fixture
def make(request: pytest.FixtureRequest, manifest: Manifest) -> Maker:
    torch.default_generator.manual_seed(11)
    return Maker(request.param, manifest)


every = these(CASES)
samples = these(SAMPLES)
batches = these(BATCHES)
settled = these(CASES, chance=("",))
"""Plans that draw nothing: an epoch is the same one for all readers."""
shared = these(CASES, chance=("", "global"), moves=(False,))
"""Plans that read nothing that another reader moves."""


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def items(run: Any, count: int = TAKE) -> list[Any]:
    """Return the first samples or batches of an epoch plan with their positions, in plain numbers."""
    if isinstance(run, BatchEpochPlan):
        return [plain(run, *batch) for batch in itertools.islice(run, count)]
    count = min(count, length(run))
    pairs = zip(*run.block(0, count), strict=True)
    return [plain(run, index, position) for index, position in pairs]


def plain(run: Any, indices: Any, positions: Any) -> tuple[Any, Any]:
    """Return a sample or a batch in plain numbers, without indices that count from where a share was bound."""
    where, found = np.asarray(positions).tolist(), indices if isinstance(indices, list) else int(indices)
    return (None, where) if run.place is not None else (found, where)


def length(run: Any) -> int:
    try:
        return len(run)
    except TypeError:
        return TAKE


def rest(reader: PlanReader[Any], count: int = TAKE) -> list[Any]:
    return items(reader.start(advance=False), count)


def choice(plan: Plan[Any]) -> Any:
    """Return where readers of a plan begin next."""
    mark = plan.bookmark
    return mark.version, mark.cursor, mark.loaded


def where(cursor: Cursor) -> tuple[int, int]:
    return cursor.epoch, cursor.mini_epoch or 0


def generators() -> Any:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


# An epoch plan is a function of position.


@shared
def test_binding_is_pure(make: Maker) -> None:
    plan = make().plan
    cursor = plan.bookmark.cursor
    draws = Draws()
    before, request = generators(), choice(plan)
    first, second = plan.bind(cursor, draws), plan.bind(cursor, draws)
    assert length(first) == length(second)
    assert (first.seed, first.epoch, first.place) == (second.seed, second.epoch, second.place)
    assert generators() == before
    assert choice(plan) == request
    whole = items(first)
    assert items(second) == whole
    assert items(plan.bind(cursor, draws)) == whole
    assert choice(plan) == request


@every
def test_looking_moves_nothing(make: Maker) -> None:
    told = make()
    if getattr(PlanReader(told.plan).peek(), "length_varies", False):
        pytest.skip("its length is found by reading it")
    reader = PlanReader(told.plan)
    before, request, own = generators(), choice(told.plan), _own(told.by)
    for look in (reader.peek, reader.whole, reader.preview):
        length(look())
    assert where(reader.plan.bookmark.cursor) == (reader.epoch, 0) == (0, 0)
    assert generators() == before
    assert choice(told.plan) == request
    assert _own(told.by) == own


def _own(sampler: Any) -> Any:
    """Return where the generator of the innermost sampler stands, if it has one."""
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner
    generator = getattr(getattr(sampler, "source", sampler), "generator", None)
    return None if generator is None else generator.get_state().tolist()


@samples
def test_any_part_is_that_of_the_whole(make: Maker) -> None:
    plan = make().plan
    cursor = plan.bookmark.cursor
    draws = Draws()
    run = plan.bind(cursor, draws)
    n = length(run)
    whole, places = plan.bind(cursor, draws).block(0, n)
    assert whole.dtype == places.dtype == np.int64
    assert whole.shape == places.shape == (n,)
    parts = [(a, b) for a in range(n + 1) for b in range(a, n + 1)]
    for a, b in random.Random(5).sample(parts, min(len(parts), 300)):
        indices, positions = run.block(a, b)
        assert indices.tolist() == whole[a:b].tolist(), (a, b)
        assert positions.tolist() == places[a:b].tolist(), (a, b)


@these(BATCHES, moves=(False,), chance=("", "global"), local=(False,))
def test_blocks_and_lists_are_those_of_the_iteration(make: Maker) -> None:
    plan = make().plan
    cursor = plan.bookmark.cursor
    draws = Draws()
    whole = items(plan.bind(cursor, draws))
    found: list[Any] = []
    for rows, positions in plan.bind(cursor, draws).blocks():
        lists = rows if isinstance(rows, list) else rows.tolist()
        assert positions.dtype == np.int64
        assert positions.shape == (len(lists), len(lists[0]))
        assert len(lists) == 1 or found, "the first batch comes at once"
        found += zip(lists, positions.tolist(), strict=True)
        if len(found) >= TAKE:
            break
    assert found[:TAKE] == whole


@every
def test_a_plan_is_as_long_as_it_says(make: Maker) -> None:
    run = make.reader().start(advance=False)
    if make.case.endless:
        with pytest.raises(TypeError):
            len(run)
    elif hasattr(make().by, "__len__"):
        try:
            announced = len(run)
        except TypeError:
            pytest.skip("somebody's sampler without a length")
        assert announced == len(items(run)) == len(run)


@every
def test_positions_are_unique_over_the_job(make: Maker) -> None:
    shares = []
    for rank in range(WORLD):
        torch.default_generator.manual_seed(11)
        shares.append(items(PlanReader(make(WORLD, rank).plan).start(advance=False)))
    each = [[p for _, places in share for p in (places if isinstance(places, list) else [places])] for share in shares]
    if not make.case.filled:
        assert all(len(set(positions)) == len(positions) for positions in each)
        if make.case.ranks:
            assert len(set().union(*each)) == sum(map(len, each))
    assert all(position >= 0 for positions in each for position in positions)


@these(CASES, ranks=(True,), local=(False,))
def test_a_sample_has_its_position_on_any_number_of_ranks(make: Maker) -> None:
    def at(world: int, rank: int) -> dict[int, Any]:
        run = PlanReader(make(world, rank).plan).start(advance=False)
        found: dict[int, Any] = {}
        for index, place in items(run):
            pairs = zip(index, place, strict=True) if isinstance(index, list) else [(index, place)]
            for one, position in pairs:
                assert found.setdefault(position, one) == one
        return found

    alone, compared = at(1, 0), 0
    for rank in range(WORLD):
        share = at(WORLD, rank)
        both = share.keys() & alone.keys()
        assert {position: share[position] for position in both} == {position: alone[position] for position in both}
        compared += len(both)
    assert compared or make.name == "iterations, start", "which begins in another epoch"


# A cursor says where its consumer is.


@every
def test_a_cursor_goes_on_at_every_count(make: Maker) -> None:
    reader = make.reader()
    reader.set_epoch(2)
    run = reader.start(advance=False)
    states = [through_json(run.cursor(0).state())]
    whole: list[Any] = []
    if isinstance(run, EpochPlan):
        whole = items(run)
        states = [through_json(run.cursor(count).state()) for count in range(len(whole) + 1)]
    else:
        for indices, positions in itertools.islice(run, TAKE):
            whole.append(plain(run, indices, positions))
            states.append(through_json(run.cursor(len(whole)).state()))
    for count, state in enumerate(states):
        again = make.loaded(state)
        assert again.epoch == 2
        assert through_json(again.cursor(0).state()) == state
        run = again.start(advance=False)
        if not make.case.endless and length(run) < TAKE:
            assert length(run) == len(whole) - count
        assert items(run, TAKE - count) == whole[count:], count


@every
def test_cursors_do_not_depend_on_what_was_read_ahead(make: Maker) -> None:
    if make.case.moves:
        pytest.skip("a sampler's own states count how often it was asked, and are as exact")
    reader = make.reader()
    run = reader.start(advance=False)
    if isinstance(run, BatchEpochPlan):
        drawn = iter(run)
        states = []
        for count in range(1, 5):
            next(drawn, None)
            states.append(run.cursor(count).state())
        list(itertools.islice(drawn, TAKE))
        assert [run.cursor(count).state() for count in range(1, 5)] == states
    else:
        before = [run.cursor(count).state() for count in range(4)]
        items(run)
        if make.case.chance != "own":  # whose generator stands elsewhere until the first index
            assert [run.cursor(count).state() for count in range(4)] == before


@every
def test_reading_a_state_changes_nothing(make: Maker) -> None:
    told = make()
    reader = PlanReader(told.plan)
    reader.set_epoch(4)
    state = through_json(reader.peek().cursor(0).state())
    other = make()
    request, text, before = choice(other.plan), json.dumps(state), generators()
    cursor = other.plan.read(state)
    assert json.dumps(state) == text
    assert cursor.epoch == 4
    assert choice(other.plan) == request
    if make.case.chance != "global":
        assert generators() == before
    for damage in ({"epoch": -1}, {"epoch": None}, {"consumed": -1}, {"consumed": "1"}):
        with pytest.raises(StateError, match=next(iter(damage))):
            other.plan.read({**state, **damage})
        with pytest.raises(StateError, match=next(iter(damage))):
            other.plan.read({name: value for name, value in state.items() if name not in damage})
    nothings: list[Any] = [{}, [], None, 3]
    for nothing in nothings:
        with pytest.raises(StateError):
            other.plan.read(nothing)
    assert choice(other.plan) == request


# Readers.


@shared
def test_two_readers_do_not_disturb_each_other(make: Maker) -> None:
    plan = make().plan
    readers = [PlanReader(plan) for _ in range(2)]
    states: list[Any] = []
    walks: list[Any] = []
    for reader in readers:
        run = reader.start(advance=False)
        states.append(through_json(run.cursor(0).state()))
        walks.append((run, iter(_one_by_one(run))))
    found: list[list[Any]] = [[], []]
    for step in range(2 * TAKE):  # the second reader is slower
        for number in range(2):
            if number == 0 or step % 2:
                found[number] += itertools.islice(walks[number][1], 1)
        for number, reader in enumerate(readers):
            count = len(found[number])
            assert reader.run is walks[number][0]
            assert reader.cursor(count).state() == walks[number][0].cursor(count).state()
    for number in range(2):
        expected = rest(make.loaded(states[number]))
        assert found[number][:TAKE] == expected
    if not make.case.chance:
        assert found[0][:TAKE] == found[1][:TAKE]


def _one_by_one(run: Any) -> Any:
    if isinstance(run, BatchEpochPlan):
        for indices, positions in itertools.islice(run, TAKE):
            yield plain(run, indices, positions)
    else:
        for place in range(length(run)):
            (index,), (position,) = run.block(place, place + 1)
            yield plain(run, index, position)


@these(CASES, moves=(False,), endless=(False,))
def test_the_whole_epoch_is_known_anywhere_in_it(make: Maker) -> None:
    reader = make.reader()
    run = reader.start(advance=False)
    state = through_json(run.cursor(0).state())
    whole = items(run)
    assert items(reader.whole()) == whole, "where it runs"
    if "iterations" in make.name and make.case.chance:
        return  # what earlier epochs drew is not in the state
    again = make.loaded(state)
    assert items(again.whole()) == whole, "before it runs"
    halfway = make.loaded(through_json(run.cursor(3).state()))
    for step in ("before it runs", "where it runs"):
        everything = items(halfway.whole())
        assert everything == whole, step
        assert length(halfway.whole()) == len(everything)
        if step == "before it runs":
            assert rest(halfway) == whole[3:]


def test_what_was_drawn_from_a_readers_seed_is_not_used_in_another_epoch() -> None:
    def order_of(epoch: int, asked: bool) -> list[Any]:
        reader = PlanReader(RandomSampler(range(40)), seed=3)
        if asked:
            reader.cursor(0)
        reader.set_epoch(epoch)
        return items(reader.start(advance=False))

    assert order_of(1, True) == order_of(1, False) != order_of(0, True)


@settled
def test_a_preview_is_the_run_that_comes(make: Maker) -> None:
    if make.case.moves:
        pytest.skip("an object of the user's moves")
    reader = make.reader()
    preview = items(reader.preview())
    assert rest(reader) == preview


@these(CASES, endless=(False,))
@pytest.mark.parametrize("advance", [False, True])
def test_what_comes_after_a_run(make: Maker, advance: bool) -> None:
    reader = make.reader()
    advance = advance and reader.plan.bookmark.advances
    reader.set_epoch(2)
    found = []
    for _ in range(5):
        run = reader.start(advance=advance)
        found.append((where(run.start), items(run)))
        had = len(found[-1][1])
        following = run.after(had) if advance else run.start
        reader.finish(advance=advance, delivered=had)
        assert where(reader.peek().start) == where(following)
        assert reader.epoch == following.epoch
    places = [place for place, _ in found]
    assert places[0] == (2, 0)
    assert len(set(places)) == (5 if advance else 1)
    if not make.case.chance and not make.case.moves:
        fresh = make.reader()
        for (epoch, mini_epoch), expected in found:
            if mini_epoch == 0:
                fresh.set_epoch(epoch)
                assert rest(fresh) == expected


@every
def test_states_are_the_runs_wherever_the_epochs_are_counted(make: Maker) -> None:
    """A reader that goes on by itself stays where it is, also if it told somebody's sampler of the epoch."""
    reader = make.reader()
    advance = reader.plan.bookmark.advances
    for _ in range(3):
        run = reader.start(advance=advance)
        items(run, 1)
        assert reader.current
        assert reader.cursor(1).state() == run.cursor(1).state()
        reader.finish(advance=advance)


@every
def test_a_run_that_is_broken_off_is_followed_by_a_whole_one(make: Maker) -> None:
    for advance in (False, True):
        reader = make.reader()
        reader.set_epoch(2)
        run = reader.start(advance=advance)
        items(run, 2)
        following = where(run.after(2) if advance else run.start)
        second = reader.start(advance=advance, delivered=2)
        assert where(second.start) == following
        if not make.case.chance and not make.case.moves and not advance:
            assert items(second) == items(make_at(make, 2))


def make_at(make: Maker, epoch: int) -> Any:
    reader = make.reader()
    reader.set_epoch(epoch)
    return reader.start(advance=False)


@every
def test_epochs_that_no_state_can_hold_are_refused(make: Maker) -> None:
    for epoch, words in ((-1, "0 or more, got -1"), (1 << 62, r"below 2\*\*62"), ("1", "an integer, 0 or more")):
        with pytest.raises(SamplerError, match=f"epoch must be {words}"):
            make.reader().set_epoch(epoch)  # type: ignore[arg-type]


# Wishes.


@every
def test_an_epoch_is_heard_once_by_each_reader(make: Maker) -> None:
    told = make()
    readers = [PlanReader(told.plan) for _ in range(3)]
    readers[2].start(advance=False)  # in the middle of something else
    told.by.set_epoch(5)
    for reader in readers:
        assert reader.epoch == 5
        assert not reader.current
    for reader in readers:
        run = reader.start(advance=True)
        assert run.epoch == 5
        following = run.after(0)
        second = reader.start(advance=True)
        assert where(second.start) == where(following), "it was heard once"


@every
def test_a_state_is_heard_once(make: Maker) -> None:
    state, expected = _state_and_rest(make)
    told = make()
    told.by.load_state_dict(closed(state))
    reader = PlanReader(told.plan)
    assert reader.epoch == 3
    assert through_json(reader.cursor(0).state()) == state
    run = reader.start(advance=False)
    assert items(run, TAKE - 2) == expected
    following = run.after(len(expected))
    second = reader.start(advance=True, delivered=len(expected))
    assert where(second.start) == where(following)
    # Uneven mini-epochs differ in length.
    if not make.case.endless and not make.case.chance and "uneven" not in make.name:
        whole = make.reader()
        whole.set_epoch(second.epoch)
        assert length(second) == length(whole.peek())


def _state_and_rest(make: Maker, epoch: int = 3) -> tuple[Any, list[Any]]:
    """Return a state behind two items of an epoch, and what comes then."""
    reader = make.reader()
    reader.set_epoch(epoch)
    run = reader.start(advance=False)
    if isinstance(run, EpochPlan):
        whole = items(run)
        return through_json(run.cursor(2).state()), whole[2:]
    walk = iter(run)
    list(itertools.islice(walk, 2))
    state = through_json(run.cursor(2).state())
    return state, [plain(run, *batch) for batch in itertools.islice(walk, TAKE - 2)]


def by_the_plan(reader: PlanReader[Any], told: Told, state: Any, epoch: int) -> None:
    told.by.load_state_dict(closed(state))
    told.by.set_epoch(epoch)


def by_the_reader(reader: PlanReader[Any], told: Told, state: Any, epoch: int) -> None:
    reader.choose(reader.plan.read(state), loaded=True)
    reader.set_epoch(epoch)


def state_by_the_reader(reader: PlanReader[Any], told: Told, state: Any, epoch: int) -> None:
    reader.choose(reader.plan.read(state), loaded=True)
    told.by.set_epoch(epoch)


def state_by_the_plan(reader: PlanReader[Any], told: Told, state: Any, epoch: int) -> None:
    told.by.load_state_dict(closed(state))
    reader.set_epoch(epoch)


ORDERS = (by_the_plan, by_the_reader, state_by_the_reader, state_by_the_plan)


@pytest.mark.parametrize("tell", ORDERS)
@every
def test_the_same_epoch_keeps_a_loaded_cursor(make: Maker, tell: Callable[..., None]) -> None:
    state, expected = _state_and_rest(make)
    told = make()
    reader = PlanReader(told.plan)
    tell(reader, told, state, 3)
    assert through_json(reader.cursor(0).state()) == state
    assert rest(reader, TAKE - 2) == expected


@pytest.mark.parametrize("tell", ORDERS)
@every
def test_another_epoch_drops_a_loaded_cursor(make: Maker, tell: Callable[..., None]) -> None:
    state, _ = _state_and_rest(make)
    told = make()
    reader = PlanReader(told.plan)
    tell(reader, told, state, 4)
    run = reader.start(advance=False)
    assert where(run.start) == (4, 0)
    whole = make_at(make, 4)
    assert length(run) == length(whole) or make.case.chance
    if not make.case.chance and not make.case.moves:
        assert items(run) == items(whole)


@every
def test_a_wish_after_the_start_of_which_nothing_was_had(make: Maker) -> None:
    told = make()
    reader = PlanReader(told.plan)
    run = reader.start(advance=False)
    assert reader.continues(run, delivered=False)
    told.by.set_epoch(7)
    assert not reader.continues(run, delivered=False)
    second = reader.start(advance=True)
    assert second.epoch == 7
    assert reader.continues(second, delivered=False)
    told.by.set_epoch(7)  # the one that runs
    assert reader.continues(second, delivered=False)
    assert reader.current
    if not make.case.chance and not make.case.moves:
        assert items(second) == items(make_at(make, 7))


@every
def test_a_wish_after_something_was_had_is_for_the_next_run(make: Maker) -> None:
    told = make()
    reader = PlanReader(told.plan)
    run = reader.start(advance=False)
    items(run, 1)
    told.by.set_epoch(7)
    assert reader.continues(run, delivered=True)
    assert reader.current
    assert reader.start(advance=True).epoch == 7


@every
def test_a_state_after_the_start_of_which_nothing_was_had(make: Maker) -> None:
    state, expected = _state_and_rest(make)
    told = make()
    reader = PlanReader(told.plan)
    run = reader.start(advance=False)
    told.by.load_state_dict(closed(state))
    assert not reader.continues(run, delivered=False)
    assert rest(reader, TAKE - 2) == expected


@every
def test_a_run_of_another_reader_goes_on(make: Maker) -> None:
    told = make()
    reader = PlanReader(told.plan)
    first = reader.start(advance=False)
    reader.start(advance=False)
    told.by.set_epoch(7)
    assert reader.continues(first, delivered=False), "it is not the one that the reader has begun last"


# Pickles.


@every
def test_a_pickled_reader_begins_its_epoch_anew(make: Maker) -> None:
    reader = make.reader()
    reader.set_epoch(2)
    run = reader.start(advance=False)
    items(run, 2)
    copy: PlanReader[Any] = pickle.loads(pickle.dumps(reader))
    assert copy.run is None
    assert reader.run is run
    assert reader.current
    assert copy.epoch == 2
    begun = copy.start(advance=False)
    assert where(begun.start) == where(run.start)
    if not make.case.chance and not make.case.moves:
        assert items(begun) == items(run)


@every
def test_a_pickled_reader_goes_on_from_a_loaded_state(make: Maker) -> None:
    state, expected = _state_and_rest(make)
    reader = make.loaded(state)
    copy: PlanReader[Any] = pickle.loads(pickle.dumps(reader))
    for one in (copy, reader):
        one.set_epoch(3)
        assert rest(one, TAKE - 2) == expected


# Whatever readers of one plan are asked, in whatever order.


class Consumer:
    """A reader, and what it should give: an epoch plan that was bound a second time."""

    def __init__(self, make: Maker, plan: Plan[Any]) -> None:
        self._make = make
        self.reader = PlanReader(plan)
        self.had = 0
        self._run: Any = None
        self._walk: Any = iter(())
        self._whole: list[Any] = []

    def state(self) -> Any:
        return through_json(self.reader.cursor(self.had).state())

    def start(self, *, advance: bool) -> None:
        # What a reader says that it begins with is where it begins, unless it goes on to the next epoch.
        settled = not self.reader.current and not advance
        expected = rest(self._make.loaded(self.reader.cursor(0).state())) if settled else None
        self._run = run = self.reader.start(advance=advance)
        self.had = 0
        self._walk = iter(_one_by_one(run))
        self._whole = rest(self._make.loaded(through_json(run.cursor(0).state())))
        assert expected in (None, self._whole)

    def take(self, count: int) -> None:
        """Read as loaders do: ask whether the run goes on, and begin the requested one if it does not."""
        for _ in range(count):
            if self._run is None or not self.reader.continues(self._run, delivered=self.had > 0):
                self.start(advance=False)
            found = next(self._walk, None)
            if found is None:
                self.reader.finish(advance=False)
                self._run = None
                return
            assert found == self._whole[self.had]
            self.had += 1

    def check(self) -> None:
        if self.reader.current:
            assert rest(self._make.loaded(self.state())) == self._whole[self.had :]


PROGRAMS = (
    *("distributed, global", "random, global, 80", "torch, distributed", "share, mini-epochs", "batch", "batch, share"),
    *(
        "grouped",
        "iterations",
        "dealt, even",
        "external, seeded",
        "external, lists",
        "external, by epoch",
    ),
)
who = st.integers(0, 1)
steps = st.one_of(
    st.tuples(st.just("start"), who, st.booleans()),
    st.tuples(st.just("take"), who, st.integers(1, 4)),
    st.tuples(st.just("end"), who),
    st.tuples(st.just("look"), who),
    st.tuples(st.just("epoch"), who, st.integers(0, 3)),
    st.tuples(st.just("hand over"), who),
    st.tuples(st.just("tell"), st.integers(0, 3)),
    st.tuples(st.just("load"), who),
)


@pytest.mark.parametrize("make", PROGRAMS, indirect=True)
@given(program=st.lists(steps, max_size=9))
@settings(
    max_examples=100 if FULL else 5,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_programs_of_two_readers(make: Maker, program: list[Any]) -> None:
    told = make()
    both = [Consumer(make, told.plan) for _ in range(2)]
    for step, *arguments in program:
        if step == "tell":
            told.by.set_epoch(*arguments)
        elif step == "load":
            told.by.load_state_dict(closed(both[arguments[0]].state()))
        else:
            one, other = both[arguments[0]], both[1 - arguments[0]]
            before, offered = other.state(), told.plan.bookmark.loaded
            _do(step, one, other, arguments[1:])
            used = offered and not told.plan.bookmark.loaded  # a loaded state is used once
            if step not in ("hand over", "epoch") and "by epoch" not in make.name and not used:
                assert other.state() == before, "it is the other reader's"
        for consumer in both:
            consumer.check()
    for consumer in both:
        consumer.take(3)
        consumer.check()


def _do(step: str, one: Consumer, other: Consumer, arguments: list[Any]) -> None:
    if step == "start":
        one.start(advance=arguments[0] and one.reader.plan.bookmark.advances)
    elif step == "take":
        one.take(arguments[0])
    elif step == "end":
        one.take(TAKE)
    elif step == "look":
        for look in (one.reader.peek, one.reader.preview, one.reader.whole):
            length(look())
    elif step == "epoch":
        one.reader.set_epoch(arguments[0])
    else:
        one.reader.choose(one.reader.plan.read(other.state()), loaded=True)


class Noting(BatchEpochPlan):
    """Batches of one sample; notes how many were drawn."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.drawn = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Any:
        for number in range(self.batches):
            self.drawn += 1
            yield [number], np.array([number])

    def cursor(self, count: int) -> Cursor:
        return Cursor(consumed=count)


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 10])
def test_the_last_batch_is_drawn_when_it_is_asked_for(batches: int) -> None:
    """A plan may move the user's generator with its last batch."""
    plan, had = Noting(batches), 0
    for lists, positions in plan.blocks():
        had += len(lists)
        assert positions[:, 0].tolist() == [number for (number,) in lists]
        assert plan.drawn == had
        assert len(lists) == 1 or had < batches, "the last one comes by itself"
    assert had == batches
