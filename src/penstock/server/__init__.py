"""The metadata server: rows of manifests over Arrow Flight, for any number of jobs. See `Client` and `Server`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Client": "client",
    "DataSetInfo": "client",
    "Limits": "options",
    "Observer": "options",
    "RemoteManifest": "remote",
    "Server": "service",
    "Slice": "protocol",
    "TLS": "auth",
}

__all__ = ["TLS", "Client", "DataSetInfo", "Limits", "Observer", "RemoteManifest", "Server", "Slice"]

if TYPE_CHECKING:
    from penstock.server.auth import TLS
    from penstock.server.client import Client, DataSetInfo
    from penstock.server.options import Limits, Observer
    from penstock.server.protocol import Slice
    from penstock.server.remote import RemoteManifest
    from penstock.server.service import Server


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
