"""Which settings are tried and which one is chosen, by results that are computed: no processes, no clock."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.ladder import Ladder
from penstock.loader.tally import INLINE, Measured, Setting, Tally
from penstock.loader.work import Work

SAMPLES = 1000


class Machine:
    """What a run takes for a sample: work that computes for some of its time, handing over, the training.

    Threads take turns unless the lock is released; cores are shared by those that compute.
    """

    def __init__(
        self, *, cores: int, work: float, computing: float, train: float, hand: float = 0.0, locked: bool = True
    ) -> None:
        self.cores = cores
        self.work = work
        self.computing = computing
        self.train = train
        self.hand = hand
        self.locked = locked

    def measure(self, setting: Setting) -> Measured:
        cpu = self.work * self.computing
        wait = self.work
        if setting.workers:
            at_once = min(self.cores, setting.workers)
            if setting.executor == "thread" and self.locked:
                at_once = 1
            each = max(self.work / setting.workers, cpu / at_once)
            wait = max(0.0, each - self.train) + (0.0 if setting.executor == "thread" else self.hand)
        numbers = [wait, self.train, self.work, cpu, self.work]
        return Measured(setting, SAMPLES // 10, SAMPLES, *(SAMPLES * number for number in numbers))  # type: ignore[arg-type]


def climb(ladder: Ladder, machine: Machine) -> list[Setting]:
    """What was tried; the choice is the ladder's current setting."""
    tried = []
    while not ladder.decided:
        tried.append(ladder.current)
        ladder.note(machine.measure(ladder.current))
        assert len(tried) < 30, tried
    return tried


def ladder(machine: Machine, *kinds: str, inline: str = "never", persistent: bool = True) -> Ladder:
    return Ladder(kinds or ["process"], inline=inline, cores=machine.cores, persistent=persistent)


def test_one_worker_is_enough_where_the_training_hardly_waits() -> None:
    machine = Machine(cores=8, work=0.9e-3, computing=1.0, train=1e-3)
    one = ladder(machine, "process", "thread", inline="try")
    assert climb(one, machine) == [Setting("process", 1)]
    assert one.current == Setting("process", 1)
    assert one.stats()["chosen"] == {"executor": "process", "workers": 1}


def test_the_fewest_workers_that_keep_up() -> None:
    machine = Machine(cores=16, work=5e-3, computing=1.0, train=1e-3)
    one = ladder(machine)
    assert climb(one, machine) == [Setting("process", 1), Setting("process", 6)]
    assert one.current.workers == 6


@pytest.mark.parametrize("cores", [1, 2, 4, 16, 100])
def test_a_data_set_that_computes_gets_the_cores(cores: int) -> None:
    machine = Machine(cores=cores, work=1.0, computing=1.0, train=1e-6)
    one = ladder(machine, "process", "thread")
    assert max(setting.workers for setting in climb(one, machine)) == (2 * cores if cores <= 4 else cores)
    assert one.current == Setting("process", cores)


def test_of_few_cores_the_training_takes_a_share_that_more_workers_win_back() -> None:
    class Shared(Machine):
        def measure(self, setting: Setting) -> Measured:
            found = super().measure(setting)
            return found._replace(wait=found.wait * (0.9 if setting.workers > self.cores else 1.0))

    for cores, chosen in ((2, 4), (4, 8), (16, 16)):
        machine = Shared(cores=cores, work=0.1, computing=1.0, train=1e-6)
        one = ladder(machine)
        climb(one, machine)
        assert one.current.workers == chosen


def test_of_few_cores_a_close_race_is_run_again() -> None:
    """What four workers bring there is as much as other programs take in a second."""

    class Noisy(Machine):
        looks = 0

        def measure(self, setting: Setting) -> Measured:
            found = super().measure(setting)
            self.looks += setting.workers == 4
            slow = setting.workers == 4 and self.looks == 1
            return found._replace(wait=found.wait * (1.1 if slow else 0.9 if setting.workers > self.cores else 1.0))

    machine = Noisy(cores=2, work=0.1, computing=1.0, train=1e-6)
    one = ladder(machine)
    assert [setting.workers for setting in climb(one, machine)] == [1, 2, 4, 2, 4]
    assert one.current.workers == 4
    for cores, computing in ((16, 1.0), (2, 0.02)):  # many cores; many workers, which take long to start
        machine = Noisy(cores=cores, work=0.1, computing=computing, train=1e-6)
        tried = climb(ladder(machine), machine)
        assert len(tried) == len(set(tried)), tried


def test_a_data_set_that_waits_gets_more_as_long_as_that_helps() -> None:
    machine = Machine(cores=2, work=1.0, computing=0.02, train=1e-6)
    one = ladder(machine)
    assert [setting.workers for setting in climb(one, machine)] == [1, 2, 4, 8, 16, 32, 64]
    assert one.current.workers == 64
    machine = Machine(cores=2, work=1.0, computing=0.2, train=1e-6)
    one = ladder(machine)
    climb(one, machine)
    assert one.current.workers == 16  # two cores have no more time than that


