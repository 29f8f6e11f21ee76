"""Lightning: callbacks that log the training loader's numbers and show them in the progress bar.

    logged = LoaderLogging(every=50)                                          # to the trainer's own loggers
    logged = LoaderLogging(TensorBoardLogger(SummaryWriter("runs/1"), every=50))
    trainer = lightning.Trainer(callbacks=[logged, LoaderProgressBar()])

Lightning trains from Penstock loaders without these callbacks. This module imports ``lightning.pytorch``, or else
``pytorch_lightning``; no other module of Penstock imports this one.
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
        logger: the logger to use; by default, all of the trainer's own loggers. It watches the trainer's loader unless
            it has a loader already.
        every: optimizer steps between two logs to the trainer's own loggers; 50 by default.

    Raises:
        ConfigError: both are given; or (in training) the loader is not a Penstock loader, or the trainer has no logger.
    """

    def __init__(self, logger: LoaderLogger | None = None, *, every: int | None = None) -> None:
        if logger is not None and every is not None:
            raise ConfigError(
                f"every={every} applies to the trainer's own loggers: pass it to the {type(logger).__name__}"
            )
        self._logger, self._every = logger, 50 if every is None else every
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the loader."""
        if self._logger is None:
            if not trainer.loggers:
                raise ConfigError("the Trainer has no logger: pass a logger to the Trainer, or to LoaderLogging")
            self._logger = _TrainersLoggers(trainer, every=self._every)
        self._logger.follow(trainer.train_dataloader)
        self._step = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the loader of this epoch, which may be new."""
        assert self._logger is not None
        self._logger.follow(trainer.train_dataloader)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count an optimizer step; a batch that only accumulates gradients does not count."""
        assert self._logger is not None
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._logger.step(self._step)


class _TrainersLoggers(LoaderLogger):
    """Logs to all loggers of a trainer."""

    def __init__(self, trainer: Any, *, every: int) -> None:
        super().__init__(every=every)
        self._trainer = trainer

    def write(self, values: dict[str, float], step: int) -> None:
        """Log the numbers to each logger."""
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step)


class _LoaderLine:
    """Mixin that adds the loader's summary to the metrics of a progress bar."""

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return the metrics that the bar shows."""
        base: Any = super()
        shown: dict[str, Any] = base.get_metrics(trainer, pl_module)
        return shown | {"loader": loader_of(trainer.train_dataloader).summary()}


class LoaderProgressBar(_LoaderLine, _callbacks.TQDMProgressBar):  # type: ignore[misc]
    """Lightning's progress bar, with the loader's summary: samples/s, waiting, and what limits the run.

    Raises:
        ConfigError: (in training) the loader is not a Penstock loader.
    """


class RichLoaderProgressBar(_LoaderLine, _callbacks.RichProgressBar):  # type: ignore[misc]
    """Lightning's ``RichProgressBar`` with the loader's summary, see `LoaderProgressBar`."""
