"""Files of this machine and objects of others: sources that notice a change, look-ahead, retries, the local cache.

On disk: open files that notice a change, the user's cache folder, atomic writes and locks. Elsewhere: `open_source`,
`local_path`, `read_object`, with `Storage` for how and `Cache` for local copies.
"""

from penstock.storage.cache import cache_root, file_lock, is_writable, write_atomically
from penstock.storage.copies import CachedFile
from penstock.storage.files import SourceFile, io_error
from penstock.storage.remote import (
    FileSource,
    RemoteSource,
    Source,
    Storage,
    local_path,
    open_source,
    read_object,
)
from penstock.storage.store import Cache
from penstock.storage.urls import is_remote

__all__ = [
    "Cache",
    "CachedFile",
    "FileSource",
    "RemoteSource",
    "Source",
    "SourceFile",
    "Storage",
    "cache_root",
    "file_lock",
    "io_error",
    "is_remote",
    "is_writable",
    "local_path",
    "open_source",
    "read_object",
    "write_atomically",
]