def test_what_was_as_good_with_few_workers_gets_a_chance_with_many() -> None:
    """Processes cost something each, threads do not."""

    class Crowded(Machine):
        def measure(self, setting: Setting) -> Measured:
            found = super().measure(setting)
            burden = 2e-4 * setting.workers if setting.executor == "process" else 0.0
            return found._replace(wait=found.wait + SAMPLES * burden)

    machine = Crowded(cores=2, work=0.1, computing=0.0, train=1e-6)
    one = ladder(machine, "process", "thread")
    tried = climb(one, machine)
    assert Setting("thread", 4) not in tried
    assert tried[-3:] == [Setting("thread", 16), Setting("thread", 32), Setting("thread", 64)]
    assert one.current == Setting("thread", 64)


def test_threads_where_handing_over_is_what_takes_the_time_and_the_lock_is_released() -> None:
    machine = Machine(cores=16, work=1e-3, computing=1.0, train=1e-6, hand=1e-3, locked=False)
    one = ladder(machine, "auto", "process", "thread")
    tried = climb(one, machine)
    assert one.current == Setting("thread", 16)
    assert Setting("process", 4) in tried
    assert Setting("process", 8) not in tried, "of the executors only the best one goes on"


def test_cheap_batches_get_twice_as_many_workers_as_cores_a_chance() -> None:
    """What they take is handing over, of which more may be under way at once."""
    for work, tried in ((5e-5, [1, 2, 4, 8, 16, 8, 16]), (2e-4, [1, 2, 4, 8])):  # of a sample, of ten in a batch
        machine = Machine(cores=8, work=work, computing=1.0, train=1e-9)
        one = ladder(machine)
        assert [setting.workers for setting in climb(one, machine)] == tried
        assert one.current.workers == 8


def test_a_close_race_of_cheap_batches_is_run_again() -> None:
    """The better figure counts: being new and other programs make it slower than it is, nothing makes it faster."""
    machine = Machine(cores=2, work=5e-5, computing=1.0, train=1e-9)
    for seconds_of_four, chosen in (((1.6, 0.8), 4), ((0.8, 1.2), 4), ((1.6, 1.2), 2)):
        one, measured = ladder(machine), []
        while not one.decided:
            workers, found = one.current.workers, machine.measure(one.current)
            factor = seconds_of_four[measured.count(4)] if workers == 4 else 1.0
            measured.append(workers)
            one.note(found._replace(wait=factor * found.wait))
        assert measured == [1, 2, 4, 2, 4]
        assert [result.setting.workers for result in one.results] == [1, 2, 4]
        assert one.current.workers == chosen
    one = ladder(machine)
    while not one.decided:
        broken = len(one.results) == 3 and one.current.workers == 2
        one.note(Measured(one.current, error="OSError: no more") if broken else machine.measure(one.current))
    assert one.current == Setting("process", 4)


def test_inline_is_tried_where_batches_take_less_than_their_way() -> None:
    machine = Machine(cores=4, work=1e-5, computing=1.0, train=1e-5, hand=1e-4)
    one = ladder(machine, inline="try")
    assert climb(one, machine)[-1] == INLINE
    assert one.current == INLINE
    one = ladder(machine, inline="trust")
    assert INLINE not in climb(one, machine)
    assert one.current == INLINE
    assert "workers told" in one.why
    one = Ladder(["process"], inline="trust", cores=4, persistent=True, overhead=2e-3)  # for each ten samples
    climb(one, machine)
    assert one.current.workers
    one = ladder(machine, inline="never")
    climb(one, machine)
    assert one.current.workers


def test_starting_workers_counts_where_passes_are_short() -> None:
    machine = Machine(cores=2, work=1e-3, computing=1.0, train=1e-6)
    for persistent in (False, True):
        one = ladder(machine, inline="try", persistent=persistent)
        one.length = 10  # batches of ten samples: 0.1 s of work
        while not one.decided:
            found = machine.measure(one.current)
            one.note(found if one.current == INLINE else found._replace(starts=2, start=0.4))
        assert one.current == (Setting("process", 2) if persistent else INLINE)


def test_no_more_workers_than_there_is_memory_for() -> None:
    machine = Machine(cores=16, work=1.0, computing=1.0, train=1e-6)
    one = ladder(machine)
    one.most = 5
    assert [setting.workers for setting in climb(one, machine)] == [1, 4]


@pytest.mark.parametrize("computing", [0.02, 1.0])
def test_eight_ranks_of_a_node_share_its_cores(computing: float) -> None:
    machine = Machine(cores=96, work=1.0, computing=computing, train=1e-6)
    one = Ladder(["process"], inline="never", cores=96, ranks=8, persistent=True)
    assert max(setting.workers for setting in climb(one, machine)) <= 96 // 8


