"""Messages to and from an executor: `BatchRequest`, and `BatchResult` with its `BatchMetrics`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BatchMetrics", "BatchRequest", "BatchResult"]


class BatchRequest:
    """A request for one batch. The requests of a stream are empty: its worker makes the next batch.

    Args:
        indices: indices of the samples.
        keys: keys of the samples' generators, as a list, or packed as 64-bit unsigned numbers in an array or bytes,
            which is cheap to send.
        place: position of the dataset when the epoch started; None for datasets without one. It is part of the request,
            so that a dataset whose position has changed since still yields the batches of this epoch.

    Attributes:
        run: number of the run, an epoch iterator's, that asks for it.
        number: number of the batch in its run.
    """

    __slots__ = ("_keys", "_packed", "indices", "number", "place", "run")

    def __init__(self, indices: list[Any], keys: list[int] | npt.NDArray[np.uint64] | bytes, place: Any = None) -> None:
        self.indices = indices
        self.place = place
        self.run = self.number = 0
        self._keys: list[int] | None = keys if isinstance(keys, list) else None
        self._packed: Any = None if isinstance(keys, list) else keys

    @property
    def keys(self) -> list[int]:
        """Keys of the samples."""
        if self._keys is None:
            packed = self._packed
            self._keys = np.frombuffer(packed, np.uint64).tolist() if len(packed) else []
        return self._keys

    @property
    def first_key(self) -> int:
        """Key of the first sample, which must exist."""
        packed = self._packed
        if self._keys is not None or not isinstance(packed, np.ndarray):
            return self.keys[0]
        return int(packed[0])

    def part(self, begin: int, end: int) -> BatchRequest:
        """Return a request for some of the samples."""
        part = BatchRequest(self.indices[begin:end], self.packed[8 * begin : 8 * end], self.place)
        part.run, part.number = self.run, self.number
        return part

    @property
    def packed(self) -> bytes:
        """Keys of the samples as 64-bit numbers, to be sent."""
        if not isinstance(self._packed, bytes):
            self._packed = np.asarray(self.keys if self._packed is None else self._packed, np.uint64).tobytes()
        return self._packed


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
        """Return constructor arguments for an equal object, to be sent."""
        numbers = self.samples, self.fetch, self.collate, self.hand_over, self.cpu
        return (*numbers, self.stages or None, self.failures or None)

    def add(self, other: BatchMetrics) -> None:
        """Add the metrics of another part of the same batch."""
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
        batch: result of the collate function.
        metrics: cost of the batch.
        number: number of the batch in its run, 0 for the first one after a resume.
        worker: the worker that made it.
        state: states of the user's dataset, iterator and collate function right after this batch or its error; None
            without states.
        way: transport: "local" (same process), "ring", "pipe" (without large tensors; of Ray "message"), or "refused"
            (the same, because there was no memory for it in the ring).
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
