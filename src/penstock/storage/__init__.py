"""Files on disk: open sources that notice a change, the user's cache folder, atomic writes and locks."""

from penstock.storage.cache import cache_root, file_lock, is_writable, write_atomically
from penstock.storage.files import SourceFile, io_error

__all__ = ["SourceFile", "cache_root", "file_lock", "io_error", "is_writable", "write_atomically"]
