"""A data set over a manifest whose file is on the program's node only: importing this in a worker hides the file."""

from __future__ import annotations

from typing import Any

import ray
from ray_support import OverManifest

from penstock.errors import ManifestIOError
from penstock.manifest import table


class OverFarManifest(OverManifest):
    """Pickled by its name, so workers import this module."""


def _missing(*arguments: Any) -> Any:
    raise ManifestIOError("no such file on this node")


if ray._private.worker.global_worker.mode == ray.WORKER_MODE:
    table._reopen = _missing
