"""`Access`: addresses and credentials of servers, and the calls opened with them."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.server.address import Address, parse_address
from penstock.server.auth import check_token, read_pem
from penstock.server.connections import Call
from penstock.server.failures import client_context

__all__ = ["Access"]

_Path = str | PathLike[str]


class Access:
    """Opens calls to servers. Picklable.

    Args: as for `penstock.server.Client`.

    Raises:
        ConfigError: invalid arguments, or a file that cannot be read.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: str | None,
        token_file: _Path | None,
        timeout: float,
        tls_roots: _Path | None,
        tls_cert: _Path | None,
        tls_key: _Path | None,
    ) -> None:
        given = [addresses] if isinstance(addresses, str) else list(addresses)
        tls = (tls_roots, tls_cert) != (None, None)
        # Try each server once.
        self.addresses = tuple(dict.fromkeys(parse_address(text, tls=tls) for text in given))
        if not self.addresses or not timeout > 0:
            raise ConfigError(f"pass at least one address and a positive timeout, got {given}, {timeout=}")
        if (tls_cert is None) != (tls_key is None) or (token is not None and token_file is not None):
            raise ConfigError("pass tls_cert= and tls_key= together, and only one of token= and token_file=")
        if tls and not any(address.tls for address in self.addresses):
            raise ConfigError(f"certificates need grpc+tls:// addresses, got {given}")
        self.timeout = timeout
        self._token, self._token_file = None if token is None else check_token(token), token_file
        self._tls = {"tls_root_certs": tls_roots, "cert_chain": tls_cert, "private_key": tls_key}
        # Report unreadable files now, not at the first call.
        self._secrets()
        self.context()

    def context(self) -> ssl.SSLContext:
        """Return the SSL context that checks certificates."""
        return client_context(*self._tls.values())

    def open(self, address: Address) -> Call:
        """Open a call to a server.

        Raises:
            ConfigError: a token or certificate file cannot be read.
            ServerForkError: this process was forked while gRPC was running.
        """
        token, tls = self._secrets()
        return Call(address, tls if address.tls else {}, token, self.timeout)

    def _secrets(self) -> tuple[str | None, dict[str, Any]]:
        """Return the token and Flight's TLS arguments, read again each time, since such files are renewed."""
        token = self._token
        if self._token_file is not None:
            try:
                token = check_token(Path(self._token_file).read_text("ascii", "replace").strip())
            except OSError as error:
                raise ConfigError(f"token_file: cannot read {self._token_file}: {error.strerror}") from None
        return token, {key: read_pem(path, key) for key, path in self._tls.items() if path is not None}
