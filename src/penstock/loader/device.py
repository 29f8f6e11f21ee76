"""``device=``: batches on a device; the next one is copied while the consumer works on the current one.

    request          k            k + 1          k + 2
    side stream      copy k + 1   copy k + 2     copy k + 3       from pinned memory
    consumer's       wait k       wait k + 1     wait k + 2       for an event of the side stream; the host continues
                     work on k    work on k + 1  work on k + 2

The consumer's thread copies a batch into pinned memory, which frees its slot of the ring. At most one batch is copied
ahead, and only if it is already finished: the current batch never waits for a later one.

Invariant: a state counts only batches that the consumer has received, not one that is copied ahead.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch

from penstock.errors import ConfigError
from penstock.loader.batches import map_batch
from penstock.loader.messages import BatchResult
from penstock.loader.statistics import Statistics
from penstock.loader.window import Window

__all__ = ["CopiesAhead", "DeviceCopier", "StreamCopier", "copier_of"]


@runtime_checkable
class DeviceCopier(Protocol):
    """Copies batches to a device. ``DataLoader(device=...)`` takes one for devices without torch streams.

    For each batch the loader calls `copy`, then `record`, perhaps while the consumer works on the batch before, and
    `wait` when it delivers the batch. All calls happen in the consumer's thread.

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
        """Start to copy a batch and return the batch on the device. An exception is raised in place of the batch."""

    def record(self) -> Any:
        """Return a mark after all copies started so far, such as a CUDA event."""

    def wait(self, mark: Any, batch: Any) -> None:
        """Make the consumer's work on the device wait for a mark, and keep the batch's memory until that work is done.

        Args:
            mark: the result of `record`.
            batch: the result of `copy`.
        """


class StreamCopier:
    """Copies to an accelerator on a separate stream; to a device without streams, in order with the consumer's work.

    Args:
        device: the device, with its index if it has streams.
        module: torch's module for this kind of device, such as ``torch.cuda``; None if it has no streams.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._device = device
        self._module = module
        self._stream = None if module is None else module.Stream(device)

    def copy(self, batch: Any) -> Any:
        """See `DeviceCopier`. When this returns, pinned memory holds a copy and the slot of the ring is free."""
        with nullcontext() if self._stream is None else self._module.stream(self._stream):
            return map_batch(self._move, batch)

    def _move(self, part: Any) -> Any:
        if not _is_movable(part):
            return part
        if self._stream is not None and getattr(part, "device", _CPU) == _CPU:
            # torch keeps the pinned memory until the copy is done.
            part = part.pin_memory()
        return part.to(self._device, non_blocking=self._stream is not None)

    def record(self) -> Any:
        """See `DeviceCopier`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any, batch: Any) -> None:
        """See `DeviceCopier`."""
        if mark is None:
            return
        stream = self._module.current_stream(self._device)
        stream.wait_event(mark)
        # Otherwise the side stream, which owns the memory, could reuse it for its next copy during the consumer's work.
        map_batch(lambda part: part.record_stream(stream) if _is_movable(part) else None, batch)


_CPU = torch.device("cpu")
_MOVES = "pin_memory", "to", "record_stream"


def _is_movable(part: Any) -> bool:
    """Return whether a value moves like a tensor. PyTorch Geometric's graphs do, too."""
    return isinstance(part, torch.Tensor) or all(callable(getattr(part, name, None)) for name in _MOVES)


def copier_of(device: str | int | torch.device | DeviceCopier) -> DeviceCopier:
    """Return a copier for a device other than the CPU.

    Raises:
        ConfigError: torch does not know the device, or this machine does not have it.
    """
    if isinstance(device, DeviceCopier):
        return device
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is not a torch device: {str(error).splitlines()[0]}") from error
    # None for example for "meta".
    module: Any = getattr(torch, place.type, None)
    if module is not None and not module.is_available():
        raise ConfigError(f"device={device!r}: torch finds no such device here; omit device= or use device='cpu'")
    if not hasattr(module, "Stream"):
        return StreamCopier(place)
    index = module.current_device() if place.index is None else place.index
    return StreamCopier(torch.device(place.type, index), module)


_Copied = tuple[BatchResult, Any, float]
"""A batch whose copy has started, or the error in its place; the mark to wait for; and the seconds that this took."""


class CopiesAhead:
    """Copies the batches of an epoch to a device, one ahead: ``deliver(next())``.

    Args:
        window: the batches.
        copier: copies to the device.
        statistics: records each delivered copy.

    Attributes:
        ready: number of finished batches at the last request, including one that was copied ahead.
    """

    def __init__(self, window: Window, copier: DeviceCopier, statistics: Statistics) -> None:
        self._window = window
        self._copier = copier
        self._statistics = statistics
        self._ahead: _Copied | None = None
        self.ready = 0

    def next(self) -> BatchResult:
        """Return the batch that was copied ahead, or else the window's next one, which `deliver` will copy.

        Raises:
            Exception: as `Window.next`.
        """
        return self._window.next() if self._ahead is None else self._ahead[0]

    def deliver(self, result: BatchResult) -> BatchResult:
        """Return a batch of `next` on the device, or its error. Start to copy the following one if it is finished."""
        window, ahead = self._window, self._ahead
        result, mark, seconds = self._copied(result) if ahead is None else ahead
        self._ahead = None
        if result.error is None:
            try:
                self._copier.wait(mark, result.batch)
            except Exception as error:
                result = result._replace(batch=None, error=error)
        follows = window.poll()
        self.ready = window.ready_on_request + (ahead is not None)
        if follows:
            # The window raises its errors again when the consumer requests that batch.
            with suppress(Exception):
                self._ahead = self._copied(window.next())
        if result.error is None:
            self._statistics.copied(seconds, ahead=ahead is not None)
        return result

    def drop(self) -> None:
        """Forget the batch that was copied ahead, because the loader is closed."""
        self._ahead = None

    def _copied(self, result: BatchResult) -> _Copied:
        if result.error is not None:
            return result, None, 0.0
        begin, mark = perf_counter(), None
        try:
            batch, error = self._copier.copy(result.batch), None
            mark = self._copier.record()
        except Exception as raised:
            batch, error = None, raised
        seconds = perf_counter() - begin
        result.metrics.hand_over += seconds
        return result._replace(batch=batch, error=error), mark, seconds
