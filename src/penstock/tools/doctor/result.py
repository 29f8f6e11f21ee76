"""What a diagnosis finds: facts as plain fields, and advice."""

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
        what: is so, and what that costs.
        do: to mend it.
        failure: something that is required, or was asked for, does not work.
    """

    about: str
    what: str
    do: str
    failure: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """What was found. Sizes are in bytes; None is what this system does not say, or what was not asked for."""

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
        """Whether all that is required, and all that was asked for, works."""
        return not any(advice.failure for advice in self.advice)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"ok": self.ok, **asdict(self)}
