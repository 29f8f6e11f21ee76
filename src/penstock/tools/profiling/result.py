"""Results of `penstock.tools.profiling.profile` as frozen dataclasses; `Profile.as_dict` is for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.tools.setting import Setting

__all__ = ["Moment", "Profile", "Rehearsal", "Setting", "Stage", "Trial", "Verdict"]


@dataclass(frozen=True)
class Stage:
    """Seconds of one stage per sample.

    Attributes:
        name: "fetch" is the dataset's time outside its named stages; "collate" is the stacking of the batch.
        first: on new samples, alone in one thread; the files of a manifest were first dropped from the page cache.
        again: on the same samples again, alone in one thread.
        together: on cached samples with a worker process on every core, summed over the workers; None if that could
            not be measured.
        waits: share of ``again`` in which the stage did not compute, but waited for storage, a lock or a server.
        first_waits: the same share of ``first``.
    """

    name: str
    first: float
    again: float
    together: float | None
    waits: float
    first_waits: float

    def ceiling(self, cores: int = 1, *, cached: bool = True) -> float:
        """Return the samples/s of this stage alone on this number of cores."""
        seconds = self.again if cached else self.first
        if cores > 1 and self.together is not None:
            # Cores share memory and clock speed, so each is slower when all are busy, also on new samples.
            seconds *= self.together / self.again if self.again > 0 else 1.0
        return cores / seconds if seconds > 0 else float("inf")


@dataclass(frozen=True)
class Trial:
    """The throughput of one setting.

    Attributes:
        setting: executor and workers.
        cached: whether all samples had been read before.
        rate: samples/s.
        batches: number of measured batches.
        start: seconds from starting the workers to the first batch.
        stages: seconds of work per sample, by stage, summed over the workers.
        error: why there is no result; "" if the trial succeeded.
    """

    setting: Setting
    cached: bool
    rate: float = 0.0
    batches: int = 0
    start: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Moment:
    """A batch of the rehearsal.

    Attributes:
        asked: when training requested it, in seconds from the start of the rehearsal.
        had: when training received it.
        ready: number of finished batches at that request.
    """

    asked: float
    had: float
    ready: int

    @property
    def wait(self) -> float:
        """How long training waited for the batch, in seconds."""
        return self.had - self.asked


@dataclass(frozen=True)
class Rehearsal:
    """The chosen setting beside a simulated training that sleeps for each step.

    Attributes:
        step: seconds of a training step, scaled if parts of batches are measured.
        cached: whether the samples had been read before.
        moments: the batches, in order.
        settled: number of batches at the start that do not count, because workers are starting and none is ready.
    """

    setting: Setting
    step: float
    cached: bool
    moments: list[Moment]
    settled: int

    @property
    def waiting(self) -> float:
        """Mean wait in seconds for a batch, or for a part of one."""
        counted = self.moments[self.settled :]
        return sum(moment.wait for moment in counted) / len(counted) if counted else 0.0


@dataclass(frozen=True)
class Verdict:
    """The conclusions from a profile.

    Attributes:
        limit: "training" if the loader keeps up with the given step, else the name of the slowest stage.
        limit_cached: the slowest stage on cached samples.
        setting: the best setting on this machine.
        rate: expected samples/s of this setting.
        needed: samples/s that the step needs; None without a step.
        keeps_up: whether the loader keeps up with the step; None without a step.
        waiting: expected wait in seconds per step; None without a step.
        sentences: the conclusions in words.
    """

    limit: str
    limit_cached: str
    setting: Setting
    rate: float
    needed: float | None
    keeps_up: bool | None
    waiting: float | None
    sentences: list[str]


@dataclass(frozen=True)
class Profile:
    """Measurements of a loader, and the conclusions.

    Attributes:
        name: title of the profile.
        cores: number of cores that this process may use.
        batch_size: samples of a batch.
        measured: samples of a measured batch; fewer than ``batch_size`` if a batch takes very long.
        samples: number of samples measured alone.
        dropped: number of files dropped from the page cache before their first read.
        given: the loader's own setting.
        others: cores that other programs kept busy during the measurement in one thread; 0 if unknown.
        seconds: duration of the measurement.
    """

    name: str
    cores: int
    batch_size: int
    measured: int
    samples: int
    dropped: int
    given: Setting
    stages: list[Stage]
    trials: list[Trial]
    rehearsal: Rehearsal
    verdict: Verdict
    others: float
    seconds: float

    @property
    def share(self) -> float:
        """Measured samples as a share of the batch size."""
        return self.measured / self.batch_size

    def rate_alone(self, *, cached: bool = True) -> float:
        """Return the samples/s of one thread that runs all stages."""
        total = sum(stage.again if cached else stage.first for stage in self.stages)
        return 1 / total if total > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as JSON-serialisable values, with ceilings in each stage."""
        result = asdict(self)
        for stage, entry in zip(self.stages, result["stages"], strict=True):
            for name, cores, cached in _CEILINGS:
                ceiling = stage.ceiling(self.cores if cores else 1, cached=cached)
                entry[name] = ceiling if ceiling != float("inf") else None
        result["rehearsal"]["waiting"] = self.rehearsal.waiting
        return result


_CEILINGS = (
    ("ceiling_one_core", False, True),
    ("ceiling_all_cores", True, True),
    ("ceiling_one_core_first", False, False),
    ("ceiling_all_cores_first", True, False),
)
