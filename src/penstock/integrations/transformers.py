"""Hugging Face Transformers: a `Trainer` over our loaders, whose checkpoints say where the data are.

    trainer = PenstockTrainer(model, arguments, train_loader=loader)
    trainer.train(resume_from_checkpoint=True)              # goes on at the next batch, on any number of ranks

The position is part of ``trainer_state.json``, as the state of a callback. The Trainer's own way to resume is to make a
loader of torch's that draws the epoch's indices again and drops them; here the loader itself stands at the batch, and
everything else that the Trainer does with the number of the step stays as it is.

`PenstockTrainer` is `TrainerLoaders` over ``transformers.Trainer``; it can be put in front of any other trainer::

    class MyTrainer(TrainerLoaders, SFTTrainer): ...

A trainer with a ``get_train_dataloader`` of its own needs `LoaderPosition` among its callbacks, and no more.

This module imports transformers, and nothing of Penstock imports this module.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import penstock.integrations.accelerate
from penstock.errors import ConfigError, StateError
from penstock.loader.dataloader import DataLoader
from penstock.plan.cursor import check_state, read_mapping

__all__ = ["LoaderPosition", "PenstockTrainer", "TrainerLoaders"]

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
        if not isinstance(getattr(loader, "base_dataloader", None), DataLoader):
            raise ConfigError(
                f"the Trainer trains from a {type(loader).__name__} that is none of Penstock's: pass train_loader= to "
                "PenstockTrainer, or return accelerator.prepare(loader) from get_train_dataloader"
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
        _keep_position()
        self._loader.__dict__["stands"] = True


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
        ConfigError: ``args`` or a data set says something about the data that the loader does not.
    """

    def __init__(
        self,
        *arguments: Any,
        train_loader: DataLoader[Any] | None = None,
        eval_loader: DataLoader[Any] | None = None,
        **named: Any,
    ) -> None:
        self._loaders = {"train": train_loader, "eval": eval_loader}
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


class PenstockTrainer(TrainerLoaders, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with ``train_loader=`` and ``eval_loader=``, see `TrainerLoaders`."""


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


def _keep_position() -> None:
    """From now on the Trainer leaves a loader alone that stands at its batch already. Idempotent.

    Raises:
        ConfigError: a Trainer that resumes in another way than those we know.
    """
    skip = getattr(_trainer, "skip_first_batches", None)
    if skip is None:
        raise ConfigError(
            f"transformers {transformers.__version__} resumes in a way that Penstock does not know: use "
            "TrainingArguments(ignore_data_skip=True)"
        )
    if getattr(skip, "keeps_penstock", False):
        return

    @functools.wraps(skip)
    def wrapper(dataloader: Any, num_batches: int = 0) -> Any:
        stands = getattr(dataloader, "__dict__", {}).pop("stands", False)
        return dataloader if stands else skip(dataloader, num_batches)

    wrapper.keeps_penstock = True  # type: ignore[attr-defined]
    _trainer.skip_first_batches = wrapper


penstock.integrations.accelerate.keep_ours()  # a Trainer prepares its loaders
