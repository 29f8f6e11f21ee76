"""Make a batch that lost three workers one sample at a time, to find the sample at fault.

    samples, one by one  ->  each by an otherwise idle worker  ->  ``on_error``  ->  collated here

Invariant: the batch is as usual, except for how ``on_error`` handles the samples at fault.
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
    """Return the batch, collated in this process, and its metrics.

    Args:
        make_alone: returns the only sample of a request, loaded in the cluster.
    """
    items = _Items(fetcher.dataset, request.place, make_alone)
    fetch = Fetch(items, fetcher.collate_fn, batched=fetcher.batched, seed_globals=False, on_error=fetcher.on_error)
    metrics = BatchMetrics()
    return fetch(BatchRequest(request.indices, request.keys), metrics), metrics


class _Items:
    """A dataset whose items are loaded in the cluster, with the sample key that is set in this process."""

    def __init__(self, dataset: Any, place: Any, make_alone: Callable[[BatchRequest], Any]) -> None:
        self._dataset = dataset
        self._place = place
        self._make_alone = make_alone

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        key = current_key()
        return self._make_alone(BatchRequest([index], [0 if key is None else key], self._place))
