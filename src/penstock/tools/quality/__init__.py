"""Measure how well an order mixes and how it reads, on samples of the order itself, in constant memory.

* `measure`: displacement, classes per batch, repeated batches and runs read, for any order and any labels.
* `buffer`: the shuffle buffer of streaming loaders as an order, for comparison.

`penstock shuffle-quality` prints the results for a manifest, `penstock plan` for a planned job.

>>> from penstock.order import make_order
>>> from penstock.tools.quality import measure
>>> found = measure(lambda epoch: make_order("global", 100_000, seed=0, epoch=epoch), batch_size=256)
>>> round(found.displacement, 2)
0.33
"""

from __future__ import annotations

from penstock.tools.quality.buffer import ShuffleBuffer
from penstock.tools.quality.measure import Invertible, Quality, TableOrder, classes_in, measure, runs_in, sorted_labels

__all__ = [
    "Invertible",
    "Quality",
    "ShuffleBuffer",
    "TableOrder",
    "classes_in",
    "measure",
    "runs_in",
    "sorted_labels",
]
