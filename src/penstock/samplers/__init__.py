"""Samplers: torch `Sampler` subclasses on top of `penstock.order`."""

from __future__ import annotations

from penstock.samplers.base import BatchPass, EpochBatchSampler, EpochSampler, Pass
from penstock.samplers.batch import BatchSampler
from penstock.samplers.distributed import DistributedSampler

__all__ = ["BatchPass", "BatchSampler", "DistributedSampler", "EpochBatchSampler", "EpochSampler", "Pass"]
