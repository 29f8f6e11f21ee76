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
if some of these are split and others are not.

With one rank nothing is split, but ``split=True`` yields the same order as with several ranks. A sampler splits
or not according to its own arguments, and so does an iterable dataset: with these, ``split=`` is a ConfigError.

A share determines its order: another order or seed is a ConfigError. If it is shuffled, so is a sampler or a ``Subset``
whose indices name rows. With ``split=True`` and no shuffle, no sample is read twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Sampler

from penstock import distributed
from penstock.errors import ConfigError, PartitionError, StateError
from penstock.order import SHUFFLES
from penstock.plan.share import SharePlan
from penstock.plan.source import Source
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.identity import data_identity, holds_a_share, own_order, parts_by_row, parts_of
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler
from penstock.samplers.share_sampler import RandomSamplerOfShare, SequentialSamplerOfShare
from penstock.samplers.shares import layers, rank_splitter
from penstock.sources.batched import BatchedDataset, StreamDataset
from penstock.wording import kind_text

__all__ = [
    "OrderArguments",
    "Splitter",
    "check_split",
    "choose_sampler",
    "epoch_of_other_world",
    "has_rank",
    "in_requested_order",
    "splits_by_rank",
    "splitter_of",
]

Splitter = Literal["the dataset", "the loader", "a sampler", "a framework", "nobody"]

_warned = False
"""Whether this process has warned that every rank reads all samples."""


class OrderArguments(NamedTuple):
    """The arguments of a loader that determine its order and its part of the data."""

    shuffle: bool | str | None
    sampler: Sampler[Any] | Iterable[Any] | None
    batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None
    seed: int | None
    generator: torch.Generator | None
    drop_last: bool
    split: bool | None

    @property
    def shuffles(self) -> bool:
        """Whether the user requests another order than the dataset's."""
        return bool(self.shuffle) and self.shuffle != "none"

    @property
    def in_order(self) -> bool:
        """Whether the user passes ``shuffle=False``. None is not False: it leaves a dataset its own order."""
        return self.shuffle is not None and not isinstance(self.shuffle, str) and not self.shuffle

    @property
    def given(self) -> Any:
        """The user's sampler or batch sampler; None without one."""
        return self.sampler if self.sampler is not None else self.batch_sampler


class DatasetParts(NamedTuple):
    """The datasets inside a dataset: shares of ranks, unsplit Penstock datasets, and all others."""

    shares: list[Any]
    whole: list[Any]
    others: list[Any]

    @classmethod
    def of(cls, dataset: Any) -> DatasetParts:
        """Return the parts of a dataset: the datasets inside torch's wrappers, or the dataset itself."""
        found = cls([], [], [])
        for part in parts_of(dataset):
            if getattr(part, "splits_by_rank", False):
                found.shares.append(part)
            # The base class is checked first, because the protocol accesses the fingerprint, which may read a file.
            elif isinstance(part, BatchedDataset | Source):
                found.whole.append(part)
            else:
                found.others.append(part)
        return found


def in_requested_order(dataset: Any, requested: OrderArguments) -> Any:
    """Return the dataset that a loader reads: for ``shuffle=False``, a share in its own order as a copy in order.

    Raises:
        ConfigError: the share has no order of rows, or is read in mini-epochs.
    """
    plan = _plan_inside(dataset)
    if not requested.in_order or requested.given is not None or plan is None or plan.agrees_with(False):
        return dataset
    # A mixture's and a pack's own order is not one of rows, so they leave the rows of their plan in order.
    if plan.shuffle == "none" or plan.mini_epochs > 1 or not hasattr(dataset, "in_order"):
        raise _other_order(dataset, requested.shuffle)
    return dataset.in_order()


def choose_sampler(dataset: Any, requested: OrderArguments) -> Sampler[Any] | Iterable[Any] | None:
    """Return the sampler for a loader: the user's, or one chosen by the rule of this module.

    Raises:
        ConfigError: the arguments contradict each other or the dataset.
        PartitionError: both the dataset and the sampler split the samples among ranks.
    """
    if not isinstance(requested.split, bool | None):
        raise ConfigError(f"split takes True, False or None, got {requested.split!r}")
    given, parts = requested.given, DatasetParts.of(dataset)
    _check_alike(dataset, parts.shares, [*parts.whole, *parts.others])
    if given is not None or isinstance(dataset, IterableDataset):
        _refuse_split(dataset, requested, given)
        _refuse_double_split(dataset, given)
        _check_rows(dataset, parts.shares, given)
        if given is None:
            _check_shares(parts.shares, requested)
        return requested.sampler
    _check_shuffle(requested.shuffle)
    if (plan := own_order(dataset)) is not None:
        if requested.shuffles and not isinstance(plan, SharePlan):
            raise _other_order(dataset, requested.shuffle)
        _check_shares([dataset], requested)
        return _in_order(dataset)
    # A random order of the positions in wrapped shares is one of rows, whatever the shares' own orders are.
    _check_shares(parts.shares, requested._replace(shuffle=None, seed=None) if requested.shuffles else requested)
    _check_rows(dataset, parts.shares, None)
    split = requested.split
    if split is None and requested.shuffles and parts.whole and _ranks() > 1:
        _check_alike(dataset, parts.whole, parts.others)
        split = True
    return _splitting_sampler(dataset, requested) if split and not parts.shares else _whole_sampler(dataset, requested)


