"""Who may ask: a bearer token, compared in constant time, and TLS.

    Server({"train": "train.txt"}, token="secret", tls=TLS("cert.pem", "key.pem"))

The token goes with every call, and is looked at before anything else of it is read. Without TLS it can be read on the
way; on networks that are not your own use both.
"""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

from penstock.errors import ConfigError, ServerAuthError
from penstock.server.protocol import encode_error

__all__ = ["TLS", "BearerToken", "check_exposure", "check_token", "no_password", "read_pem"]


@dataclass(frozen=True)
class TLS:
    """Files (PEM): the server's certificate with its chain, and its key. With ``client_roots`` clients must have a
    certificate as well, signed by one of these (mutual TLS)."""

    cert: str | PathLike[str]
    key: str | PathLike[str]
    client_roots: str | PathLike[str] | None = None

    def options(self) -> dict[str, Any]:
        """The arguments of a Flight server.

        Raises:
            ConfigError: a file is missing or no PEM, or the key is not that of the certificate.
        """
        cert, key = read_pem(self.cert, "tls cert"), read_pem(self.key, "tls key")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, password=no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{fspath(self.cert)} and {fspath(self.key)} are no certificate and its key: {error}"
            ) from None
        options: dict[str, Any] = {"tls_certificates": [(cert, key)]}
        if self.client_roots is not None:
            options |= {"verify_client": True, "root_certificates": read_pem(self.client_roots, "tls client roots")}
        return options


def no_password() -> str:
    """Instead of asking at the terminal: ValueError."""
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")


def read_pem(path: str | PathLike[str], what: str) -> bytes:
    """The content of a PEM file; ConfigError, naming ``what``, if it is none."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: cannot read {fspath(path)}: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{what}: {fspath(path)} is not in PEM format (-----BEGIN ...)")
    return data


def check_token(token: str) -> str:
    """The token, if it can travel in a header.

    Raises:
        ConfigError: it is empty, or has other characters than visible ASCII.
    """
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            "a token is one or more visible ASCII characters without spaces; did the file end with a line feed?"
        )
    return token


def check_exposure(host: str, token: str | None, tls: TLS | None, insecure: bool) -> None:
    """Refuse to serve strangers by accident.

    Raises:
        ConfigError: an address other than loopback with neither a token nor mutual TLS nor ``insecure``.
    """
    guarded = token is not None or (tls is not None and tls.client_roots is not None)
    if not (guarded or insecure or _is_loopback(host)):
        raise ConfigError(
            f"anyone who reaches {host} could read what is served: give a token, or insecure=True (--insecure) "
            "where the network itself keeps strangers out"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BearerToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets calls with ``authorization: Bearer TOKEN`` through."""

    def __init__(self, token: str, refused: Callable[[], None]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refused = refused

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        """Called by Flight before each call; raises what the client gets as a `ServerAuthError`."""
        given = [_bytes(value) for value in headers.get("authorization", [])]
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            return
        self._refused()
        problem = "the token is wrong" if given else "this server asks for a token, and none was given"
        error = ServerAuthError(problem)
        raise flight.FlightUnauthenticatedError(str(error), encode_error(error))


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
