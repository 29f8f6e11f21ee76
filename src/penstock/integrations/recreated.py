"""Cooperation with libraries that recreate our loader from its attributes, without patching them.

Accelerate reads the attributes of a loader and creates a torch loader from them: `AccelerateGuard` refuses that.
Lightning calls ``type(loader)`` again, with a sampler for the rank, and gets the arguments in one of two ways::

    loader created in a hook      the arguments that Lightning recorded, made usable by `drop_record` and
                                  `convert_record`
    loader created before         the attributes of the same names

    new = type(loader)(**arguments, sampler=torch's DistributedSampler)
    for args, function in assignments(loader): function(new, *args)          the first one is `take_place`

Lightning first checks ``isinstance(loader.sampler, DistributedSampler)`` and does not touch such a loader. Therefore
our samplers of a share belong to that class, see `penstock.samplers.sequential`.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock import distributed
from penstock.errors import ConfigError, PartitionError
from penstock.loader.who_splits import splits_by_rank
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.random import RandomSampler

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader

__all__ = ["AccelerateGuard", "assignments", "convert_record", "drop_record", "keep_assignments", "take_place"]

_ASSIGNMENTS = "__pl_attrs_record"
_ARGS, _KWARGS, _NAMES = "__pl_saved_args", "__pl_saved_kwargs", "__pl_saved_arg_names"
"""Attributes of Lightning's records."""


class AccelerateGuard:
    """The attribute ``_is_accelerate_prepared``, which ``Accelerator.prepare`` tests before it creates a torch loader.

    Only that truth test raises, because tools read every attribute of a loader and must not fail. A program that sets
    the attribute disables Accelerate's change.
    """

    def __bool__(self) -> bool:
        raise ConfigError(
            "accelerate.Accelerator would replace this DataLoader by torch's, without its workers, seed and state: "
            "write `from penstock.integrations.accelerate import Accelerator` instead of `from accelerate import "
            "Accelerator`; in a Trainer, use penstock.integrations.transformers.PenstockTrainer or put its "
            "TrainerLoaders before the Trainer's class. loader._is_accelerate_prepared = True disables the change"
        )

    def __repr__(self) -> str:
        return "<refused where accelerate.Accelerator asks for it>"


def drop_record(loader: Any) -> None:
    """Drop Lightning's record of a base class's arguments, which are others than the loader's.

    Lightning records arguments of the loader classes that are imported before a hook such as ``train_dataloader``. For
    a class imported in the hook, only the base class's constructor is recorded. Without a record, Lightning reads the
    attributes of the same names.
    """
    for name in [name for name in vars(loader) if name.startswith("__pl_")]:
        del vars(loader)[name]


def convert_record(loader: Any, dataset: Any) -> None:
    """Convert positional arguments in Lightning's record to keyword arguments, since it adds others by keyword.

    Positional-only arguments and ``*args`` of a subclass stay. ``split`` and the ranks are removed, because Lightning's
    sampler replaces them. ``dataset`` is the one that the loader reads.
    """
    record = vars(loader)
    args, kwargs = record[_ARGS], dict(record[_KWARGS])
    parameters = list(inspect.signature(type(loader).__init__).parameters.values())[1 : 1 + len(args)]
    if args and len(parameters) == len(args) and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters):
        kwargs |= {one.name: value for one, value in zip(parameters, args, strict=True)}
        record[_ARGS], record[_NAMES] = (), ()
    if isinstance(kwargs.get("split"), bool | None):
        for name in ("split", "rank", "world_size", "process_group", "mesh"):
            kwargs.pop(name, None)
    if "dataset" in kwargs:
        kwargs["dataset"] = dataset
    record[_KWARGS] = kwargs


Assignment = tuple[tuple[Any, ...], Any]


def assignments(loader: Any) -> list[Assignment]:
    """Return operations for Lightning to run on a recreated loader: pairs of arguments and a function.

    The first one makes the new loader read the old one's order. The others are the assignments that Lightning recorded
    on the old loader.
    """
    return [((loader,), take_place), *vars(loader).get(_ASSIGNMENTS, ())]


def keep_assignments(loader: Any, record: list[Assignment]) -> None:
    """Store Lightning's record of assignments, without private attributes, since the new loader starts fresh."""
    vars(loader)[_ASSIGNMENTS] = kept = []
    for args, function in record:
        name = args[0]
        if isinstance(name, str) and name != "consumer" and not name.startswith("_"):
            kept.append((args, function))


def take_place(made: DataLoader[Any], other: DataLoader[Any]) -> None:
    """Let a loader that Lightning created take over the order and the share of the old one.

    Data without one of our orders that is not split yet keeps Lightning's sampler.

    Raises:
        PartitionError: the old sampler already splits by rank, and Lightning's batches would split again to predict.
    """
    batches = made.batch_sampler
    given: Any = getattr(batches, "sampler", made.sampler)
    own: Any = getattr(other.batch_sampler, "sampler", other.sampler)
    if not isinstance(given, torch.utils.data.DistributedSampler) or own is given:
        return
    sampler: Any
    if splits_by_rank(other, ranks=distributed.ranks()):
        if batches is not None and type(batches).__iter__ is not torch.utils.data.BatchSampler.__iter__:
            raise PartitionError(
                f"this {type(own).__name__} already splits by rank, and Lightning would split its share again to "
                "predict: pass use_distributed_sampler=False to the Trainer"
            )
        sampler = own
    elif type(given) is not torch.utils.data.DistributedSampler:
        return
    else:
        options: dict[str, Any] = {"num_replicas": given.num_replicas, "rank": given.rank, "drop_last": given.drop_last}
        dataset: Any = other.dataset
        permutes = isinstance(own, RandomSampler) and not own.replacement and own.num_samples == len(own.data_source)
        if other.config.shuffle == "none":
            # Lightning treats the name of an order as True.
            sampler = DistributedSampler(dataset, shuffle=False, **options)
        elif given.shuffle and permutes and own.seed is not None:
            order = {"shuffle": own.shuffle, "seed": own.seed, "block_size": own.block_size, "window": own.window}
            sampler = DistributedSampler(dataset, **order, **options)
        else:
            return
    # torch refuses assignments to these two.
    vars(made)["sampler"] = sampler
    if batches is not None:
        copied: Any = copy.copy(batches)
        copied.sampler = sampler
        vars(made)["batch_sampler"] = copied
    made._set_up()
