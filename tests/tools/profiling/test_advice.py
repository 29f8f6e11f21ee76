"""The rules by which a setting is chosen, and ceilings, over numbers that are made up."""

from __future__ import annotations

import json
import math

import pytest
from report_support import made_up

from penstock.tools.profiling.advice import choose, expected_wait, limiting, storage_matters
from penstock.tools.profiling.measure import worker_counts
from penstock.tools.profiling.result import Setting, Stage, Trial


def trial(executor: str, workers: int, rate: float, **options: str) -> Trial:
    return Trial(Setting(executor, workers), True, rate, 10, 0.1, **options)


class TestChoose:
    def test_the_fewest_workers_of_those_that_are_as_good_as_the_best(self) -> None:
        trials = [trial("inline", 0, 100), trial("process", 1, 95), trial("process", 2, 185), trial("process", 4, 200)]
        assert choose(trials, needed=None).setting == Setting("process", 2)
        assert choose([*trials, trial("process", 8, 400)], needed=None).setting == Setting("process", 8)

    def test_what_leaves_most_to_the_training(self) -> None:
        trials = [trial("thread", 2, 200), trial("process", 2, 190), trial("auto", 2, 185)]
        assert choose(trials, needed=None).setting == Setting("auto", 2)
        assert choose(trials[:2], needed=None).setting == Setting("process", 2)
        assert choose([trial("thread", 2, 300), trial("process", 2, 190)], needed=None).setting.executor == "thread"

    def test_with_a_step_no_more_than_it_needs(self) -> None:
        trials = [trial("inline", 0, 100), trial("process", 1, 95), trial("process", 2, 185), trial("process", 4, 350)]
        assert choose(trials, needed=80).setting == Setting("process", 1)
        assert choose(trials, needed=90).setting == Setting("process", 2)  # 95 is no tenth more
        assert choose(trials, needed=1000).setting == Setting("process", 4)
        assert choose(trials, needed=4).setting == Setting("inline", 0)  # 4 % of the step
        assert choose(trials, needed=6).setting == Setting("process", 1)

    def test_inline_only_where_workers_are_slower(self) -> None:
        assert choose([trial("inline", 0, 100), trial("process", 2, 95)], needed=None).setting.workers == 2
        assert choose([trial("inline", 0, 100), trial("process", 2, 50)], needed=None).setting.workers == 0

    def test_settings_without_a_result_are_passed_over(self) -> None:
        trials = [trial("process", 1, 0, error="TypeError: cannot pickle"), trial("thread", 1, 10)]
        assert choose(trials, needed=None).setting.executor == "thread"


def test_waiting_by_step() -> None:
    assert expected_wait(Setting("process", 2), 100, 10, 0.08) == pytest.approx(0.02)
    assert expected_wait(Setting("process", 2), 100, 10, 0.3) == 0
    assert expected_wait(Setting("inline", 0), 100, 10, 0.3) == pytest.approx(0.1)


def test_ceilings() -> None:
    stage = Stage("decode", 0.004, 0.002, 0.003, 0.0, 0.0)
    assert stage.ceiling() == pytest.approx(500)
    assert stage.ceiling(4) == pytest.approx(4 / 0.003)
    assert stage.ceiling(cached=False) == pytest.approx(250)
    assert stage.ceiling(4, cached=False) == pytest.approx(4 / 0.006)  # together it costs half as much again
    assert Stage("read", 0.0, 0.0, None, 0.0, 0.0).ceiling(2) == math.inf


def test_what_limits_and_whether_storage_matters() -> None:
    stages = [Stage("read", 0.004, 0.001, None, 0, 0), Stage("decode", 0.002, 0.002, None, 0, 0)]
    assert (limiting(stages, cached=True), limiting(stages, cached=False)) == ("decode", "read")
    assert storage_matters(stages)
    assert not storage_matters(stages[1:])
    assert not storage_matters([Stage("read", 4e-6, 1e-6, None, 0, 0)])  # microseconds: imports, first uses


def test_worker_counts() -> None:
    assert worker_counts(1, 0.0) == [1, 2]
    assert worker_counts(2, 0.0) == [1, 2]
    assert worker_counts(2, 0.9) == [1, 2, 4, 8]
    assert worker_counts(16, 0.0) == [1, 4, 8, 16]
    assert worker_counts(16, 0.9) == [1, 4, 8, 16, 32, 64]


def test_settings_as_text() -> None:
    assert [str(Setting(*pair)) for pair in (("inline", 0), ("process", 1), ("process", 2), ("thread", 3))] == [
        *("inline", "1 process", "2 processes", "3 threads")
    ]
    assert str(Setting("ray", 2)) == "2 Ray workers"
    assert str(Setting("auto", 2)) == "1 process, 2 threads"
    assert Setting("auto", 2).arguments == 'executor="auto", num_workers=2'
    assert Setting("inline", 0).arguments == "num_workers=0"


def test_as_dict_is_json_without_infinity() -> None:
    found = made_up()
    text = json.dumps(found.as_dict(), allow_nan=False)
    stages = {entry["name"]: entry for entry in json.loads(text)["stages"]}
    assert stages["nothing"]["ceiling_one_core"] is None
    assert stages["decode"]["ceiling_one_core"] == pytest.approx(1 / stages["decode"]["again"])
    assert json.loads(text)["rehearsal"]["waiting"] == pytest.approx(found.rehearsal.waiting)
