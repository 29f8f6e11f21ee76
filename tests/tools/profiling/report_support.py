"""A profile that is made up, with something in every part of it."""

from __future__ import annotations

from dataclasses import replace

from penstock.tools.profiling import Moment, Profile, Rehearsal, Setting, Stage, Trial, Verdict
from penstock.tools.profiling.advice import restated


def made_up(*, name: str = "train:loader", step: float = 0.05, batches: int = 60) -> Profile:
    """Two cores, ten samples a batch; the loader does not keep up."""
    stages = [
        Stage("read", 0.02, 0.0002, 0.0003, 0.1, 0.97),
        Stage("decode", 0.006, 0.006, 0.007, 0.0, 0.0),
        Stage("nothing", 0.0, 0.0, 0.0, 0.0, 0.0),
        Stage("collate", 0.0001, 0.0001, 0.0001, 0.0, 0.0),
    ]
    trials = [
        Trial(Setting("inline", 0), True, 150.0, 20, 0.05),
        Trial(Setting("process", 1), True, 148.0, 20, 0.08),
        Trial(Setting("process", 2), True, 280.0, 30, 0.09, {"decode": 0.007}),
        Trial(Setting("auto", 2), True, 260.0, 30, 0.08),
        Trial(Setting("thread", 2), True, error="RuntimeError: not in threads <b>"),
        Trial(Setting("process", 2), False, 75.0, 9, 0.2),
        Trial(Setting("process", 8), False, 170.0, 21, 0.3),
    ]
    moments, now = [], 0.0
    for number in range(batches):
        wait = 0.3 if number == 0 else 0.03 if number % 2 else 0.0
        moments.append(Moment(now, now + wait, number % 3))
        now += wait + step
    chosen = Setting("process", 8)
    rehearsal = Rehearsal(chosen, step, False, moments, min(2, batches // 2))
    verdict = Verdict("read", "decode", chosen, 170.0, 10 / step, False, 10 / 170 - step, [])
    found = Profile(
        *(name, 2, 10, 10, 240, 120, Setting("process", 2), stages, trials, rehearsal, verdict, 0.9, 20.4),
    )
    return replace(found, verdict=replace(verdict, sentences=restated(found)))
