"""The metadata server: manifest rows and cached copies over Arrow Flight. See `Server`, `Client`, `CacheClient`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["TLS", "CacheClient", "Client", "DataSetInfo", "Limits", "Observer", "RemoteManifest", "Server"]

if TYPE_CHECKING:
    from penstock.server.auth import TLS
    from penstock.server.client import Client, DataSetInfo
    from penstock.server.copies import CacheClient
    from penstock.server.remote_manifest import RemoteManifest
    from penstock.server.service import Limits, Observer, Server

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "auth": ["TLS"],
        "client": ["Client", "DataSetInfo"],
        "copies": ["CacheClient"],
        "remote_manifest": ["RemoteManifest"],
        "service": ["Limits", "Observer", "Server"],
    },
)
