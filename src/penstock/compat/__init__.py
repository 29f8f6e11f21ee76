"""The names and arguments of the projects that Penstock replaces, for programs that migrate.

The names here are the same as in `penstock`. `penstock.compat.rank_dataset` and `penstock.compat.mpdataset` take the
arguments of the original projects.
"""

from __future__ import annotations

from penstock import lazy

TYPE_CHECKING: bool = False  # like typing.TYPE_CHECKING, without the slow import

_MODULES = {
    ".datasets.stream": ["MPDataset"],
    ".samplers": ["IterationBasedBatchSampler"],
    "dpex": ["DpexDataLoader"],
    "maskrcnn_benchmark": ["make_batch_data_sampler", "make_data_sampler"],
}

__all__ = ["DpexDataLoader", "IterationBasedBatchSampler", "MPDataset", "make_batch_data_sampler", "make_data_sampler"]

if TYPE_CHECKING:
    from penstock.compat.dpex import DpexDataLoader
    from penstock.compat.maskrcnn_benchmark import make_batch_data_sampler, make_data_sampler
    from penstock.datasets.stream import MPDataset
    from penstock.samplers import IterationBasedBatchSampler


__getattr__, __dir__ = lazy.names(__name__, _MODULES)
