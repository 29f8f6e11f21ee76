"""`Address`: the address of a server, and the function that parses it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

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

    def refusal(reason: str) -> ConfigError:
        return ConfigError(
            f"{text!r} is no address of a server: {reason}. Write host:port, grpc://host:port or grpc+tls://host:port"
        )

    if not isinstance(text, str):
        raise refusal("it must be a str")
    given = text.strip()
    if any(letter.isspace() or letter == "," for letter in given):
        raise refusal("pass several addresses as a list")
    try:
        parts = urlsplit(given if "://" in given else f"{'grpc+tls' if tls else 'grpc'}://{given}")
        host, port = parts.hostname, parts.port
    except ValueError:
        bare = given.count(":") > 1
        raise refusal("put an IPv6 host in brackets: [::1]:8815" if bare else "that is no port") from None
    if parts.scheme not in _SCHEMES:
        raise refusal(f"servers are not asked by {parts.scheme}://")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise refusal("there is more in it than host and port")
    if not host:
        raise refusal("it has no host")
    if not port:
        raise refusal("it has no port; penstock serve prints the port")
    return Address(host, port, _SCHEMES[parts.scheme])
