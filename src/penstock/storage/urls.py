"""URLs of objects: whether they are remote, their parts, and how to print them safely.

A remote URL is ``scheme://...``, except ``file://``. It is printed without password and query, where presigned URLs
have their signature.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError, StorageError

__all__ = [
    *("ABSOLUTE", "WEB", "Name", "basename", "is_inside", "is_remote", "listed", "not_a_name", "path_of"),
    *("scheme", "shown", "text_of", "through_gateway", "unsigned"),
]

Name = str | os.PathLike[str]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
ABSOLUTE = f"^(/|{_SCHEME.pattern})"
"""Matches a path or URL that is not relative."""
_LOCAL = ("file", "local")
_OTHER = re.compile(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]+:[/\\]")  # a drive, or the scheme of a URL
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@-]")
WEB = ("http", "https")
_OTHER_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_NORMALISED = re.compile(r"(https?|s3a?|gcs|gs|az|abfss?|adl|hf|ais):/[^/]")  # a URL that went through Path
_SIGNED = re.compile(r"\?[^!]*\b(?:x-amz-signature|x-goog-signature|signature|sig)=[^!]*", re.IGNORECASE)


def scheme(url: str | os.PathLike[str]) -> str:
    """Return the scheme of a URL in lower case, ``"s3"`` for ``"s3://bucket/key"``; empty for a path."""
    found = _SCHEME.match(os.fspath(url))
    return found[1].lower() if found else ""


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Return whether this is a remote URL, and not a path or a ``file://`` URL."""
    text = os.fspath(url)
    return "://" in text and scheme(text) not in ("", *_LOCAL)


def path_of(name: Name) -> str | None:
    """Return the path of a local file; None for objects in stores, and for commands (``pipe:``).

    ``file:`` is removed, and its percent signs are decoded; ``~`` is not expanded.

    Raises:
        ConfigError: a remote URL that went through `Path`, which turns two slashes into one; ``file://`` and a host; a
            NUL, or a lone surrogate that no file system encodes.
    """
    text = text_of(name)
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{text!r} cannot be the name of a file or an object: {error.reason}") from None
    if b"\0" in encoded:
        raise ConfigError(f"{text!r} cannot be the name of a file or an object: it contains a NUL")
    if text[:8].lower().startswith(("file:", "local://")) and not os.path.lexists(text):
        path = text.partition(":")[2]
        if path.startswith("//"):
            host, slash, path = path[2:].partition("/")
            if host not in ("", "localhost"):
                raise ConfigError(f"{text!r} names the host {host!r}: file:// URLs have three slashes")
            path = slash + path
        return unquote(path)
    if _OTHER_SCHEME.match(text) is None or (not is_remote(text) and os.path.lexists(text)):
        return text
    if _NORMALISED.match(text):
        raise ConfigError(f"{text!r} looks like a URL that lost a slash in pathlib.Path: pass it as a str")
    return None


def text_of(name: Name) -> str:
    """Return a name as text; ConfigError: it is neither str nor Path."""
    text = os.fspath(name)
    if not isinstance(text, str):
        raise not_a_name(name)
    return text


def not_a_name(given: object) -> ConfigError:
    """Return the error for what is no name of a source."""
    return ConfigError(f"a source must be a path or URL, as str or Path, or a list of these; got {given!r}")


def is_inside(name: str) -> bool:
    """Return whether this is the relative path of a file that stays within its folder or address.

    For names in untrusted data. `%2E` counts as a dot, as in web addresses.
    """
    plain = unquote(name)
    steps = plain.replace("\\", "/").split("/")
    return bool(steps[-1]) and steps[0] != "" and ".." not in steps and not _OTHER.match(plain) and "\0" not in plain


def listed(urls: Sequence[str | os.PathLike[str]]) -> str:
    """Return the first URL, safe to print, and the number of further ones."""
    return shown(urls[0]) + (f" and {len(urls) - 1} more" if len(urls) > 1 else "")


def shown(url: str | os.PathLike[str]) -> str:
    """Return the URL without password, query and fragment, safe to print."""
    text = os.fspath(url)
    if scheme(text) in WEB or "@" in text.partition("://")[2].partition("/")[0]:
        try:
            parts = urlsplit(text)
        except ValueError:  # not a URL
            return text.partition("?")[0].rpartition("@")[2]
        return f"{scheme(text)}://{parts.netloc.rpartition('@')[2]}{parts.path}{'?...' if parts.query else ''}"
    return text


def unsigned(url: str) -> str:
    """Return the URL without a signature, which changes each time; a part after ``!`` is kept.

    >>> unsigned("https://bucket.s3.amazonaws.com/a.mp4?X-Amz-Date=20260101&X-Amz-Signature=7f3a")
    'https://bucket.s3.amazonaws.com/a.mp4'
    """
    return _SIGNED.sub("", url) if scheme(url) in WEB else url


def basename(url: str) -> str:
    """Return the last segment of the URL as a file name, with its extension."""
    path = unquote(urlsplit(url).path) if scheme(url) in WEB else url.partition("://")[2]
    name = _UNSAFE.sub("_", path.rstrip("/").rpartition("/")[2])[-100:].lstrip(".")
    return name or "object"


def through_gateway(url: str) -> str:
    """Return ``ais://bucket/object`` as a URL of AIStore's HTTP gateway (AIS_ENDPOINT); other URLs unchanged."""
    if scheme(url) != "ais":
        return url
    gateway = os.environ.get("AIS_ENDPOINT", "").rstrip("/")
    if not gateway:
        raise StorageError(f"{url}: set AIS_ENDPOINT to the address of the gateway, as for AIStore's own clients")
    bucket, _, name = url.partition("://")[2].partition("/")
    return f"{gateway}/v1/objects/{bucket}/{name}"
