"""Hugging Face Accelerate: an `Accelerator` of which a prepared `DataLoader` stays one.

A program changes one import. ``accelerate.Accelerator`` builds loaders anew, as torch's, and their workers, seeds and
states would be lost: a loader of ours refuses that, with an error that names this class. Nothing of Accelerate is
changed. ::

    from penstock.integrations.accelerate import Accelerator

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = ps.DataLoader(images, batch_size=32, shuffle="global", seed=0, num_workers=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader: ...                     # on the device, this rank's, made by Penstock
    accelerator.save_state("checkpoint")         # with the position of the loader; load_state goes on there

``use_stateful_dataloader`` means what it means to Accelerate, but needs no torchdata. Without it (the default) nothing
is stored and nothing restored, and the program passes over the first steps of an epoch itself.
``skip_first_batches``, the method and the function of this module, counts from the beginning of the epoch in both
cases, and makes none of the batches that it skips.

What a rank gets: with a seed, whole batches in turn, with the random draws of a run on one rank, and states that any
number of ranks can load. Loaders that are dealt to ranks already (`DistributedSampler`, anybody's; `RankDataset`,
`MPDataset`, `GroupedBatchSampler`) are left as they are. Without a seed Accelerate deals, in its own way.

This module imports accelerate, and nothing of Penstock but `penstock.integrations.transformers` imports this module.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from penstock.errors import ConfigError
from penstock.integrations.dispatch_batches import DealtBatches
from penstock.loader.dataloader import DataLoader
from penstock.loader.ranks import splits_by_rank
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import batch_plan_of
from penstock.samplers.sequential import SequentialSampler

__all__ = ["Accelerator", "PreparedLoader", "skip_first_batches"]

accelerate: Any = importlib.import_module("accelerate")  # with its types mypy would read all of it
_data_loader: Any = importlib.import_module("accelerate.data_loader")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator``, whose ``prepare`` and ``skip_first_batches`` keep loaders of Penstock what they are.

    All arguments are those of ``accelerate.Accelerator``. Loaders of torch become what they become there.

    Raises:
        ConfigError: on ``prepare``, a position is asked for where one rank reads for all, or the device is a TPU.
    """

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Return a loader for this rank and its device; of one of ours, one that is made by it.

        Args:
            data_loader: to prepare. One that is prepared already is returned as it is.
            device_placement: put batches on the device; by default as the accelerator was told.
            slice_fn_for_dispatch: cuts batches that rank 0 reads for all.
        """
        if isinstance(data_loader, DataLoader) and not _is_prepared(data_loader):
            if device_placement is None:
                device_placement = self.device_placement
            options = self._options(put_on_device=device_placement, slice_fn_for_dispatch=slice_fn_for_dispatch)
            data_loader = _prepare(data_loader, options)
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a prepared loader without the first batches of each epoch, see `skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def _options(self, **options: Any) -> dict[str, Any]:
        """Return what ``accelerate.Accelerator`` tells its function that makes loaders, by name."""
        mesh = getattr(self.state, "ds_device_mesh", None)  # DeepSpeed's
        options |= {
            "device": self.device,
            "num_processes": self.num_processes,
            "process_index": self.process_index,
            "split_batches": self.split_batches,
            "rng_types": self.rng_types.copy(),
            "dispatch_batches": self.dispatch_batches,
            "even_batches": self.even_batches,
            "use_seedable_sampler": self.use_seedable_sampler,
            "data_seed": self.dataloader_config.data_seed,
            "non_blocking": self.non_blocking,
            "use_stateful_dataloader": self.use_stateful_dataloader,
            "torch_device_mesh": getattr(self, "torch_device_mesh", None) if mesh is None else mesh,
        }
        known = inspect.signature(_data_loader.prepare_data_loader).parameters  # fewer in older versions
        return {name: value for name, value in options.items() if name in known}


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader without the first batches of each epoch, in place of the function of that name of Accelerate.

    Args:
        dataloader: a prepared loader. One of torch is skipped by Accelerate.
        num_batches: how many. They are not made, but for streams that only the data set can order, and where rank 0
            reads for all.

    Raises:
        ConfigError: a loader of ours that is not prepared, of which Accelerate would make torch's.
    """
    if isinstance(dataloader, PreparedLoader):
        return _without_first(dataloader, num_batches)
    if isinstance(dataloader, DataLoader):
        raise ConfigError(
            "prepare the DataLoader first: skip_first_batches(accelerator.prepare(loader), n). Of one that is not "
            "prepared Accelerate would make torch's, without its workers, seed and epoch"
        )
    return _data_loader.skip_first_batches(dataloader, num_batches)


