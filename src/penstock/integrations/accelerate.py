"""Hugging Face Accelerate: a prepared `DataLoader` stays one.

``Accelerator.prepare`` builds loaders anew, as torch's: executors, seeds and states would be lost without a word. Here
its function is wrapped, once, when it first asks about a loader of ours, so that nothing has to be called::

    loader = ps.DataLoader(images, batch_size=32, shuffle="global", seed=0, num_workers=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader: ...                     # on the device, this rank's, made by Penstock
    accelerator.save_state("checkpoint")         # with the position of the loader; load_state goes on there

What a rank gets: with a seed, whole batches in turn, with the random draws of a run on one rank, and states that any
number of ranks can load. Loaders that are dealt to ranks already (`DistributedSampler`, `RankDataset`, `MPDataset`) are
left as they are. Without a seed Accelerate deals, in its own way. ``skip_first_batches`` is torch's work: load a state.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.utils.data
from torch.utils.data import IterableDataset, Subset

from penstock.integrations.dealing import DealtBatches
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.sequential import SequentialSampler

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader

__all__ = ["WhenPrepared", "keep_ours"]


class WhenPrepared:
    """``_is_accelerate_prepared`` of our loaders, which ``Accelerator.prepare`` reads before anything else.

    Whoever sets that attribute on a loader, to keep Accelerate off, still can.
    """

    def __get__(self, loader: Any, owner: type) -> bool:
        if "accelerate.accelerator" in sys.modules:
            keep_ours()
        return False


def keep_ours() -> None:
    """From now on ``Accelerator.prepare`` keeps loaders of ours. Idempotent; imports accelerate."""
    from accelerate import accelerator, data_loader

    prepare = accelerator.prepare_data_loader
    if getattr(prepare, "keeps_penstock", False):
        return

    shard = type("Shard", (_Shard, data_loader.DataLoaderShard), {})

    @functools.wraps(prepare)
    def wrapper(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        from penstock.loader.dataloader import DataLoader

        if not isinstance(dataloader, DataLoader):
            return prepare(dataloader, *args, **kwargs)
        options = inspect.signature(prepare).bind(dataloader, *args, **kwargs).arguments
        return _prepare(prepare, shard, dataloader, {**options, "use_stateful_dataloader": False})

    wrapper.keeps_penstock = True  # type: ignore[attr-defined]
    accelerator.prepare_data_loader = wrapper


class _Shard:
    """Accelerate's loader of one rank, over ours: the epoch is told to the loader itself, and is part of its state."""

    base_dataloader: Any
    iteration: int
    dl_state_dict: Mapping[str, Any]

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch
        dataset = self.base_dataloader.dataset
        if not isinstance(dataset, IterableDataset) or hasattr(dataset, "set_epoch"):
            self.base_dataloader.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base_dataloader.load_state_dict(state)
        self.iteration = self.base_dataloader.epoch
        self.dl_state_dict = self.base_dataloader.state_dict()


def _prepare(prepare: Callable[..., Any], shard: type, loader: DataLoader[Any], options: dict[str, Any]) -> Any:
    """Accelerate's function, with our loader in the place of the one that it makes.

    Args:
        prepare: that function.
        shard: what a rank's loader is to be.
        options: its arguments by name.
    """
    state = _partial_state()
    world, rank = options.get("num_processes") or state.num_processes, options.get("process_index")
    rank = state.process_index if rank is None else rank
    alone = {
        **options,
        "num_processes": 1,
        "process_index": 0,
        "dispatch_batches": False,
        "use_seedable_sampler": False,
    }
    batches = _seeded_batches(loader)
    if is_dealt(loader):
        return _over(shard, prepare(**alone), loader, trimmed=world > 1)
    if world > 1 and batches is not None and not options.get("dispatch_batches") and not _has_mesh(options):
        mine = DealtBatches(
            batches, rank, world, split=options.get("split_batches", False), even=options.get("even_batches", True)
        )
        return _over(shard, prepare(**alone), like(loader, batch_sampler=mine))
    sampler = getattr(loader.batch_sampler, "sampler", None)
    prepared = prepare(**{**options, "use_seedable_sampler": options.get("use_seedable_sampler") and batches is None})
    base = getattr(prepared, "base_dataloader", None)
    if base is None:  # on a TPU, which has a loader of its own
        return prepared
    if isinstance(base.dataset, IterableDataset):
        if base.dataset is not loader.dataset or base.batch_size != loader.batch_size:
            loader = like(loader, dataset=base.dataset, batch_size=base.batch_size, drop_last=base.drop_last)
    elif base.batch_sampler is not loader.batch_sampler:
        loader = like(loader, batch_sampler=base.batch_sampler)
    elif getattr(base.batch_sampler, "sampler", None) is not sampler:  # Accelerate has put one in
        loader = like(loader, sampler=prepared.batch_sampler.sampler)
    return _over(shard, prepared, loader)


def _over(shard: type, prepared: Any, loader: DataLoader[Any], *, trimmed: bool = False) -> Any:
    """What Accelerate prepared, over our loader instead of torch's.

    Args:
        trimmed: ranks have their shares already, so Accelerate does not know which samples of the last batch repeat:
            ``gather_for_metrics`` is to cut nothing off.
    """
    from accelerate.data_loader import DataLoaderShard

    prepared.__dict__.update(base_dataloader=loader, dl_state_dict=loader.state_dict(), use_stateful_dataloader=True)
    if type(prepared) is not DataLoaderShard:
        return prepared
    over: Any = object.__new__(shard)
    over.__dict__.update(prepared.__dict__, _drop_last=prepared._drop_last or trimmed)
    return over


def like(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A loader with the same arguments, but for some.

    Args:
        changes: by name. With a batch sampler those that it replaces are left out.
    """
    from penstock.loader.dataloader import DataLoader

    names = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "shuffle", "batch_sampler", "sampler"}
    arguments = {name: getattr(loader, name) for name in names} | changes
    if not loader._chosen:
        arguments["prefetch_factor"] = None  # what torch has put there is nobody's choice: light batches go on as light
    if "batch_sampler" in changes:
        del arguments["batch_size"], arguments["drop_last"]
    return DataLoader(**arguments)


def is_dealt(loader: DataLoader[Any]) -> bool:
    """Whether each rank has its own share already."""
    dataset: Any = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    inner: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (deeper := getattr(inner, "batch_sampler", None) or getattr(inner, "sampler", None)) is not None:
        inner = deeper
    return bool(getattr(dataset, "splits_by_rank", False)) or isinstance(
        inner, DistributedSampler | torch.utils.data.DistributedSampler
    )


def _seeded_batches(loader: DataLoader[Any]) -> EpochBatchSampler | None:
    """The loader's batches, if they are ours and the same on all ranks."""
    from penstock.loader.foreign import source_of

    if loader.batch_sampler is None:
        return None
    batches = source_of(loader.batch_sampler)
    same = batches.peek().seed is not None or isinstance(getattr(batches, "sampler", None), SequentialSampler)
    return batches if same else None


def _partial_state() -> Any:
    from accelerate.state import PartialState

    return PartialState()


def _has_mesh(options: Mapping[str, Any]) -> bool:
    """Whether Accelerate derives other ranks from a mesh than the global ones."""
    return options.get("torch_device_mesh") is not None
