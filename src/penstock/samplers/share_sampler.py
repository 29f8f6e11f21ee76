"""Samplers over one rank's share. They are subclasses of torch's ``DistributedSampler``, so no framework splits again.

They yield the share in its own order, or shuffled. The dataset or a batch sampler has split the data among the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.utils.data

from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler

__all__ = ["RandomSamplerOfShare", "SequentialSamplerOfShare"]

if TYPE_CHECKING:
    # torch annotates its attributes more narrowly than it documents them.
    class _Torch: ...

else:
    _Torch = torch.utils.data.DistributedSampler


class SequentialSamplerOfShare(SequentialSampler, _Torch):
    """The indices of one rank's share in its own order."""


class RandomSamplerOfShare(RandomSampler, _Torch):
    """The indices of one rank's share in random order."""
