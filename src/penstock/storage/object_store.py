"""S3, Google and Azure stores and web servers, through obstore: Python bindings of Rust's object_store.

obstore pools connections, signs requests, follows redirects, and reads proxies from the environment. This module adds
error messages that never show a signature, and support for servers without range requests.
"""

from __future__ import annotations

import email.utils
import fnmatch
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.errors import (
    PenstockError,
    StorageAuthError,
    StorageChangedError,
    StorageError,
    StorageNotFoundError,
)
from penstock.storage.backend import Answer, Stat, Transient
from penstock.storage.fork_safe import obstore
from penstock.storage.stores import NO_CREDENTIALS, Stores
from penstock.storage.urls import WEB, scheme, shown

__all__ = ["ObjectStoreBackend"]

_KNOWN = 10_000  # remembered objects of servers without ranges, so that they are requested only once
_PIECE = 1 << 16  # bytes passed on at once; a lost connection loses at most this many
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})([\w ]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CAUSE = re.compile(r'\b(?:message|error): "([^"\\]*)"')
_KIND = re.compile(r"\bkind: (\w+)")
_METADATA = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")  # metadata services for credentials
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_ADDRESS = re.compile(r"\w+://\S+")
_AGAIN, _NEVER = (408, 425, 429), (501, 505)
_LASTING = {  # transport errors that retries do not fix
    "MissingContentLength": "the server does not say how large the object is (Content-Length), so that nobody could "
    "tell whether all of it arrived; download it by other means",
    "TooManyRedirects": "more than 10 redirections",
    "redirect without LOCATION": "the bucket is in another region; options={'region': ...} names it, or AWS_REGION",
    "BadScheme": "the server sends us to http:// or something that is no web address, which has no TLS; say http://",
}
_MAGIC = re.compile(r"[*?\[]")


class _NoRanges(Exception):
    """The server returned the whole object for a range request, or has no such range."""


class ObjectStoreBackend:
    """Reads with GET only: many servers, and all presigned URLs, refuse HEAD."""

    def __init__(self, options: Mapping[str, Any], idle: float) -> None:
        self._obstore, self._stores = obstore(), Stores(options, idle)
        self._unranged: set[str] = set()

    def stat(self, url: str) -> Stat:
        if url not in self._unranged:
            try:
                answer = self._get(url, (0, 1))
                with self._translated(url):
                    answer.bytes()
                return _stat(answer.meta)
            except (_NoRanges, StorageChangedError):  # an empty object has no first byte either
                pass
        found = _stat(self._get(url, None).meta)
        if found.size and len(self._unranged) < _KNOWN:
            self._unranged.add(url)
        return replace(found, ranged=not found.size)

    def read(self, url: str, begin: int, end: int | None, *, ranged: bool) -> Answer:
        whole = (begin == 0 and end is None) or not ranged
        wanted = {"offset": begin} if end is None else (begin, end)
        try:
            answer = self._get(url, None if whole else wanted)
        except _NoRanges:
            answer, ranged = self._get(url, None), False
        return Answer(replace(_stat(answer.meta), ranged=ranged), answer.range[0], self._pieces(url, answer))

    def _pieces(self, url: str, answer: Any) -> Generator[memoryview]:
        left, pieces = answer.range[1] - answer.range[0], iter(answer.stream(_PIECE))
        try:
            piece: Any = b""
            while piece is not None:
                with self._translated(url):
                    piece = next(pieces, None)
                    left -= len(piece or b"")
                    if left <= 0:
                        # Reading an answer to its end keeps the connection for the next request.
                        next(pieces, None)
                if piece is not None:
                    yield memoryview(piece)
        finally:
            # A traceback would keep these objects alive until a fork of this process frees them. There it would wait
            # forever for a lock that a thread of obstore held in this process.
            del answer, pieces

    def put(self, url: str, data: bytes, *, if_absent: bool) -> bool:
        mode = "create" if if_absent else "overwrite"
        try:
            with self._translated(url, "write"):
                store, path = self._stores.find(url)
                self._obstore.put(store, path, data, mode=mode, use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def find(self, url: str) -> list[tuple[str, Stat]]:
        if scheme(url) in (*WEB, "ais"):
            raise StorageError(
                f"{shown(url)}: patterns need a store that can be listed, and HTTP cannot; name the files"
            )
        start, _, pattern = url.partition("://")
        bucket, _, pattern = pattern.partition("/")
        parts = pattern.split("/")
        fixed = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts) - 1)
        folder = "/".join(parts[:fixed])
        with self._translated(url, "list"):
            store, _ = self._stores.find(url)
            if fixed == len(parts) - 1 and parts[-1] != "**":
                found = self._obstore.list_with_delimiter(store, folder or None)["objects"]
            else:
                found = self._obstore.list(store, folder or None).collect()
        files = [meta for meta in found if _matches(meta["path"].split("/"), parts) and not _is_folder(meta, found)]
        return sorted((f"{start}://{bucket}/{meta['path']}", _stat(meta)) for meta in files)

    def _get(self, url: str, span: Any) -> Any:
        options = {} if span is None else {"range": span}
        with self._translated(url):
            store, path = self._stores.find(url)
            return self._obstore.get(store, path, options=options)

    @contextmanager
    def _translated(self, url: str, what: str = "read") -> Iterator[None]:
        """Raise obstore's errors as Penstock's. Their text is never shown, since it contains the URL."""
        errors = self._obstore.exceptions
        try:
            yield
        except (PenstockError, errors.AlreadyExistsError):
            raise
        except (errors.NotSupportedError, NotImplementedError) as error:
            if "RangeNotSupported" in str(error):
                raise _NoRanges from None
            raise StorageError(f"cannot {what} {shown(url)}: the store does not support this") from None
        except ValueError as error:
            raise StorageError(f"cannot {what} {shown(url)}: {_brief(error)}") from None
        except (OSError, errors.BaseError) as error:
            raise _failure(url, str(error), what) from None


