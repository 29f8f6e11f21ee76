"""Translate failed calls: from the texts of Flight, gRPC and TLS to the types of `penstock.errors`.

For most failures gRPC only reports that a server is "unavailable". If the reason may be lasting (TLS on one side only,
a rejected certificate), `explain` opens its own connection to find out.
"""

from __future__ import annotations

import socket
import ssl
from os import PathLike

import pyarrow as pa
import pyarrow.flight as flight

from penstock.errors import (
    ConfigError,
    PenstockError,
    ServerAuthError,
    ServerError,
    ServerTLSError,
    ServerUnavailableError,
)
from penstock.server.address import Address
from penstock.server.auth import no_password
from penstock.server.protocol import decode_error

__all__ = ["client_context", "explain"]

_PROBE_TIMEOUT_S = 2.0


def explain(error: BaseException, address: Address, tls: ssl.SSLContext | None) -> PenstockError:
    """Return Penstock's error for a failure; the message names the server.

    Args:
        error: the exception of Flight.
        address: the server.
        tls: the SSL context of the client, None without TLS.
    """
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
        return _look(address, tls) or ServerUnavailableError(f"{address} is not available: {text}")
    return ServerError(f"{address} failed: {text}")


def _look(address: Address, tls: ssl.SSLContext | None) -> ServerTLSError | None:
    """Return why TLS fails; None if TLS is not the reason."""
    try:
        with socket.create_connection((address.host, address.port), _PROBE_TIMEOUT_S) as plain:
            if tls is not None:
                return _handshake(plain, address, tls)
            anyone = ssl.create_default_context()
            anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
            anyone.set_alpn_protocols(["h2"])
            if _handshake(plain, address, anyone) is None:
                return ServerTLSError(
                    f"{address} speaks TLS: use grpc+tls://, with tls_roots= for a certificate of your own"
                )
    except OSError:
        pass  # no server answers: TLS is not the reason
    return None


def _handshake(plain: socket.socket, address: Address, context: ssl.SSLContext) -> ServerTLSError | None:
    try:
        with context.wrap_socket(plain, server_hostname=address.host) as secure:
            # A server that accepts the client sends first. Others disconnect, some with a reason.
            if secure.recv(1) or context.verify_mode == ssl.CERT_NONE:
                return None
            return _not_this_client(address)
    except ssl.SSLCertVerificationError as error:
        return ServerTLSError(f"the certificate of {address} is not accepted: {error.verify_message}")
    except ssl.SSLError as error:
        reason = str(error.reason)
        if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"):
            return ServerTLSError(f"{address} does not speak TLS: use grpc:// there, or start it with a certificate")
        if "ALERT" in reason and ("CERT" in reason or "UNKNOWN_CA" in reason):
            return _not_this_client(address)
        return ServerTLSError(f"TLS with {address} fails: {error.reason or error}")


def _not_this_client(address: Address) -> ServerTLSError:
    return ServerTLSError(
        f"{address} hangs up on this client: it wants a certificate (tls_cert=, tls_key=) of an authority that it knows"
    )


def client_context(roots: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return the SSL context of a client with these files.

    Raises:
        ConfigError: the files do not match, or are damaged.
    """
    try:
        context = ssl.create_default_context(cafile=roots)
        context.set_alpn_protocols(["h2"])
        if cert is not None:
            context.load_cert_chain(cert, key, password=no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the certificates cannot be used ({roots}, {cert}, {key}): {error}") from None
    return context


Path = str | PathLike[str]
