"""From measurements to answers: which setting, which stage limits, and whether a training step is kept up with.

Rules: a setting is as good as another one if it makes 90 % of its samples/s; of those that are as good as the best
one, that with the fewest workers, and then the one that leaves most to the training (processes before threads).
With a training step, that with the fewest workers among those that make a tenth more than it needs. Inline batches are
all waited for, so it is chosen where the step hardly notices, or where workers are slower.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loader.setting import EXECUTOR_COST
from penstock.loader.throughput import ENOUGH
from penstock.tools.profiling.result import Profile, Setting, Stage, Trial, Verdict
from penstock.wording import counted, rate_text

__all__ = ["choose", "expected_wait", "judge", "limiting", "restated"]

_AS_GOOD = 0.9
_SPARE = 1.1  # samples/s over those that the step needs
_MATTERS = 1.25  # times as long, the first time: then storage decides
_BUSY = 0.3  # cores that others use, from which it is said
_TINY = 2e-5  # seconds that a sample takes longer the first time, for reasons that have nothing to do with storage


def choose(trials: Sequence[Trial], *, needed: float | None) -> Trial:
    """The trial of the setting to use, with ``needed`` samples/s or as many as there can be."""
    good = [trial for trial in trials if not trial.error and trial.rate > 0]
    if not good:
        return trials[0]
    enough = [trial for trial in good if needed is not None and trial.rate >= _wanted(trial, needed)]
    if not enough:
        best = max(trial.rate for trial in good)
        enough = [trial for trial in good if trial.rate >= _AS_GOOD * best]
        enough = [trial for trial in enough if trial.setting.workers] or enough  # inline batches are all waited for
    return min(enough, key=lambda trial: (trial.setting.workers, EXECUTOR_COST[trial.setting.executor]))


def _wanted(trial: Trial, needed: float) -> float:
    """Samples/s at which next to nothing is waited for."""
    return needed * _SPARE if trial.setting.workers else needed / ENOUGH


def expected_wait(setting: Setting, rate: float, batch_size: int, step: float) -> float:
    """Seconds of waiting by step, by arithmetic: inline a whole batch, else what a batch takes longer than the step."""
    batch = batch_size / rate if rate > 0 else 0.0
    return batch if not setting.workers else max(0.0, batch - step)


def limiting(stages: Sequence[Stage], *, cached: bool) -> str:
    """The stage with the lowest ceiling."""
    return max(stages, key=lambda stage: stage.again if cached else stage.first).name


def storage_matters(stages: Sequence[Stage]) -> bool:
    """Whether samples take much longer the first time that they are asked for."""
    first, again = sum(stage.first for stage in stages), sum(stage.again for stage in stages)
    return first > max(_MATTERS * again, again + _TINY)


def judge(stages: Sequence[Stage], chosen: Trial, *, batch_size: int, step: float | None) -> Verdict:
    """All answers. Their sentences are made by `restated`, when the whole profile is there."""
    needed = batch_size / step if step else None
    waiting = None if step is None else expected_wait(chosen.setting, chosen.rate, batch_size, step)
    keeps_up = None if step is None or waiting is None else waiting <= ENOUGH * step
    slowest = limiting(stages, cached=chosen.cached)
    return Verdict(
        limit="training" if keeps_up else slowest,
        limit_cached=limiting(stages, cached=True),
        setting=chosen.setting,
        rate=chosen.rate,
        needed=needed,
        keeps_up=keeps_up,
        waiting=waiting,
        sentences=[],
    )


def restated(profile: Profile) -> list[str]:
    """The answers in words."""
    return [
        _limit(profile),
        _setting(profile),
        *_step(profile),
        *_remarks(profile),
    ]


def _limit(profile: Profile) -> str:
    first, again = limiting(profile.stages, cached=False), profile.verdict.limit_cached
    stage = next(stage for stage in profile.stages if stage.name == again)
    alone = rate_text(stage.ceiling())
    text = f"{again!r} is the slowest stage: with nothing else to do, one core makes {alone} samples/s"
    if profile.cores > 1:
        text += f", all {profile.cores} together {rate_text(stage.ceiling(profile.cores))}"
    if stage.waits > 0.5:
        text += f"; it waits for {stage.waits:.0%} of that time, so more workers than cores raise it"
    if storage_matters(profile.stages):
        slower = sum(stage.first for stage in profile.stages) / sum(stage.again for stage in profile.stages)
        same = "it is the slowest stage then, too" if first == again else f"then {first!r} is the slowest stage"
        text += f". The first time that samples are read, they take {slower:.1f}x as long, and {same}"
    return text + "."


def _setting(profile: Profile) -> str:
    verdict, alone = profile.verdict, profile.rate_alone()
    text = f"This machine wants {verdict.setting.arguments}: {rate_text(verdict.rate)} samples/s"
    if verdict.setting.workers and alone and verdict.rate > 1.05 * alone:
        text += f", {verdict.rate / alone:.1f}x those of one thread"
    if verdict.setting != profile.given:
        chosen = [t.cached for t in profile.trials if (t.setting, t.rate) == (verdict.setting, verdict.rate)]
        alike = (t for t in profile.trials if t.setting == profile.given and t.cached in chosen and t.rate)
        same = next(alike, None)  # of samples that were read before, or that were not, as those of the verdict
        known = f", which makes {rate_text(same.rate)}" if same is not None else ""
        text += f". The loader has {profile.given.arguments}{known}"
    else:
        text += ", which is what the loader has"
    return text + "."


def _step(profile: Profile) -> list[str]:
    verdict, step = profile.verdict, profile.rehearsal.step / profile.share
    if verdict.needed is None or verdict.waiting is None:
        return []
    text = f"A step of {_time(step)} needs {rate_text(verdict.needed)} samples/s"
    measured = f"{_time(profile.rehearsal.waiting / profile.share)} a step was waited in a rehearsal of "
    measured += counted(len(profile.rehearsal.moments), "batch" if profile.share == 1 else "part") + (
        "" if profile.share == 1 else " of batches"
    )
    if verdict.keeps_up:
        return [f"{text}: the loader keeps up, and the training sets the pace; {measured}."]
    if not verdict.setting.workers:
        why = "without workers every batch is waited for"
    else:
        why = f"{verdict.limit!r} is what to make cheaper"
    return [f"{text}: the loader does not keep up. Expect to wait {_time(verdict.waiting)} a step; {measured}; {why}."]


def _remarks(profile: Profile) -> list[str]:
    remarks = []
    if profile.others > _BUSY:
        remarks.append(
            f"Other programs kept {profile.others:.1f} of {counted(profile.cores, 'core')} busy meanwhile: without "
            "them there is more to be had."
        )
    remarks += [f"{trial.setting}: no result, {trial.error}." for trial in profile.trials if trial.error]
    if {stage.name for stage in profile.stages} <= {"fetch", "collate"}:
        remarks.append(
            'The data set names no stages: put `with penstock.stage("read"):` and the like around its steps to see '
            "which of them takes the time."
        )
    if profile.measured < profile.batch_size:
        remarks.append(
            f"Batches of {counted(profile.measured, 'sample')} were measured instead of {profile.batch_size}, which "
            "take too long for the time given."
        )
    return remarks


def _time(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"
