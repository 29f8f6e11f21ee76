"""``device=``: batches arrive on a device, and the next one is copied while the consumer works on this one.

    consumer asks    k            k + 1          k + 2
    side stream      copy k + 1   copy k + 2     copy k + 3       from pinned memory
    consumer's       wait k       wait k + 1     wait k + 2       for an event of the side stream; the host goes on
                     work on k    work on k + 1  work on k + 2

The consumer's thread copies a batch into pinned memory, which frees its slot of the ring. One batch is copied ahead at
most, and only if it is finished already: the batch at hand never waits for a later one.

Invariant: a state counts the batches that the consumer has received. One that is copied ahead is not among them.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from penstock.errors import ConfigError, WorkerError
from penstock.loader.batches import map_batch
from penstock.loader.interrupts import is_of_signal_handler
from penstock.loader.messages import BatchResult
from penstock.loader.snapshots import Snapshot
from penstock.loader.statistics import Statistics
from penstock.loader.window import INTERRUPTED

if TYPE_CHECKING:
    from penstock.loader.dataloader_iter import ResultIterator

__all__ = ["DeviceCopier", "DevicePrefetcher", "StreamCopier", "copier_of"]


@runtime_checkable
class DeviceCopier(Protocol):
    """How batches get to a device: what ``device=`` of a `DataLoader` takes for a device that torch has no streams of.

    The loader calls `copy` and then `record` for each batch, maybe while the consumer works on the batch before, and
    `wait` when it hands the batch out. All of it happens in the consumer's thread.

    >>> class ToLists:
    ...     def copy(self, batch):
    ...         return batch.tolist()
    ...
    ...     def record(self):
    ...         return None
    ...
    ...     def wait(self, mark, batch):
    ...         pass
    >>> list(DataLoader(range(4), batch_size=2, device=ToLists()))
    [[0, 1], [2, 3]]
    """

    def copy(self, batch: Any) -> Any:
        """Begin to copy a batch, and return it as it will be on the device. What is raised comes in its place."""

    def record(self) -> Any:
        """Return a mark behind all copies that have begun."""

    def wait(self, mark: Any, batch: Any) -> None:
        """Let the consumer's work on the device wait for a mark, and keep the batch's memory until that work is done.

        Args:
            mark: what `record` returned.
            batch: what `copy` returned.
        """


class StreamCopier:
    """Copies to an accelerator of torch's, on a stream of its own.

    Args:
        device: with its number.
        module: torch's module for that kind of device, such as ``torch.cuda``.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        self._stream = module.Stream(device)

    def copy(self, batch: Any) -> Any:
        """As in `DeviceCopier`. The slot of the ring is free when this returns, since pinned memory holds a copy."""
        with self._module.stream(self._stream):
            return map_batch(self._move, batch)

    def _move(self, part: Any) -> Any:
        if not _is_movable(part):
            return part
        # torch keeps the pinned memory until the copy is done.
        pinned = part.pin_memory() if getattr(part, "device", _CPU) == _CPU else part
        return pinned.to(self._device, non_blocking=True)

    def record(self) -> Any:
        """As in `DeviceCopier`."""
        return self._stream.record_event()

    def wait(self, mark: Any, batch: Any) -> None:
        """As in `DeviceCopier`."""
        stream = self._module.current_stream(self._device)
        stream.wait_event(mark)
        # The memory belongs to the side stream, whose next copy would use it again while the consumer's work goes on.
        map_batch(lambda part: part.record_stream(stream) if _is_movable(part) else None, batch)


