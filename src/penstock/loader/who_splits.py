"""Splitting of data among the ranks of a job, by the dataset, the loader, a sampler or nobody. The rule is here only.

For a map-style dataset, without ``sampler=`` and ``batch_sampler=``, with more than one rank:

    dataset                 split=None                                          True               False
    ----------------------  --------------------------------------------------  -----------------  -----------------
    one rank's share        its own order                                       its own order      ConfigError
    Penstock's, unsplit     with shuffle= the loader splits; else every rank    the loader splits  every rank reads all
                            reads all, with a warning
    any other               every rank reads all; a warning if the order is     the loader splits  every rank reads all
                            the same on all

torch's ``Subset``, ``ConcatDataset`` and ``StackDataset`` follow the rule of the datasets inside. It is one ConfigError
if some of these are split and others are not. With one rank nothing is split, but ``split=True`` yields the same order
as with several ranks: without shuffle no sample is read twice.

The ranks are those of the job, or those of the loader's ``rank=`` and ``world_size=``, ``process_group=`` or ``mesh=``,
which imply ``split=True``, and are a ConfigError if the loader does not split. A sampler and an iterable dataset split
or not by themselves: with these, ``split=`` is a ConfigError.

A share determines its order: another order or seed is a ConfigError. If it is shuffled, so is a sampler or a ``Subset``
whose indices name rows.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Sampler

from penstock import distributed
from penstock.errors import ConfigError, PartitionError
from penstock.loader.config import LoaderConfig
from penstock.plan.share import SharePlan
from penstock.plan.source import Source
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import has_rank, layers, rank_splitter
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.identity import holds_a_share, own_order, parts_of
from penstock.samplers.random import RandomSampler, RandomSamplerOfShare
from penstock.samplers.sequential import SequentialSampler, SequentialSamplerOfShare
from penstock.sources.batched import BatchedDataset, StreamDataset
from penstock.wording import kind_text

__all__ = ["Splitter", "check_split", "choose_data", "splits_by_rank"]

Splitter = Literal["the dataset", "the loader", "a sampler", "a framework", "nobody"]

_warned = False
"""Whether this process has warned that every rank reads all samples."""


def choose_data(
    dataset: Any, config: LoaderConfig, given: Any, world: distributed.LateWorld
) -> tuple[Any, Sampler[int] | None]:
    """Return the dataset that a loader reads, and a sampler, by the rule of this module.

    For ``shuffle=False`` the dataset is a copy of a share in order. The sampler is None if the user's one stays, or if
    the dataset is iterable.

    Args:
        given: the user's sampler or batch sampler.
        world: the ranks among which the loader splits.

    Raises:
        ConfigError: the arguments contradict each other or the dataset.
        PartitionError: both the dataset and the sampler split the samples among ranks.
    """
    # None is not False: it leaves a dataset its own order.
    plan = _plan_inside(dataset) if given is None and config.shuffle is False else None
    # What cannot be read in order is refused below, such as a mixture or packs, whose order is not one of rows.
    if plan is not None and plan.shuffle != "none" and plan.mini_epochs == 1 and hasattr(dataset, "in_order"):
        dataset = dataset.in_order()
    # Lightning's child processes have WORLD_SIZE without RANK until the process group exists. The first iter() checks
    # again.
    known = world.known()
    ranks = 1 if known is None else known.world_size
    loader_may_split = config.split is None and config.shuffles and given is None
    shares, whole = _shares_and_whole(dataset, ranks, loader_may_split=loader_may_split)
    ranks_given = "rank=, world_size=, process_group=, mesh="
    if world.given and config.split is False:
        raise ConfigError(f"split=False lets every rank read all samples: omit {ranks_given}")
    iterable = isinstance(dataset, IterableDataset)
    other = dataset if iterable or (world.given and shares) else given
    if config.split is not None and other is not None:
        what, there = (f"{ranks_given} are", "pass the ranks there") if world.given else ("split= is", "omit it")
        raise ConfigError(
            f"{what} for a dataset that the DataLoader splits itself. Here {kind_text(other)} determines which "
            f"samples this rank reads: {there}"
        )
    if given is not None:
        _check_sampler(dataset, shares, given, ranks)
        return dataset, None
    own = own_order(dataset) is not None
    # A random order of the positions in wrapped shares is one of rows, whatever the shares' own orders are.
    free = config.shuffles and not own and not iterable
    _check_shares(shares, replace(config, shuffle=None, seed=None) if free else config, ranks)
    if iterable:
        return dataset, None
    # A share is never split again.
    split = (config.split and not shares) or (loader_may_split and whole and ranks > 1)
    shuffle: Any = "global" if config.shuffle is True else config.shuffle
    seed, random = config.seed or 0, RandomSamplerOfShare if shares else RandomSampler
    rank, count = world.get() if world.given else (None, None)
    sampler: Sampler[int]
    if split and config.shuffles:
        if config.generator is not None:
            raise ConfigError(
                "ranks can only split an order that all of them compute alike: pass seed= instead of generator=, or "
                "split=False to let every rank read all samples"
            )
        # Never torch's order: it needs 8 bytes per sample, and its epochs do not advance by themselves.
        sampler = DistributedSampler(dataset, count, rank, shuffle=shuffle, seed=seed, drop_last=config.drop_last)
    elif split:
        # Ranks may differ by one sample, and no sample is repeated: for an exact evaluation.
        remainder = "drop" if config.drop_last else "uneven"
        sampler = DistributedSampler(dataset, count, rank, shuffle=False, remainder=remainder)
    elif own or not config.shuffles:
        sampler = SequentialSamplerOfShare(dataset) if shares else SequentialSampler(dataset)
    elif config.shuffle is True and config.seed is None:
        sampler = random(dataset, generator=config.generator)
    else:
        sampler = random(dataset, shuffle=shuffle, seed=seed)
    return dataset, sampler


def splits_by_rank(loader: TorchDataLoader[Any], *, ranks: int) -> bool:
    """Return whether the loader's dataset or one of its samplers gives each of ``ranks`` ranks a separate share."""
    return holds_a_share(loader.dataset) or rank_splitter(_outermost(loader), ranks=ranks) is not None


