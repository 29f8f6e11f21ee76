"""Messages to and from an executor: `BatchRequest`, and `BatchResult` with its `BatchMetrics`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["BatchMetrics", "BatchRequest", "BatchResult"]


@dataclass(slots=True, eq=False)
class BatchRequest:
    """A request for one batch. The requests of a stream are empty: its worker makes the next batch.

    Attributes:
        indices: indices of the samples, as a list; or packed: the bytes of int64 numbers, which are cheap to send.
        keys: keys of the samples' generators, likewise; uint64 if they are packed.
        place: position of the dataset when the epoch started; None for datasets without one. It is part of the request,
            so that a dataset whose position has changed since still yields the batches of this epoch.
        run: number of the run, an epoch iterator's, that asks for it.
        number: number of the batch in its run.
    """

    indices: Any
    keys: Any
    place: Any = None
    run: int = 0
    number: int = 0

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.indices) // (8 if isinstance(self.indices, bytes) else 1)

    def unpack(self) -> None:
        """Make lists of packed numbers, for datasets and for messages."""
        if isinstance(self.indices, bytes):
            self.indices = memoryview(self.indices).cast("q").tolist()
        if isinstance(self.keys, bytes):
            self.keys = memoryview(self.keys).cast("Q").tolist()

    def part(self, begin: int, end: int) -> BatchRequest:
        """Return a request for some of the samples."""
        self.unpack()
        return BatchRequest(self.indices[begin:end], self.keys[begin:end], self.place, self.run, self.number)


@dataclass(slots=True, eq=False)
class BatchMetrics:
    """The cost of making a batch or a part of one, as plain numbers and text that can be sent.

    Attributes:
        samples: number of samples loaded.
        fetch: seconds in the dataset, over all threads.
        collate: seconds in the collate function.
        hand_over: seconds from there to the consumer: packing in the worker, unpacking in the consumer's process.
        cpu: CPU seconds in the dataset.
        stages: seconds in each `penstock.stages.stage` of the dataset, contained in ``fetch``.
        failures: failures that ``on_error`` handled (`penstock.loader.on_error.Failure`).
    """

    samples: int = 0
    fetch: float = 0.0
    collate: float = 0.0
    hand_over: float = 0.0
    cpu: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    failures: list[Any] = field(default_factory=list)

    def add(self, other: BatchMetrics) -> None:
        """Add the costs of another batch, or of another part of the same one."""
        self.samples += other.samples
        self.fetch += other.fetch
        self.collate += other.collate
        self.hand_over += other.hand_over
        self.cpu += other.cpu
        for name, seconds in other.stages.items():
            self.stages[name] = self.stages.get(name, 0.0) + seconds

    def by_stage(self) -> dict[str, float]:
        """Return the seconds of work by stage, without overlap."""
        named = dict(self.stages)
        # The dataset's time outside of its named stages.
        rest = max(0.0, self.fetch - sum(named.values()))
        stages = {"fetch": rest + named.pop("fetch", 0.0), **named}
        for name, seconds in (("collate", self.collate), ("hand-over", self.hand_over)):
            stages[name] = stages.get(name, 0.0) + seconds
        return stages


class BatchResult(NamedTuple):
    """A finished batch, or the error in its place.

    Attributes:
        batch: result of the collate function.
        metrics: cost of the batch.
        number: number of the batch in its run, 0 for the first one after a resume.
        worker: the worker that made it.
        state: states of the user's dataset, iterator and collate function right after this batch or its error; None
            without states, and empty if a stream could not make the batch, which counts as not made.
        way: transport: "local" (same process), "ring", "pipe" (without large values), "refused" (the same, because
            there was no memory for it in the ring), or Ray's "message".
        error: exception raised in place of this batch.
        run: number of the run that asked for it.
        ended: whether there is no such batch, because the worker's stream has ended.
        nbytes: bytes that were sent for it; 0 in the same process.
    """

    batch: Any
    metrics: BatchMetrics
    number: int
    worker: int = 0
    state: Any = None
    way: str = "local"
    error: BaseException | None = None
    run: int = 0
    ended: bool = False
    nbytes: int = 0
