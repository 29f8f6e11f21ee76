"""Let another library make a second loader of one of ours, or refuse it; nothing of that library is changed.

Accelerate reads the attributes of a loader and makes torch's of them: `AskedByAccelerate` refuses that. Lightning calls
``type(loader)`` once more, with a sampler for the rank, and learns the arguments in one of two ways::

    loader made in a hook      the arguments that Lightning recorded        `own_record`, `name_arguments`
    loader made before         the attributes of the same names

    new = type(loader)(**arguments, sampler=torch's DistributedSampler)
    for args, function in record of assignments: function(new, *args)       `Assignments` says which

Lightning asks ``isinstance(loader.sampler, DistributedSampler)`` first, and leaves such a loader alone: therefore the
samplers of a share are of that class, see `penstock.samplers.share_sampler`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock import distributed
from penstock.errors import ConfigError, PartitionError
from penstock.loader.ranks import splits_by_rank
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.random import RandomSampler

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader

__all__ = ["RECORD", "AskedByAccelerate", "Assignments", "name_arguments", "own_record", "sampler_in_place_of"]

RECORD = "__pl_attrs_record"
"""Where Lightning looks for what to do with the loader that it has made of another one."""

_ARGS, _KWARGS, _NAMES = "__pl_saved_args", "__pl_saved_kwargs", "__pl_saved_arg_names"


class AskedByAccelerate:
    """``_is_accelerate_prepared`` of our loaders, which ``Accelerator.prepare`` tests before it makes torch's loader.

    That test alone is refused: tools read every attribute of a loader, and go on.

    Whoever sets that attribute on a loader keeps Accelerate off.
    """

    def __bool__(self) -> bool:
        raise ConfigError(
            "accelerate.Accelerator would make torch's loader of this DataLoader, without its workers, seed and state: "
            "write `from penstock.integrations.accelerate import Accelerator` in place of `from accelerate import "
            "Accelerator`; in a Trainer use penstock.integrations.transformers.PenstockTrainer, or put its "
            "TrainerLoaders in front of the Trainer's class. loader._is_accelerate_prepared = True keeps Accelerate off"
        )

    def __repr__(self) -> str:
        return "<refused where accelerate.Accelerator asks for it>"


@contextmanager
def own_record(loader: Any) -> Iterator[None]:
    """Drop a record of arguments that begins inside: it is that of a base class, which has other arguments.

    Lightning records the arguments of the loader classes that are imported when a hook such as ``train_dataloader``
    begins. A class that is imported in the hook has a recorder around the constructor of its base class alone. Without
    a record Lightning takes the arguments from the attributes of the same names.
    """
    recorded = _ARGS in vars(loader)
    yield
    if not recorded:
        for name in [name for name in vars(loader) if name.startswith("__pl_")]:
            del vars(loader)[name]


def name_arguments(loader: Any) -> None:
    """Give names to the arguments that Lightning recorded by position: it adds others by name, which would clash.

    Arguments that a subclass takes by position alone, or by ``*args``, stay as they are. ``split`` is left out, since
    Lightning's sampler comes in its place, and ``skip``, which Lightning's sampler knows no steps for: the new loader
    takes it over with the order of the old one.
    """
    record = vars(loader)
    if _ARGS not in record:
        return
    args, kwargs = record[_ARGS], dict(record[_KWARGS])
    parameters = list(inspect.signature(type(loader).__init__).parameters.values())[1 : 1 + len(args)]
    if args and len(parameters) == len(args) and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters):
        kwargs |= {one.name: value for one, value in zip(parameters, args, strict=True)}
        record[_ARGS], record[_NAMES] = (), ()
    if isinstance(kwargs.get("split"), bool | None):
        kwargs.pop("split", None)
    kwargs.pop("skip", None)
    record[_KWARGS] = kwargs


class Assignments:
    """What Lightning is to do with a loader that it has made of another one: pairs of arguments and a function.

    The first makes the new loader read the other one's order. The rest are the assignments that Lightning recorded
    since the other one was made. Inner attributes are left out, since the new loader begins anew.

    Args:
        take_place: called with the new loader and the other one.
    """

    def __init__(self, take_place: Callable[[Any, Any], None]) -> None:
        self._take_place = take_place

    def __get__(self, loader: Any, owner: type) -> Any:
        return self if loader is None else [((loader,), self._take_place), *vars(loader).get(RECORD, ())]

    def __set__(self, loader: Any, record: list[tuple[tuple[Any, ...], Any]]) -> None:
        vars(loader)[RECORD] = [entry for entry in record if _is_assignment(*entry)]


def _is_assignment(args: tuple[Any, ...], function: Any) -> bool:
    """Return whether an entry is about an attribute that programs know."""
    name = args[0]
    return isinstance(name, str) and name != "pipeline" and not name.startswith("_")


def sampler_in_place_of(made: DataLoader[Any], other: DataLoader[Any]) -> Any:
    """Return the sampler that keeps a loader's order and share in the one that Lightning has made of it.

    None where Lightning's stays: it deals what has no order of ours, and what is not dealt yet.

    Args:
        made: the loader that reads Lightning's sampler.
        other: the one of which it was made.

    Raises:
        PartitionError: the other one's sampler deals to ranks already, and Lightning's batches would deal once more.
    """
    batches = made.batch_sampler
    given: Any = getattr(batches, "sampler", made.sampler)
    own: Any = getattr(other.batch_sampler, "sampler", other.sampler)
    if not isinstance(given, torch.utils.data.DistributedSampler) or own is given:
        return None
    if splits_by_rank(other, ranks=distributed.current().world_size):
        if batches is not None and type(batches).__iter__ is not torch.utils.data.BatchSampler.__iter__:
            raise PartitionError(
                f"this {type(own).__name__} deals to ranks already, and Lightning would deal its share once more to "
                "predict: give the Trainer use_distributed_sampler=False"
            )
        return own
    if type(given) is not torch.utils.data.DistributedSampler:
        return None
    options: dict[str, Any] = {"num_replicas": given.num_replicas, "rank": given.rank, "drop_last": given.drop_last}
    dataset: Any = other.dataset
    if other.config.shuffle == "none":
        # Lightning takes the name of an order for True.
        return DistributedSampler(dataset, shuffle=False, **options)
    permutes = isinstance(own, RandomSampler) and not own.replacement and own.num_samples == len(own.data_source)
    if not given.shuffle or not permutes or own.seed is None:
        return None
    return DistributedSampler(
        dataset, shuffle=own.shuffle, seed=own.seed, block_size=own.block_size, window=own.window, **options
    )
