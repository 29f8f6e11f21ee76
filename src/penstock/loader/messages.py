"""What goes into an executor and what comes out: `BatchRequest`, `BatchResult` with its `BatchMetrics`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BatchMetrics", "BatchRequest", "BatchResult"]


class BatchRequest:
    """One batch to be made. A stream's requests are empty: whoever holds the stream takes what comes next.

    Args:
        indices: of its samples.
        keys: of their generators; as a list, or packed: 64-bit unsigned numbers in an array or bytes, which travels at
            little cost.
        place: where the dataset stood when the pass began (None for datasets that have no place of their own). It
            travels with the request, so a dataset that was moved on meanwhile still gives the batches of this pass.
    """

    __slots__ = ("_keys", "_packed", "indices", "place")

    def __init__(self, indices: list[Any], keys: list[int] | npt.NDArray[np.uint64] | bytes, place: Any = None) -> None:
        self.indices = indices
        self.place = place
        self._keys: list[int] | None = keys if isinstance(keys, list) else None
        self._packed: Any = None if isinstance(keys, list) else keys

    @property
    def keys(self) -> list[int]:
        """The keys of the samples."""
        if self._keys is None:
            packed = self._packed
            self._keys = np.frombuffer(packed, np.uint64).tolist() if len(packed) else []
        return self._keys

    @property
    def first_key(self) -> int:
        """The key of the first sample; there has to be one."""
        packed = self._packed
        if self._keys is not None or not isinstance(packed, np.ndarray):
            return self.keys[0]
        return int(packed[0])

    def part(self, begin: int, end: int) -> BatchRequest:
        """The same for some of the samples."""
        return BatchRequest(*self.packed(begin, end))

    def packed(self, begin: int = 0, end: int | None = None) -> tuple[list[Any], bytes, Any]:
        """Arguments of the request of the samples ``begin`` to ``end``, to be sent."""
        packed = self._packed
        if not isinstance(packed, np.ndarray):
            self._packed = packed = np.array(self.keys, np.uint64)
        return self.indices[begin:end], packed[begin:end].tobytes(), self.place

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchRequest, self.packed()


class BatchMetrics:
    """What making a batch, or a part of one, took. Plain numbers and text, so that it travels.

    Attributes:
        samples: how many were loaded.
        fetch: seconds in the dataset, over all threads.
        collate: seconds in the collate function.
        hand_over: seconds between there and the consumer: packing in the worker, unpacking in the consumer's process.
        cpu: seconds of the processor in the dataset.
        stages: seconds in each `penstock.stages.stage` that the dataset named, within ``fetch``.
        failures: what ``on_error`` had to deal with (`penstock.loader.failures.Failure`).
    """

    __slots__ = ("collate", "cpu", "failures", "fetch", "hand_over", "samples", "stages")

    def __init__(
        self,
        samples: int = 0,
        fetch: float = 0.0,
        collate: float = 0.0,
        hand_over: float = 0.0,
        cpu: float = 0.0,
        stages: dict[str, float] | None = None,
        failures: list[Any] | None = None,
    ) -> None:
        self.samples = samples
        self.fetch = fetch
        self.collate = collate
        self.hand_over = hand_over
        self.cpu = cpu
        self.stages: dict[str, float] = {} if stages is None else stages
        self.failures: list[Any] = [] if failures is None else failures

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchMetrics, self.packed()

    def packed(self) -> tuple[Any, ...]:
        """Arguments of an equal one, to be sent."""
        numbers = self.samples, self.fetch, self.collate, self.hand_over, self.cpu
        return (*numbers, self.stages or None, self.failures or None)

    def copy(self) -> BatchMetrics:
        """Return an equal one that does not change with this one."""
        numbers = self.samples, self.fetch, self.collate, self.hand_over, self.cpu
        return BatchMetrics(*numbers, dict(self.stages), list(self.failures))

    def become(self, other: BatchMetrics) -> None:
        """Be what another one is, which is not used any more."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def add(self, other: BatchMetrics) -> None:
        """Add what another part of the same batch took."""
        self.samples += other.samples
        self.fetch += other.fetch
        self.collate += other.collate
        self.hand_over += other.hand_over
        self.cpu += other.cpu
        for name, seconds in other.stages.items():
            self.stages[name] = self.stages.get(name, 0.0) + seconds
        self.failures += other.failures


class BatchResult(NamedTuple):
    """A finished batch, or the error in its place.

    Attributes:
        batch: what the collate function returned.
        metrics: what it took.
        number: of the batch in its pass, 0 for the first one after a resume.
        worker: id of the worker (process or thread) that a stream's batch came from; 0 where it does not matter.
        state: of the user's dataset, iterator and collate function right after this batch, or after its error; None if
            they have none.
        way: how it came: "local" (same process), "ring", "pipe" (small, too large, or no ring yet), "copy" (out of it).
        error: what was raised in the place of this batch.
    """

    batch: Any
    metrics: BatchMetrics
    number: int
    worker: int = 0
    state: Any = None
    way: str = "local"
    error: BaseException | None = None
