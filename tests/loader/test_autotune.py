"""Which settings are tried and which one is chosen, by results that are computed: no processes, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.autotune import Autotuner
from penstock.loader.messages import BatchMetrics
from penstock.loader.setting import INLINE, Setting
from penstock.loader.throughput import Throughput

SAMPLES = 1000


class Machine:
    """What a run takes for a sample: work that computes for some of its time, handing over, the training.

    Threads take turns unless the lock is released; cores are shared by those that compute.
    """

    def __init__(
        self, *, cores: int, metrics: float, computing: float, train: float, hand: float = 0.0, locked: bool = True
    ) -> None:
        self.cores = cores
        self.metrics = metrics
        self.computing = computing
        self.train = train
        self.hand = hand
        self.locked = locked

    def measure(self, setting: Setting) -> Throughput:
        cpu = self.metrics * self.computing
        wait = self.metrics
        if setting.workers:
            at_once = min(self.cores, setting.workers)
            if setting.executor == "thread" and self.locked:
                at_once = 1
            each = max(self.metrics / setting.workers, cpu / at_once)
            wait = max(0.0, each - self.train) + (0.0 if setting.executor == "thread" else self.hand)
        metrics = BatchMetrics(SAMPLES, fetch=SAMPLES * self.metrics, cpu=SAMPLES * cpu)
        return Throughput(SAMPLES // 10, SAMPLES * wait, SAMPLES * self.train, metrics)


def search(tuner: Autotuner, machine: Machine) -> list[Setting]:
    """What was tried; the choice is the tuner's current setting."""
    tried = []
    while not tuner.decided:
        tried.append(tuner.current)
        tuner.note(machine.measure(tuner.current))
        assert len(tried) < 30, tried
    return tried


def tuner_of(machine: Machine, *kinds: str, inline: str = "never", **options: Any) -> Autotuner:
    options = {"cores": machine.cores, "persistent": True, "later": 0.0, **options}
    return Autotuner(kinds or ["process"], inline=inline, **options)


def counts(tried: list[Setting]) -> list[int]:
    return [setting.workers for setting in tried]


def test_inline_comes_first_and_is_enough_where_the_training_hardly_waits() -> None:
    machine = Machine(cores=8, metrics=0.9e-3, computing=1.0, train=1e-1)
    tuner = tuner_of(machine, "process", "thread", inline="try")
    assert search(tuner, machine) == [INLINE]
    assert tuner.current == INLINE
    assert tuner.stats()["chosen"] == {"executor": "inline", "workers": 0}
    assert tuner.why.endswith("; more workers would gain almost nothing")


def test_one_worker_is_enough_where_the_training_hardly_waits_for_it() -> None:
    machine = Machine(cores=8, metrics=0.9e-3, computing=1.0, train=1e-3)
    tuner = tuner_of(machine, "process", "thread", inline="try")
    assert search(tuner, machine) == [INLINE, Setting("process", 1)]
    assert tuner.current == Setting("process", 1)


