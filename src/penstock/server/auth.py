"""Authentication: a bearer token, compared in constant time, and TLS.

    Server({"train": "train.txt"}, token="secret", tls=TLS("cert.pem", "key.pem"))

Every call carries the token, which is checked before anything else is read. Without TLS, others on the network can read
the token; on networks that you do not control, use both.
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

__all__ = ["TLS", "BearerToken", "FilePath", "check_exposure", "check_token", "client_context", "read_pem"]

FilePath = str | PathLike[str]


@dataclass(frozen=True)
class TLS:
    """PEM files: the server's certificate with its chain, and its key.

    With ``client_roots``, clients, too, need a certificate, signed by one of these (mutual TLS).
    """

    cert: FilePath
    key: FilePath
    client_roots: FilePath | None = None

    def options(self) -> dict[str, Any]:
        """Return the TLS arguments of a Flight server.

        Raises:
            ConfigError: a file is missing or not PEM, or the key does not match the certificate.
        """
        cert, key = read_pem(self.cert, "tls cert"), read_pem(self.key, "tls key")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{fspath(self.cert)} and {fspath(self.key)} are not a certificate and its key: {error}"
            ) from None
        options: dict[str, Any] = {"tls_certificates": [(cert, key)]}
        if self.client_roots is not None:
            options |= {"verify_client": True, "root_certificates": read_pem(self.client_roots, "tls client roots")}
        return options


def client_context(roots: FilePath | None, cert: FilePath | None, key: FilePath | None) -> ssl.SSLContext:
    """Return the SSL context of a client with these files.

    Raises:
        ConfigError: the files do not match, or are damaged.
    """
    try:
        context = ssl.create_default_context(cafile=roots)
        context.set_alpn_protocols(["h2"])
        if cert is not None:
            context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the certificates cannot be used ({roots}, {cert}, {key}): {error}") from None
    return context


def _no_password() -> str:
    """Raise ValueError instead of asking for a password at the terminal."""
    raise ValueError("the key is encrypted, and its password cannot be asked for here: decrypt the key file")


def read_pem(path: FilePath, what: str) -> bytes:
    """Return the content of a PEM file; ConfigError, which names ``what``, if it is not one."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: cannot read {fspath(path)}: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{what}: {fspath(path)} is not in PEM format (-----BEGIN ...)")
    return data


def check_token(token: str) -> str:
    """Return the token if it can be sent in a header.

    Raises:
        ConfigError: it is empty, or contains characters that are not visible ASCII.
    """
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            "a token is one or more visible ASCII characters without spaces; did the file end with a line feed?"
        )
    return token


def check_exposure(host: str, token: str | None, tls: TLS | None, insecure: bool) -> None:
    """Refuse an address that would serve data to strangers by accident.

    Raises:
        ConfigError: a non-loopback address without a token, mutual TLS or ``insecure``.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    guarded = token is not None or (tls is not None and tls.client_roots is not None)
    if not (guarded or insecure or is_loopback):
        raise ConfigError(
            f"anyone who reaches {host} could read the served data: pass a token, or insecure=True (--insecure) "
            "if the network itself keeps strangers out"
        )


class BearerToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Accepts calls with ``authorization: Bearer TOKEN``."""

    def __init__(self, token: str, refused: Callable[[], None]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refused = refused

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        """Check the token; Flight calls this before each call. The client receives a `ServerAuthError`."""
        given = [value.encode() for value in headers.get("authorization", [])]
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            return
        self._refused()
        problem = "the token is wrong" if given else "this server asks for a token, and none was given"
        raise flight.FlightUnauthenticatedError(problem, encode_error(ServerAuthError(problem)))
