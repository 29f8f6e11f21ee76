"""Results of a diagnosis: facts as plain fields, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.tools.doctor.filesystems import CacheFolder, Place
    from penstock.tools.doctor.machine import Cores, Memory, OpenFiles, SharedMemory
    from penstock.tools.doctor.packages import Images, Package, Torch
    from penstock.tools.doctor.services import RayCluster, Server

__all__ = ["Advice", "Diagnosis"]


@dataclass(frozen=True)
class Advice:
    """Something that could be better.

    Attributes:
        about: the subject: a package, a path, ...
        what: the problem, and its effect.
        do: how to solve it.
        failure: whether a required or requested thing does not work.
    """

    about: str
    what: str
    do: str
    failure: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. Sizes are in bytes. None: unknown on this system, or not requested."""

    penstock: str
    python: str
    system: str
    packages: Sequence[Package]
    torch: Torch | None
    images: Images | None
    cores: Cores
    memory: Memory
    shared_memory: SharedMemory | None
    open_files: OpenFiles | None
    places: Sequence[Place]
    cache: CacheFolder
    ray: RayCluster | None
    server: Server | None
    advice: Sequence[Advice]

    @property
    def ok(self) -> bool:
        """Whether all required and all requested things work."""
        return not any(advice.failure for advice in self.advice)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a dict for JSON."""
        return {"ok": self.ok, **asdict(self)}
