"""`DpexDataLoader`: a `DataLoader` with the arguments of Dpex.

loader = ps.DpexDataLoader(dataset, distribute_mode=True, head_address="10.0.0.1:6379", batch_size=64, num_workers=10)

In new programs use ``DataLoader(dataset, 64, num_workers=10, executor="ray")``, which has more options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, Sampler

from penstock.errors import ConfigError
from penstock.integrations.recreated import drop_record
from penstock.loader.dataloader import DataLoader
from penstock.loader.executors.ray.options import RayOptions

__all__ = ["DpexDataLoader"]

T_co = TypeVar("T_co", covariant=True)


class DpexDataLoader(DataLoader[T_co]):
    """A `DataLoader` with the arguments of Dpex, in Dpex's order.

    Args:
        dataset: a map-style or iterable dataset.
        distribute_mode: True makes batches on a Ray cluster, False in processes of this machine (inline without
            workers).
        head_address: address of the cluster, as in ``RayOptions(address=)``; only with ``distribute_mode=True``.
        others: as in torch; arguments that Dpex lacks are keyword-only. As in Dpex, workers are persistent unless
            ``persistent_workers=False``.

    Raises:
        ConfigError: ``distribute_mode=True`` without workers, or a ``head_address`` without ``distribute_mode``.

    >>> len(DpexDataLoader(range(10)))
    10
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        distribute_mode: bool = False,
        head_address: str = "auto",
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        if not isinstance(distribute_mode, bool):
            raise ConfigError(
                f"distribute_mode must be True or False, got {distribute_mode!r}: in DpexDataLoader it is the second "
                "argument, before head_address and batch_size. Pass arguments by name, or use "
                "DataLoader, which has torch's order"
            )
        if not distribute_mode and head_address != "auto":
            raise ConfigError(f"head_address={head_address!r} is for distribute_mode=True: omit it")
        options: dict[str, Any] = {"pin_memory_device": pin_memory_device, "in_order": in_order}
        options["prefetch_factor"] = prefetch_factor if num_workers else None
        options["persistent_workers"] = persistent_workers and num_workers > 0
        if distribute_mode:
            options |= {"executor": "ray", "ray_options": RayOptions(head_address)}
        elif num_workers:
            options["executor"] = "process"
        recorded = "__pl_saved_args" in vars(self)
        arguments = (batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last)
        more = (timeout, worker_init_fn, multiprocessing_context, generator)
        super().__init__(dataset, *arguments, *more, **options)
        if not recorded:
            drop_record(self)
        self.distribute_mode = distribute_mode
        self.head_address = head_address
