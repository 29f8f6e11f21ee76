"""`Servers`: the interchangeable servers of a client. Opens calls, and if a server fails, tries the next, then waits.

The wait doubles, up to a second, and is random, so that a thousand clients do not reconnect at once. A lasting error (a
wrong token, other data) is raised when every server has returned one.

For most failures gRPC only reports that a server is "unavailable". If the reason may be lasting (TLS on one side only,
a rejected certificate), a connection of our own finds out.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import (
    ConfigError,
    PenstockError,
    ServerAuthError,
    ServerError,
    ServerForkError,
    ServerTLSError,
    ServerUnavailableError,
)
from penstock.server.address import Address, parse_address
from penstock.server.auth import FilePath, check_token, client_context, read_pem
from penstock.server.connections import FAILURES, Call, Released
from penstock.server.protocol import decode_error

__all__ = ["Access", "Servers"]

T = TypeVar("T")
_FIRST_WAIT = 0.05
_LONGEST_WAIT = 1.0
_PROBE_TIMEOUT_S = 2.0
_chance = secrets.SystemRandom()  # does not change the state of the program's generators


class Access(TypedDict, total=False):
    """The options of `penstock.server.Client` that say how to connect."""

    token: str | None
    token_file: FilePath | None
    timeout: float
    tls_roots: FilePath | None
    tls_cert: FilePath | None
    tls_key: FilePath | None


class Servers:
    """Interchangeable servers. Thread-safe; a pickled copy begins with another server.

    Args: as for `penstock.server.Client`.

    Raises:
        ConfigError: invalid arguments, or a file that cannot be read.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: str | None = None,
        token_file: FilePath | None = None,
        timeout: float = 10.0,
        tls_roots: FilePath | None = None,
        tls_cert: FilePath | None = None,
        tls_key: FilePath | None = None,
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
        client_context(*self._tls.values())
        self._at = secrets.randbelow(len(self.addresses))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _at=secrets.randbelow(len(state["addresses"])))

    def __repr__(self) -> str:
        return ", ".join(map(str, self.addresses))

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

    def insist(
        self, attempt: Callable[[Address], T], patience: float, asked: Callable[[], Address | None] | None = None
    ) -> T:
        """Return the result of ``attempt(address)`` for one of the servers.

        Args:
            attempt: may raise `FAILURES`, `PenstockError`, or `Released` to be called again.
            patience: seconds after which no more attempts are made, except for a second one.
            asked: returns the server that the attempt will use regardless of its argument, if any.

        Raises:
            PenstockError: the errors of the servers.
        """
        failures: dict[Address, PenstockError] = {}
        until, attempts = time.monotonic() + patience, 0
        while True:
            at = self._at
            address = (asked and asked()) or self.addresses[at]
            try:
                return attempt(address)
            except Released:
                pass
            except (ServerForkError, ConfigError):
                raise
            except (*FAILURES, PenstockError) as error:
                failures[address] = self.explain(error, address)
                if self.addresses[at] == address and self._at == at:
                    self._at = (at + 1) % len(self.addresses)
                lasting = [each for each in failures.values() if not isinstance(each, ServerUnavailableError)]
                if len(lasting) == len(self.addresses):
                    raise _one_error(lasting) from None
            attempts += 1
            if attempts > 1 and time.monotonic() >= until:
                raise _one_error(list(failures.values()) or [ServerUnavailableError("the connection was closed")])
            if (rounds := attempts - len(self.addresses)) >= 0:  # every server is tried before waiting
                time.sleep(_chance.uniform(0.0, min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(rounds, 10))))

    def explain(self, error: BaseException, address: Address) -> PenstockError:
        """Return Penstock's error for a failure of a call; the message names the server."""
        if isinstance(error, PenstockError):
            return error
        sent = decode_error(getattr(error, "extra_info", None) or b"")
        if sent is not None:
            return type(sent)(f"{address}: {sent}")
        text = str(error).partition(". gRPC client debug context")[0].partition(". Detail: ")[0]
        text = text.removeprefix("Flight returned unavailable error, with message: ")
        if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
            return ServerAuthError(f"{address} does not let this client in: {text}")
        if isinstance(error, flight.FlightTimedOutError):
            return ServerUnavailableError(f"{address} did not answer in time")
        if isinstance(error, flight.FlightUnavailableError | flight.FlightCancelledError | pa.ArrowCancelled | OSError):
            fault = _tls_fault(address, client_context(*self._tls.values()) if address.tls else None)
            return fault or ServerUnavailableError(f"{address} is not available: {text}")
        return ServerError(f"{address} failed: {text}")


def _one_error(errors: list[PenstockError]) -> PenstockError:
    """Return one error for the errors of all servers."""
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    text = "; ".join(map(str, errors))
    if len(kinds) == 1:
        return kinds.pop()(text)
    passes = any(isinstance(error, ServerUnavailableError) for error in errors)
    return ServerUnavailableError(text) if passes else ServerError(text)


def _tls_fault(address: Address, tls: ssl.SSLContext | None) -> ServerTLSError | None:
    """Return why TLS fails with a client's context, None without TLS; None if TLS is not the reason."""
    try:
        with socket.create_connection((address.host, address.port), _PROBE_TIMEOUT_S) as plain:
            if tls is not None:
                return _handshake_fault(plain, address, tls)
            anyone = ssl.create_default_context()
            anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
            anyone.set_alpn_protocols(["h2"])
            if _handshake_fault(plain, address, anyone) is None:
                return ServerTLSError(
                    f"{address} speaks TLS: use grpc+tls://, with tls_roots= for a certificate of your own"
                )
    except OSError:
        pass  # no server answers: TLS is not the reason
    return None


def _handshake_fault(plain: socket.socket, address: Address, context: ssl.SSLContext) -> ServerTLSError | None:
    refused = ServerTLSError(
        f"{address} hangs up on this client: it wants a certificate (tls_cert=, tls_key=) of an authority that it knows"
    )
    try:
        with context.wrap_socket(plain, server_hostname=address.host) as secure:
            # A server that accepts the client sends first. Others disconnect, some with a reason.
            return None if secure.recv(1) or context.verify_mode == ssl.CERT_NONE else refused
    except ssl.SSLCertVerificationError as error:
        return ServerTLSError(f"the certificate of {address} is not accepted: {error.verify_message}")
    except ssl.SSLError as error:
        reason = str(error.reason)
        if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"):
            return ServerTLSError(f"{address} does not speak TLS: use grpc:// there, or start it with a certificate")
        if "ALERT" in reason and ("CERT" in reason or "UNKNOWN_CA" in reason):
            return refused
        return ServerTLSError(f"TLS with {address} fails: {error.reason or error}")
