"""Samplers over one rank's share: torch's ``DistributedSampler`` to whoever asks, so that no framework deals it again.

They yield the share in its own order, or shuffled within itself; who deals is the data set, or a batch sampler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.utils.data

from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler

__all__ = ["RandomSamplerOfShare", "SequentialSamplerOfShare"]

if TYPE_CHECKING:

    class _Torch: ...  # its types of attributes are narrower than its promises

else:
    _Torch = torch.utils.data.DistributedSampler


class SequentialSamplerOfShare(SequentialSampler, _Torch):
    """The indices of one rank's share in its own order."""


class RandomSamplerOfShare(RandomSampler, _Torch):
    """The indices of one rank's share in random order."""