def _stat(meta: Mapping[str, Any]) -> Stat:
    when = meta["last_modified"]
    modified = email.utils.format_datetime(when, usegmt=True) if when.timestamp() else ""
    etag = meta["e_tag"] or ""
    # Azure's listings omit the quotation marks of etags.
    return Stat(int(meta["size"]), f'"{etag}"' if etag and '"' not in etag else etag, modified)


def _is_folder(meta: Mapping[str, Any], found: list[Any]) -> bool:
    """Return whether this is an empty object that represents a folder."""
    return not meta["size"] and any(other["path"].startswith(meta["path"] + "/") for other in found)


def _matches(names: list[str], parts: list[str]) -> bool:
    """Return whether a path matches a pattern, both split into segments: ``**`` matches any number of segments."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_matches(names[skipped:], parts[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])


def _brief(error: object) -> str:
    """Return the text of an error without URLs and without obstore's debug details."""
    return _ADDRESS.sub("...", str(error).partition("\n\nDebug source:")[0])


def _failure(url: str, text: str, what: str) -> Exception:
    """Return Penstock's error for one of obstore, whose kind only its text tells."""
    where = shown(url)
    if any(host in text for host in _METADATA):
        return StorageAuthError(f"{where}: no credentials were found, nor has this machine any; {NO_CREDENTIALS}")
    if "NotPartial" in text:
        return _NoRanges()
    if found := _STATUS.search(text):
        code = _CODE.search(text)
        reason = f"HTTP {found[1]}{found[2].rstrip()}{f', {code[1]}' if code else ''}"
        return _refused(where, int(found[1]), reason, what)
    if untrusted := _CERTIFICATE.search(text):
        return StorageError(
            f"cannot {what} {where}: its certificate is not trusted ({untrusted[1]}); options={{'ca_file': ...}} names "
            "your own"
        )
    for sign, meaning in _LASTING.items():
        if sign in text:
            return StorageError(f"cannot {what} {where}: {meaning}")
    if "TimedOut" in text or "kind: Timeout" in text:
        return Transient("no byte came in time")
    if "reqwest" in text or "hyper" in text:
        causes, kinds = _CAUSE.findall(text), _KIND.findall(text)
        return Transient((causes or kinds or ["the connection failed"])[-1])
    return StorageError(f"cannot {what} {where}: {_brief(text)}")


def _refused(where: str, status: int, reason: str, what: str) -> Exception:
    """Return Penstock's error for an HTTP status."""
    if status in (404, 410):
        return StorageNotFoundError(f"{where} does not exist ({reason})")
    if status in (401, 403, 407):
        return StorageAuthError(f"{where}: access refused ({reason}); {NO_CREDENTIALS}")
    if status == 416:
        return StorageChangedError(f"{where} is shorter than it was: the server has no such range ({reason})")
    if status in _AGAIN or (status >= 500 and status not in _NEVER):
        return Transient(reason)
    return StorageError(f"cannot {what} {where}: {reason}")