def test_what_cannot_be_had_is_no_good() -> None:
    machine = Machine(cores=8, work=1.0, computing=1.0, train=1e-6)
    one = ladder(machine, "process", "thread")
    one.note(machine.measure(one.current))
    while not one.decided:
        broken = one.current.executor == "process" and one.current.workers == 8
        one.note(Measured(one.current, error="OSError: no more") if broken else machine.measure(one.current))
    assert one.current == Setting("process", 4)
    assert [tried["error"] for tried in one.stats()["tried"]].count("OSError: no more") == 1


def test_where_no_workers_can_be_had_it_is_inline_if_that_may_be() -> None:
    for inline, chosen in (("trust", INLINE), ("never", Setting("process", 1))):
        one = Ladder(["process"], inline=inline, cores=2, persistent=True)
        while not one.decided:
            one.note(Measured(one.current, error="OSError: no more"))
        assert one.current == chosen
        assert one.why == ("no workers can be had" if chosen == INLINE else "0 samples/s, waiting 100%")


@given(
    cores=st.integers(1, 80),
    work=st.floats(1e-6, 1.0),
    computing=st.floats(0.0, 1.0),
    train=st.floats(1e-6, 1.0),
    hand=st.floats(0.0, 1e-3),
    locked=st.booleans(),
    kinds=st.sampled_from([["process"], ["thread"], ["process", "thread"], ["auto", "process", "thread"]]),
    inline=st.sampled_from(["try", "trust", "never"]),
    length=st.none() | st.integers(0, 100),
    most=st.none() | st.integers(0, 100),
)
def test_it_ends_within_its_limits_and_with_one_of_the_best(
    kinds: list[str], inline: str, length: int | None, most: int | None, **numbers: Any
) -> None:
    machine = Machine(**numbers)
    one = ladder(machine, *kinds, inline=inline)
    one.length, one.most = length, most
    tried = climb(one, machine)
    assert max(map(tried.count, tried)) <= 2
    assert all(one != other for one, other in pairwise(tried))
    assert [result.setting for result in one.results] == list(dict.fromkeys(tried))
    assert {setting.executor for setting in tried} <= {*kinds, "inline"}
    assert max(setting.workers for setting in tried) <= max(64, machine.cores)
    assert most is None or max(setting.workers for setting in tried) <= max(1, most)
    assert inline == "try" or INLINE not in tried
    best = max(result.rate for result in one.results)
    assert machine.measure(one.current).rate >= 0.9 * best


# The measurement.


def spend(tally: Tally, count: int, *, wait: float, train: float, now: float = 0.0) -> tuple[int, float]:
    """Give it so many batches at most; how many it took, and the time then."""
    for number in range(count):
        asked = now + train * (number > 0)
        now = asked + wait
        if tally.add(Work(samples=4, fetch=0.01, collate=0.01), asked, now):
            return number + 1, now
    return count, now


def test_rounds_are_counted_from_the_first_batch_of_every_worker_on() -> None:
    tally = Tally(Setting("process", 4), 8, None, 0.0, 0.8)
    count, _ = spend(tally, 1000, wait=0.05, train=0.05)
    found = tally.result()
    assert count == 4 + found.batches
    assert found.batches % 4 == 0
    assert found.samples == 4 * found.batches
    assert 0.8 <= found.seconds < 0.8 + 4 * 0.1
    assert found.wait == pytest.approx(found.train) == pytest.approx(0.05 * found.batches)
    assert found.work == pytest.approx(0.02 * found.batches)
    assert (found.starts, found.start) == (1, pytest.approx(0.05))


def test_slow_batches_need_one_round() -> None:
    tally = Tally(Setting("process", 2), 4, None, 0.0, 0.8)
    assert spend(tally, 1000, wait=2.0, train=0.0)[0] == 2 + 2


def test_a_pause_of_the_program_is_no_training() -> None:
    tally = Tally(Setting("process", 1), 2, None, 0.0, 0.8)
    _, now = spend(tally, 30, wait=0.01, train=0.01)
    assert not tally.add(Work(4), now + 9.0, now + 9.0)  # validation; and everything is ready
    _, _ = spend(tally, 1000, wait=0.01, train=0.01, now=now + 9.0)
    assert tally.result().rate == pytest.approx(4 / 0.02, rel=0.05)


def test_short_passes_add_up() -> None:
    before = None
    for number in range(9):
        tally = Tally(Setting("process", 4), 8, before, 0.0, 0.8)
        assert spend(tally, 3, wait=0.1, train=0.0)[0] == 3
        before, known = tally.at_end()
        assert before.batches == 3 * (number + 1)
        assert known == (before.batches >= 8)
        if known:
            break
    assert before is not None
    assert before.rate == pytest.approx(40)
    assert before.starts == 0, "it is in the seconds already"
