"""Lightning: callbacks that log what the training loader does, and show it in the progress bar.

    logged = LoaderLogging(every=50)                                          # to the trainer's own loggers
    logged = LoaderLogging(TensorBoardLogger(SummaryWriter("runs/1"), every=50))
    trainer = lightning.Trainer(callbacks=[logged, LoaderProgressBar()])

Lightning needs neither to train from a loader of Penstock's. This module imports ``lightning.pytorch``, or
``pytorch_lightning`` where that is not installed, and nothing of Penstock imports this module.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from penstock.errors import ConfigError
from penstock.integrations.loader_logger import LoaderLogger, loader_of

__all__ = ["LoaderLogging", "LoaderProgressBar", "RichLoaderProgressBar"]

_name = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
_callbacks: Any = importlib.import_module(f"{_name}.callbacks")


class LoaderLogging(_callbacks.Callback):  # type: ignore[misc]
    """Logs the training loader's numbers, see `penstock.integrations.loader_logger.LoaderLogger`.

    Args:
        logger: where to; by default the trainer's own loggers, whatever they are. It watches the trainer's loader,
            unless it has one.
        every: optimizer steps from one log to the next, for the trainer's own loggers; 50 if not given.

    Raises:
        ConfigError: both are given; in training, the loader is none of Penstock's, or the trainer has no logger.
    """

    def __init__(self, logger: LoaderLogger | None = None, *, every: int | None = None) -> None:
        if logger is not None and every is not None:
            raise ConfigError(f"every={every} is for the trainer's own loggers: give it to the {type(logger).__name__}")
        self._logger = logger
        self._every = 50 if every is None else every
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the loader."""
        if self._logger is None:
            if not trainer.loggers:
                raise ConfigError("the Trainer has no logger: give LoaderLogging one of Penstock's, or the Trainer one")
            self._logger = _TrainersLoggers(trainer, every=self._every)
        self._logger.follow(trainer.train_dataloader)
        self._step = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the loader of this epoch, which may be a new one."""
        assert self._logger is not None
        self._logger.follow(trainer.train_dataloader)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count a step of the optimizer; a batch that only adds to the gradients is none."""
        assert self._logger is not None
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._logger.step(self._step)


class _TrainersLoggers(LoaderLogger):
    """Writes to all loggers of a trainer."""

    def __init__(self, trainer: Any, *, every: int) -> None:
        super().__init__(every=every)
        self._trainer = trainer

    def write(self, values: dict[str, float], step: int) -> None:
        """Write to each."""
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step)


class _LoaderLine:
    """Adds the loader's summary to what a progress bar shows beside it."""

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return what the bar shows."""
        base: Any = super()
        shown: dict[str, Any] = base.get_metrics(trainer, pl_module)
        return shown | {"loader": loader_of(trainer.train_dataloader).summary()}


class LoaderProgressBar(_LoaderLine, _callbacks.TQDMProgressBar):  # type: ignore[misc]
    """Lightning's progress bar, with the loader's summary: samples/s, waiting, and what limits the run.

    Raises:
        ConfigError: in training, the loader is none of Penstock's.
    """


class RichLoaderProgressBar(_LoaderLine, _callbacks.RichProgressBar):  # type: ignore[misc]
    """The same over Lightning's ``RichProgressBar``."""
