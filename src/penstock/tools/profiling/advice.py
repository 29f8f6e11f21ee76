"""Conclusions from measurements: the best setting, the limiting stage, and whether the loader keeps up with training.

Without a training step, candidates are the settings with at least 90 % of the best samples/s. The one with the fewest
workers is chosen, then the executor that leaves most of the processor to training (processes before threads). With a
training step, candidates are the settings with 10 % more samples/s than the step needs; the one with the fewest workers
is chosen. Training waits for every inline batch, so inline is chosen only if that wait is negligible, or if workers are
slower.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loader.autotune import ENOUGH
from penstock.tools.profiling.result import Profile, Setting, Stage, Trial, Verdict
from penstock.wording import counted, rate_text

__all__ = ["choose", "expected_wait", "judge", "limiting", "restated"]

_AS_GOOD = 0.9
_EXECUTOR_COST = {"auto": 0, "process": 1, "thread": 2, "inline": 3}  # a lower one slows the training less
_SPARE = 1.1  # factor over the samples/s that the step needs
_MATTERS = 1.25  # storage matters if first reads are slower by this factor
_BUSY = 0.3  # the report mentions other programs that use at least this many cores
_TINY = 2e-5  # extra seconds of a first read that are not due to storage


def choose(trials: Sequence[Trial], *, needed: float | None) -> Trial:
    """Return the trial of the best setting for ``needed`` samples/s; None: for the most samples/s."""
    good = [trial for trial in trials if not trial.error and trial.rate > 0]
    if not good:
        return trials[0]
    enough = [trial for trial in good if needed is not None and trial.rate >= _wanted(trial, needed)]
    if not enough:
        best = max(trial.rate for trial in good)
        enough = [trial for trial in good if trial.rate >= _AS_GOOD * best]
        enough = [trial for trial in enough if trial.setting.workers] or enough  # training waits for every inline batch
    return min(enough, key=lambda trial: (trial.setting.workers, _EXECUTOR_COST[trial.setting.executor]))


def _wanted(trial: Trial, needed: float) -> float:
    """Return the samples/s that a setting must reach so that training hardly waits."""
    return needed * _SPARE if trial.setting.workers else needed / ENOUGH


def expected_wait(setting: Setting, rate: float, batch_size: int, step: float) -> float:
    """Return the expected wait per step in seconds: inline, a whole batch; else the time of a batch beyond the step."""
    batch = batch_size / rate if rate > 0 else 0.0
    return batch if not setting.workers else max(0.0, batch - step)


def limiting(stages: Sequence[Stage], *, cached: bool) -> str:
    """Return the name of the stage with the lowest ceiling."""
    return max(stages, key=lambda stage: stage.again if cached else stage.first).name


def storage_matters(stages: Sequence[Stage]) -> bool:
    """Return whether the first read of a sample takes much longer than the second."""
    first, again = sum(stage.first for stage in stages), sum(stage.again for stage in stages)
    return first > max(_MATTERS * again, again + _TINY)


def judge(stages: Sequence[Stage], chosen: Trial, *, batch_size: int, step: float | None) -> Verdict:
    """Return the verdict without its sentences; `restated` writes those from the whole profile."""
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
    """Return the verdict as sentences."""
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
    text = f"{again!r} is the slowest stage: alone, it runs at {alone} samples/s on one core"
    if profile.cores > 1:
        text += f", and at {rate_text(stage.ceiling(profile.cores))} on all {profile.cores}"
    if stage.waits > 0.5:
        text += f"; it waits {stage.waits:.0%} of that time, so use more workers than cores"
    if storage_matters(profile.stages):
        slower = sum(stage.first for stage in profile.stages) / sum(stage.again for stage in profile.stages)
        same = "it is the slowest stage then, too" if first == again else f"{first!r} is the slowest stage then"
        text += f". The first read of a sample takes {slower:.1f}x as long, and {same}"
    return text + "."


def _setting(profile: Profile) -> str:
    verdict, alone = profile.verdict, profile.rate_alone()
    text = f"Best on this machine: {verdict.setting.arguments}, with {rate_text(verdict.rate)} samples/s"
    if verdict.setting.workers and alone and verdict.rate > 1.05 * alone:
        text += f", {verdict.rate / alone:.1f}x one thread"
    if verdict.setting != profile.given:
        chosen = [t.cached for t in profile.trials if (t.setting, t.rate) == (verdict.setting, verdict.rate)]
        alike = (t for t in profile.trials if t.setting == profile.given and t.cached in chosen and t.rate)
        same = next(alike, None)  # compare on cached or on new samples, like the verdict
        known = f", with {rate_text(same.rate)}" if same is not None else ""
        text += f". Your loader has {profile.given.arguments}{known}"
    else:
        text += ". Your loader has this setting"
    return text + "."


def _step(profile: Profile) -> list[str]:
    verdict, step = profile.verdict, profile.rehearsal.step / profile.share
    if verdict.needed is None or verdict.waiting is None:
        return []
    text = f"A step of {_time(step)} needs {rate_text(verdict.needed)} samples/s"
    measured = f"the rehearsal waited {_time(profile.rehearsal.waiting / profile.share)} a step, over "
    measured += counted(len(profile.rehearsal.moments), "batch" if profile.share == 1 else "part") + (
        "" if profile.share == 1 else " of batches"
    )
    if verdict.keeps_up:
        return [f"{text}: the loader keeps up, and training is the limit; {measured}."]
    if not verdict.setting.workers:
        why = "without workers, training waits for every batch"
    else:
        why = f"make {verdict.limit!r} cheaper"
    return [f"{text}: the loader does not keep up. Expect to wait {_time(verdict.waiting)} a step; {measured}; {why}."]


def _remarks(profile: Profile) -> list[str]:
    remarks = []
    if profile.others > _BUSY:
        remarks.append(
            f"Other programs kept {profile.others:.1f} of {counted(profile.cores, 'core')} busy meanwhile: without "
            "them, expect more samples/s."
        )
    remarks += [f"{trial.setting}: no result, {trial.error}." for trial in profile.trials if trial.error]
    if {stage.name for stage in profile.stages} <= {"fetch", "collate"}:
        remarks.append(
            'The dataset names no stages: put `with penstock.stage("read"):` and the like around its steps to see '
            "which step takes the time."
        )
    if profile.measured < profile.batch_size:
        remarks.append(
            f"Batches of {counted(profile.measured, 'sample')} were measured instead of {profile.batch_size}, which "
            "take too long for these seconds."
        )
    return remarks


def _time(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"
