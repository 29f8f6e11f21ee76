"""Hugging Face Transformers: a `Trainer` over our loaders, whose checkpoints say where the data are.

    trainer = PenstockTrainer(model, arguments, train_loader=loader)
    trainer.train(resume_from_checkpoint=True)              # goes on at the next batch, on any number of ranks

The position is part of ``trainer_state.json``, as the state of a callback. The Trainer's own way to resume is to make a
loader of torch's that draws the epoch's indices again and drops them; here the loader itself stands at the batch, and
everything else that the Trainer does with the number of the step stays as it is.

`PenstockTrainer` is `TrainerLoaders` over ``transformers.Trainer``; it can be put in front of any other trainer::

    class MyTrainer(TrainerLoaders, SFTTrainer): ...

A trainer with a ``get_train_dataloader`` of its own needs `TrainerLoaders` in front too, since the accelerator of the
plain Trainer takes no loaders of ours, and `LoaderPosition` among its callbacks.

Nothing of Transformers is changed: `TrainerLoaders` overrides public methods of the Trainer.

    Trainer.train                        get_train_dataloader        a loader, prepared by our Accelerator
      set_initial_training_values        steps of an epoch           noted
      skip_first_batches(loader, n)                                  makes a loader of torch's, which nobody reads
      get_batch_samples(iterator, k)     the first iterator          ours in its place, behind the n batches

This module imports transformers, and nothing of Penstock imports this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import ConfigError, StateError
from penstock.integrations.accelerate import Accelerator, PreparedLoader, skip_first_batches
from penstock.integrations.loader_logger import LoaderLogger
from penstock.loader.dataloader import DataLoader
from penstock.plan.cursor import check_state, read_mapping

__all__ = ["LoaderLogging", "LoaderPosition", "PenstockTrainer", "TrainerLoaders"]

transformers: Any = importlib.import_module("transformers")  # with its types mypy would read all of it
_trainer: Any = importlib.import_module("transformers.trainer")
_callbacks: Any = importlib.import_module("transformers.trainer_callback")

_SAYS = {"batches": "batches of an epoch", "accumulated": "batches of a step"}


class LoaderPosition(_callbacks.TrainerCallback, _callbacks.ExportableState):  # type: ignore[misc]
    """The callback that saves where the training loader is, with every checkpoint of the Trainer, and puts it back.

    The state is that of the whole job: rank 0 saves it, all ranks load it. It is a few hundred bytes of JSON with
    Penstock's samplers.

    Raises:
        ConfigError: on training, the loader is none of Penstock's.
        StateError: on resume, the checkpoint says no position, or that of other data, of another order, or of epochs of
            another length.
    """

    def __init__(self) -> None:
        self.position: dict[str, Any] | None = None
        self._loader: Any = None
        self._shape: dict[str, int | None] = {}

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``, when the Trainer saves."""
        if self._loader is not None:
            self.position = {**self._shape, "loader": dict(self._loader.state_dict())}
        return {"args": {}, "attributes": {"position": self.position}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The loader and the step are known now, and no batch has been asked for."""
        loader: Any = objects.get("train_dataloader")
        _check_prepared(loader)
        if not isinstance(getattr(loader, "base_dataloader", None), DataLoader):
            raise ConfigError(
                f"the Trainer trains from a {type(loader).__name__} that is none of Penstock's: pass train_loader= to "
                "PenstockTrainer, or put TrainerLoaders in front of the Trainer's class and return "
                "self.accelerator.prepare(loader) from get_train_dataloader"
            )
        batches = len(loader) if _trainer.has_length(loader) else None
        self._loader, self._shape = loader, {"batches": batches, "accumulated": args.gradient_accumulation_steps}
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step:
            self._resume(saved, ignored=args.ignore_data_skip)
        state.stateful_callbacks[type(self).__name__] = self.state()  # where the Trainer puts it when it saves

    def _resume(self, saved: Any, *, ignored: bool) -> None:
        """The loader stands where the checkpoint says.

        Args:
            ignored: the program says ``ignore_data_skip``: a checkpoint without a position begins the epoch anew.
        """
        attributes = saved.get("attributes") if isinstance(saved, Mapping) else None
        position = attributes.get("position") if isinstance(attributes, Mapping) else None
        if position is None:
            if ignored:
                return
            raise StateError(
                "this checkpoint does not say where the loader was: it was saved without LoaderPosition. "
                "TrainingArguments(ignore_data_skip=True) begins the epoch that it was in anew"
            )
        check_state(position, {}, of="LoaderPosition")
        loader = read_mapping(position, "loader", of="LoaderPosition")
        for name, found in self._shape.items():
            if name not in position:
                raise StateError(f"the position in this checkpoint is damaged: {name!r} is missing")
            if found != position[name]:
                raise StateError(
                    f"{_SAYS[name]} are {position[name]} in the checkpoint and {found} here, and the Trainer counts "
                    "steps: keep batch_size times ranks, and gradient_accumulation_steps, as they were"
                )
        self._loader.load_state_dict(loader)
        self._loader.stands = True  # `TrainerLoaders` skips nothing of it


class LoaderLogging(_callbacks.TrainerCallback):  # type: ignore[misc]
    """The callback that logs the training loader's numbers, every so many steps of the optimizer.

    Args:
        logger: where to. It watches the Trainer's loader, unless it has one.

    Raises:
        ConfigError: in training, the loader is none of Penstock's.
    """

    def __init__(self, logger: LoaderLogger) -> None:
        self._logger = logger

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Watch the loader."""
        self._logger.follow(objects.get("train_dataloader"))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Count a step."""
        self._logger.step(state.global_step)


class TrainerLoaders:
    """What makes a trainer take loaders of Penstock instead of data sets; in front of any subclass of ``Trainer``.

    Args:
        train_loader: the batches of training, as they are on one rank: seeded ones are dealt to the ranks whole, so its
            ``batch_size`` is ``per_device_train_batch_size``. A loader that is dealt already (`DistributedSampler`,
            `RankDataset`) is left as it is.
        eval_loader: those of ``evaluate()``.
        arguments: the trainer's own, of which ``model`` and ``args``. Options of ``args`` that say how data are loaded
            (``dataloader_num_workers`` and so on) belong to the loader, and are refused.

    Raises:
        ConfigError: ``args`` or a data set says something about the data that the loader does not; or a version of
            Transformers whose Trainer resumes in another way than those we know.
    """

    def __init__(
        self,
        *arguments: Any,
        train_loader: DataLoader[Any] | None = None,
        eval_loader: DataLoader[Any] | None = None,
        **named: Any,
    ) -> None:
        _check_version()
        self._loaders = {"train": train_loader, "eval": eval_loader}
        self._steps_of_epoch = 1
        self._first: tuple[Any, Iterator[Any]] | None = None
        if eval_loader is not None:
            named.setdefault("eval_dataset", eval_loader.dataset)  # without one the Trainer does not evaluate
        super().__init__(*arguments, **named)
        trainer: Any = self
        for kind, loader in self._loaders.items():
            if loader is not None:
                _check(loader, trainer.args, kind)
                given = getattr(trainer, f"{kind}_dataset", None)
                if given is not None and given is not loader.dataset:
                    raise ConfigError(f"{kind}_dataset is another one than that of {kind}_loader: give one of them")
        if train_loader is not None and not any(
            isinstance(callback, LoaderPosition) for callback in trainer.callback_handler.callbacks
        ):
            trainer.add_callback(LoaderPosition())

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator, as one that keeps loaders of ours."""
        base: Any = super()
        base.create_accelerator_and_postprocess()
        trainer: Any = self
        trainer.accelerator = _TrainersAccelerator.like(trainer.accelerator)

    def get_train_dataloader(self) -> Any:
        """``train_loader``, prepared; without one, what the trainer makes of its data set."""
        trainer: Any = self
        loader = self._loaders["train"]
        base: Any = super()
        return base.get_train_dataloader() if loader is None else trainer.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """``eval_loader``, prepared, unless another data set is asked for."""
        trainer: Any = self
        loader = self._loaders["eval"]
        base: Any = super()
        if loader is None or (eval_dataset is not None and eval_dataset is not loader.dataset):
            return base.get_eval_dataloader(eval_dataset)
        return trainer.accelerator.prepare(loader)

    def set_initial_training_values(self, *arguments: Any) -> Any:
        """Return the Trainer's numbers of epochs and steps, before it trains."""
        base: Any = super()
        values = base.set_initial_training_values(*arguments)
        self._steps_of_epoch, self._first = values[1], None
        return values

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *arguments: Any) -> Any:
        """Return the batches of a step, from our loader also where the Trainer has made another one to skip batches.

        Args:
            epoch_iterator: the Trainer's.
            arguments: of the method of ``Trainer``.
        """
        if self._first is None:
            self._first = epoch_iterator, self._behind_checkpoint(epoch_iterator)
        theirs, ours = self._first
        base: Any = super()
        return base.get_batch_samples(ours if epoch_iterator is theirs else epoch_iterator, *arguments)

    def _behind_checkpoint(self, epoch_iterator: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of our loader that stands where the Trainer goes on; the given one if that is it.

        Raises:
            ConfigError: the loader is ours and not prepared.
        """
        trainer: Any = self
        loader: Any = trainer.callback_handler.train_dataloader
        epoch, steps = divmod(trainer.state.global_step, self._steps_of_epoch)
        if not steps or trainer.args.ignore_data_skip:
            return epoch_iterator
        _check_prepared(loader)
        if not isinstance(loader, PreparedLoader):
            return epoch_iterator
        loader.set_epoch(epoch)
        if loader.stands:
            loader.stands = False
        else:
            loader = skip_first_batches(loader, steps * trainer.args.gradient_accumulation_steps)
        iterator: Iterator[Any] = iter(loader)
        return iterator


class _TrainersAccelerator(Accelerator):
    """The accelerator of `TrainerLoaders`. The Trainer may make torch's loaders of prepared ones: nobody reads them."""

    @classmethod
    def like(cls, accelerator: Any) -> _TrainersAccelerator:
        """Return one in the state of the Trainer's."""
        ours = object.__new__(cls)
        ours.__dict__.update(accelerator.__dict__)
        return ours

    def prepare_data_loader(self, *arguments: Any, **named: Any) -> Any:
        """Return a loader for this rank and its device."""
        prepared = super().prepare_data_loader(*arguments, **named)
        if isinstance(prepared, PreparedLoader):
            prepared.may_be_remade = True
        return prepared


class PenstockTrainer(TrainerLoaders, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with ``train_loader=`` and ``eval_loader=``, see `TrainerLoaders`."""


def _check_version() -> None:
    """Refuse a Trainer that would not call the methods by which `TrainerLoaders` keeps loaders ours.

    Raises:
        ConfigError: it says the version.
    """
    names = "create_accelerator_and_postprocess", "set_initial_training_values", "get_batch_samples"
    if not all(hasattr(transformers.Trainer, name) for name in names):
        raise ConfigError(
            f"the Trainer of transformers {transformers.__version__} resumes in a way that Penstock does not know: use "
            "a later version"
        )


def _check_prepared(loader: Any) -> None:
    """Refuse a loader of ours as it is: to resume, the Trainer would read one of torch's, in the order of epoch 0.

    Raises:
        ConfigError: it says what to return.
    """
    prepared: bool = isinstance(loader, PreparedLoader)
    if not prepared and isinstance(loader, DataLoader):
        raise ConfigError(
            "get_train_dataloader returned a DataLoader of Penstock's that is not prepared: return "
            "self.accelerator.prepare(loader) there, else the Trainer resumes with a loader of torch's in another order"
        )


def _check(loader: DataLoader[Any], args: Any, kind: str) -> None:
    """Refuse options of the Trainer that the loader would not follow.

    Raises:
        ConfigError: it says which.
    """
    name = f"per_device_{kind}_batch_size"
    size = getattr(args, name)
    if loader.batch_size is not None and loader.batch_size != size:
        raise ConfigError(
            f"{name} is {size} and batch_size of {kind}_loader {loader.batch_size}: give both the same, the Trainer "
            "reckons with its own"
        )
    defaults = {
        "dataloader_num_workers": 0,
        "dataloader_drop_last": False,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None,
    }
    given = [option for option, default in defaults.items() if getattr(args, option, default) != default]
    if given:
        raise ConfigError(f"{', '.join(given)} would do nothing for {kind}_loader: give it to the DataLoader instead")
