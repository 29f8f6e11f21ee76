"""Weights & Biases: a loader's numbers in a run.

    run = wandb.init(project="images")              # WANDB_MODE=offline writes to a folder
    logger = WandbLogger(run, loader, every=50)
    for batch in loader:
        ...
        logger.step()

This module does not import wandb.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.integrations.loader_logger import LoaderLogger
from penstock.wording import kind_text

__all__ = ["WandbLogger"]


class WandbLogger(LoaderLogger):
    """Logs a loader's numbers to a run, see `penstock.integrations.loader_logger.LoaderLogger`.

    The numbers have a step axis of their own, ``loader/step``, so they do not affect the run's own step.

    Args:
        run: the run that ``wandb.init`` returned. The program finishes it.
        loader, every, prefix: as for `LoaderLogger`.

    Raises:
        ConfigError: ``run`` is not a run; or an error of `LoaderLogger`.
    """

    def __init__(self, run: Any, loader: Any = None, *, every: int = 50, prefix: str = "loader") -> None:
        if not callable(getattr(run, "define_metric", None)):
            raise ConfigError(f"WandbLogger takes the run of wandb.init as its first argument, got {kind_text(run)}")
        super().__init__(loader, every=every, prefix=prefix)
        self._run = run
        run.define_metric(f"{prefix}/step")
        run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def write(self, values: dict[str, float], step: int) -> None:
        """Log the numbers together."""
        self._run.log({**values, f"{self._prefix}/step": step})
