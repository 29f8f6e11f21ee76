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

__all__ = ["TLS", "BearerToken", "check_exposure", "check_token", "no_password", "read_pem"]


@dataclass(frozen=True)
class TLS:
    """PEM files: the server's certificate with its chain, and its key.

    With ``client_roots``, clients, too, need a certificate, signed by one of these (mutual TLS).
    """

    cert: str | PathLike[str]
    key: str | PathLike[str]
    client_roots: str | PathLike[str] | None = None

    def options(self) -> dict[str, Any]:
        """Return the TLS arguments of a Flight server.

        Raises:
            ConfigError: a file is missing or not PEM, or the key does not match the certificate.
        """
        cert, key = read_pem(self.cert, "tls cert"), read_pem(self.key, "tls key")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, password=no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{fspath(self.cert)} and {fspath(self.key)} are not a certificate and its key: {error}"
            ) from None
        options: dict[str, Any] = {"tls_certificates": [(cert, key)]}
        if self.client_roots is not None:
            options |= {"verify_client": True, "root_certificates": read_pem(self.client_roots, "tls client roots")}
        return options


def no_password() -> str:
    """Raise ValueError instead of asking for a password at the terminal."""
    raise ValueError("the key is encrypted, and its password cannot be asked for here: decrypt the key file")


def read_pem(path: str | PathLike[str], what: str) -> bytes:
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
    guarded = token is not None or (tls is not None and tls.client_roots is not None)
    if not (guarded or insecure or _is_loopback(host)):
        raise ConfigError(
            f"anyone who reaches {host} could read the served data: pass a token, or insecure=True (--insecure) "
            "if the network itself keeps strangers out"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BearerToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Accepts calls with ``authorization: Bearer TOKEN``."""

    def __init__(self, token: str, refused: Callable[[], None]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refused = refused

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        """Check the token; Flight calls this before each call. The client receives a `ServerAuthError`."""
        given = [_bytes(value) for value in headers.get("authorization", [])]
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            return
        self._refused()
        problem = "the token is wrong" if given else "this server asks for a token, and none was given"
        error = ServerAuthError(problem)
        raise flight.FlightUnauthenticatedError(str(error), encode_error(error))


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