@pytest.mark.parametrize(("cores", "tried"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_a_data_set_that_computes_gets_the_cores(cores: int, tried: list[int]) -> None:
    machine = Machine(cores=cores, metrics=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    assert counts(search(tuner, machine)) == tried
    assert tuner.current == Setting("process", cores)
    assert tuner.why.endswith("; this rank may have no more workers")


def test_a_count_that_cannot_bring_a_tenth_is_not_tried() -> None:
    machine = Machine(cores=17, metrics=1.0, computing=1.0, train=1e-6)
    assert counts(search(tuner_of(machine), machine)) == [1, 2, 4, 8, 16]


def test_a_data_set_that_waits_gets_more_as_long_as_that_helps() -> None:
    machine = Machine(cores=2, metrics=1.0, computing=0.02, train=1e-6)
    tuner = tuner_of(machine)
    assert counts(search(tuner, machine)) == [1, 2, 4, 8, 16, 32, 64]
    assert tuner.current.workers == 64
    machine = Machine(cores=2, metrics=1.0, computing=0.2, train=1e-6)
    tuner = tuner_of(machine)
    assert counts(search(tuner, machine)) == [1, 2, 4, 8, 16, 32]
    assert tuner.current.workers == 16  # two cores have no more time than that
    assert tuner.why.endswith("; more workers are not faster")


def test_a_few_slow_batches_tell_that_a_data_set_computes() -> None:
    """Otherwise a noisy measurement chooses more processes than cores."""

    class Slow(Machine):
        def measure(self, setting: Setting) -> Throughput:
            metrics = BatchMetrics(5 * 64, fetch=1.0, cpu=0.9)
            return Throughput(5, 1.0 / max(1, setting.workers), 0.0, metrics)  # noise that favours more workers

    machine = Slow(cores=2, metrics=0.0, computing=1.0, train=0.0)
    tuner = tuner_of(machine, inline="try")
    assert counts(search(tuner, machine)) == [0, 1, 2]
    assert tuner.current == Setting("process", 2)


@pytest.mark.parametrize("computing", [0.02, 1.0])
def test_eight_ranks_of_a_node_share_its_cores(computing: float) -> None:
    machine = Machine(cores=96, metrics=1.0, computing=computing, train=1e-6)
    tuner = tuner_of(machine, ranks=8)
    assert max(counts(search(tuner, machine))) == 96 // 8
    assert tuner.stats()["local_ranks"] == 8


@pytest.mark.parametrize("cores", [1, 4])
def test_every_rank_has_a_worker_where_there_are_more_ranks_than_cores(cores: int) -> None:
    machine = Machine(cores=cores, metrics=1.0, computing=1.0, train=1e-6)
    assert counts(search(tuner_of(machine, ranks=100), machine)) == [1]


def test_no_more_workers_than_there_is_memory_for() -> None:
    machine = Machine(cores=16, metrics=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    tuner.memory_for = 5
    assert counts(search(tuner, machine)) == [1, 2, 4, 5]


def test_no_more_workers_than_batches_in_a_pass() -> None:
    machine = Machine(cores=16, metrics=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    tuner.length = 4
    assert counts(search(tuner, machine)) == [1, 2, 4]


def test_each_executor_is_tried_with_two_workers_and_the_best_goes_on() -> None:
    machine = Machine(cores=16, metrics=1e-3, computing=1.0, train=1e-6, hand=1e-3, locked=False)
    tuner = tuner_of(machine, "auto", "process", "thread")
    two = [Setting(kind, 2) for kind in ("auto", "process", "thread")]
    more = [Setting("thread", count) for count in (4, 8, 16)]
    assert search(tuner, machine) == [Setting("auto", 1), *two, *more]
    assert tuner.current == Setting("thread", 16)


def test_where_no_number_of_workers_helps_it_says_so() -> None:
    machine = Machine(cores=4, metrics=1e-5, computing=1.0, train=1e-5, hand=1e-4)
    tuner = tuner_of(machine, inline="try")
    assert counts(search(tuner, machine)) == [0, 1, 2]
    assert tuner.current == INLINE
    assert tuner.why.endswith("; no number of workers is faster")


def test_of_settings_as_good_as_the_best_the_smallest_is_chosen() -> None:
    class Close(Machine):
        def measure(self, setting: Setting) -> Throughput:
            rate = {0: 900, 1: 500, 2: 930, 4: 980}[setting.workers]
            return Throughput(SAMPLES // 10, SAMPLES / rate, 0.0, BatchMetrics(SAMPLES, fetch=1.0, cpu=1.0))

    machine = Close(cores=4, metrics=0.0, computing=1.0, train=0.0)
    tuner = tuner_of(machine, inline="try")
    assert counts(search(tuner, machine)) == [0, 1, 2, 4]
    assert tuner.current == Setting("process", 4)  # 930 is no 95 % of 980
    machine.cores = 2
    tuner = tuner_of(machine, inline="try")
    search(tuner, machine)
    assert tuner.current == INLINE


def test_an_estimate_says_nothing_of_the_processor() -> None:
    """It is known after 64 quick batches that were made, and not after 40 that count twice."""
    tuner = Autotuner(["process"], inline="estimate", cores=1, persistent=True, later=0.0)
    tuner.note(Throughput(40, 0.04, 0.001, BatchMetrics(400, fetch=0.04, cpu=0.04)))
    assert not tuner.decided
    assert tuner.current == Setting("process", 2)


def test_inline_is_estimated_where_trying_it_is_not_safe() -> None:
    machine = Machine(cores=4, metrics=1e-5, computing=1.0, train=1e-5, hand=1e-4)
    tuner = tuner_of(machine, inline="estimate")
    assert INLINE not in search(tuner, machine)
    assert tuner.current == INLINE
    assert "estimated from one worker" in tuner.why
    assert [one["estimated"] for one in tuner.stats()["tried"]] == [False, True, False]
    assert tuner.finished, "a fork could share files that are open by now"
    tuner = tuner_of(machine, inline="estimate", overhead=2e-3)  # for each ten samples
    search(tuner, machine)
    assert tuner.current.workers
    tuner = tuner_of(machine)
    search(tuner, machine)
    assert tuner.current.workers


def test_starting_workers_counts_where_passes_are_short() -> None:
    machine = Machine(cores=2, metrics=1e-3, computing=1.0, train=1e-6)
    for persistent in (False, True):
        tuner = tuner_of(machine, inline="try", persistent=persistent)
        tuner.length = 10  # batches of ten samples: 0.1 s of work
        while not tuner.decided:
            found = machine.measure(tuner.current)
            if tuner.current != INLINE:
                found.starts, found.start = 2, 0.4
            tuner.note(found)
        assert tuner.current == (Setting("process", 2) if persistent else INLINE)


def test_what_cannot_be_had_is_no_good() -> None:
    machine = Machine(cores=8, metrics=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine, "process", "thread")
    while not tuner.decided:
        broken = tuner.current == Setting("process", 8)
        found = Throughput() if broken else machine.measure(tuner.current)
        tuner.note(found, "OSError: no more" if broken else "")
    assert tuner.current == Setting("process", 4)
    assert [tried["error"] for tried in tuner.stats()["tried"]].count("OSError: no more") == 1


@pytest.mark.parametrize(("inline", "chosen"), [("estimate", INLINE), ("never", Setting("process", 1))])
def test_where_no_workers_can_be_had_it_is_inline_if_that_may_be(inline: str, chosen: Setting) -> None:
    tuner = Autotuner(["process"], inline=inline, cores=64, persistent=True)
    tries = 0
    while not tuner.decided:
        tuner.note(Throughput(), "OSError: no more")
        tries += 1
    assert tries == 2
    assert tuner.current == chosen
    assert tuner.why == "no workers could be started"


# The second search.


def test_later_it_searches_once_more_from_the_chosen_setting_on() -> None:
    machine = Machine(cores=8, metrics=3e-3, computing=1.0, train=1e-3)
    tuner = tuner_of(machine, inline="try")
    assert counts(search(tuner, machine)) == [0, 1, 2, 4]
    assert not tuner.finished
    machine.metrics = 7e-3
    assert tuner.search_again(1e9)
    assert tuner.stats()["chosen"]["workers"] == 4, "until there is another choice"
    assert counts(search(tuner, machine)) == [4, 8]
    assert tuner.current == Setting("process", 8)
    assert tuner.finished
    assert not tuner.search_again(1e9)
    stats = tuner.stats()
    assert [one["workers"] for one in stats["tried"]] == [0, 1, 2, 4, 4, 8]
    assert stats["searches"] == 2


def test_a_second_search_touches_nothing_where_the_setting_is_enough() -> None:
    machine = Machine(cores=8, metrics=3e-3, computing=1.0, train=1e-3)
    tuner = tuner_of(machine)
    search(tuner, machine)
    assert tuner.search_again(1e9)
    assert search(tuner, machine) == [Setting("process", 4)]


def test_it_does_not_look_again_early() -> None:
    machine = Machine(cores=2, metrics=3e-3, computing=1.0, train=1e-3)
    tuner = tuner_of(machine, later=60.0)
    assert not tuner.search_again(1e9), "a search is under way"
    search(tuner, machine)
    assert not tuner.search_again(0.0)
    assert tuner.decided


@given(
    cores=st.integers(1, 80),
    metrics=st.floats(1e-6, 1.0),
    computing=st.floats(0.0, 1.0),
    train=st.floats(1e-6, 1.0),
    hand=st.floats(0.0, 1e-3),
    locked=st.booleans(),
    kinds=st.sampled_from([["process"], ["thread"], ["process", "thread"], ["auto", "process", "thread"]]),
    inline=st.sampled_from(["try", "estimate", "never"]),
    ranks=st.integers(1, 16),
    length=st.none() | st.integers(0, 100),
    memory=st.none() | st.integers(0, 100),
)
def test_it_ends_within_its_limits_and_with_one_of_the_best(
    kinds: list[str], inline: str, ranks: int, length: int | None, memory: int | None, **numbers: Any
) -> None:
    machine = Machine(**numbers)
    tuner = tuner_of(machine, *kinds, inline=inline, ranks=ranks)
    tuner.length, tuner.memory_for = length, memory
    for _ in range(2):
        tried = search(tuner, machine)
        assert len(tried) == len(set(tried)) <= 11
        assert {setting.executor for setting in tried} <= {*kinds, "inline"}
        assert max(counts(tried)) <= max(1, max(64, machine.cores) // ranks)
        assert memory is None or max(counts(tried)) <= max(1, memory)
        assert inline == "try" or INLINE not in tried
        best = max(machine.measure(setting).rate for setting in tried)
        assert machine.measure(tuner.current).rate >= 0.9 * best
        if not tuner.search_again(1e9):
            break
