"""Local files and remote objects: sources that detect changes, read-ahead, retries, and the local cache.

Local: open files that detect changes, the user's cache folder, atomic writes and locks. Remote: `open_source`,
`local_path` and `read_object`, with the options in `Storage` and local copies in `Cache`.

Names are imported at first use: local files need no retries, downloads or locks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = [
    "UNWRITABLE",
    "Cache",
    "File",
    "RemoteSource",
    "Source",
    "Storage",
    "cache_root",
    "file_lock",
    "grown",
    "io_error",
    "is_remote",
    "is_writable",
    "kept_path",
    "list_objects",
    "local_path",
    "open_source",
    "read_object",
    "write_atomically",
    "write_kept",
]

if TYPE_CHECKING:
    from penstock.storage.cache import UNWRITABLE, cache_root, file_lock, is_writable, write_atomically
    from penstock.storage.derived import grown, kept_path, write_kept
    from penstock.storage.files import File, io_error
    from penstock.storage.remote import (
        RemoteSource,
        Source,
        Storage,
        list_objects,
        local_path,
        open_source,
        read_object,
    )
    from penstock.storage.store import Cache
    from penstock.storage.urls import is_remote

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "UNWRITABLE": "cache",
        "Cache": "store",
        "RemoteSource": "remote",
        "Source": "remote",
        "File": "files",
        "Storage": "remote",
        "cache_root": "cache",
        "file_lock": "cache",
        "grown": "derived",
        "io_error": "files",
        "is_remote": "urls",
        "is_writable": "cache",
        "kept_path": "derived",
        "list_objects": "remote",
        "local_path": "remote",
        "open_source": "remote",
        "read_object": "remote",
        "write_atomically": "cache",
        "write_kept": "derived",
    },
)