def _check_shuffle(shuffle: Any) -> None:
    """Refuse a ``shuffle`` that is neither a truth value nor a name. torch would interpret it as one of them."""
    named = shuffle is None or isinstance(shuffle, str | np.bool_)
    if not (named or (isinstance(shuffle, int) and shuffle in (0, 1))):
        raise ConfigError(f"shuffle takes True, False, or one of {', '.join(map(repr, SHUFFLES))}, got {shuffle!r}")


def splitter_of(loader: TorchDataLoader[Any], *, chosen: bool, by_framework: bool) -> Splitter:
    """Return what splits a loader's data.

    Args:
        chosen: whether `choose_sampler` chose the loader's sampler.
        by_framework: whether a framework distributes the batches to the ranks.
    """
    if holds_a_share(loader.dataset) or isinstance(loader.dataset, IterableDataset):
        return "the dataset"
    if splits_by_rank(loader, ranks=distributed.ranks()):
        return "the loader" if chosen else "a sampler"
    return "a framework" if by_framework else "nobody"


def splits_by_rank(loader: TorchDataLoader[Any], *, ranks: int) -> bool:
    """Return whether the loader's dataset or one of its samplers gives each of ``ranks`` ranks a separate share."""
    return holds_a_share(loader.dataset) or rank_splitter(_outermost(loader), ranks=ranks) is not None


def has_rank(sampler: Any) -> bool:
    """Return whether a sampler, or one inside it, belongs to a particular rank, even if it is the only rank."""
    return _is_told(sampler) or rank_splitter(sampler, ranks=2) is not None


def check_split(loader: TorchDataLoader[Any], plan: EpochBatchSampler | None, *, chosen: bool) -> None:
    """Raise, or warn once per process, if all ranks are about to read all samples without the user's consent.

    With data that are not Penstock's there is no warning for an unseeded shuffle, since each rank draws another order,
    as with torch's loader; for a dataset in its own order, since programs evaluate on every rank; or for a sampler that
    was created for one rank.

    Args:
        loader: a loader that is about to start, without ``split=`` and without a framework that distributes batches.
        plan: plan of the loader's batches; None if only an iterable dataset knows them.
        chosen: whether `choose_sampler` chose the loader's sampler.

    Raises:
        ConfigError: the dataset contains both a share and unsplit data.
        PartitionError: the process group was created after a loader that would have split the data.
    """
    global _warned
    ranks = distributed.current().world_size
    if ranks == 1:
        return
    parts, name = DatasetParts.of(loader.dataset), type(loader.dataset).__name__
    _check_alike(loader.dataset, parts.shares, [*parts.whole, *parts.others])
    if plan is None or splits_by_rank(loader, ranks=ranks) or _is_told(_outermost(loader)):
        return
    should_split = chosen and bool(parts.whole)
    if should_split and isinstance(loader.sampler, RandomSampler):
        raise PartitionError(
            f"this DataLoader was created with one rank, and now there are {ranks}: initialise torch.distributed "
            "before you create it, or pass split=True; with split=False every rank reads all samples"
        )
    if _warned or (plan.key_seed is None and not should_split):
        return
    _warned = True
    share, everything = ("split=True", "split=False") if chosen else _what_to_write(loader)
    warnings.warn(
        f"each of the {ranks} ranks reads all of this {name}, {'in order' if should_split else 'in the same order'}: "
        f"pass {share}{'' if chosen else ' instead of its shuffle or sampler'} to the DataLoader to let each rank read "
        f"a separate share, or pass {everything} to let every rank read all samples, as for an evaluation on one rank "
        "or if the data already are this rank's share",
        stacklevel=4,
    )