def check_split(loader: TorchDataLoader[Any], plan: EpochBatchSampler | None, *, ranks: int, chosen: bool) -> None:
    """Raise, or warn once per process, if all ranks are about to read all samples without the user's consent.

    With data that are not Penstock's there is no warning for an unseeded shuffle, since each rank draws another order,
    as with torch's loader; for a dataset in its own order, since programs evaluate on every rank; or for a sampler that
    was created for one rank.

    Args:
        loader: a loader that is about to start, without ``split=`` and without a framework that distributes batches.
        plan: plan of the loader's batches; None if only an iterable dataset knows them.
        ranks: number of ranks, more than one.
        chosen: whether `choose_data` chose the loader's sampler.

    Raises:
        ConfigError: the dataset contains both a share and unsplit data.
        PartitionError: the process group was created after a loader that would have split the data.
    """
    global _warned
    shares, whole = _shares_and_whole(loader.dataset, ranks)
    if plan is None or shares or has_rank(_outermost(loader)):
        return
    should_split = chosen and bool(whole)
    if should_split and isinstance(loader.sampler, RandomSampler):
        raise PartitionError(
            f"this DataLoader was created with one rank, and now there are {ranks}: initialise torch.distributed "
            "before you create it, or pass split=True; with split=False every rank reads all samples"
        )
    if _warned or (plan.key_seed is None and not should_split):
        return
    _warned = True
    share, everything = "split=True", "split=False"
    if not chosen:
        share = "a ps.DistributedSampler (for any other order, a ps.GroupedBatchSampler) instead of its sampler"
        everything = "one with num_replicas=1, rank=0 (world_size=1)"
    warnings.warn(
        f"each of the {ranks} ranks reads all of this {type(loader.dataset).__name__}, "
        f"{'in order' if should_split else 'in the same order'}: pass {share} to the DataLoader to let each rank read "
        f"a separate share, or pass {everything} to let every rank read all samples, as for an evaluation on one rank "
        "or if the data already are this rank's share",
        stacklevel=3,
    )