def _is_prepared(loader: Any) -> bool:
    """Return whether a loader is prepared, or was told to keep Accelerate off."""
    return isinstance(loader, PreparedLoader) or bool(vars(loader).get("_is_accelerate_prepared", False))


class PreparedLoader:
    """What one of Accelerate's loaders becomes over ours: epoch and position are the loader's own.

    Attributes:
        base_dataloader: our loader.
        may_be_remade: whether Accelerate may make torch's loader of this one, which somebody else is not to read.
        stands: whether a state was loaded that has had the batches which the Trainer is about to skip.
    """

    _is_accelerate_prepared = True
    may_be_remade = False
    stands = False
    base_dataloader: Any
    end_of_dataloader: bool
    iteration: int
    dl_state_dict: Mapping[str, Any] | None

    @property
    def multiprocessing_context(self) -> Any:
        """What our loader says. Accelerate's functions ask for it when they make a loader of torch's of this one.

        Raises:
            ConfigError: that loader would not be ours.
        """
        if not self.may_be_remade:
            raise ConfigError(
                "accelerate would make torch's loader of this prepared one, without our workers and seeds: skip "
                "batches by the method of penstock.integrations.accelerate.Accelerator, or by skip_first_batches of "
                "that module; in a Trainer put TrainerLoaders in front of its class"
            )
        return self.base_dataloader.multiprocessing_context

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, if the data set has epochs."""
        self.iteration = epoch
        dataset = self.base_dataloader.dataset
        if not isinstance(dataset, IterableDataset) or hasattr(dataset, "set_epoch"):
            self.base_dataloader.set_epoch(epoch)

    def state_dict(self) -> Mapping[str, Any]:
        """The position of whoever reads this loader."""
        return self.base_dataloader.state_dict() if self.dl_state_dict is None else self.dl_state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next pass."""
        self.base_dataloader.load_state_dict(state)
        self.iteration, self.dl_state_dict = self.base_dataloader.epoch, None

    def _update_state_dict(self) -> None:
        """Note the position, before Accelerate reads the next batch.

        At the end of a pass there is none to read. The loader is not asked then: without a seed its answer would be
        drawn from torch's global generator, earlier than torch draws.
        """
        self.dl_state_dict = None if self.end_of_dataloader else self.base_dataloader.state_dict()


class _WithoutFirst:
    """A prepared loader without the first batches of each pass. Epoch and position are those of the whole one, which is
    what ``save_state`` asks.
    """

    whole: Any
    skipped: int
    skip_batches: int
    base_dataloader: Any

    @property
    def iteration(self) -> int:
        return int(self.whole.iteration)

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.whole.iteration = epoch

    @property
    def dl_state_dict(self) -> Mapping[str, Any] | None:
        state: Mapping[str, Any] | None = self.whole.dl_state_dict
        return state

    @dl_state_dict.setter
    def dl_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self.whole.dl_state_dict = state

    def __iter__(self) -> Iterator[Any]:
        loader: Any = super()
        loader.set_epoch(self.iteration)  # here already: another epoch would be whole
        self.base_dataloader.pipeline.position.skip(self.skipped - self.skip_batches)
        yield from loader.__iter__()

    def __len__(self) -> int:
        loader: Any = super()
        batches: int = loader.__len__() - self.skipped
        return max(0, batches)


def _without_first(prepared: Any, batches: int) -> Any:
    """Return what `_prepare` made without its first batches.

    Streams that only the data set can order have no indices to skip, and a dispatcher counts in batches of all ranks:
    there Accelerate drops batches that were made.
    """
    whole, skipped = prepared, batches
    if isinstance(prepared, _WithoutFirst):
        whole, skipped = prepared.whole, prepared.skipped + batches
    dropped = not isinstance(whole, _data_loader.DataLoaderShard) or whole.base_dataloader.pipeline.stream
    rest: Any = object.__new__(_class_of(_WithoutFirst, type(whole)))
    rest.__dict__.update(whole.__dict__, whole=whole, skipped=skipped, skip_batches=skipped if dropped else 0)
    return rest


def _class_of(front: type, theirs: type) -> type:
    """Return a class of Accelerate's, with one of these in front."""
    return type(front.__name__.lstrip("_"), (front, theirs), {})