class PlainCopier:
    """Copies to a device without streams, in order with the consumer's work.

    Args:
        device: to which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, batch: Any) -> Any:
        """As in `DeviceCopier`."""
        return map_batch(lambda part: part.to(self._device) if _is_movable(part) else part, batch)

    def record(self) -> None:
        """As in `DeviceCopier`: there is nothing to wait for."""

    def wait(self, mark: Any, batch: Any) -> None:
        """As in `DeviceCopier`."""


_CPU = torch.device("cpu")
_MOVES = "pin_memory", "to", "record_stream"


def _is_movable(part: Any) -> bool:
    """Return whether a part of a batch moves as tensors do; the graphs of PyTorch Geometric do, too."""
    return isinstance(part, torch.Tensor) or all(callable(getattr(part, name, None)) for name in _MOVES)


def copier_of(device: str | int | torch.device | DeviceCopier) -> DeviceCopier | None:
    """Return what copies batches to a device; None for the CPU, where they are already.

    Raises:
        ConfigError: torch knows no such device, or has none here.
    """
    if isinstance(device, DeviceCopier):
        return device
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is no device of torch's here: {str(error).splitlines()[0]}") from error
    if place.type == "cpu":
        return None
    module: Any = getattr(torch, place.type, None)
    if module is None:  # "meta"
        return PlainCopier(place)
    if not module.is_available():
        raise ConfigError(f"device={device!r}: torch finds no such device here, leave device= out or use device='cpu'")
    if not hasattr(module, "Stream"):
        return PlainCopier(place)
    index = module.current_device() if place.index is None else place.index
    return StreamCopier(torch.device(place.type, index), module)


class _Copied(NamedTuple):
    """A batch whose copy has begun.

    Attributes:
        result: with the batch on the device, or with an error.
        mark: to wait for.
        seconds: that the consumer's thread took for it.
    """

    result: BatchResult
    mark: Any
    seconds: float


class DevicePrefetcher:
    """The batches of a pass on a device, one ahead; see `penstock.loader.dataloader_iter.ResultIterator`.

    Args:
        batches: as the executor makes them.
        copier: to the device.
        statistics: told of every copy that is handed out.
    """

    def __init__(self, batches: ResultIterator, copier: DeviceCopier, statistics: Statistics) -> None:
        self._batches = batches
        self._copier = copier
        self._statistics = statistics
        self._ahead: _Copied | Exception | None = None
        self._in_hand = False  # a batch is out of the window, and neither kept here nor handed out yet
        self.ready_when_asked = 0

    @property
    def depth(self) -> int:
        """Batches that may be begun at the moment: with workers one more than without a device."""
        depth = self._batches.depth
        return depth + 1 if depth else 0

    @property
    def processes(self) -> list[Any] | None:
        """The worker processes."""
        return self._batches.processes

    @property
    def first_states(self) -> dict[int, Snapshot]:
        """Snapshots of users' objects right after their beginning."""
        return self._batches.first_states

    def next(self) -> BatchResult:
        """Return the next batch on the device, or its error, and begin to copy the one behind it if that is there."""
        if self._in_hand:
            raise WorkerError(INTERRUPTED)
        ahead, was_ahead = self._ahead, self._ahead is not None
        # What a handler of a signal raises while a batch is in hand leaves it out, so no other may follow.
        if ahead is None:
            result = self._batches.next()
            self._in_hand = True
            ahead = self._copied(result)
        self._in_hand, self._ahead = True, None
        self.ready_when_asked = self._batches.ready_when_asked
        if isinstance(ahead, Exception):
            self._in_hand = False
            raise ahead
        result = self._wait_for(ahead)
        if self._batches.poll():
            if was_ahead:
                self.ready_when_asked = self._batches.ready_when_asked + 1
            self._ahead = self._take_ahead()
        if result.error is None:
            self._statistics.copied(ahead.seconds, ahead=was_ahead)
        self._in_hand = False
        return result

    def poll(self) -> bool:
        """Return whether `next` would not wait."""
        return self._ahead is not None or self._batches.poll()

    def close(self) -> None:
        """Want nothing more. Idempotent."""
        self._ahead = None
        self._batches.close()

    def end(self, patience: float) -> None:
        """The loader is closed: end the workers in so many seconds."""
        self._ahead = None
        self._batches.end(patience)

    def _take_ahead(self) -> _Copied | Exception:
        """Begin to copy a batch that is there; what is raised in its stead waits until it is asked for."""
        try:
            return self._copied(self._batches.next())
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            return error

    def _copied(self, result: BatchResult) -> _Copied:
        if result.error is not None:
            return _Copied(result, None, 0.0)
        begin, mark = perf_counter(), None
        try:
            batch, error = self._copier.copy(result.batch), None
            mark = self._copier.record()
        except Exception as raised:
            if is_of_signal_handler(raised):
                raise
            batch, error = None, raised
        seconds = perf_counter() - begin
        result.metrics.hand_over += seconds
        return _Copied(result._replace(batch=batch, error=error), mark, seconds)

    def _wait_for(self, copied: _Copied) -> BatchResult:
        if copied.result.error is None:
            try:
                self._copier.wait(copied.mark, copied.result.batch)
            except Exception as error:
                if is_of_signal_handler(error):
                    raise
                return copied.result._replace(batch=None, error=error)
        return copied.result
