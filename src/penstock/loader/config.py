"""`LoaderConfig`: the settings of a data loader in one frozen record.

    DataLoader(...)  -->  LoaderConfig  -->  kind, workers, threads, depth, small_batch_depth
    loader.timeout = 9            |          read by Workers, Flow, auto-tuning, Probe, integrations
       a new record at the next iter()

Its fields are the list of settings: the constructor's signature repeats it, and a loader's attributes and torch's
arguments are made from it. It also contains the properties that dataset and sampler declare (``pure``,
``releases_gil``, ``exact_depth``), because the executor depends on them.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch.utils.data import IterableDataset, IterDataPipe

from penstock.cores import cores
from penstock.errors import ConfigError
from penstock.loader.on_error import Failure, OnError, check_count
from penstock.loader.sizes import LIGHT_FACTOR
from penstock.plan.user_states import has_state
from penstock.sources.batched import StreamDataset

if TYPE_CHECKING:
    from penstock.loader.device import DeviceCopier
    from penstock.loader.executors.ray.options import RayOptions

__all__ = [
    "AUTO",
    "EXECUTORS",
    "FIELDS",
    "PROCESSES",
    "REMOVED",
    "SETTINGS",
    "AutoWorkers",
    "LoaderConfig",
    "check",
    "check_assigned",
    "check_dataset",
    "declarations",
    "resolve_num_workers",
]

PROCESSES = hasattr(select, "poll")
"""Whether this platform supports worker processes. Windows does not: there ``"auto"`` means threads."""

REMOVED = {
    "dispatch": "DataLoader takes no dispatch=: one worker process makes each batch. To share it among threads of that "
    "process, pass threads_per_worker=",
    "skip": "DataLoader takes no skip=: call loader.skip(n), which leaves out the next n batches. "
    "Ledger(loader).step is the number of the next step",
}
"""What to do instead of an argument that a loader does not have any more."""

AUTO = "auto"
EXECUTORS = (AUTO, "inline", "thread", "process", "ray")
_CHOICES = {"executor": EXECUTORS, "on_worker_death": ("raise", "restart"), "output": ("torch", "numpy")}


class AutoWorkers(int):
    """The value of ``loader.num_workers`` while "auto" has not chosen yet. As a number it is the count of cores.

    A loader created from this loader's attributes is auto-tuned too.
    """

    def __repr__(self) -> str:
        return repr(AUTO)


def resolve_num_workers(num_workers: Any, executor: str) -> Any:
    """Return ``num_workers`` as a number, with "auto" as an `AutoWorkers`.

    For ``executor="thread"``, 0 (torch's default) becomes one thread, which costs almost nothing. Processes and Ray
    workers need an explicit number, since each has a copy of the dataset.

    Raises:
        ConfigError: a string other than "auto".
    """
    if isinstance(num_workers, str):
        if num_workers != AUTO:
            raise ConfigError(f"num_workers={num_workers!r} is neither a number nor {AUTO!r}")
        return AutoWorkers(cores())
    return 1 if executor == "thread" and num_workers == 0 else num_workers


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """The arguments of a `DataLoader`, without dataset and samplers. See there for their meaning.

    Args:
        prefetch_factor: None unless the user chose one; small batches may then be prefetched deeper.
        pure: the dataset's declaration that a sample depends only on its index and key.
        releases_gil: the dataset's declaration that it mostly runs without the GIL, so several threads may call it.
        exact_depth: the prefetch depth is observable, so small batches must not be prefetched deeper.

    `check` refuses combinations that do not fit together. Derived values are computed once.
    """

    batch_size: int | None = 1
    drop_last: bool = False
    shuffle: bool | str | None = None
    split: bool | None = None
    seed: int | None = None
    generator: torch.Generator | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    executor: str = AUTO
    num_workers: int = 0
    threads_per_worker: int = 1
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    max_bytes_in_flight: int | None = None
    in_order: bool = True
    timeout: float = 0
    on_error: str | Callable[[Failure], str] | OnError = "raise"
    on_worker_death: str = "raise"
    ray_options: RayOptions | None = None
    pin_memory: bool = False
    pin_memory_device: str = ""
    output: str = "torch"
    device: str | int | torch.device | DeviceCopier | None = None
    progress: bool = False
    pure: bool = False
    releases_gil: bool = False
    exact_depth: bool = False

    @property
    def shuffles(self) -> bool:
        """Whether the user requests another order than the dataset's."""
        return self.shuffle not in (None, False, "none")

    @property
    def auto_tunes(self) -> bool:
        """Whether auto-tuning still has to choose the number of workers."""
        return isinstance(self.num_workers, AutoWorkers)

    @cached_property
    def kind(self) -> str:
        """The executor: "inline", "thread", "process" or "ray"."""
        if not self.num_workers:
            return "inline"
        if self.executor == "ray":
            return "ray"
        return "thread" if self.executor == "thread" or not PROCESSES else "process"

    @cached_property
    def single_process(self) -> bool:
        """Whether "auto" means one worker process with ``num_workers`` threads.

        Threads in the trainer's own process would slow it down, and more processes would cost memory.
        """
        return self.kind == "process" and self.executor == AUTO and self.releases_gil and self.threads_per_worker == 1

    @cached_property
    def workers(self) -> int:
        """Number of worker processes, threads of the thread executor, or Ray actors; 0 inline."""
        return 1 if self.single_process else self.num_workers

    @cached_property
    def threads(self) -> int:
        """Number of threads in each process or actor."""
        if self.kind in ("inline", "thread"):
            return 1
        return self.num_workers if self.single_process else self.threads_per_worker

    @cached_property
    def depth(self) -> int:
        """Maximum number of batches in flight."""
        return max(1, self.num_workers * (self.prefetch_factor or 2)) if self.num_workers else 0

    @cached_property
    def small_batch_depth(self) -> int:
        """Maximum number of small, quickly made batches in flight, where the hand-over costs more than the work."""
        chosen = self.prefetch_factor is not None or self.exact_depth or self.kind == "thread"
        return self.depth if chosen else self.depth * LIGHT_FACTOR

    @cached_property
    def policy(self) -> OnError | None:
        """What to do with a sample that cannot be loaded; None if its error is raised."""
        given = self.on_error if isinstance(self.on_error, OnError) else OnError(self.on_error)
        return None if given.action == "raise" else given

    @cached_property
    def to_device(self) -> bool:
        """Whether batches are copied to a device other than the CPU."""
        return self.device is not None and str(self.device).partition(":")[0] != "cpu"

    @cached_property
    def forks_workers(self) -> bool:
        """Whether each epoch iterator starts its own workers, unless they are persistent."""
        return self.kind in ("process", "ray")


FIELDS = tuple(one.name for one in fields(LoaderConfig))
SETTINGS = tuple(name for name in FIELDS if name not in ("shuffle", "split", "pure", "releases_gil", "exact_depth"))
"""The fields that are attributes of a loader under the same names, so programs can assign them."""


def check(config: LoaderConfig) -> None:
    """Refuse settings that are unknown or do not fit together.

    Raises:
        ConfigError: an unknown name, or a combination in which one setting would be ignored.
    """
    executor, num_workers, limit = config.executor, config.num_workers, config.max_bytes_in_flight
    for name, known in _CHOICES.items():
        if (value := getattr(config, name)) not in known:
            raise ConfigError(f"unknown {name} {value!r}: use one of {', '.join(map(repr, known))}")
    if executor in ("process", "ray") and num_workers == 0:
        raise ConfigError(f"executor={executor!r} needs num_workers of 1 or more: pass it, or omit executor for inline")
    if executor == "inline" and num_workers:
        raise ConfigError(f"executor='inline' has no workers: omit num_workers={num_workers}")
    if executor in ("thread", "ray") and config.multiprocessing_context is not None:
        raise ConfigError(f"multiprocessing_context has no effect with executor={executor!r}")
    if executor == "process" and not PROCESSES:
        raise ConfigError("worker processes are not supported on this platform: use executor='thread'")
    if executor == "ray":
        from penstock.loader.executors.ray.options import RayOptions

        if not isinstance(given := config.ray_options, RayOptions | None):
            raise ConfigError(f"ray_options must be a RayOptions, as in RayOptions(address=...), got {given!r}")
        if config.on_worker_death == "restart":
            raise ConfigError("executor='ray' always replaces lost workers: omit on_worker_death='restart'")
    elif config.ray_options is not None:
        raise ConfigError(f"ray_options is for executor='ray', not {executor!r}")
    check_count("threads_per_worker", config.threads_per_worker)
    if config.kind != "process":
        needed = "is for worker processes: pass num_workers, and executor 'process' or 'auto'"
        if config.threads_per_worker > 1 and executor != "ray":
            raise ConfigError(f"threads_per_worker={config.threads_per_worker} {needed}")
        if config.on_worker_death != "raise":
            raise ConfigError(f"on_worker_death={config.on_worker_death!r} {needed}")
    if limit is not None:
        check_count("max_bytes_in_flight", limit)
        if num_workers == 0:
            raise ConfigError(f"max_bytes_in_flight={limit} is for loaders with workers: omit it")
    if config.generator is not None and (config.seed is not None or isinstance(config.shuffle, str)):
        raise ConfigError(
            "generator= is for torch's orders, seed= and a named shuffle are for Penstock's: pass only one of them"
        )
    if not isinstance(config.split, bool | None):
        raise ConfigError(f"split takes True, False or None, got {config.split!r}")
    if isinstance(config.device, str):
        try:
            torch.device(config.device)
        except RuntimeError as error:
            raise ConfigError(
                f"device={config.device!r} is not a torch device: use a name such as 'cuda' or 'cuda:1'"
            ) from error
    if config.output == "numpy" and config.pin_memory:
        raise ConfigError(
            "pin_memory=True copies tensors into memory that a GPU reads, and NumPy has no such arrays: leave "
            "pin_memory=True out, or use output='torch'"
        )
    if config.output == "numpy" and config.device is not None:
        raise ConfigError(
            f"device={config.device!r} copies tensors, and output='numpy' returns arrays on the CPU: omit device= "
            "and copy the arrays with your library (jax.device_put), or use output='torch'"
        )


def check_assigned(config: LoaderConfig) -> None:
    """Refuse assigned attributes that torch's constructor would refuse.

    Raises:
        ConfigError: not a number, a negative number, or not callable.
    """
    numbers: dict[str, Any] = {"num_workers": SupportsIndex, "timeout": Real, "prefetch_factor": SupportsIndex | None}
    for name, kinds in numbers.items():
        value = getattr(config, name)
        if not isinstance(value, kinds):
            raise ConfigError(f"{name}={value!r} was assigned: it must be a number")
        if value is not None and value < 0:
            raise ConfigError(f"{name}={value!r} was assigned: it must be 0 or more")
    for name in ("collate_fn", "worker_init_fn"):
        value = getattr(config, name)
        if not callable(value) and (value is not None or name == "collate_fn"):
            raise ConfigError(f"{name}={value!r} was assigned: it must be a function")


def check_dataset(dataset: Any, config: LoaderConfig) -> None:
    """Refuse settings that a dataset cannot support.

    Raises:
        ConfigError: several threads share a map-style dataset with a state, or a user's iterable dataset cannot do it.
    """
    samples = dataset.samples if isinstance(dataset, StreamDataset) else dataset
    name = type(samples).__name__
    if not isinstance(samples, IterableDataset):
        # The state after a batch would contain samples of other batches in progress. Auto-tuning refuses states itself.
        several = config.threads > 1 or (config.kind == "thread" and config.num_workers > 1)
        if several and not config.auto_tunes and has_state(samples):
            raise ConfigError(
                f"{name} has a state, and several threads share one dataset: use processes with threads_per_worker=1, "
                "or one thread"
            )
        return
    if isinstance(dataset, IterDataPipe):
        # torch's loader has wrapped it to make it picklable.
        name = type(getattr(dataset, "_datapipe", dataset)).__name__
        raise ConfigError(
            f"{name} is a torch DataPipe, and Penstock does not support the sharding and seeding of DataPipes: "
            "use torch.utils.data.DataLoader for it, or a plain IterableDataset"
        )
    if config.seed is not None:
        raise ConfigError(
            f"seed= has no effect on {name}: an iterable dataset fixes its own order and draws. Omit seed, or "
            "make it a map-style dataset"
        )
    if config.policy is not None:
        raise ConfigError(
            f"on_error cannot skip a sample of {name}: an iterable dataset cannot continue after an error. "
            "Handle errors in its __iter__, or make it a map-style dataset"
        )
    if config.on_worker_death != "raise":
        raise ConfigError(
            f"on_worker_death='restart' cannot make batches of {name} again: an iterable dataset yields each sample "
            "only once"
        )
    if config.executor == "thread" and config.num_workers > 1 and has_state(dataset):
        raise ConfigError(f"{name} has a state, and threads share one dataset: use executor='process', or one thread")
    if config.threads > 1:
        raise ConfigError(f"threads_per_worker has no effect on {name}: each worker has one iterator of it")


def declarations(dataset: Any) -> dict[str, bool]:
    """Return the declarations of a dataset as settings of a loader. A stream never runs in several threads."""
    samples = dataset.samples if isinstance(dataset, StreamDataset) else dataset
    pure = bool(getattr(samples, "pure", False))
    threads = pure and bool(getattr(samples, "releases_gil", False)) and not isinstance(samples, IterableDataset)
    return {"pure": pure, "releases_gil": threads}
