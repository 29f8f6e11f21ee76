"""Select the obstore store of a URL, and its options.

Options have obstore's names, or the older ones of s3fs, gcsfs and adlfs. Missing credentials are searched where the
stores' own tools search: by obstore, and for S3 by botocore if it is installed, which reads ``~/.aws``.
"""

from __future__ import annotations

import base64
import datetime
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from penstock.errors import ConfigError, StorageAuthError, StorageError
from penstock.storage.fork_safe import obstore
from penstock.storage.urls import WEB, scheme, shown, through_gateway

__all__ = ["NO_CREDENTIALS", "Stores"]

NO_CREDENTIALS = (
    "check the credentials (AWS_* variables, ~/.aws); for public data give storage=Storage(options={'anon': True})"
)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SAFE = "/:@!$&'()*+,;=~-._[]"
_SINGLE = 64  # cached stores that serve a single URL
_FOREVER = datetime.timedelta(days=365)  # `transfer` enforces the deadline
_FRESH = datetime.timedelta(minutes=5)  # after which credentials are read from botocore again
_ANONYMOUS = {"anon": "skip_signature"}
_NAMES = {
    "s3": _ANONYMOUS
    | {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token", "endpoint_url": "endpoint"}
    | {"region_name": "region", "requester_pays": "request_payer"},
    "gs": _ANONYMOUS | {"token": "service_account", "endpoint_url": "base_url"},
    "az": _ANONYMOUS | {"sas_token": "sas_key"},
}
_HEADERS = "give options={'headers': {'https://HOST': {'Authorization': ...}}}, which sends them to that host alone"
# obstore's client does not send the first two on when a server redirects it to another host. All others, it does.
_SAFE_HEADERS = ("authorization", "cookie", "accept", "accept-language", "user-agent")
_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}


class Stores:
    """The stores of one set of options, created at first use. For one process and all its threads.

    Args:
        options: see the module; also ``headers`` by host, ``ca_file``, ``client_options``.
        idle: seconds allowed for connecting, and without a byte.

    Raises:
        ConfigError: headers without a host, or headers that a redirect would send to another host.
        ImportError: obstore is not installed.
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
        self._kept: dict[tuple[str, str], Any] = {}
        self._single: OrderedDict[str, Any] = OrderedDict()

    def find(self, url: str) -> tuple[Any, str]:
        """Return the store of a URL, and the object's path in it.

        Raises:
            StorageError: it is not a URL.
            StorageAuthError: no credentials found.
        """
        if _CONTROL.search(url):
            raise StorageError(f"cannot read {shown(url)!r}: it contains line feeds or other control characters")
        if scheme(url) in (*WEB, "ais"):
            return self._on_the_web(url)
        bucket, _, path = url.partition("://")[2].partition("/")
        if not bucket or not path:
            raise StorageError(f"{url}: an object has a URL such as {scheme(url)}://bucket/key")
        key = (scheme(url), bucket)
        if key not in self._kept:
            self._kept[key] = self._in_cloud(url, *key)
        return self._kept[key], path

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
        host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        user = parts.netloc.rpartition("@")[0]
        if _is_plain(parts):
            key = (host, user)
            if key not in self._kept:
                self._kept[key] = self._web_store(host, parts)
            return self._kept[key], unquote(parts.path[1:])
        # In object_store, a query is part of the store, and so is a path that it would encode differently.
        found = self._single.pop(address, None)
        if found is None:
            whole = host + quote(parts.path, safe=_SAFE + "%") + (f"?{parts.query}" if parts.query else "")
            found = self._web_store(whole, parts)
        self._single[address] = found
        while len(self._single) > _SINGLE:
            self._single.popitem(last=False)
        return found, ""

    def _web_store(self, address: str, parts: SplitResult) -> Any:
        headers = self._headers.get(_host(address), {})
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers = {"Authorization": "Basic " + base64.b64encode(user.encode()).decode()} | headers
        return self._obstore.store.HTTPStore.from_url(address, **self._how(headers, parts.scheme == "http"))

    def _how(self, headers: Mapping[str, str], plain: bool) -> dict[str, Any]:
        """Return the arguments that all stores take. Retries are off: Penstock's resume at the next byte."""
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        client = {"default_headers": encoded, "allow_http": plain} if encoded else {"allow_http": plain}
        return {"client_options": {**client, **self._client}, "retry_config": {"max_retries": 0}}

    def _in_cloud(self, url: str, protocol: str, bucket: str) -> Any:
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
    segments = path.split("/")[1:]
    odd = any(segment in ("", ".", "..") for segment in segments)
    return not parts.query and not odd and quote(path, safe=_SAFE) == quote(parts.path, safe=_SAFE + "%")


def _endpoint(kind: str) -> str:
    """Return the endpoint from the environment variables."""
    names = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
    return next((os.environ[name] for name in names.get(kind, ()) if os.environ.get(name)), "")


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
        raise StorageAuthError(f"{url}: {error}; {NO_CREDENTIALS}") from None
    if found is None:
        raise StorageAuthError(f"{url}: no credentials for S3 found; {NO_CREDENTIALS}")

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