def epoch_of_other_world(sampler: Any, state: Any) -> int | None:
    """Return the epoch to start for an unseeded state from one rank on several ranks, or the reverse.

    Without a seed the loader uses torch's order on one rank, and an order that all ranks can compute on several.
    Neither can continue in the middle of the other. At the start or end of an epoch nothing has to continue.

    Args:
        sampler: the unseeded sampler that the loader chose.
        state: a loader's state.

    Returns:
        None if the state is not of such a loader, or is of the same order.

    Raises:
        StateError: the state is from the middle of an epoch.
    """
    saved = state.get("sampler") if isinstance(state, Mapping) else None
    if not isinstance(saved, Mapping) or state.get("seed") is not None:
        return None
    orders = ("randperm", "global") if isinstance(sampler, DistributedSampler) else ("global", "randperm")
    data = data_identity(sampler.dataset if isinstance(sampler, DistributedSampler) else sampler.data_source)
    epoch, consumed = saved.get("epoch"), saved.get("consumed")
    if saved.get("shuffle") != orders[0] or any(saved.get(name) != value for name, value in data.items()):
        return None
    if not isinstance(epoch, int) or not isinstance(consumed, int):
        return None
    if 0 < consumed < data["samples"]:
        before, now = ("one rank", "several") if orders[0] == "randperm" else ("several ranks", "one")
        raise StateError(
            f"this state is of {before}, in the middle of an epoch, and without seed= the order is different on {now}: "
            "finish the epoch with the same number of ranks, or train with seed= to resume on any number"
        )
    return epoch + (consumed > 0)


def _is_told(sampler: Any) -> bool:
    """Return whether a sampler is a Penstock sampler that splits by rank, even with a single rank."""
    return any(isinstance(getattr(layer, "_world", None), distributed.LateWorld) for layer in layers(sampler))


def _what_to_write(loader: TorchDataLoader[Any]) -> tuple[str, str]:
    """Return the arguments that split the samples among ranks, and those with which each rank reads all."""
    *_, innermost = layers(_outermost(loader))
    if isinstance(innermost, RandomSampler) and not innermost.replacement:
        order = f"shuffle={innermost.shuffle!r}, seed={innermost.seed}"
        name = "sampler=ps.DistributedSampler"
        return f"{name}(dataset, {order})", f"{name}(dataset, num_replicas=1, rank=0, {order})"
    name, groups = "batch_sampler=ps.GroupedBatchSampler", "sampler, [0] * len(dataset), batch_size"
    return f"{name}({groups})", f"{name}({groups}, world_size=1)"


def _outermost(loader: TorchDataLoader[Any]) -> Any:
    """Return the sampler that the loader reads: the batch sampler, or the sampler of indices without batching."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _ranks() -> int:
    """Return the number of ranks known when a loader is created."""
    try:
        return distributed.current().world_size
    except PartitionError:
        # Lightning's child processes have WORLD_SIZE without RANK until the process group exists. The first iter()
        # checks again, and raises any error that remains.
        return 1


def _splitting_sampler(dataset: Any, requested: OrderArguments) -> DistributedSampler:
    if requested.generator is not None and requested.shuffles:
        raise ConfigError(
            "ranks can only split an order that all of them compute alike: pass seed= instead of generator=, or "
            "split=False to let every rank read all samples"
        )
    if not requested.shuffles:
        # Ranks may differ by one sample, and no sample is repeated: for an exact evaluation.
        remainder = "drop" if requested.drop_last else "uneven"
        return DistributedSampler(dataset, shuffle=False, remainder=remainder)
    # Without a name use our order: torch's needs 8 bytes per sample, and its epochs do not advance by themselves.
    name = requested.shuffle if isinstance(requested.shuffle, str) else "global"
    return DistributedSampler(dataset, shuffle=name, seed=requested.seed or 0, drop_last=requested.drop_last)


def _whole_sampler(dataset: Any, requested: OrderArguments) -> Sampler[Any]:
    """Return a sampler over all samples, with torch's order without a seed and ours with one."""
    if not requested.shuffles:
        return _in_order(dataset)
    random = RandomSamplerOfShare if holds_a_share(dataset) else RandomSampler
    if isinstance(requested.shuffle, str) or requested.seed is not None:
        name = requested.shuffle if isinstance(requested.shuffle, str) else "global"
        return random(dataset, shuffle=name, seed=requested.seed or 0)
    return random(dataset, generator=requested.generator)


def _in_order(dataset: Any) -> SequentialSampler:
    return SequentialSamplerOfShare(dataset) if holds_a_share(dataset) else SequentialSampler(dataset)


