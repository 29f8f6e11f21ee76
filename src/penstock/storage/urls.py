"""Addresses of objects: which are remote, what their parts are, and how they may be printed.

A remote address is ``scheme://...``, other than ``file://``. It is printed without password and query, since presigned
addresses carry their signature there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit, urlunsplit

from penstock.errors import ConfigError, StorageError

__all__ = ["WEB", "basename", "is_remote", "listed", "local_part", "scheme", "shown", "through_gateway", "unsigned"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_NORMALISED = re.compile(r"(https?|s3a?|gcs|gs|az|abfss?|adl|hf|ais):/[^/]")  # what a Path makes of an address
_LOCAL = ("file", "local")
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@-]")
WEB = ("http", "https")
_SIGNED = re.compile(r"\?[^!]*\b(?:x-amz-signature|x-goog-signature|signature|sig)=[^!]*", re.IGNORECASE)


def scheme(url: str | os.PathLike[str]) -> str:
    """``"s3"`` of ``"s3://bucket/key"``, in lower case; empty for a path."""
    found = _SCHEME.match(os.fspath(url))
    return found[1].lower() if found else ""


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether this is an address of another machine, and not a path or ``file://`` address of this one."""
    text = os.fspath(url)
    return "://" in text and scheme(text) not in ("", *_LOCAL)


def local_part(url: str | os.PathLike[str]) -> str:
    """The path of something that is not remote: ``file://`` taken away, ``~`` left as it is.

    Raises:
        ConfigError: a remote address that went through `Path`, which makes one slash of two.
    """
    text = os.fspath(url)
    if _NORMALISED.match(text) and not os.path.lexists(text):
        raise ConfigError(f"{text!r} looks like an address that pathlib.Path has taken a slash from: give it as a str")
    if scheme(text) not in _LOCAL:
        return text
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{text!r} names the host {parts.netloc!r}: file:// addresses have three slashes")
    return unquote(parts.path)


def listed(urls: Sequence[str | os.PathLike[str]]) -> str:
    """Return the first address, safe to print, and how many more there are."""
    return shown(urls[0]) + (f" and {len(urls) - 1} more" if len(urls) > 1 else "")


def shown(url: str | os.PathLike[str]) -> str:
    """The address without password, query and fragment, safe to print."""
    text = os.fspath(url)
    if scheme(text) in WEB or "@" in text.partition("://")[2].partition("/")[0]:
        try:
            parts = urlsplit(text)
        except ValueError:  # no address at all
            return text.partition("?")[0].rpartition("@")[2]
        host = parts.netloc.rpartition("@")[2]
        return (
            urlunsplit((parts.scheme, host, parts.path, "...", ""))
            if parts.query
            else f"{scheme(text)}://{host}{parts.path}"
        )
    return text


def unsigned(url: str) -> str:
    """The address without a query that signs it, which is another one each time; what may follow a ``!`` stays.

    >>> unsigned("https://bucket.s3.amazonaws.com/a.mp4?X-Amz-Date=20260101&X-Amz-Signature=7f3a")
    'https://bucket.s3.amazonaws.com/a.mp4'
    """
    return _SIGNED.sub("", url) if scheme(url) in WEB else url


def basename(url: str) -> str:
    """The last part of the address as the name of a file: the extension tells readers what it is."""
    path = unquote(urlsplit(url).path) if scheme(url) in WEB else url.partition("://")[2]
    name = _UNSAFE.sub("_", path.rstrip("/").rpartition("/")[2])[-100:].lstrip(".")
    return name or "object"


def through_gateway(url: str) -> str:
    """``ais://bucket/object`` as the HTTP address of AIStore's gateway (AIS_ENDPOINT); others as they are."""
    if scheme(url) != "ais":
        return url
    gateway = os.environ.get("AIS_ENDPOINT", "").rstrip("/")
    if not gateway:
        raise StorageError(f"{url}: set AIS_ENDPOINT, as AIStore's own clients need it, to the address of the gateway")
    bucket, _, name = url.partition("://")[2].partition("/")
    return f"{gateway}/v1/objects/{bucket}/{name}"
