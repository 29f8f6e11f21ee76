"""A batch that three workers were lost over: one sample at a time, so that the one at fault is found.

    samples, one by one  ->  each by a worker that does nothing else  ->  ``on_error``  ->  collated here

Invariant: the batch is what it would have been, but for what ``on_error`` makes of the samples at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.loader.fetch import Fetch
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.random import current_key

__all__ = ["make_carefully"]


def make_carefully(
    request: BatchRequest, fetcher: Fetch, make_alone: Callable[[BatchRequest], Any]
) -> tuple[Any, BatchMetrics]:
    """The batch, collated here, and what that took.

    Args:
        make_alone: has the only sample of a request made in the cluster.
    """
    items = _Items(fetcher.dataset, request.place, make_alone)
    fetch = Fetch(items, fetcher.collate_fn, batched=fetcher.batched, seed_globals=False, on_error=fetcher.on_error)
    metrics = BatchMetrics()
    return fetch(BatchRequest(request.indices, request.keys), metrics), metrics


class _Items:
    """A data set of which each item is made in the cluster, with the key that is in force here."""

    def __init__(self, dataset: Any, place: Any, make_alone: Callable[[BatchRequest], Any]) -> None:
        self._dataset = dataset
        self._place = place
        self._make_alone = make_alone

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        key = current_key()
        return self._make_alone(BatchRequest([index], [0 if key is None else key], self._place))
