"""`RayOptions`: where the workers of ``executor="ray"`` run, and their time-outs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

from penstock.errors import ConfigError

__all__ = ["RayOptions"]

_LIKE = {
    "resources": '{"loader": 1}',
    "label_selector": '{"role": "loader"}',
    "runtime_env": '{"env_vars": {"A": "b"}}',
}


@dataclass(frozen=True)
class RayOptions:
    """Options of ``DataLoader(executor="ray", ray_options=RayOptions(...))``.

    Args:
        address: the cluster: ``"host:port"``; ``"local"`` starts one on this machine, which ends with the program; None
            or ``"auto"`` uses the cluster that the program is connected to, or else the one that runs on this machine.
            An existing connection is used; it is an error if it leads to a cluster other than this address.
        num_cpus: CPUs that each worker reserves; 0 for workers that only wait.
        memory: bytes that each worker reserves; None: not counted.
        resources: custom resources that each worker reserves.
        label_selector: labels that a node must have, as in ``{"role": "loader"}``, for example to avoid GPU nodes.
        scheduling: Ray's scheduling strategy: ``"SPREAD"`` over the nodes, ``"DEFAULT"`` packs them, or a Ray object.
        runtime_env: Ray's runtime environment for the workers. It delays their start by seconds.
        deadline: seconds after which an unanswered batch is made by another worker, and the late one is dropped; None:
            never. It must exceed the time of the slowest sample.
        start_timeout: seconds for the first worker to start. The others are not waited for, except for an iterable
            dataset or one with a state of its own, for which all must start.
        name: the prefix of the workers' names in Ray's dashboard.

    Raises:
        ConfigError: invalid values.

    >>> RayOptions(label_selector={"role": "loader"}, num_cpus=2).deadline
    300.0
    """

    address: str | None = None
    _: KW_ONLY
    num_cpus: float = 1
    memory: int | None = None
    resources: Mapping[str, float] | None = None
    label_selector: Mapping[str, str] | None = None
    scheduling: Any = "SPREAD"
    runtime_env: Mapping[str, Any] | None = None
    deadline: float | None = 300.0
    start_timeout: float = 120.0
    name: str = "penstock"
    hedge: InitVar[None] = None
    min_workers: InitVar[None] = None
    max_workers: InitVar[None] = None
    threads_per_worker: InitVar[None] = None

    def __post_init__(self, hedge: None, min_workers: None, max_workers: None, threads_per_worker: None) -> None:
        constant = "num_workers= to the DataLoader, a constant number"
        for name, value, instead in (
            ("hedge", hedge, "deadline=, after which another worker makes a batch"),
            ("min_workers", min_workers, constant),
            ("max_workers", max_workers, constant),
            ("threads_per_worker", threads_per_worker, "threads_per_worker= to the DataLoader"),
        ):
            if value is not None:
                raise ConfigError(f"RayOptions takes no {name}=: pass {instead}")
        if self.address not in (None, "auto", "local") and not (isinstance(self.address, str) and ":" in self.address):
            raise ConfigError(f"address must be 'host:port', 'auto', 'local' or None, got {self.address!r}")
        if self.memory is not None and (not isinstance(self.memory, int) or self.memory < 1):
            raise ConfigError(f"memory must be an integer of 1 or more, or None, got {self.memory!r}")
        if not isinstance(self.num_cpus, int | float) or not 0 <= self.num_cpus < math.inf:
            raise ConfigError(f"num_cpus must be a number of 0 or more, got {self.num_cpus!r}")
        for name, value in (("deadline", self.deadline), ("start_timeout", self.start_timeout)):
            if not (name == "deadline" and value is None) and not (isinstance(value, int | float) and value > 0):
                raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")
        for name, kind in (("resources", (int, float)), ("label_selector", str), ("runtime_env", object)):
            value = getattr(self, name)
            if value is None:
                continue
            items = value.items() if isinstance(value, Mapping) else [(None, None)]
            if not all(isinstance(key, str) and isinstance(item, kind) for key, item in items):
                raise ConfigError(f"{name} must be a dict like {_LIKE[name]}, or None, got {value!r}")
        if isinstance(self.scheduling, str) and self.scheduling not in ("SPREAD", "DEFAULT"):
            raise ConfigError(f"scheduling is 'SPREAD', 'DEFAULT' or one of Ray's objects, got {self.scheduling!r}")
        if not isinstance(self.name, str):
            raise ConfigError(f"name must be a str, got {self.name!r}")

    def of_actors(self) -> dict[str, Any]:
        """Return the options as Ray's arguments for an actor."""
        names = ("memory", "resources", "label_selector", "runtime_env")
        given = {name: value for name in names if (value := getattr(self, name))}
        given = {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}
        return {"num_cpus": self.num_cpus, "scheduling_strategy": self.scheduling, **given}
