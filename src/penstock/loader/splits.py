"""Who splits the data among the ranks of a job: the dataset, the loader, a sampler, or nobody. One rule, in one place.

Over a map-style dataset, without ``sampler=`` and ``batch_sampler=``, in a world of more than one rank:

    dataset                      split=  shuffle=True or a name          no shuffle, or "none"
    ----------------------------  ------  ------------------------------  --------------------------------------
    one rank's share already      None    its own order, if they agree    its own order; "none" has to agree
                                  True    the same                        the same
                                  False   ConfigError                     ConfigError
    ours, and whole               None    the loader splits               every rank reads all, and a warning
                                  True    the loader splits               the loader splits, no sample twice
                                  False   every rank reads all            every rank reads all
    anybody else's                None    every rank reads all; a warning every rank reads all
                                          if all draw the same order
                                  True    the loader splits               the loader splits, no sample twice
                                  False   every rank reads all            every rank reads all

torch's ``Subset``, ``ConcatDataset`` and ``StackDataset`` are as their parts. Where these differ:

    shares, and data that are none    any   ConfigError                     ConfigError
    ours whole, and anybody else's    None  ConfigError                     every rank reads all, and a warning
                                      else  as it says                      as it says

In a world of one rank nobody splits, except that ``split=True`` has the same order on one rank as on many. A sampler
splits or not as it was told, and an iterable dataset too: there ``split=`` is a ConfigError.
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
from penstock.loader.ranks import splits_by_rank, warn_of_same_batches
from penstock.order import SHUFFLES
from penstock.plan.share import SharePlan
from penstock.plan.source import Source
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.identity import data_identity, holds_a_share, own_order, parts_of
from penstock.samplers.random import RandomSampler
from penstock.samplers.sequential import SequentialSampler
from penstock.samplers.share_sampler import RandomSamplerOfShare, SequentialSamplerOfShare
from penstock.samplers.shares import rank_splitter
from penstock.sources.batched import BatchedDataset

__all__ = ["Asked", "Splitter", "check_pass", "choose_sampler", "epoch_of_other_world", "splitter_of"]

Splitter = Literal["the data set", "the loader", "a sampler", "a framework", "nobody"]

_warned = False
"""Whether this process has been told of a loader in order."""


class Asked(NamedTuple):
    """The arguments of a loader that say in which order it reads, and which part of the data."""

    shuffle: bool | str | None
    sampler: Sampler[Any] | Iterable[Any] | None
    batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None
    seed: int | None
    generator: torch.Generator | None
    drop_last: bool
    split: bool | None

    @property
    def shuffles(self) -> bool:
        """Whether another order than the dataset's is asked for."""
        return bool(self.shuffle) and self.shuffle != "none"


class Parts(NamedTuple):
    """The datasets inside a dataset, by whose they are: shares of ranks, whole data of ours, and anybody else's."""

    shares: list[Any]
    whole: list[Any]
    others: list[Any]

    @classmethod
    def of(cls, dataset: Any) -> Parts:
        """Return the parts of a dataset; its only part is itself, unless it is one of torch's that hold others."""
        found = cls([], [], [])
        for part in parts_of(dataset):
            if getattr(part, "splits_by_rank", False):
                found.shares.append(part)
            # The base class is asked first: the protocol looks at the fingerprint, for which a file may be read.
            elif isinstance(part, BatchedDataset | Source):
                found.whole.append(part)
            else:
                found.others.append(part)
        return found


def choose_sampler(dataset: Any, asked: Asked) -> Sampler[Any] | Iterable[Any] | None:
    """Return the sampler that a loader is to read: the given one, or the one that the rule of this module chooses.

    Raises:
        ConfigError: the arguments contradict each other, or the dataset.
        PartitionError: both the dataset and the sampler deal samples to ranks.
    """
    if not isinstance(asked.split, bool | None):
        raise ConfigError(f"split takes True, False or None, got {asked.split!r}")
    given = asked.sampler if asked.sampler is not None else asked.batch_sampler
    parts = Parts.of(dataset)
    _check_mixed_shares(dataset, parts, told=asked.split is False or given is not None)
    if given is not None or isinstance(dataset, IterableDataset):
        _refuse_split(dataset, asked, given)
        _refuse_double_split(dataset, given)
        return asked.sampler
    _check_shuffle(asked.shuffle)
    if own_order(dataset) is not None:
        _check_share(dataset, asked)
        return _in_order(dataset)
    if parts.shares:
        _check_inner_shares(parts.shares, asked)
    elif asked.split:
        return _splitting_sampler(dataset, asked)
    elif asked.split is None and asked.shuffles and parts.whole and _ranks() > 1:
        _check_mixed_owners(dataset, parts)
        return _splitting_sampler(dataset, asked)
    return _whole_sampler(dataset, asked)


