"""Results of `penstock.tools.profiling.profile`: frozen dataclasses of numbers, and `Profile.as_dict` for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.loader.setting import Setting

__all__ = ["Moment", "Profile", "Rehearsal", "Setting", "Stage", "Trial", "Verdict"]


@dataclass(frozen=True)
class Stage:
    """What one step takes for a sample, in seconds.

    Attributes:
        name: "fetch" is what the data set does outside of its named stages, "collate" making the batch.
        first: alone in one thread, the first time that the samples are asked for; files that we know of were dropped
            from the page cache before.
        again: the same samples once more, alone in one thread.
        together: the same with a worker process on every core, the work of all of them added up; None where that could
            not be measured.
        waits: share of ``again`` in which it did not compute, but waited: for storage, a lock, a server.
        first_waits: the same of ``first``.
    """

    name: str
    first: float
    again: float
    together: float | None
    waits: float
    first_waits: float

    def ceiling(self, cores: int = 1, *, cached: bool = True) -> float:
        """Samples/s if there were nothing but this stage, on one core, or on all of them."""
        seconds = self.again if cached else self.first
        if cores > 1 and self.together is not None:
            # Together costs more than alone: cores share memory and clock. That holds for the first time, too.
            seconds *= self.together / self.again if self.again > 0 else 1.0
        return cores / seconds if seconds > 0 else float("inf")


@dataclass(frozen=True)
class Trial:
    """Batches made by one setting, as fast as it can.

    Attributes:
        setting: which.
        cached: whether all samples had been asked for before.
        rate: samples/s.
        batches: that this rests on.
        start: seconds from starting the workers to the first batch.
        stages: seconds of work by sample and stage, all workers together.
        error: why there is no result, in words; "" if there is one.
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
    """A batch of the rehearsal: seconds since it began; ``ready`` batches were finished when it was asked for."""

    asked: float
    had: float
    ready: int

    @property
    def wait(self) -> float:
        """Seconds that the training waited for the batch."""
        return self.had - self.asked


@dataclass(frozen=True)
class Rehearsal:
    """The chosen setting beside a training that takes no core.

    Attributes:
        step: seconds that it takes for each batch; its share of them, where parts of batches are measured.
        cached: whether the samples had been asked for before.
        moments: the batches, in order.
        settled: batches at the beginning that are not counted: workers start, and nothing is ready yet.
    """

    setting: Setting
    step: float
    cached: bool
    moments: list[Moment]
    settled: int

    @property
    def waiting(self) -> float:
        """Seconds of waiting by batch, or part of one."""
        counted = self.moments[self.settled :]
        return sum(moment.wait for moment in counted) / len(counted) if counted else 0.0


@dataclass(frozen=True)
class Verdict:
    """The answers.

    Attributes:
        limit: "training" if the loader keeps up with the step that was given, else the name of a stage.
        limit_cached: the stage that limits where everything has been read before.
        setting: that this machine wants.
        rate: samples/s that are to be expected of it.
        needed: samples/s that the step asks for; None without one.
        keeps_up: whether it does; None without a step.
        waiting: seconds of waiting by step that are expected; None without one.
        sentences: all of it in words.
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
    """What was measured, and what follows.

    Attributes:
        name: of what was measured.
        cores: that this process may use.
        batch_size: samples of a batch.
        measured: samples of a batch as it was measured: fewer, where a batch takes very long.
        samples: that the measurement alone rests on.
        dropped: files that were dropped from the page cache before they were read the first time.
        given: what the loader had.
        others: cores that other programs kept busy while this one measured in one thread; 0 where nobody knows.
        seconds: that it took.
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
        """Of a batch, that was measured as one."""
        return self.measured / self.batch_size

    def rate_alone(self, *, cached: bool = True) -> float:
        """Samples/s of one thread that does everything."""
        total = sum(stage.again if cached else stage.first for stage in self.stages)
        return 1 / total if total > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-serialisable; ceilings are added to the stages."""
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
