"""Lightning: a loader that it makes anew keeps its arguments, its order and its share.

On several ranks Lightning's Trainer and Fabric give a loader a sampler by calling its class once more. What follows
needs no call: a loader of ours sees to it when it is made::

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):                  # each rank reads its share of the global order of seed 3
            return ps.DataLoader(rows, batch_size=32, shuffle="global", seed=3)

* A seeded shuffle stays: the sampler is a `DistributedSampler` of the same order and seed. Lightning's own has torch's
  order, by Lightning's seed.
* What splits by rank already (`RankDataset`, `ShardDataset`, `GroupedBatchSampler`) is not split again.
* All arguments stay, also where Lightning did not see them: see `unrecorded`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch.utils.data

from penstock import distributed
from penstock.loader.ranks import splits_by_rank
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.random import RandomSampler

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader

__all__ = ["keep_ours", "unrecorded"]

_TRAINER, _FABRIC = "trainer.connectors.data_connector", "fabric"
_ASKS = {
    f"lightning.pytorch.{_TRAINER}": "_DataConnector",
    f"pytorch_lightning.{_TRAINER}": "_DataConnector",
    f"lightning.fabric.{_FABRIC}": "Fabric",
    f"lightning_fabric.{_FABRIC}": "Fabric",
}
"""Lightning's modules that make loaders anew, and the class in each that asks whether a loader needs a sampler."""

_RECORDERS = ("lightning.fabric.utilities.data", "lightning_fabric.utilities.data")


def unrecorded(base: type) -> Callable[..., None]:
    """Return a class's constructor without Lightning's recorder around it, for the constructor of a subclass to call.

    While a hook such as ``train_dataloader`` runs, Lightning records the arguments of the loader classes that it found
    imported, to call ``type(loader)`` with them again. Ours may be imported in that hook: then the recorder is around
    torch's constructor alone, and would note what ours passes on to that. Without a record Lightning takes the
    arguments from the attributes of the same names.
    """
    init: Any = base.__init__  # type: ignore[misc]
    while getattr(init, "__globals__", {}).get("__name__") in _RECORDERS:
        init = init.__wrapped__
    return cast(Callable[..., None], init)


def keep_ours() -> None:
    """Have Lightning keep what loaders of ours are, in those of its modules that are imported. Idempotent."""
    for name, asks in _ASKS.items():
        module: Any = sys.modules.get(name)
        update = getattr(module, "_update_dataloader", None)
        if hasattr(module, asks) and update is not None and not hasattr(update, "keeps_penstock"):
            module._update_dataloader = _keeping_order(update)
            asker = getattr(module, asks)
            asker._requires_distributed_sampler = _keeping_share(asker._requires_distributed_sampler)


def _keeping_order(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that makes a loader anew with a sampler."""

    @functools.wraps(update)
    def wrapper(dataloader: Any, sampler: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(dataloader):
            return update(dataloader, sampler, *args, **kwargs)
        _name_arguments(dataloader)
        _forget_inner_attributes(dataloader)
        result = update(dataloader, _of_same_order(dataloader, sampler), *args, **kwargs)
        for name, value in vars(dataloader).items():
            if not name.startswith("_") and name not in vars(result):
                setattr(result, name, value)  # the program's own
        return result

    wrapper.keeps_penstock = True  # type: ignore[attr-defined]
    return wrapper


def _keeping_share(requires: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap the method that says whether a loader needs a sampler for its rank."""

    @functools.wraps(requires)
    def wrapper(self: Any, dataloader: Any) -> bool:
        if _is_ours(dataloader) and splits_by_rank(dataloader, ranks=distributed.current().world_size):
            return False
        return requires(self, dataloader)

    return wrapper


def _is_ours(loader: Any) -> bool:
    from penstock.loader.dataloader import DataLoader

    return isinstance(loader, DataLoader)


def _name_arguments(loader: Any) -> None:
    """Give names to the arguments that Lightning recorded by position: it adds others by name, which would clash.

    Arguments that a subclass takes by position alone, or by ``*args``, stay as they are.
    """
    record = vars(loader)
    args = record.get("__pl_saved_args", ())
    parameters = list(inspect.signature(type(loader).__init__).parameters.values())[1 : 1 + len(args)]
    if len(parameters) == len(args) and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters) and args:
        named = {one.name: value for one, value in zip(parameters, args, strict=True)}
        record["__pl_saved_kwargs"] = {**named, **record["__pl_saved_kwargs"]}
        record["__pl_saved_args"], record["__pl_saved_arg_names"] = (), ()


def _forget_inner_attributes(loader: Any) -> None:
    """Have Lightning set those attributes alone on the new loader that are no part of what the loader does.

    It records all that are set after the constructor, and sets them again. The position would be the old loader's.
    """
    record = vars(loader).get("__pl_attrs_record")
    if record is not None:
        record[:] = [(args, function) for args, function in record if not args[0].startswith("_")]


def _of_same_order(loader: DataLoader[Any], sampler: Any) -> Any:
    """Return a sampler that deals the loader's own order, where Lightning's would deal another one.

    Args:
        sampler: Lightning's.
    """
    own: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if type(sampler) is not torch.utils.data.DistributedSampler:
        return sampler
    if loader._shuffle == "none":
        sampler.shuffle = False  # Lightning takes the name of an order for True
    permutes = isinstance(own, RandomSampler) and not own.replacement and own.num_samples == len(own.data_source)
    if not sampler.shuffle or not permutes or own.seed is None:
        return sampler
    return DistributedSampler(
        loader.dataset,  # type: ignore[arg-type]
        sampler.num_replicas,
        sampler.rank,
        own.shuffle,
        own.seed,
        sampler.drop_last,
        block_size=own.block_size,
        window=own.window,
    )
