"""`LoaderLogger`: what a loader did in the last N steps, as numbers for a tracker of experiments.

    every N steps:  stats() now - stats() then  ->  {"loader/samples_per_second": 1240.0, ...}  ->  write(values, step)

`penstock.integrations.tensorboard` and `penstock.integrations.wandb` write to those two. Loops of your own call `step`;
`penstock.integrations.lightning` and `penstock.integrations.transformers` have a callback that does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.dataloader import DataLoader

__all__ = ["LoaderLogger", "loader_of"]


class LoaderLogger(ABC):
    """Logs a loader's numbers every so many steps. A subclass says where to, by `write`.

    Args:
        loader: whose numbers they are; None where a callback of a framework says it, by `follow`.
        every: steps from one log to the next.
        prefix: of the names.

    Raises:
        ConfigError: ``every`` is no positive integer, or the loader is none of Penstock's.

    Logged are, of the steps since the last time:

    * ``loader/samples_per_second``
    * ``loader/wait_share``: of the time, how much of it the training waited for data, 0 to 1
    * ``loader/ms_per_sample/STAGE``: milliseconds of work on a sample in ``fetch``, ``decode``, ``collate``, ... , all
      workers together

    A step costs less than a microsecond, a log a few tenths of a millisecond, as ``loader.stats()`` does.

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
            raise ConfigError(f"every={every!r} is no number of steps: give an integer of 1 or more")
        self._every = every
        self._prefix = prefix
        self._loader: DataLoader[Any] | None = None
        self._given = loader is not None
        self._before: dict[str, Any] = {}
        self._steps = 0
        if loader is not None:
            self.watch(loader)

    def watch(self, loader: Any) -> None:
        """Log the numbers of a loader from now on; of one that Accelerate has prepared, too."""
        found = loader_of(loader)
        if found is not self._loader:
            self._loader, self._before = found, found.stats()

    def follow(self, loader: Any) -> None:
        """Watch the loader that a framework trains from, unless one was given when this logger was made."""
        if not self._given:
            self.watch(loader)

    def step(self, number: int | None = None) -> None:
        """Count a step of the training, and log if it is time to.

        Args:
            number: of the step in the run; by default steps are counted here, from 1.
        """
        self._steps += 1
        if not self._steps % self._every:
            self.log(self._steps if number is None else number)

    def log(self, number: int) -> None:
        """Log what happened since the last time, now. Nothing is logged where no sample has come.

        Raises:
            ConfigError: no loader was given.
        """
        if self._loader is None:
            raise ConfigError(f"{type(self).__name__} has no loader: give it the loader, or call watch(loader)")
        before, now = self._before, self._loader.stats()
        self._before = now
        values = _between(before, now)
        if values:
            self.write({f"{self._prefix}/{name}": value for name, value in values.items()}, number)

    @abstractmethod
    def write(self, values: dict[str, float], step: int) -> None:
        """Write numbers by name, for a step."""


def _between(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """Return what happened between two ``stats()``; after a ``reset_stats()`` in between, what happened since."""
    if now["samples"] < before["samples"] or now["seconds"] < before["seconds"]:
        before = {"samples": 0, "seconds": 0.0, "wait_seconds": 0.0, "stages": {}}
    samples, seconds = now["samples"] - before["samples"], now["seconds"] - before["seconds"]
    if not samples or seconds <= 0:
        return {}
    stages = {name: spent - before["stages"].get(name, 0.0) for name, spent in now["stages"].items()}
    return {
        "samples_per_second": samples / seconds,
        "wait_share": (now["wait_seconds"] - before["wait_seconds"]) / seconds,
        **{f"ms_per_sample/{name}": 1e3 * spent / samples for name, spent in stages.items()},
    }


def loader_of(loader: Any) -> DataLoader[Any]:
    """Return the loader of Penstock's that something is, or that Accelerate has prepared.

    Raises:
        ConfigError: it is another one, or several.
    """
    found = getattr(loader, "base_dataloader", loader)
    if not isinstance(found, DataLoader):
        raise ConfigError(
            f"a {type(loader).__name__} has no statistics of a Penstock loader: train from one penstock.DataLoader, or "
            "give the one to be watched"
        )
    return found
