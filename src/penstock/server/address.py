"""`Address`: the address of a server, and the function that parses it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from penstock.errors import ConfigError

__all__ = ["Address", "parse_address"]

_SCHEMES = {"grpc": False, "grpc+tcp": False, "grpc+tls": True}
"""Whether each scheme uses TLS."""


@dataclass(frozen=True)
class Address:
    """Host and port of a server, and whether it uses TLS."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"grpc{'+tls' if self.tls else ''}://{host}:{self.port}"


def parse_address(text: str, *, tls: bool = False) -> Address:
    """Parse ``host:port``, ``grpc://host:port`` or ``grpc+tls://host:port``, with IPv6 hosts in brackets.

    Args:
        text: the address. Surrounding spaces are ignored.
        tls: whether an address without a scheme uses TLS.

    Raises:
        ConfigError: an invalid address; the message shows a valid one.
    """
    if not isinstance(text, str):
        raise _refusal(text, "it must be a str")
    given = text.strip()
    if any(letter.isspace() or letter == "," for letter in given):
        raise _refusal(text, "pass several addresses as a list")
    try:
        parts = urlsplit(given if "://" in given else f"{'grpc+tls' if tls else 'grpc'}://{given}")
        host, port = parts.hostname, parts.port
    except ValueError:
        reason = "put an IPv6 host in brackets: [::1]:8815" if given.count(":") > 1 else "that is no port"
        raise _refusal(text, reason) from None
    fault = _fault(parts, host, port)
    if fault is not None or host is None or port is None:
        raise _refusal(text, fault)
    return Address(host, port, _SCHEMES[parts.scheme])


def _fault(parts: SplitResult, host: str | None, port: int | None) -> str | None:
    """Return what is wrong with an address that parses as a URL; None if it is valid."""
    if parts.scheme not in _SCHEMES:
        return f"servers are not asked by {parts.scheme}://"
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        return "there is more in it than host and port"
    if not host:
        return "it has no host"
    if not port:
        return "it has no port; penstock serve prints the port"
    return None


def _refusal(text: object, reason: str | None) -> ConfigError:
    return ConfigError(
        f"{text!r} is no address of a server: {reason}. Write host:port, grpc://host:port or grpc+tls://host:port"
    )
