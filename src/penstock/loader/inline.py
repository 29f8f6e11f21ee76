"""The inline executor: batches are made where they are asked for, in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from penstock.errors import WorkerError
from penstock.loader.delivery import CLOSED
from penstock.loader.fetch import Maker, preserved_generators
from penstock.loader.snapshots import Snapshot
from penstock.loader.work import Made, Task, Work
from penstock.plan.opening import Told

__all__ = ["InlineBatches"]


class InlineBatches:
    """Batches of the tasks, one at a time. A batch that fails raises in its place; the next call goes on.

    Args:
        tasks: what is to be made. If it raises, the iteration is over.
        maker: makes it; where it seeds the global generators, they are afterwards what they were before.
        epoch: given to the maker, which begins a pass here: an iterable data set's ``__iter__`` is called now.

    Attributes:
        number: of the batch that was last returned or raised.
        worker: that it came from.
        depth: batches that may be in flight: none.
        first_states: snapshots right after the beginning, by worker.
        failed_state: snapshot right after the batch that was raised last.
    """

    worker = 0
    depth = 0

    def __init__(self, tasks: Iterator[Task], maker: Maker, *, epoch: Told = None) -> None:
        self._tasks = tasks
        self._maker = maker
        self._seeds = bool(getattr(maker, "seed_globals", False))
        self._ended = False
        self.number = -1
        self.failed_state: Snapshot | None = None
        first = maker.begin(epoch)
        self.first_states: dict[int, Snapshot] = {} if first is None else {0: first}

    def __iter__(self) -> InlineBatches:
        return self

    def __next__(self) -> Made:
        try:
            task = next(self._tasks)
        except Exception as error:
            self.close()
            if self._ended and isinstance(error, StopIteration):
                raise WorkerError(CLOSED) from None
            raise
        self.number += 1
        work = Work()
        try:
            with preserved_generators() if self._seeds else nullcontext():
                batch = self._maker(task, work)
        except StopIteration:
            raise
        except Exception:
            self.failed_state = self._maker.state_after_error()
            raise
        return Made(batch, work, self.number, state=self._maker.state_dict())

    def ready(self) -> int:
        """Batches that are made and not handed out: none."""
        return 0

    def close(self) -> None:
        """Nothing comes after this."""
        self._tasks = iter(())

    def end(self, patience: float) -> None:
        """The loader is closed. There are no workers to end."""
        self._ended = True
        self.close()
