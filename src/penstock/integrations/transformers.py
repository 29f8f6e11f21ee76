"""Hugging Face Transformers: a `Trainer` for Penstock loaders, whose checkpoints hold the loader's position.

    trainer = PenstockTrainer(model, arguments, train_loader=loader)
    trainer.train(resume_from_checkpoint=True)              # resumes at the next batch, on any number of ranks

The position is stored in ``trainer_state.json``, as the state of a callback. By itself, the Trainer resumes by building
a torch loader that draws the epoch's indices again and drops them; here the loader itself starts at the right batch,
and the rest of the Trainer's handling of steps is unchanged.

`PenstockTrainer` is `TrainerLoaders` with ``transformers.Trainer``; other trainers work the same way::

    class MyTrainer(TrainerLoaders, SFTTrainer): ...

A trainer that overrides ``get_train_dataloader`` needs `TrainerLoaders` as its first base class too, since the plain
Trainer's accelerator refuses Penstock loaders, and `LoaderPosition` among its callbacks.

Transformers is not patched: `TrainerLoaders` overrides public methods of the Trainer.

    Trainer.train                        get_train_dataloader        a loader prepared by Penstock's Accelerator
      set_initial_training_values        steps of an epoch           recorded
      skip_first_batches(loader, n)                                  builds a torch loader, which nobody reads
      get_batch_samples(iterator, k)     the first iterator          replaced by Penstock's, after the n batches

This module imports transformers; no other module of Penstock imports this one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import ConfigError, StateError
from penstock.integrations.accelerate import Accelerator, PreparedLoader, skip_first_batches
from penstock.integrations.loader_logger import LoaderLogger
from penstock.loader.dataloader import DataLoader
from penstock.plan.cursor import STATE_ENTRY, check_state, read_mapping
from penstock.wording import kind_text

__all__ = ["LoaderLogging", "LoaderPosition", "PenstockTrainer", "TrainerLoaders"]

transformers: Any = importlib.import_module("transformers")  # untyped, or mypy would check all of it
_trainer: Any = importlib.import_module("transformers.trainer")
_callbacks: Any = importlib.import_module("transformers.trainer_callback")


class LoaderPosition(_callbacks.TrainerCallback, _callbacks.ExportableState):  # type: ignore[misc]
    """A callback that saves the training loader's position in every checkpoint of the Trainer, and restores it.

    The state describes the whole job: rank 0 saves it, all ranks load it. With Penstock's samplers it is a few hundred
    bytes of JSON.

    Raises:
        ConfigError: (when training starts) the loader is not a Penstock loader.
        StateError: (on resume) the checkpoint has no position, or one of other data, another order, or epochs of
            another length.
    """

    def __init__(self) -> None:
        self.position: dict[str, Any] | None = None
        self._loader: Any = None
        self._shape: dict[str, int | None] = {}

    def state(self) -> dict[str, Any]:
        """Return the position for ``trainer_state.json``, when the Trainer saves.

        Raises:
            StateError: a user's object has a state that JSON would change.
        """
        if self._loader is not None:
            state = dict(self._loader.state_dict())
            if not isinstance(state[STATE_ENTRY], str):
                raise StateError(
                    "the Trainer saves its state as JSON, which would change the state of this loader: a state_dict() "
                    "of yours (of a dataset, sampler or collate function) returned a tuple, a tensor, or a key that is "
                    "no string. Return numbers, strings, lists, and dicts with strings as keys"
                )
            self.position = {**self._shape, "loader": state}
        return {"args": {}, "attributes": {"position": self.position}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Restore the position: the loader and the step are known, and no batch has been requested."""
        loader: Any = objects.get("train_dataloader")
        _check_prepared(loader)
        if not isinstance(getattr(loader, "base_dataloader", None), DataLoader):
            raise ConfigError(
                f"the Trainer trains from {kind_text(loader)}, which is not a Penstock loader: pass "
                "train_loader= to PenstockTrainer, or put TrainerLoaders before the Trainer in its bases "
                "and return self.accelerator.prepare(loader) from get_train_dataloader"
            )
        batches = len(loader) if _trainer.has_length(loader) else None
        self._loader, self._shape = loader, {"batches": batches, "accumulated": args.gradient_accumulation_steps}
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step:
            self._resume(saved, ignored=args.ignore_data_skip)
        state.stateful_callbacks[type(self).__name__] = self.state()  # where the Trainer puts it when it saves

    def _resume(self, saved: Any, *, ignored: bool) -> None:
        """Move the loader to the position in the checkpoint; with ``ignored``, a checkpoint may have none."""
        attributes = saved.get("attributes") if isinstance(saved, Mapping) else None
        position = attributes.get("position") if isinstance(attributes, Mapping) else None
        if position is None:
            if ignored:
                return
            raise StateError(
                "this checkpoint has no position of the loader: it was saved without LoaderPosition. "
                "TrainingArguments(ignore_data_skip=True) restarts its epoch from the beginning"
            )
        check_state(position, {}, of="LoaderPosition")
        loader = read_mapping(position, "loader", of="LoaderPosition")
        for name, text in (("batches", "batches of an epoch"), ("accumulated", "batches of a step")):
            if name not in position:
                raise StateError(f"the position in this checkpoint is damaged: {name!r} is missing")
            if position[name] != self._shape[name]:
                raise StateError(
                    f"{text} are {position[name]} in the checkpoint and {self._shape[name]} here, but the Trainer "
                    "counts steps: keep batch_size times ranks, and gradient_accumulation_steps, unchanged"
                )
        self._loader.load_state_dict(loader)
        self._loader.stands = True  # so `TrainerLoaders` skips no batches