def _other_order(dataset: Any, shuffle: Any) -> ConfigError:
    """Return the error for a dataset that has another order than the requested one."""
    return ConfigError(
        f"this {type(dataset).__name__} determines its own order, which is not shuffle={shuffle!r}: choose the order "
        "there (shuffle=, seed=), and omit shuffle here"
    )


def _check_shares(shares: list[Any], requested: OrderArguments) -> None:
    """Raise if a dataset has another order than the requested one, or another part of the data."""
    shuffle = requested.shuffle if isinstance(requested.shuffle, str | None) else bool(requested.shuffle)
    for share in shares:
        plan, name = _plan_inside(share), type(share).__name__
        # Checked only with split=, since the world may not be known yet.
        if requested.split is not None:
            _check_world(name, _ranks() if plan is None else plan.ranks, requested)
        if plan is None:
            continue
        if shuffle is not None and not plan.agrees_with(shuffle):
            raise _other_order(share, shuffle)
        if plan.agrees_with(False):
            continue
        if requested.seed is not None and requested.seed != plan.seed:
            raise ConfigError(
                f"the order of this {name} follows from its own seed={plan.seed}, not from seed={requested.seed} of "
                f"the DataLoader: pass seed={requested.seed} there, and omit it here"
            )
        if requested.generator is not None and requested.shuffles:
            raise ConfigError(
                f"the order of this {name} follows from its own seed={plan.seed}, not from a generator: pass seed= "
                "there, and omit generator= here"
            )


def _check_rows(dataset: Any, shares: list[Any], given: Any) -> None:
    """Raise if torch's ``Subset`` or ``StackDataset``, or a user's sampler, takes an index of a share for a row.

    It is a position in the share's own order. A random order of positions is a random order of rows.
    """
    for share in parts_by_row(dataset):
        if (plan := _plan_inside(share)) is not None:
            plan.check_reads_by_row()
    *_, innermost = [None, *layers(given)]
    if given is None or isinstance(innermost, SequentialSamplerOfShare | torch.utils.data.RandomSampler):
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
    plan = own_order(dataset.samples if isinstance(dataset, StreamDataset) else dataset)
    return plan if isinstance(plan, SharePlan) else None


def _check_alike(dataset: Any, split: list[Any], unsplit: list[Any]) -> None:
    """Raise if several ranks would read a share of some datasets inside a dataset, and all of others."""
    ranks = _ranks()
    if ranks == 1 or not split or not unsplit:
        return
    name, shared = type(dataset).__name__, kind_text(split[0])
    is_share = getattr(split[0], "splits_by_rank", False)
    first = f"replace {shared} by the data that it splits (a Manifest, a ShardSet, ...), then " if is_share else ""
    raise ConfigError(
        f"this {name} contains {shared}, which is split among the {ranks} ranks, and {kind_text(unsplit[0])}, which is "
        f"not: {first}pass split=True to let each rank read a share of everything, or split=False to let every rank "
        f"read everything, or use a Mixture instead of {name}, which splits all its parts"
    )


def _check_world(name: str, ranks: int, requested: OrderArguments) -> None:
    if requested.split is False and ranks > 1:
        raise ConfigError(
            f"split=False, but this {name} already is one rank's share of {ranks}: open it with rank=0, "
            "world_size=1 to let every rank read all of it"
        )
    # A share for fewer ranks than the job has may belong to a process group. A share for one rank is everything.
    if requested.split and ranks == 1 and _ranks() > 1:
        raise ConfigError(
            f"split=True, but this {name} was opened with world_size=1, so that every rank reads all of it: omit rank "
            "and world_size there"
        )


def _refuse_split(dataset: Any, requested: OrderArguments, given: Any) -> None:
    """Raise if ``split=`` is used with a sampler or an iterable dataset, which split by themselves or not."""
    if requested.split is None:
        return
    if given is None:
        raise ConfigError(
            f"split={requested.split} has no effect on {type(dataset).__name__}: an iterable dataset splits itself or "
            "not. Omit split, or make it a map-style dataset"
        )
    argument = "batch_sampler" if requested.sampler is None else "sampler"
    raise ConfigError(
        f"split={requested.split} and {argument}= exclude each other: the sampler determines which samples this rank "
        f"reads. Omit split, or pass shuffle= instead of {argument}="
    )


def _refuse_double_split(dataset: Any, given: Any) -> None:
    """Raise if both the dataset and the sampler split the samples among ranks."""
    if not holds_a_share(dataset):
        return
    second = rank_splitter(given, ranks=_ranks())
    if second is not None:
        raise PartitionError(
            f"{type(dataset).__name__} already is this rank's share, and {type(second).__name__} would split it "
            "again: omit the sampler, or use it with the Manifest"
        )
