"""The backend of a URL, created once per process."""

from __future__ import annotations

import importlib
import json
import os
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, StorageError
from penstock.storage.backend import Backend
from penstock.storage.urls import WEB, scheme, shown

if TYPE_CHECKING:
    from penstock.storage.remote import Storage

__all__ = ["backend_for"]

_OBJECT_STORE = frozenset({*WEB, "ais", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"})

# Those of a parent process stay, too: it shares their sockets, so they must not be closed here.
_backends: dict[tuple[int, str, str, float], Backend] = {}


def backend_for(url: str, storage: Storage) -> Backend:
    """Return the backend of a URL in this process, created at first use.

    Raises:
        StorageError: an unknown scheme, or its package is not installed.
    """
    protocol = scheme(url)
    key = (os.getpid(), protocol, json.dumps(dict(storage.options), sort_keys=True, default=repr), storage.idle)
    found = _backends.get(key)
    # Of two threads that make one at the same time, both get the first one.
    return found if found is not None else _backends.setdefault(key, _make(protocol, url, storage))


def _make(protocol: str, url: str, storage: Storage) -> Backend:
    options, idle = storage.options, storage.idle
    if not protocol:
        raise StorageError(f"{shown(url)} is neither a file nor an address in a store")
    package = {"hf": "huggingface_hub"}.get(protocol, "obstore" if protocol in _OBJECT_STORE else "fsspec")
    try:
        if protocol in _OBJECT_STORE:
            return importlib.import_module("penstock.storage.object_store").ObjectStoreBackend(options, idle)  # type: ignore[no-any-return]
        if protocol == "hf":
            return importlib.import_module("penstock.storage.hub").HubBackend(options, idle)  # type: ignore[no-any-return]
        return importlib.import_module("penstock.storage.generic").GenericBackend(protocol, options)  # type: ignore[no-any-return]
    except ImportError as error:
        missing = (error.name or package).partition(".")[0]
        extra = "'penstock[cloud]'" if missing in ("fsspec", "huggingface_hub", "obstore") else missing
        raise StorageError(
            f"{shown(url)}: reading {protocol}:// needs the package {missing}: pip install {extra}"
        ) from error
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise StorageError(f"{shown(url)}: {error}") from error