class LoaderLogging(_callbacks.TrainerCallback):  # type: ignore[misc]
    """A callback that logs the training loader's numbers every few optimizer steps.

    Args:
        logger: the logger, which sets the interval. It watches the Trainer's loader unless it has a loader already.

    Raises:
        ConfigError: (when training starts) the loader is not a Penstock loader.
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
    """Mixin that makes a trainer accept Penstock loaders; put it before any subclass of ``Trainer``.

    Args:
        train_loader: the loader for training, as for one rank: a seeded loader's batches are split across ranks, so its
            ``batch_size`` is ``per_device_train_batch_size``. A loader that already splits its data
            (`DistributedSampler`, `RankDataset`) is left as it is.
        eval_loader: the loader for ``evaluate()``.
        arguments: the trainer's own, such as ``model`` and ``args``. Options in ``args`` that set how data are loaded
            (``dataloader_num_workers`` and so on) are refused: give them to the loader.

    Raises:
        ConfigError: ``args`` or a dataset contradicts the loader; or the Trainer of this version of Transformers
            resumes in an unsupported way.
    """

    accelerator: Any
    add_callback: Any
    args: Any
    callback_handler: Any
    state: Any

    def __init__(
        self,
        *arguments: Any,
        train_loader: DataLoader[Any] | None = None,
        eval_loader: DataLoader[Any] | None = None,
        **named: Any,
    ) -> None:
        names = "create_accelerator_and_postprocess", "set_initial_training_values", "get_batch_samples"
        if not all(hasattr(transformers.Trainer, name) for name in names):
            raise ConfigError(
                f"the Trainer of transformers {transformers.__version__} resumes in a way that Penstock does not "
                "support: use a later version"
            )
        self._loaders = {"train": train_loader, "eval": eval_loader}
        self._steps_of_epoch = 1
        self._first: tuple[Any, Iterator[Any]] | None = None
        if eval_loader is not None:
            named.setdefault("eval_dataset", eval_loader.dataset)  # the Trainer does not evaluate without one
        super().__init__(*arguments, **named)
        for kind, loader in self._loaders.items():
            if loader is not None:
                _check(loader, self.args, kind)
                given = getattr(self, f"{kind}_dataset", None)
                if given is not None and not loader.is_over(given):
                    raise ConfigError(
                        f"{kind}_dataset differs from the dataset of {kind}_loader: pass only one of them"
                    )
        callbacks = self.callback_handler.callbacks
        if train_loader is not None and not any(isinstance(each, LoaderPosition) for each in callbacks):
            self.add_callback(LoaderPosition())

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator, as one that keeps Penstock loaders."""
        base: Any = super()
        base.create_accelerator_and_postprocess()
        ours = object.__new__(_TrainersAccelerator)
        ours.__dict__.update(self.accelerator.__dict__)
        self.accelerator = ours
        # The Trainer has kept the method of the accelerator that is replaced here.
        self.gather_function = functools.partial(
            ours.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def get_train_dataloader(self) -> Any:
        """Return the prepared ``train_loader``; without one, the trainer's own loader."""
        loader = self._loaders["train"]
        base: Any = super()
        return base.get_train_dataloader() if loader is None else self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the prepared ``eval_loader``, unless another dataset is passed."""
        loader = self._loaders["eval"]
        base: Any = super()
        if loader is None or (eval_dataset is not None and not loader.is_over(eval_dataset)):
            return base.get_eval_dataloader(eval_dataset)
        return self.accelerator.prepare(loader)

    def set_initial_training_values(self, *arguments: Any) -> Any:
        """Return and record the Trainer's numbers of epochs and steps."""
        base: Any = super()
        values = base.set_initial_training_values(*arguments)
        self._steps_of_epoch, self._first = values[1], None
        return values

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *arguments: Any) -> Any:
        """Return the batches of a step, from the Penstock loader even if the Trainer built another to skip batches."""
        if self._first is None:
            self._first = epoch_iterator, self._behind_checkpoint(epoch_iterator)
        theirs, ours = self._first
        base: Any = super()
        return base.get_batch_samples(ours if epoch_iterator is theirs else epoch_iterator, *arguments)

    def _behind_checkpoint(self, epoch_iterator: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the Penstock loader at the Trainer's position; the given one if it is there."""
        loader: Any = self.callback_handler.train_dataloader
        epoch, steps = divmod(self.state.global_step, self._steps_of_epoch)
        if not steps or self.args.ignore_data_skip:
            return epoch_iterator
        _check_prepared(loader)
        if not isinstance(loader, PreparedLoader):
            return epoch_iterator
        loader.set_epoch(epoch)
        if loader.stands:
            loader.stands = False
        else:
            loader = skip_first_batches(loader, steps * self.args.gradient_accumulation_steps)
        iterator: Iterator[Any] = iter(loader)
        return iterator


class _TrainersAccelerator(Accelerator):
    """The accelerator of `TrainerLoaders`. The Trainer may build torch loaders from prepared ones; none is read."""

    def prepare_data_loader(self, *arguments: Any, **named: Any) -> Any:
        """Return a loader for this rank and its device."""
        prepared = super().prepare_data_loader(*arguments, **named)
        if isinstance(prepared, PreparedLoader):
            prepared.may_be_remade = True
        return prepared


class PenstockTrainer(TrainerLoaders, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with ``train_loader=`` and ``eval_loader=``, see `TrainerLoaders`."""


def _check_prepared(loader: Any) -> None:
    """Refuse an unprepared Penstock loader: to resume, the Trainer would read a torch loader in epoch 0's order."""
    if isinstance(loader, DataLoader) and not isinstance(loader, PreparedLoader):
        raise ConfigError(
            "get_train_dataloader returned a Penstock DataLoader that is not prepared: return "
            "self.accelerator.prepare(loader) there, or the Trainer resumes with a torch loader in another order"
        )


def _check(loader: DataLoader[Any], args: Any, kind: str) -> None:
    """Refuse options of the Trainer that contradict the loader."""
    name = f"per_device_{kind}_batch_size"
    size = getattr(args, name)
    if loader.batch_size is not None and loader.batch_size != size:
        raise ConfigError(
            f"{name} is {size}, but batch_size of {kind}_loader is {loader.batch_size}: make them equal, since the "
            "Trainer computes with its own"
        )
    defaults = {
        "dataloader_num_workers": 0,
        "dataloader_drop_last": False,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None,
    }
    given = [option for option, default in defaults.items() if getattr(args, option, default) != default]
    if given:
        raise ConfigError(
            f"{', '.join(given)} would have no effect on {kind}_loader: pass it to the DataLoader instead"
        )