def _check_shuffle(shuffle: Any) -> None:
    """Refuse values that are neither a truth value nor a name, where torch would take them for one or the other."""
    named = shuffle is None or isinstance(shuffle, str | np.bool_)
    if not (named or (isinstance(shuffle, int) and shuffle in (0, 1))):
        raise ConfigError(f"shuffle takes True, False, or one of {', '.join(map(repr, SHUFFLES))}, got {shuffle!r}")


def splitter_of(loader: TorchDataLoader[Any], *, chosen: bool, dealt: bool) -> Splitter:
    """Return who splits a loader's data.

    Args:
        chosen: whether the loader's sampler is one that `choose_sampler` has chosen.
        dealt: whether a framework deals the batches to the ranks.
    """
    if holds_a_share(loader.dataset) or isinstance(loader.dataset, IterableDataset):
        return "the data set"
    if splits_by_rank(loader, ranks=distributed.current().world_size):
        return "the loader" if chosen else "a sampler"
    return "a framework" if dealt else "nobody"


def check_pass(loader: TorchDataLoader[Any], plan: EpochBatchSampler | None, *, chosen: bool) -> None:
    """Raise or warn if all ranks are about to read all samples, and nobody has said that they should.

    Args:
        loader: whose pass begins. It has no ``split=``, and no framework deals its batches.
        plan: of the loader's batches; None where only an iterable dataset knows them.
        chosen: whether the loader's sampler is one that `choose_sampler` has chosen.

    Raises:
        ConfigError: the dataset holds both a share and data that are none.
        PartitionError: the process group was made after a loader that would have split the data.
    """
    ranks = distributed.current().world_size
    if ranks == 1:
        return
    parts = Parts.of(loader.dataset)
    _check_mixed_shares(loader.dataset, parts, told=not chosen)
    if not chosen or parts.shares or not parts.whole:
        warn_of_same_batches(loader, plan, chosen=chosen)
    elif isinstance(loader.sampler, RandomSampler):
        raise PartitionError(
            f"this DataLoader was made in a world of one rank, and now there are {ranks}: initialise torch.distributed "
            "before you make it, or say split=True; split=False lets every rank read all samples"
        )
    elif isinstance(loader.sampler, SequentialSampler):
        _warn_of_whole(type(loader.dataset).__name__, ranks)


def epoch_of_other_world(sampler: Any, state: Any) -> int | None:
    """Return the epoch to begin for a state of a world of one rank in one of several, or the other way round.

    Without a seed the loader chooses torch's order on one rank, and one that all ranks draw alike on several. None of
    the two goes on in the middle of the other; where an epoch begins or ends, nothing has to.

    Args:
        sampler: the loader's own choice, without a seed.
        state: of a loader.

    Returns:
        None where the state is of no such loader, or of this order.

    Raises:
        StateError: the state is of the middle of an epoch.
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
            f"this state is of {before}, in the middle of an epoch, and without seed= the order is another on {now}: "
            "finish the epoch on as many ranks as before, and give the DataLoader seed= to go on anywhere"
        )
    return epoch + (consumed > 0)


def _warn_of_whole(name: str, ranks: int) -> None:
    """Warn, once in a process, of a loader in order that does not say which part each rank reads."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"each of the {ranks} ranks reads all of this {name}, in order: say split=True, and each rank reads a share of "
        "its own, no sample twice; or split=False, and every rank reads all samples, as for an evaluation on one of "
        "them",
        stacklevel=5,
    )


def _ranks() -> int:
    """Return the number of ranks, as far as it is known when a loader is made."""
    try:
        return distributed.current().world_size
    except PartitionError:
        # Lightning's child processes have WORLD_SIZE without RANK until the process group is there. The first pass
        # asks again, and raises what is still wrong then.
        return 1


def _splitting_sampler(dataset: Any, asked: Asked) -> DistributedSampler:
    if asked.generator is not None and asked.shuffles:
        raise ConfigError(
            "ranks can only share out an order that all of them draw alike: give seed= in place of generator=, or "
            "split=False to let every rank read all samples"
        )
    if not asked.shuffles:
        # Ranks may differ by one sample, and none comes twice: for an exact evaluation.
        remainder = "drop" if asked.drop_last else "uneven"
        return DistributedSampler(dataset, shuffle=False, remainder=remainder)
    # Without a name our own order: torch's needs 8 bytes a sample, and its epochs do not advance by themselves.
    name = asked.shuffle if isinstance(asked.shuffle, str) else "global"
    return DistributedSampler(dataset, shuffle=name, seed=asked.seed or 0, drop_last=asked.drop_last)


def _whole_sampler(dataset: Any, asked: Asked) -> Sampler[Any]:
    """Return torch's order without a seed, ours with one."""
    if not asked.shuffles:
        return _in_order(dataset)
    random = RandomSamplerOfShare if holds_a_share(dataset) else RandomSampler
    if isinstance(asked.shuffle, str) or asked.seed is not None:
        name = asked.shuffle if isinstance(asked.shuffle, str) else "global"
        return random(dataset, shuffle=name, seed=asked.seed or 0)
    return random(dataset, generator=asked.generator)


