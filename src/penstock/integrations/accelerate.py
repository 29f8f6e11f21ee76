"""Hugging Face Accelerate: a prepared `DataLoader` stays one.

``Accelerator.prepare`` builds loaders anew, as torch's: executors, seeds and states would be lost without a word. Here
its function is wrapped, once, when it first asks about a loader of ours, so that nothing has to be called::

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = ps.DataLoader(images, batch_size=32, shuffle="global", seed=0, num_workers=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader: ...                     # on the device, this rank's, made by Penstock
    accelerator.save_state("checkpoint")         # with the position of the loader; load_state goes on there

``use_stateful_dataloader`` means what it means to Accelerate, but needs no torchdata. Without it (the default) nothing
is stored and nothing restored, and the program passes over the first steps of an epoch itself.
``accelerator.skip_first_batches`` counts from the beginning of the epoch in both cases, and makes none of the batches
that it skips.

What a rank gets: with a seed, whole batches in turn, with the random draws of a run on one rank, and states that any
number of ranks can load. Loaders that are dealt to ranks already (`DistributedSampler`, anybody's; `RankDataset`,
`MPDataset`, `GroupedBatchSampler`) are left as they are. Without a seed Accelerate deals, in its own way.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from penstock.errors import ConfigError
from penstock.loader.ranks import splits_by_rank
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import batch_plan_of
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
    """Make ``Accelerator.prepare`` and ``skip_first_batches`` keep loaders of ours. Idempotent; imports accelerate."""
    import accelerate
    from accelerate import accelerator, data_loader

    prepare, skip = accelerator.prepare_data_loader, accelerator.skip_first_batches
    if getattr(prepare, "keeps_penstock", False):
        return

    @functools.wraps(prepare)
    def prepare_ours(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        from penstock.loader.dataloader import DataLoader

        if not isinstance(dataloader, DataLoader):
            return prepare(dataloader, *args, **kwargs)
        return _prepare(prepare, dataloader, inspect.signature(prepare).bind(dataloader, *args, **kwargs).arguments)

    @functools.wraps(skip)
    def skip_ours(dataloader: Any, num_batches: int = 0) -> Any:
        ours = isinstance(dataloader, _Prepared)
        return _without_first(dataloader, num_batches) if ours else skip(dataloader, num_batches)

    prepare_ours.keeps_penstock = True  # type: ignore[attr-defined]
    accelerator.prepare_data_loader = prepare_ours
    for module in (accelerate, accelerator, data_loader, sys.modules.get("transformers.trainer")):
        if getattr(module, "skip_first_batches", None) is skip:
            module.skip_first_batches = skip_ours  # type: ignore[union-attr]


class _Prepared:
    """What one of Accelerate's loaders becomes over ours: epoch and position are the loader's own."""

    base_dataloader: Any
    end_of_dataloader: bool
    iteration: int
    dl_state_dict: Mapping[str, Any] | None

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch
        dataset = self.base_dataloader.dataset
        if not isinstance(dataset, IterableDataset) or hasattr(dataset, "set_epoch"):
            self.base_dataloader.set_epoch(epoch)

    def state_dict(self) -> Mapping[str, Any]:
        """The position of whoever reads this loader."""
        return self.base_dataloader.state_dict() if self.dl_state_dict is None else self.dl_state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        self.base_dataloader._position.skip(self.skipped - self.skip_batches)
        yield from loader.__iter__()

    def __len__(self) -> int:
        loader: Any = super()
        batches: int = loader.__len__() - self.skipped
        return max(0, batches)


def _without_first(prepared: Any, batches: int) -> Any:
    """Accelerate's ``skip_first_batches`` for what `_prepare` made.

    Streams that only the data set can order have no indices to skip, and a dispatcher counts in batches of all ranks:
    there Accelerate drops batches that were made.
    """
    from accelerate.data_loader import DataLoaderShard

    whole, skipped = prepared, batches
    if isinstance(prepared, _WithoutFirst):
        whole, skipped = prepared.whole, prepared.skipped + batches
    dropped = not isinstance(whole, DataLoaderShard) or whole.base_dataloader._position.plan is None
    rest: Any = object.__new__(_class_of(_WithoutFirst, type(whole)))
    rest.__dict__.update(whole.__dict__, whole=whole, skipped=skipped, skip_batches=skipped if dropped else 0)
    return rest


def _class_of(front: type, theirs: type) -> type:
    """A class of Accelerate's, with one of these in front."""
    return type(front.__name__.lstrip("_"), (front, theirs), {})


def _prepare(prepare: Callable[..., Any], loader: DataLoader[Any], options: dict[str, Any]) -> Any:
    """Accelerate's function, with our loader in the place of the one that it makes.

    Args:
        prepare: that function.
        options: its arguments by name.
    """
    from penstock.integrations.dealing import DealtBatches

    stateful = bool(options.get("use_stateful_dataloader"))
    options = {**options, "use_stateful_dataloader": False}  # else torchdata's loader is made, and thrown away
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
    if splits_by_rank(loader, ranks=world):
        return _over(prepare(**alone), loader, stateful, trimmed=world > 1)
    if world > 1 and batches is not None and not options.get("dispatch_batches") and not _has_mesh(options):
        mine = DealtBatches(
            batches, rank, world, split=options.get("split_batches", False), even=options.get("even_batches", True)
        )
        return _over(prepare(**alone), like(loader, batch_sampler=mine), stateful)
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
    from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher

    loader._dealt = True
    if not isinstance(prepared, DataLoaderAdapter):  # on a TPU, which has a loader of its own
        return prepared
    if stateful and isinstance(prepared, DataLoaderDispatcher) and prepared.state.num_processes > 1:
        raise ConfigError(
            "use_stateful_dataloader cannot be had where rank 0 reads for all ranks, a round ahead of them: use "
            "DataLoaderConfiguration(dispatch_batches=False), or leave use_stateful_dataloader out and pass over the "
            "first steps with skip_first_batches"
        )
    over: Any = object.__new__(_class_of(_Prepared, type(prepared)))
    over.__dict__.update(
        prepared.__dict__,
        base_dataloader=loader,
        dl_state_dict=None,
        use_stateful_dataloader=stateful,
        _drop_last=prepared._drop_last or trimmed,
    )
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


def _seeded_batches(loader: DataLoader[Any]) -> EpochBatchSampler | None:
    """The loader's batches, if they are ours and the same on all ranks."""
    if loader.batch_sampler is None:
        return None
    batches = batch_plan_of(loader.batch_sampler)
    same = batches.key_seed is not None or isinstance(getattr(batches, "sampler", None), SequentialSampler)
    return batches if same else None


def _partial_state() -> Any:
    from accelerate.state import PartialState

    return PartialState()


def _has_mesh(options: Mapping[str, Any]) -> bool:
    """Whether Accelerate derives other ranks from a mesh than the global ones."""
    return options.get("torch_device_mesh") is not None