def _shares_and_whole(dataset: Any, ranks: int, *, loader_may_split: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the datasets inside a dataset that are shares of ranks, and Penstock's others, which are unsplit.

    Args:
        ranks: number of ranks.
        loader_may_split: whether the loader splits Penstock's unsplit datasets by itself.

    Raises:
        ConfigError: several ranks would read a share of some datasets inside, and all of others.
    """
    shares: list[Any] = []
    whole: list[Any] = []
    others: list[Any] = []
    for part in parts_of(dataset):
        # The base class is checked first, because the protocol accesses the fingerprint, which may read a file.
        is_share = getattr(part, "splits_by_rank", False)
        (shares if is_share else whole if isinstance(part, BatchedDataset | Source) else others).append(part)
    # A share that was opened for one rank is everything.
    split = [share for share in shares if (plan := own_order(share)) is None or plan.ranks > 1]
    unsplit, remedy = whole + others, "replace {} by the data that it splits (a Manifest, a ShardSet, ...), then "
    if loader_may_split and not split:
        split, unsplit, remedy = whole, others, ""
    if ranks > 1 and split and unsplit:
        name, first = type(dataset).__name__, kind_text(split[0])
        raise ConfigError(
            f"this {name} contains {first}, which is split among the {ranks} ranks, and {kind_text(unsplit[0])}, which "
            f"is not: {remedy.format(first)}pass split=True to let each rank read a share of everything, or "
            f"split=False to let every rank read everything, or use a Mixture instead of {name}, which splits all its "
            "parts"
        )
    return shares, whole


def _check_shares(shares: list[Any], config: LoaderConfig, ranks: int) -> None:
    """Raise if a share has another order than the requested one, or is another part of the data."""
    for share in shares:
        plan, name = _plan_inside(share), type(share).__name__
        # Checked only with split=, since the world may not be known yet.
        of = None if config.split is None else ranks if plan is None else plan.ranks
        if config.split is False and of != 1:
            raise ConfigError(
                f"split=False, but this {name} already is one rank's share of {of}: open it with rank=0, "
                "world_size=1 to let every rank read all of it"
            )
        # A share for fewer ranks than the job has may belong to a process group. A share for one rank is everything.
        if config.split and of == 1 and ranks > 1:
            raise ConfigError(
                f"split=True, but this {name} was opened with world_size=1, so that every rank reads all of it: omit "
                "rank and world_size there"
            )
        if plan is None:
            continue
        if config.shuffle is not None and not plan.agrees_with(config.shuffle):
            raise ConfigError(
                f"this {name} determines its own order, which is not shuffle={config.shuffle!r}: choose the order "
                "there (shuffle=, seed=), and omit shuffle here"
            )
        other = None
        if config.seed not in (None, plan.seed):
            other = f"seed={config.seed} of the DataLoader"
        elif config.generator is not None and config.shuffles:
            other = "a generator"
        if other is not None and not plan.agrees_with(False):
            raise ConfigError(
                f"the order of this {name} follows from its own seed={plan.seed}, not from {other}: pass seed= there, "
                "and omit it here"
            )


def _check_sampler(dataset: Any, shares: list[Any], given: Any, ranks: int) -> None:
    """Raise if a user's sampler contradicts the share or the order of the dataset."""
    second = rank_splitter(given, ranks=ranks) if shares else None
    if second is not None:
        raise PartitionError(
            f"{type(dataset).__name__} already is this rank's share, and {type(second).__name__} would split it "
            "again: omit the sampler, or use it with the Manifest"
        )
    *_, innermost = layers(given)
    # A random order of positions is a random order of rows.
    if isinstance(innermost, SequentialSamplerOfShare | torch.utils.data.RandomSampler):
        return
    for share in shares:
        if (plan := _plan_inside(share)) is not None and not plan.keeps_rows:
            raise ConfigError(
                f"the indices of {kind_text(innermost)} are rows, but an index of this {type(share).__name__} is "
                "a position in its own order, which differs in each epoch: omit the sampler (shuffle=False reads in "
                "order), or open the dataset with shuffle='none', remainder='uneven' (not a mixture or packs, which "
                "have no order of rows)"
            )


def _plan_inside(dataset: Any) -> SharePlan | None:
    """Return the plan of a share, also of the samples of an iterable one."""
    return own_order(dataset.samples if isinstance(dataset, StreamDataset) else dataset)


def _outermost(loader: TorchDataLoader[Any]) -> Any:
    """Return the sampler that the loader reads: the batch sampler, or the sampler of indices without batching."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler
