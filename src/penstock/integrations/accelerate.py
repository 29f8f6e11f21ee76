"""Hugging Face Accelerate: an `Accelerator` that prepares a Penstock `DataLoader` without replacing it.

A program changes one import. ``accelerate.Accelerator`` replaces every loader by a new torch DataLoader, which would
lose Penstock's workers, seeds and states; so a Penstock loader refuses that, with an error that names this class.
Accelerate itself is not patched. ::

    from penstock.integrations.accelerate import Accelerator

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = ps.DataLoader(images, batch_size=32, shuffle="global", seed=0, num_workers=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader: ...                     # this rank's batches, loaded by Penstock, on the device
    accelerator.save_state("checkpoint")         # includes the loader's position; load_state resumes there

``use_stateful_dataloader`` means the same as in Accelerate, but does not need torchdata. Without it (the default) no
position is saved or restored, and the program skips the first steps of an epoch itself. ``skip_first_batches``, both
the method and the function of this module, counts from the beginning of the epoch in either case, and does not load the
batches that it skips.

A seeded loader is split across ranks by whole batches, round robin, with the random draws of a run on one rank, and its
states fit any number of ranks. Loaders that already split their data (any `DistributedSampler`; `RankDataset`,
`MPDataset`, `GroupedBatchSampler`) stay as they are. Accelerate splits a loader without a seed in its own way.

This module imports accelerate; only `penstock.integrations.transformers` imports this module.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from penstock.errors import ConfigError
from penstock.integrations.dispatch_batches import DispatchedBatches
from penstock.loader.dataloader import DataLoader
from penstock.loader.who_splits import splits_by_rank
from penstock.order.partition import Layout
from penstock.plan.share import SharePlan
from penstock.samplers.batch import batch_plan_of, sampler_of
from penstock.samplers.identity import holds_a_share, own_order
from penstock.samplers.sequential import SequentialSampler

__all__ = ["Accelerator", "PreparedLoader", "skip_first_batches"]

accelerate: Any = importlib.import_module("accelerate")  # untyped, or mypy would check all of it
_data_loader: Any = importlib.import_module("accelerate.data_loader")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` whose ``prepare`` and ``skip_first_batches`` keep Penstock's loaders.

    It takes the arguments of ``accelerate.Accelerator`` and treats torch's loaders as that does.

    Raises:
        ConfigError: (in ``prepare``) ``use_stateful_dataloader`` with rank 0 reading for all ranks, or a TPU device.
    """

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Return a loader for this rank and its device; for a Penstock loader, one that reads through it.

        Args:
            data_loader: the loader to prepare. A prepared loader is returned as it is.
            device_placement: move batches to the device; by default, the accelerator's setting.
            slice_fn_for_dispatch: slices batches that rank 0 reads for all ranks.
        """
        if isinstance(data_loader, DataLoader) and not vars(data_loader).get("_is_accelerate_prepared", False):
            if device_placement is None:
                device_placement = self.device_placement
            options = self._options(put_on_device=device_placement, slice_fn_for_dispatch=slice_fn_for_dispatch)
            data_loader = _prepare(data_loader, options)
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a prepared loader without the first batches of each epoch, see `skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather a batch's values from all ranks, without those of samples that the end of an epoch repeats.

        Raises:
            ConfigError: the loader splits its data by itself, and the ranks have different numbers of batches, or
                repeat samples in an unknown way.
        """
        active = self.gradient_state.active_dataloader
        ends = active.last_batches(self) if isinstance(active, PreparedLoader) and active.splits_itself else None
        ended = ends is not None and self.gradient_state.end_of_dataloader
        if ends is None or not ended or (len(set(ends)) == 1 and ends[0].kept == ends[0].samples):
            return super().gather_for_metrics(input_data, use_gather_object)
        try:
            accelerate.utils.recursively_apply(lambda values: values, input_data, error_on_other_type=True)
        except TypeError:  # not only tensors
            use_gather_object = True
        if use_gather_object:
            values = iter(super().gather_for_metrics(input_data, True))
            parts = [list(itertools.islice(values, end.samples)) for end in ends]
            return [value for end, part in zip(ends, parts, strict=True) for value in part[: end.kept]]
        if len({end.samples for end in ends}) > 1:
            input_data = self.pad_across_processes(input_data)

        def kept(values: torch.Tensor) -> torch.Tensor:
            parts = torch.split(values, len(values) // len(ends))
            return torch.cat([part[: end.kept] for part, end in zip(parts, ends, strict=True)])

        return accelerate.utils.recursively_apply(kept, super().gather_for_metrics(input_data))

    def _options(self, **options: Any) -> dict[str, Any]:
        """Return the arguments that ``accelerate.Accelerator`` passes to its ``prepare_data_loader``, by name."""
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
        known = inspect.signature(_data_loader.prepare_data_loader).parameters  # older versions have fewer
        return {name: value for name, value in options.items() if name in known}


class _End(NamedTuple):
    """The last batch of a rank: its samples, and those at its beginning that the epoch did not have before."""

    samples: int
    kept: int


def _ends(layout: Layout) -> list[_End]:
    """Return the last batch of each rank; ConfigError if the ranks have different numbers of batches."""
    found, counts = [], set()
    for rank in range(layout.ranks):
        partition = layout.partition(rank)
        left = max(0, len(partition) - layout.skip)
        full, rest = divmod(left, layout.batch_size)
        rest = 0 if layout.drop_last else rest
        samples = rest or min(left, layout.batch_size)
        end = layout.skip + full * layout.batch_size + rest
        kept = int((partition.positions(end - samples, end) < layout.samples).sum())
        counts.add(full + bool(rest))
        found.append(_End(samples, kept))
    if len(counts) > 1:
        raise ConfigError(
            f"gather_for_metrics needs equally many batches on all ranks, but some have {max(counts)} and others "
            f"{min(counts)}: let Accelerate split the data (split=False in the DataLoader); or use a dataset or a "
            "sampler with remainder='pad', whose repeated samples are removed here"
        )
    return found


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader without the first batches of each epoch; replaces the function of Accelerate.

    Args:
        dataloader: a prepared loader. Accelerate handles torch's loaders.
        num_batches: batches to skip. They are loaded and dropped only for streams whose order only the dataset knows,
            and where rank 0 reads for all ranks.

    Raises:
        ConfigError: a Penstock loader is not prepared; Accelerate would replace it by torch's.
    """
    if isinstance(dataloader, PreparedLoader):
        rest: Any = object.__new__(type(dataloader))
        rest.__dict__.update(dataloader.__dict__, skipped=dataloader.skipped + num_batches)
        return rest
    if isinstance(dataloader, DataLoader):
        raise ConfigError(
            "prepare the DataLoader first: skip_first_batches(accelerator.prepare(loader), n). Accelerate would "
            "replace an unprepared one by torch's, without its workers, seed and epoch"
        )
    return _data_loader.skip_first_batches(dataloader, num_batches)


class PreparedLoader:
    """Mixin that makes one of Accelerate's loaders read from a Penstock loader, with its epoch and position.

    Attributes:
        base_dataloader: the Penstock loader.
        may_be_remade: whether Accelerate may build a torch loader from this one, because nobody will read it.
        stands: whether a loaded state is already past the batches that the Trainer is about to skip.
        splits_itself: whether the loader splits its data among several ranks.
        skipped: the number of batches to leave out at the beginning of each pass.
        position: epoch and state, which a loader shares with the copies of it that skip batches: ``save_state`` reads
            the loader that was prepared.
    """

    _is_accelerate_prepared = True
    may_be_remade = False
    stands = False
    splits_itself = False
    skipped = 0
    position: SimpleNamespace
    base_dataloader: Any
    end_of_dataloader: bool
    _layout: Layout | None
    _ends: list[_End] | None

    @property
    def iteration(self) -> int:
        """The epoch; Accelerate counts it."""
        return int(self.position.iteration)

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.position.iteration = epoch

    @property
    def dl_state_dict(self) -> Mapping[str, Any] | None:
        """The state before the batch that Accelerate reads ahead."""
        state: Mapping[str, Any] | None = self.position.state
        return state

    @dl_state_dict.setter
    def dl_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self.position.state = state

    @property
    def skip_batches(self) -> int:
        """The batches that Accelerate loads and drops, in two cases: a stream whose order only the dataset knows has no
        indices to skip, and a dispatcher counts batches of all ranks.
        """
        dropped = not isinstance(self, _data_loader.DataLoaderShard) or self.base_dataloader.consumer.plan is None
        return self.skipped if dropped else 0

    def __iter__(self) -> Iterator[Any]:
        loader: Any = super()
        if self.skipped:
            self.set_epoch(self.iteration)  # set here too: after another epoch, the pass would not be shortened
            self.base_dataloader.consumer.skip_from_start(self.skipped - self.skip_batches)
        yield from loader.__iter__()

    def __len__(self) -> int:
        loader: Any = super()
        batches: int = loader.__len__() - self.skipped
        return max(0, batches)

    @property
    def multiprocessing_context(self) -> Any:
        """The Penstock loader's context. Accelerate reads it when it builds a torch loader from this one.

        Raises:
            ConfigError: that torch loader would replace the Penstock loader.
        """
        if not self.may_be_remade:
            raise ConfigError(
                "accelerate would replace this prepared loader by torch's, without Penstock's workers and seeds: skip "
                "batches with the method of penstock.integrations.accelerate.Accelerator or with "
                "penstock.integrations.accelerate.skip_first_batches; for a Trainer, put TrainerLoaders before it in "
                "the list of base classes"
            )
        return self.base_dataloader.multiprocessing_context

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, if the dataset has epochs."""
        self.iteration = epoch
        dataset = self.base_dataloader.dataset
        if not isinstance(dataset, IterableDataset) or hasattr(dataset, "set_epoch"):
            self.base_dataloader.set_epoch(epoch)

    def begin(self) -> None:
        """Begin a pass."""
        theirs: Any = super()
        theirs.begin()
        self._layout = self._ends = None
        self._had = self.base_dataloader.stats()["samples"] if self.splits_itself else 0

    def last_batches(self, accelerator: Any) -> list[_End] | None:
        """Return the last batch of each rank in this pass; None if no sample is repeated.

        Raises:
            ConfigError: see `Accelerator.gather_for_metrics`.
        """
        if self._layout is not None and self._layout.ranks == accelerator.num_processes:
            self._ends = _ends(self._layout) if self._ends is None else self._ends
            return self._ends
        if accelerator.gradient_state.end_of_dataloader and self.base_dataloader.consumer.plan is not None:
            had = torch.tensor(self.base_dataloader.stats()["samples"] - self._had, device=accelerator.device)
            data = self.base_dataloader.dataset
            order = own_order(data)
            samples = order.samples if isinstance(order, SharePlan) else 0 if holds_a_share(data) else len(data)
            if int(accelerator.reduce(had)) > samples:
                raise ConfigError(
                    f"gather_for_metrics cannot tell which samples of this {type(data).__name__} the end of the epoch "
                    "repeats: evaluate with a DataLoader that has neither a sampler nor one rank's share, which "
                    "Accelerate splits"
                )
        return None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position of this loader's consumer."""
        return self.base_dataloader.state_dict() if self.dl_state_dict is None else self.dl_state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state at the next pass."""
        self.base_dataloader.load_state_dict(state)
        self.iteration, self.dl_state_dict = self.base_dataloader.epoch, None

    def _update_state_dict(self) -> None:
        """Record the position before Accelerate reads the next batch.

        At the end of a pass no batch follows, and the loader's state is not read: without a seed that would draw from
        torch's global generator earlier than torch does.
        """
        if self.end_of_dataloader:
            self.dl_state_dict = None
            return
        consumer = self.base_dataloader.consumer
        if self.splits_itself and self._layout is None and consumer.plan is not None:
            # An order of batches has no position for each sample, and a sampler over a share moves the padding.
            self._layout = None if sampler_of(consumer.plan) is consumer.plan else consumer.peek().layout
        self.dl_state_dict = self.base_dataloader.state_dict()


def _prepare(loader: DataLoader[Any], options: dict[str, Any]) -> Any:
    """Return Accelerate's loader with the Penstock loader inside; ``options`` are those of its function, by name."""
    prepare = _data_loader.prepare_data_loader
    stateful = bool(options.get("use_stateful_dataloader"))
    options = {**options, "use_stateful_dataloader": False}  # or Accelerate would build torchdata's loader for nothing
    world, rank = options["num_processes"], options["process_index"]
    alone = {"num_processes": 1, "process_index": 0, "dispatch_batches": False, "use_seedable_sampler": False}
    batches = None if loader.batch_sampler is None else batch_plan_of(loader.batch_sampler)
    if batches is not None and batches.key_seed is None:
        in_order = isinstance(getattr(batches, "sampler", None), SequentialSampler)
        batches = batches if in_order else None  # without a seed, the batches differ between ranks
    if splits_by_rank(loader, ranks=world):
        return _over(prepare(loader, **options | alone), loader, stateful, splits_itself=world > 1)
    # With a device mesh, Accelerate's ranks differ from the global ranks.
    has_mesh = options.get("torch_device_mesh") is not None
    if world > 1 and batches is not None and not options.get("dispatch_batches") and not has_mesh:
        mine = DispatchedBatches(
            batches, rank, world, split=options.get("split_batches", False), even=options.get("even_batches", True)
        )
        return _over(prepare(loader, **options | alone), like(loader, batch_sampler=mine), stateful)
    sampler = getattr(loader.batch_sampler, "sampler", None)
    options["use_seedable_sampler"] = options["use_seedable_sampler"] and batches is None
    prepared = prepare(loader, **options)
    base = _base_of(prepared)
    if isinstance(base.dataset, IterableDataset):
        if base.dataset is not loader.dataset or base.batch_size != loader.batch_size:
            loader = like(loader, dataset=base.dataset, batch_size=base.batch_size, drop_last=base.drop_last)
    elif base.batch_sampler is not loader.batch_sampler:
        loader = like(loader, batch_sampler=base.batch_sampler)
    elif getattr(base.batch_sampler, "sampler", None) is not sampler:  # Accelerate has replaced the sampler
        loader = like(loader, sampler=prepared.batch_sampler.sampler)
    return _over(prepared, loader, stateful)


def _over(prepared: Any, loader: DataLoader[Any], stateful: bool, *, splits_itself: bool = False) -> Any:
    """Return what Accelerate prepared, reading from a Penstock loader instead of torch's.

    Args:
        stateful: ``save_state`` and ``load_state`` include the position.
        splits_itself: the loader splits its data across ranks itself, so Accelerate cannot know which samples of the
            last batch repeat, and must not cut any off: `Accelerator.gather_for_metrics` does.
    """
    _base_of(prepared)
    if stateful and isinstance(prepared, _data_loader.DataLoaderDispatcher) and prepared.state.num_processes > 1:
        raise ConfigError(
            "use_stateful_dataloader is impossible where rank 0 reads for all ranks, a round ahead of them: use "
            "DataLoaderConfiguration(dispatch_batches=False), or omit use_stateful_dataloader and skip the first steps "
            "with skip_first_batches"
        )
    loader.consumer.is_split = True
    over: Any = object.__new__(type("PreparedLoader", (PreparedLoader, type(prepared)), {}))
    over.__dict__.update(
        prepared.__dict__,
        position=SimpleNamespace(iteration=prepared.iteration, state=None),
        base_dataloader=loader,
        use_stateful_dataloader=stateful,
        splits_itself=splits_itself,
        _drop_last=prepared._drop_last or splits_itself,
    )
    return over


def _base_of(prepared: Any) -> Any:
    """Return the loader inside a prepared loader; ConfigError for one that is for TPUs."""
    if not isinstance(prepared, _data_loader.DataLoaderAdapter):
        raise ConfigError(
            "Accelerate uses another loader on a TPU, which Penstock cannot replace: use torch's DataLoader there"
        )
    return prepared.base_dataloader


def like(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader with the same arguments, except for some.

    Args:
        changes: new values by name. A batch sampler removes the arguments that it replaces.
    """
    # Who splits is settled: the new loader reads samples or batches that Accelerate has chosen.
    split = {"split", "rank", "world_size", "process_group", "mesh"}
    chosen = {"self", "shuffle", "skip", "batch_sampler", "sampler", "dispatch"}
    names = set(inspect.signature(DataLoader.__init__).parameters) - split - chosen
    arguments = {name: getattr(loader, name) for name in names}
    arguments |= {"prefetch_factor": loader.config.prefetch_factor, **changes}
    if "batch_sampler" in changes:
        del arguments["batch_size"], arguments["drop_last"]
    return DataLoader(**arguments)
