"""`ObjectStore`: S3, Google and Azure stores and web servers, through obstore: bindings of Rust's object_store.

obstore pools connections, signs requests, follows redirects, and reads proxies from the environment. This module adds
error messages that never show a signature, support for servers without range requests, headers that are bound to a
host, and options under the older names of s3fs, gcsfs and adlfs. Missing credentials are searched where the stores' own
tools search: by obstore, and for S3 by botocore if it is installed, which reads ``~/.aws``.
"""

from __future__ import annotations

import base64
import datetime
import email.utils
import fnmatch
import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from penstock.errors import (
    ConfigError,
    PenstockError,
    StorageAuthError,
    StorageChangedError,
    StorageError,
    StorageNotFoundError,
)
from penstock.storage.fork_safe import obstore
from penstock.storage.transfer import Answer, Stat, Transient
from penstock.storage.urls import WEB, scheme, shown, through_gateway

__all__ = ["ObjectStore"]

_UNRANGED = 10_000  # remembered objects of servers without ranges, so that they are requested only once
_PIECE = 1 << 16  # bytes passed on at once; a lost connection loses at most this many
_SINGLE = 64  # cached stores that serve a single URL
_FOREVER = datetime.timedelta(days=365)  # `transfer` enforces the deadline
_FRESH = datetime.timedelta(minutes=5)  # after which credentials are read from botocore again
_SAFE = "/:@!$&'()*+,;=~-._[]"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MAGIC = re.compile(r"[*?\[]")
_NO_CREDENTIALS = (
    "check the credentials (AWS_* variables, ~/.aws); for public data give storage=Storage(options={'anon': True})"
)

