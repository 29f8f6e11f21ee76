"""`LoaderLogger`: logs a loader's rates over the last N steps to an experiment tracker.

    every N steps:  stats() now - stats() then  ->  {"loader/samples_per_second": 1240.0, ...}  ->  write(values, step)

`penstock.integrations.tensorboard` and `penstock.integrations.wandb` have subclasses. Your own training loop calls
`step`; `penstock.integrations.lightning` and `penstock.integrations.transformers` have a callback that calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.dataloader import DataLoader
from penstock.wording import kind_text

__all__ = ["LoaderLogger", "loader_of"]


class LoaderLogger(ABC):
    """Logs a loader's numbers every few steps. A subclass defines `write`, the destination.

    Args:
        loader: the loader to watch; None if a framework's callback sets it with `follow`.
        every: steps between two logs.
        prefix: prefix of the names.

    Raises:
        ConfigError: ``every`` is not a positive integer, or the loader is not a Penstock loader.

    It logs, for the steps since the last log:

    * ``loader/samples_per_second``
    * ``loader/wait_share``: the share of time in which training waited for data, 0 to 1
    * ``loader/ms_per_sample/STAGE``: milliseconds of work per sample in ``fetch``, ``decode``, ``collate``, ..., summed
      over all workers

    A step costs less than a microsecond; a log costs a few tenths of a millisecond, like ``loader.stats()``.

    >>> class Printer(LoaderLogger):
    ...     def write(self, values, step):
    ...         print(step, sorted(values)[-2:])
    >>> loader = DataLoader(range(8), batch_size=2)
    >>> logger = Printer(loader, every=2)
    >>> for batch in loader:
    ...     logger.step()
    2 ['loader/samples_per_second', 'loader/wait_share']
    4 ['loader/samples_per_second', 'loader/wait_share']
    """

    def __init__(self, loader: Any = None, *, every: int = 50, prefix: str = "loader") -> None:
        if not isinstance(every, int) or every < 1:
            raise ConfigError(f"every must be a number of steps, an integer of 1 or more, got {every!r}")
        self._every = every
        self._prefix = prefix
        self._loader: DataLoader[Any] | None = None
        self._given = loader is not None
        self._before: dict[str, Any] = {}
        self._steps = 0
        if loader is not None:
            self.watch(loader)

    def watch(self, loader: Any) -> None:
        """Watch a loader from now on, which Accelerate may have prepared."""
        found = loader_of(loader)
        if found is not self._loader:
            self._loader, self._before = found, found.stats()

    def follow(self, loader: Any) -> None:
        """Watch the loader that a framework trains from, unless a loader was passed to the constructor."""
        if not self._given:
            self.watch(loader)

    def step(self, number: int | None = None) -> None:
        """Count a training step, and log if it is time.

        Args:
            number: the number of the step in the run; by default the logger counts steps from 1.
        """
        self._steps += 1
        if not self._steps % self._every:
            self.log(self._steps if number is None else number)

    def log(self, number: int) -> None:
        """Log the numbers since the last log now. Logs nothing if no sample was delivered.

        Raises:
            ConfigError: there is no loader to watch.
        """
        if self._loader is None:
            raise ConfigError(f"{type(self).__name__} has no loader: pass the loader, or call watch(loader)")
        before, now = self._before, self._loader.stats()
        self._before = now
        if now["samples"] < before["samples"] or now["seconds"] < before["seconds"]:  # reset_stats() in between
            before = {"samples": 0, "seconds": 0.0, "wait_seconds": 0.0, "stages": {}}
        samples, seconds = now["samples"] - before["samples"], now["seconds"] - before["seconds"]
        if not samples or seconds <= 0:
            return
        values = {
            "samples_per_second": samples / seconds,
            "wait_share": (now["wait_seconds"] - before["wait_seconds"]) / seconds,
        }
        for name, spent in now["stages"].items():
            values[f"ms_per_sample/{name}"] = 1e3 * (spent - before["stages"].get(name, 0.0)) / samples
        self.write({f"{self._prefix}/{name}": value for name, value in values.items()}, number)

    @abstractmethod
    def write(self, values: dict[str, float], step: int) -> None:
        """Write the numbers of a step, by name."""


def loader_of(loader: Any) -> DataLoader[Any]:
    """Return the Penstock loader that ``loader`` is, or that Accelerate has prepared.

    Raises:
        ConfigError: it is another loader, or several.
    """
    found = getattr(loader, "base_dataloader", loader)
    if not isinstance(found, DataLoader):
        raise ConfigError(
            f"{kind_text(loader)} has no statistics of a Penstock loader: train from one penstock.DataLoader, or "
            "pass the loader to watch"
        )
    return found