def _in_order(dataset: Any) -> SequentialSampler:
    return SequentialSamplerOfShare(dataset) if holds_a_share(dataset) else SequentialSampler(dataset)


def _check_share(dataset: Any, asked: Asked) -> None:
    """Raise if a dataset with an order of its own has another one, or another share, than is asked for."""
    plan, name = own_order(dataset), type(dataset).__name__
    if not isinstance(plan, SharePlan):
        if asked.shuffles:
            raise ConfigError(
                f"{name} has an order of its own: choose it there, and leave shuffle={asked.shuffle!r} out"
            )
        return
    if asked.split is not None:  # the world may not be known yet
        _check_world(name, plan.peek_world().world_size, asked)
    asks = asked.shuffles or isinstance(asked.shuffle, str)  # frameworks pass False where nobody asks
    if asks and not plan.agrees_with(asked.shuffle or False):
        if asked.shuffle is True:
            raise ConfigError(
                f"this {name} was made with shuffle='none', and orders its samples itself: open it with "
                "shuffle='global', or leave shuffle=True out here"
            )
        raise ConfigError(
            f"this {name} orders its samples itself, and not by shuffle={asked.shuffle!r}: choose the order there "
            "(shuffle=, seed=), and leave shuffle out here, or say True"
        )


def _check_inner_shares(shares: list[Any], asked: Asked) -> None:
    """Raise if shares inside of one of torch's datasets contradict ``split=``."""
    if asked.split is None:  # the world may not be known yet
        return
    for share in shares:
        _check_world(type(share).__name__, _ranks_of(share), asked)


def _check_mixed_shares(dataset: Any, parts: Parts, *, told: bool) -> None:
    """Raise if every rank would read all of one part of the data, and a share of another.

    Args:
        told: whether the program says that every rank reads all, or which samples it reads.
    """
    rest, ranks = [*parts.whole, *parts.others], _ranks()
    if ranks == 1 or not parts.shares or not rest:
        return
    if told and all(_ranks_of(share) == 1 for share in parts.shares):
        return
    raise ConfigError(
        f"this {type(dataset).__name__} holds one rank's share of a {_name(parts.shares)}, and the whole of a "
        f"{_name(rest)}, whose samples would come on each of the {ranks} ranks: put in place of the share the data "
        "below it (a Manifest, a ShardSet, ...), and give the DataLoader split=True to share out everything; or open "
        "the share with rank=0, world_size=1, and say split=False to let every rank read everything"
    )


def _check_mixed_owners(dataset: Any, parts: Parts) -> None:
    """Raise if a part of the data is shared out by the rule, and another is not."""
    if parts.others:
        raise ConfigError(
            f"this {type(dataset).__name__} holds a {_name(parts.whole)}, which a DataLoader with shuffle= shares out "
            f"among the {_ranks()} ranks, and a {_name(parts.others)}, which it does not: say split=True, and each "
            "rank reads a share of everything, or split=False, and every rank reads everything"
        )


def _name(parts: list[Any]) -> str:
    return type(parts[0]).__name__


def _ranks_of(share: Any) -> int:
    """Return the number of ranks that a share is one of."""
    plan = own_order(share)
    return plan.peek_world().world_size if isinstance(plan, SharePlan) else _ranks()


def _check_world(name: str, ranks: int, asked: Asked) -> None:
    if asked.split is False and ranks > 1:
        raise ConfigError(
            f"split=False, and this {name} holds one rank's share of {ranks} already: open it with rank=0, "
            "world_size=1, and every rank reads all of it"
        )
    # A share of fewer ranks than the job has may be that of a process group; one of a single rank is the whole.
    if asked.split and ranks == 1 and _ranks() > 1:
        raise ConfigError(
            f"split=True, and this {name} was opened with world_size=1, for every rank to read all of it: leave rank "
            "and world_size out there"
        )


def _refuse_split(dataset: Any, asked: Asked, given: Any) -> None:
    """Raise if ``split=`` comes with something that splits, or not, by itself."""
    if asked.split is None:
        return
    if given is None:
        raise ConfigError(
            f"split={asked.split} has no effect on {type(dataset).__name__}: an iterable dataset splits itself, or "
            "not. Leave split out, or make it a map-style dataset"
        )
    argument = "batch_sampler" if asked.sampler is None else "sampler"
    raise ConfigError(
        f"split={asked.split} and {argument}= exclude each other: the sampler says which samples this rank reads. "
        f"Leave split out, or give shuffle= in place of {argument}="
    )


def _refuse_double_split(dataset: Any, given: Any) -> None:
    """Raise if both the dataset and the sampler deal samples to ranks."""
    if not holds_a_share(dataset):
        return
    second = rank_splitter(given, ranks=_ranks())
    if second is not None:
        raise PartitionError(
            f"{type(dataset).__name__} holds this rank's share already, and {type(second).__name__} would split it "
            "once more: leave the sampler out, or put it over the Manifest"
        )
