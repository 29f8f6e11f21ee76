"""Objects of all other file systems that fsspec supports: ftp, gdrive, hf, ...

fsspec's range reads do not report the version of the bytes. So size and etag are checked again after each range: one
more request, but never bytes of two versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import fsspec

from penstock.errors import StorageAuthError, StorageError, StorageNotFoundError
from penstock.storage.transfer import Answer, Stat, Transient
from penstock.storage.urls import scheme, shown

__all__ = ["FsspecStore"]

_ETAGS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id", "xet_hash", "oid", "hash")
_TIMES = ("last_modified", "LastModified", "updated", "mtime", "last_commit", "modified", "created")


class FsspecStore:
    """Reads by ``info`` and ``cat_file``."""

    def __init__(self, protocol: str, options: Mapping[str, Any]) -> None:
        self._protocol = protocol
        self._fs = fsspec.filesystem(protocol, **{"skip_instance_cache": True, "use_listings_cache": False, **options})

    def stat(self, url: str) -> Stat:
        with self._translated(url):
            return self._stat(url)

    def read(self, url: str, begin: int, end: int | None, *, ranged: bool) -> Answer:
        with self._translated(url):
            data: bytes = self._fs.cat_file(self._path(url), begin, end)
            return Answer(self._stat(url), begin, (piece for piece in [data]))

    def put(self, url: str, data: bytes, *, if_absent: bool) -> bool:
        if if_absent:
            raise StorageError(f"cannot write {shown(url)}: fsspec cannot write an object only if it is absent")
        with self._translated(url):
            self._fs.pipe_file(self._path(url), data)
        return True

    def find(self, url: str) -> list[tuple[str, Stat]]:
        prefix = f"{scheme(url)}://"
        with self._translated(url):
            found = self._fs.glob(self._path(url), detail=True)
            files = {name: info for name, info in found.items() if info.get("type") != "directory"}
            return sorted(
                (name if "://" in name else prefix + name, self._stat_of(info, name)) for name, info in files.items()
            )

    def _path(self, url: str) -> str:
        path: str = self._fs._strip_protocol(url)
        return path

    def _stat(self, url: str) -> Stat:
        self._fs.invalidate_cache()
        return self._stat_of(self._fs.info(self._path(url)), url)

    def _stat_of(self, info: Mapping[str, Any], url: str) -> Stat:
        if info.get("type") == "directory" or info.get("size") is None:
            raise StorageNotFoundError(f"{shown(url)} is a folder or has no size; give an object in it")
        etag = next((str(info[name]) for name in _ETAGS if info.get(name)), "")
        modified = next((info[name] for name in _TIMES if info.get(name)), "")
        # Some file systems list times as seconds, but return the time of a single object as a date.
        modified = modified.timestamp() if isinstance(modified, datetime) else modified
        return Stat(int(info["size"]), etag, str(modified))

    @contextmanager
    def _translated(self, url: str) -> Iterator[None]:
        """Turn errors of the file system into those of `Store`."""
        try:
            yield
        except (Transient, StorageError):
            raise
        except FileNotFoundError:
            raise StorageNotFoundError(f"{shown(url)} does not exist") from None
        except PermissionError as error:
            raise StorageAuthError(f"{shown(url)}: access refused ({error}); check the credentials") from None
        except Exception as error:
            status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
            reason = f"{type(error).__name__}: {error}"
            if status in (401, 403):
                raise StorageAuthError(f"{shown(url)}: access refused ({reason}); check the credentials") from None
            if isinstance(error, TypeError | ValueError | NotImplementedError):
                raise StorageError(f"cannot read {shown(url)}: {reason}") from error
            raise Transient(reason) from None