def _prepare(loader: DataLoader[Any], options: dict[str, Any]) -> Any:
    """Return Accelerate's loader, with ours in the place of the one that it makes.

    Args:
        options: of ``accelerate.data_loader.prepare_data_loader``, by name.
    """
    prepare = _data_loader.prepare_data_loader
    stateful = bool(options.get("use_stateful_dataloader"))
    options = {**options, "use_stateful_dataloader": False}  # else torchdata's loader is made, and thrown away
    world, rank = options["num_processes"], options["process_index"]
    alone = {
        **options,
        "num_processes": 1,
        "process_index": 0,
        "dispatch_batches": False,
        "use_seedable_sampler": False,
    }
    batches = _seeded_batches(loader)
    if splits_by_rank(loader, ranks=world):
        return _over(prepare(loader, **alone), loader, stateful, trimmed=world > 1)
    if world > 1 and batches is not None and not options.get("dispatch_batches") and not _has_mesh(options):
        mine = DealtBatches(
            batches, rank, world, split=options.get("split_batches", False), even=options.get("even_batches", True)
        )
        return _over(prepare(loader, **alone), like(loader, batch_sampler=mine), stateful)
    sampler = getattr(loader.batch_sampler, "sampler", None)
    options["use_seedable_sampler"] = options["use_seedable_sampler"] and batches is None
    prepared = prepare(loader, **options)
    base = _base_of(prepared)
    if isinstance(base.dataset, IterableDataset):
        if base.dataset is not loader.dataset or base.batch_size != loader.batch_size:
            loader = like(loader, dataset=base.dataset, batch_size=base.batch_size, drop_last=base.drop_last)
    elif base.batch_sampler is not loader.batch_sampler:
        loader = like(loader, batch_sampler=base.batch_sampler)
    elif getattr(base.batch_sampler, "sampler", None) is not sampler:  # Accelerate has put one in
        loader = like(loader, sampler=prepared.batch_sampler.sampler)
    return _over(prepared, loader, stateful)


def _over(prepared: Any, loader: DataLoader[Any], stateful: bool, *, trimmed: bool = False) -> Any:
    """What Accelerate prepared, over our loader instead of torch's.

    Args:
        stateful: ``save_state`` and ``load_state`` are to include the position.
        trimmed: ranks have their shares already, so Accelerate does not know which samples of the last batch repeat:
            ``gather_for_metrics`` is to cut nothing off.

    Raises:
        ConfigError: a position is asked for where one rank reads for all.
    """
    _base_of(prepared)
    if stateful and isinstance(prepared, _data_loader.DataLoaderDispatcher) and prepared.state.num_processes > 1:
        raise ConfigError(
            "use_stateful_dataloader cannot be had where rank 0 reads for all ranks, a round ahead of them: use "
            "DataLoaderConfiguration(dispatch_batches=False), or leave use_stateful_dataloader out and pass over the "
            "first steps with skip_first_batches"
        )
    loader.pipeline.dealt = True
    over: Any = object.__new__(_class_of(PreparedLoader, type(prepared)))
    over.__dict__.update(
        prepared.__dict__,
        base_dataloader=loader,
        dl_state_dict=None,
        use_stateful_dataloader=stateful,
        _drop_last=prepared._drop_last or trimmed,
    )
    return over


def _base_of(prepared: Any) -> Any:
    """Return the loader inside of what Accelerate prepared.

    Raises:
        ConfigError: on a TPU, which has a loader of its own.
    """
    if not isinstance(prepared, _data_loader.DataLoaderAdapter):
        raise ConfigError(
            "a TPU has a loader of its own, which cannot be made by Penstock: use torch's DataLoader there"
        )
    return prepared.base_dataloader


def like(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A loader with the same arguments, but for some.

    Args:
        changes: by name. With a batch sampler those that it replaces are left out.
    """
    names = set(inspect.signature(DataLoader.__init__).parameters) - {
        "self",
        "shuffle",
        "split",
        "batch_sampler",
        "sampler",
    }
    config = loader.config
    arguments = {name: getattr(loader, name) for name in names}
    arguments |= {"prefetch_factor": config.prefetch_factor, "skip": config.skip}
    arguments |= changes
    if "batch_sampler" in changes:
        del arguments["batch_size"], arguments["drop_last"]
    return DataLoader(**arguments)


def _seeded_batches(loader: DataLoader[Any]) -> EpochBatchSampler | None:
    """The loader's batches, if they are ours and the same on all ranks."""
    if loader.batch_sampler is None:
        return None
    batches = batch_plan_of(loader.batch_sampler)
    same = batches.key_seed is not None or isinstance(getattr(batches, "sampler", None), SequentialSampler)
    return batches if same else None


def _has_mesh(options: Mapping[str, Any]) -> bool:
    """Whether Accelerate derives other ranks from a mesh than the global ones."""
    return options.get("torch_device_mesh") is not None
