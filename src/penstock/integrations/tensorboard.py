"""TensorBoard: a loader's numbers as scalars.

    from torch.utils.tensorboard import SummaryWriter

    logger = TensorBoardLogger(SummaryWriter("runs/1"), loader, every=50)
    for batch in loader:
        ...
        logger.step()

Any writer with ``add_scalar`` works, such as tensorboardX. This module imports neither.
"""

from __future__ import annotations

from typing import Any, Protocol

from penstock.errors import ConfigError
from penstock.integrations.loader_logger import LoaderLogger
from penstock.wording import kind_text

__all__ = ["TensorBoardLogger"]


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class TensorBoardLogger(LoaderLogger):
    """Writes a loader's numbers as scalars, see `penstock.integrations.loader_logger.LoaderLogger`.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``. The program closes it.
        loader, every, prefix: as for `LoaderLogger`.

    Raises:
        ConfigError: the writer has no ``add_scalar``; or an error of `LoaderLogger`.
    """

    def __init__(self, writer: _Writer, loader: Any = None, *, every: int = 50, prefix: str = "loader") -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise ConfigError(f"TensorBoardLogger takes a SummaryWriter as its first argument, got {kind_text(writer)}")
        super().__init__(loader, every=every, prefix=prefix)
        self._writer = writer

    def write(self, values: dict[str, float], step: int) -> None:
        """Write a scalar for each number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
