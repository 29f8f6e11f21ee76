"""The names and arguments of the projects that Penstock succeeds, for programs that move over.

The names here are those of `penstock` itself. `penstock.compat.rank_dataset` and `penstock.compat.mpdataset` have the
originals' arguments.
"""

from __future__ import annotations

from penstock import lazy

TYPE_CHECKING = False  # that of typing, whose import takes a while

_HOMES = {
    "DpexDataLoader": ".loader",
    "IterationBasedBatchSampler": ".samplers",
    "MPDataset": ".datasets",
    "make_batch_data_sampler": ".samplers",
    "make_data_sampler": ".samplers",
}

__all__ = [
    "DpexDataLoader",
    "IterationBasedBatchSampler",
    "MPDataset",
    "make_batch_data_sampler",
    "make_data_sampler",
]

if TYPE_CHECKING:
    from penstock.datasets import MPDataset
    from penstock.loader import DpexDataLoader
    from penstock.samplers import IterationBasedBatchSampler, make_batch_data_sampler, make_data_sampler


__getattr__, __dir__ = lazy.names(__name__, _HOMES)
