"""`SequentialSampler`: 0, 1, 2, ...; over a data set with an order of its own, that data set's pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch.utils.data

from penstock.errors import SamplerError
from penstock.order import ORDER_VERSION, Partition, make_order
from penstock.samplers.base import EpochSampler, Pass
from penstock.samplers.identity import check_place, data_identity
from penstock.samplers.orders import OrderPass
from penstock.state import STATE_VERSION, State, check_state

__all__ = ["SequentialSampler"]


class SequentialSampler(EpochSampler, torch.utils.data.SequentialSampler):
    """The indices of a data set in its own order, like ``torch.utils.data.SequentialSampler``.

    Args:
        data_source: anything with a length (read at every pass). A data set that has an order of its own, such as
            `RankDataset` (it has ``start_pass``, ``peek_pass``, ``load_state_dict`` and ``set_epoch``), keeps place,
            epoch and state itself: the sampler passes everything on to it.

    The state over a plain data set is a count: O(1).

    >>> list(SequentialSampler("abc"))
    [0, 1, 2]
    """

    def __init__(self, data_source: Sized) -> None:
        super().__init__()
        self.data_source = data_source
        self.seed: int | None = getattr(data_source, "seed", None) if self.delegates else None

    @property
    def delegates(self) -> bool:
        """Whether the data set keeps the place."""
        return hasattr(self.data_source, "start_pass")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The epoch of a state just loaded keeps its position."""
        super().set_epoch(epoch)
        if self.delegates:
            self._source.set_epoch(epoch)
            self._pass, self.yielded = None, 0

    def peek(self) -> Pass:
        """The pass that `start` would begin."""
        return self._peek_source() if self.delegates else super().peek()

    def whole(self) -> Pass:
        """A pass over the whole epoch, whatever state was loaded; over a data set with a place, from that place."""
        return self._peek_source() if self.delegates else super().whole()

    def start(self) -> Pass:
        """Begin a pass."""
        if not self.delegates:
            return super().start()
        run: Pass = self._source.start_pass()
        self._pass = run
        self._resume, self.yielded, self.epoch = None, 0, run.epoch
        return run

    def advance(self) -> None:
        """Go on to the next epoch, or to the next mini-epoch of a data set that has them."""
        if self.delegates and hasattr(self.data_source, "next_mini_epoch"):
            self.data_source.next_mini_epoch()
            self._pass, self._resume, self.yielded = None, None, 0
            self.epoch = self._source.epoch
        else:
            super().advance()

    @property
    def running(self) -> bool:
        """Whether a pass has begun since the epoch was set or a state loaded, here or on the data set."""
        return self._pass is not None and (not self.delegates or bool(getattr(self.data_source, "running", True)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``; it is the data set's own where that keeps the place.

        Raises:
            StateError: the state belongs to other data.
        """
        if not self.delegates:
            super().load_state_dict(state)
            return
        self._source.load_state_dict(state)
        self._pass, self._resume, self.yielded = None, None, 0
        self.epoch = self._source.peek_pass().epoch

    def _current(self) -> Pass:
        if not self.running:
            self._pass, self.yielded = None, 0  # somebody called the data set's own set_epoch or load_state_dict
        return super()._current()

    @property
    def _source(self) -> Any:
        return self.data_source

    def _peek_source(self) -> Pass:
        missing = [
            name for name in ("peek_pass", "load_state_dict", "set_epoch") if not hasattr(self.data_source, name)
        ]
        if missing:
            raise SamplerError(
                f"a {type(self.data_source).__name__} has start_pass and so keeps its own order, but it lacks "
                f"{', '.join(missing)}"
            )
        peek: Callable[[], Pass] = self._source.peek_pass
        return peek()

    def _identity(self) -> State:
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "shuffle": "none",
            **data_identity(self.data_source),
        }

    def _build(self, resume: State | None) -> Pass:
        n = len(self.data_source)
        partition = Partition(n, remainder="uneven", consumed=0 if resume is None else resume["consumed"])
        return OrderPass(lambda: make_order("none", n), partition, self._identity(), seed=None, epoch=self.epoch)

    def _check(self, state: Mapping[str, Any]) -> State:
        check_state(state, self._identity(), of="SequentialSampler")
        return check_place(state, len(self.data_source), of="SequentialSampler")
