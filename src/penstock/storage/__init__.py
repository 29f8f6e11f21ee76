"""Local files and remote objects: sources that detect changes, read-ahead, retries, and the local cache.

Local: open files that detect changes, the user's cache folder, atomic writes and locks. Remote: `open_source`,
`local_path` and `read_object`, with the options in `Storage` and local copies in `Cache`.

Names are imported at first use: local files need no retries, downloads or locks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["UNWRITABLE", "Cache", "File", "RemoteSource", "Source", "Storage", "cache_root", "file_lock", "io_error"]
__all__ += ["is_remote", "is_writable", "list_objects", "local_path", "open_source", "read_object", "write_atomically"]

if TYPE_CHECKING:
    from penstock.storage.cache import Cache
    from penstock.storage.files import File, io_error
    from penstock.storage.local import UNWRITABLE, cache_root, file_lock, is_writable, write_atomically
    from penstock.storage.remote import (
        RemoteSource,
        Source,
        Storage,
        list_objects,
        local_path,
        open_source,
        read_object,
    )
    from penstock.storage.urls import is_remote

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "cache": ["Cache"],
        "files": ["File", "io_error"],
        "local": ["UNWRITABLE", "cache_root", "file_lock", "is_writable", "write_atomically"],
        "remote": ["RemoteSource", "Source", "Storage", "list_objects", "local_path", "open_source", "read_object"],
        "urls": ["is_remote"],
    },
)