_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
_ANONYMOUS = {"anon": "skip_signature"}
_NAMES = {
    "s3": _ANONYMOUS
    | {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token", "endpoint_url": "endpoint"}
    | {"region_name": "region", "requester_pays": "request_payer"},
    "gs": _ANONYMOUS | {"token": "service_account", "endpoint_url": "base_url"},
    "az": _ANONYMOUS | {"sas_token": "sas_key"},
}
_ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
_HEADERS = "give options={'headers': {'https://HOST': {'Authorization': ...}}}, which sends them to that host alone"
# obstore's client does not send the first two on when a server redirects it to another host. All others, it does.
_SAFE_HEADERS = ("authorization", "cookie", "accept", "accept-language", "user-agent")

# What obstore's errors tell, only in their text.
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})([\w ]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CAUSE = re.compile(r'\b(?:message|error): "([^"\\]*)"')
_KIND = re.compile(r"\bkind: (\w+)")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_ADDRESS = re.compile(r"\w+://\S+")
_METADATA = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")  # metadata services for credentials
_AGAIN, _NEVER = (408, 425, 429), (501, 505)
_LASTING = {  # transport errors that retries do not fix
    "MissingContentLength": "the server does not say how large the object is (Content-Length), so that nobody could "
    "tell whether all of it arrived; download it by other means",
    "TooManyRedirects": "more than 10 redirections",
    "redirect without LOCATION": "the bucket is in another region; options={'region': ...} names it, or AWS_REGION",
    "BadScheme": "the server sends us to http:// or something that is no web address, which has no TLS; say http://",
}


class _NoRanges(Exception):
    """The server returned the whole object for a range request, or has no such range."""


class ObjectStore:
    """All object stores and web servers, with one set of options. Implements `penstock.storage.transfer.Store`.

    Args:
        options: see `penstock.storage.Storage`; also ``ca_file`` and ``client_options``.
        idle: seconds allowed for connecting, and without a byte.

    Raises:
        ConfigError: headers without a host, or headers that a redirect would send to another host.
        ImportError: obstore is not installed.

    Reads with GET only: many servers, and all presigned URLs, refuse HEAD.
    """

    def __init__(self, options: Mapping[str, Any], idle: float) -> None:
        self._obstore = obstore()
        self._options = dict(options)
        self._headers = _by_host(self._options.pop("headers", None) or {})
        self._client: dict[str, Any] = {
            "connect_timeout": datetime.timedelta(seconds=idle),
            "read_timeout": datetime.timedelta(seconds=idle),
            "timeout": _FOREVER,
            "pool_idle_timeout": datetime.timedelta(seconds=30),
        }
        ca_file = self._options.pop("ca_file", None)
        if ca_file is not None:
            with open(ca_file, "rb") as file:
                self._client["root_certificate"] = file.read()
        client = self._options.pop("client_options", None) or {}
        if "default_headers" in client:
            raise ConfigError(f"client_options: default_headers would go to any host: {_HEADERS}")
        self._client |= client
        self._buckets: dict[tuple[str, str], Any] = {}
        self._site = lru_cache(None)(self._web_store)
        self._single = lru_cache(_SINGLE)(self._web_store)
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
        if found.size and len(self._unranged) < _UNRANGED:
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
                store, path = self._locate(url)
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
            store, _ = self._locate(url)
            if fixed == len(parts) - 1 and parts[-1] != "**":
                found = self._obstore.list_with_delimiter(store, folder or None)["objects"]
            else:
                found = self._obstore.list(store, folder or None).collect()
        files = [meta for meta in found if _matches(meta["path"].split("/"), parts) and not _is_folder(meta, found)]
        return sorted((f"{start}://{bucket}/{meta['path']}", _stat(meta)) for meta in files)

    def _get(self, url: str, span: Any) -> Any:
        options = {} if span is None else {"range": span}
        with self._translated(url):
            store, path = self._locate(url)
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

    # The obstore store of a URL, and the object's path in it.

    def _locate(self, url: str) -> tuple[Any, str]:
        if _CONTROL.search(url):
            raise StorageError(f"cannot read {shown(url)!r}: it contains line feeds or other control characters")
        if scheme(url) in (*WEB, "ais"):
            return self._on_the_web(url)
        bucket, _, path = url.partition("://")[2].partition("/")
        if not bucket or not path:
            raise StorageError(f"{url}: an object has a URL such as {scheme(url)}://bucket/key")
        key = (scheme(url), bucket)
        if key not in self._buckets:
            self._buckets[key] = self._cloud_store(url, *key)
        return self._buckets[key], path

    def _on_the_web(self, url: str) -> tuple[Any, str]:
        if self._options:
            unknown = ", ".join(map(repr, sorted(self._options)))
            raise ConfigError(
                f"unknown options for HTTP: {unknown}; use 'headers' and 'ca_file', or 'client_options' for the client"
            )
        address = through_gateway(url)
        parts = urlsplit(address)
        if parts.scheme not in WEB or not parts.hostname:
            raise StorageError(f"{shown(url)}: not a URL of a web server: {shown(address)}")
        user, _, host = parts.netloc.rpartition("@")
        site = f"{parts.scheme}://{host}"
        if _is_plain(parts):
            return self._site(site, user), unquote(parts.path[1:])
        # In object_store, a query is part of the store, and so is a path that it would encode differently.
        query = f"?{parts.query}" if parts.query else ""
        return self._single(site + quote(parts.path, safe=_SAFE + "%") + query, user), ""

    def _web_store(self, address: str, user: str) -> Any:
        headers = self._headers.get(_host(address), {})
        if user:
            login = base64.b64encode(unquote(user if ":" in user else f"{user}:").encode()).decode()
            headers = {"Authorization": f"Basic {login}"} | headers
        return self._obstore.store.HTTPStore.from_url(address, **self._how(headers, address.startswith("http://")))

    def _how(self, headers: Mapping[str, str], plain: bool) -> dict[str, Any]:
        """Return the arguments that all stores take. Retries are off: Penstock's resume at the next byte."""
        client: dict[str, Any] = {"allow_http": plain}
        if headers:
            client["default_headers"] = {name: value.encode("latin-1") for name, value in headers.items()}
        return {"client_options": client | self._client, "retry_config": {"max_retries": 0}}

    def _cloud_store(self, url: str, protocol: str, bucket: str) -> Any:
        kind = _KINDS.get(protocol, "az")
        given = dict(self._options)
        # As in s3fs, where None means not given.
        given |= given.pop("client_kwargs", None) or {}
        names = _NAMES[kind]
        config = {names.get(name, name): value for name, value in given.items() if value is not None}
        provider = _from_botocore(url, config) if kind == "s3" else None
        endpoint = str(config.get("endpoint") or config.get("base_url") or _endpoint(kind))
        how = self._how(self._headers.get(_host(url), {}), endpoint.startswith("http://"))
        if provider is not None:
            how["credential_provider"] = provider
        address = f"{'gs' if kind == 'gs' else protocol}://{bucket}"
        try:
            return self._obstore.store.from_url(address, config=config, **how)
        except self._obstore.exceptions.UnknownConfigurationKeyError as error:
            name = re.search(r"'([^']*)'", str(error))
            raise StorageError(
                f"cannot open {url}: {name[1] if name else 'an option'!r} is neither a supported option of s3fs "
                f"({', '.join([*names, 'client_kwargs'])}) nor an option of obstore's store"
            ) from None


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
        return StorageAuthError(f"{where}: no credentials were found, nor has this machine any; {_NO_CREDENTIALS}")
    if "NotPartial" in text:
        return _NoRanges()
    if found := _STATUS.search(text):
        status, code = int(found[1]), _CODE.search(text)
        reason = f"HTTP {status}{found[2].rstrip()}{f', {code[1]}' if code else ''}"
        if status in (404, 410):
            return StorageNotFoundError(f"{where} does not exist ({reason})")
        if status in (401, 403, 407):
            return StorageAuthError(f"{where}: access refused ({reason}); {_NO_CREDENTIALS}")
        if status == 416:
            return StorageChangedError(f"{where} is shorter than it was: the server has no such range ({reason})")
        if status in _AGAIN or (status >= 500 and status not in _NEVER):
            return Transient(reason)
        return StorageError(f"cannot {what} {where}: {reason}")
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


def _by_host(headers: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return headers by the `_host` that they are for: a list, or a redirect, may name any other host."""
    found: dict[str, dict[str, str]] = {}
    for host, some in headers.items():
        if not scheme(host) or not isinstance(some, Mapping):
            raise ConfigError(f"headers: {str(host)!r} is not a host with its headers: {_HEADERS}")
        for name, value in some.items():
            if name.lower() not in _SAFE_HEADERS:
                raise ConfigError(
                    f"headers: {name!r} would be sent to any host that {host} redirects to; supported are "
                    f"{', '.join(_SAFE_HEADERS)}"
                )
            found.setdefault(_host(host), {})[name] = str(value)
    return found


def _host(url: str) -> str:
    """Return scheme and host of a URL, or scheme and bucket, in the form in which they are compared."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    return f"{parts.scheme}://{host.removesuffix({'http': ':80', 'https': ':443'}.get(parts.scheme, ''))}"


def _is_plain(parts: SplitResult) -> bool:
    """Return whether object_store would request exactly this path, encoded as it is here."""
    path = unquote(parts.path)
    is_odd = any(segment in ("", ".", "..") for segment in path.split("/")[1:])
    return not parts.query and not is_odd and quote(path, safe=_SAFE) == quote(parts.path, safe=_SAFE + "%")


def _endpoint(kind: str) -> str:
    """Return the endpoint from the environment variables."""
    return next((os.environ[name] for name in _ENDPOINTS.get(kind, ()) if os.environ.get(name)), "")


def _from_botocore(url: str, config: dict[str, Any]) -> Any:
    """Return the credential provider, None for obstore's own; add region and endpoint of the profile.

    Raises:
        StorageAuthError: no credentials, or no such profile.
    """
    profile = config.pop("profile", None)
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        if profile is None:
            return None
        raise StorageError(f"{url}: profiles need the package botocore: pip install 'penstock[cloud]'") from None
    try:
        session = botocore.session.Session(profile=profile)
        region, endpoint = session.get_config_variable("region"), session.get_scoped_config().get("endpoint_url")
        if region:
            config.setdefault("region", region)
        if endpoint and not _endpoint("s3"):
            config.setdefault("endpoint", endpoint)
        if config.get("skip_signature") or "access_key_id" in config:
            return None
        found = session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise StorageAuthError(f"{url}: {error}; {_NO_CREDENTIALS}") from None
    if found is None:
        raise StorageAuthError(f"{url}: no credentials for S3 found; {_NO_CREDENTIALS}")

    def credentials() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        until = datetime.datetime.now(datetime.UTC) + _FRESH
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": until,
        }

    return credentials
