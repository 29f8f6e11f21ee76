"""`diagnose`: run all checks, one after the other."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock import __version__
from penstock.tools.doctor import filesystems, machine, packages, services
from penstock.tools.doctor.result import Advice, Diagnosis

__all__ = ["diagnose"]

T = TypeVar("T")


def diagnose(
    paths: Sequence[str | os.PathLike[str]] = (".",),
    *,
    ray: str | None = None,
    server: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_roots: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Diagnosis:
    """Check this machine and its packages. This takes seconds, mostly to import the required packages.

    Args:
        paths: files and folders whose file systems are checked.
        ray: address of a Ray cluster that must answer. None: check a cluster on this machine, if one runs.
        server: address of a metadata server that must answer, ``HOST:PORT`` or ``grpc+tls://HOST:PORT``.
        token_file, tls_roots: for that server, see `penstock.server.Client`.
        progress: called with the numbers of finished and of all checks.

    Returns:
        The facts. Problems are in ``advice``; they raise no errors.

    >>> found = diagnose(["."])
    >>> found.ok, found.places[0].path
    (True, '.')
    """
    advice: list[Advice] = []

    def noted(found: tuple[T, list[Advice]]) -> T:
        advice.extend(found[1])
        return found[0]

    known = noted(packages.packages(progress))
    has_ray = any(package.name == "ray" and package.version for package in known)
    return Diagnosis(
        penstock=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        packages=known,
        torch=noted(packages.torch(known)),
        images=noted(packages.images(known)),
        cores=noted(machine.cores()),
        memory=noted(machine.memory()),
        shared_memory=noted(machine.shared_memory()),
        open_files=noted(machine.open_files()),
        places=[noted(filesystems.place(os.fspath(path))) for path in paths],
        cache=noted(filesystems.cache_folder()),
        ray=noted(services.ray_cluster(ray, installed=has_ray)),
        server=noted(services.server(server, token_file=token_file, tls_roots=tls_roots)),
        advice=advice,
    )
