"""`Servers`: choose one of several servers; if it fails, try the next, then wait and retry.

The wait doubles, up to a second, and is random, so that a thousand clients do not reconnect at once. A lasting error (a
wrong token, other data) is raised when every server has returned one.
"""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.errors import ConfigError, PenstockError, ServerError, ServerForkError, ServerUnavailableError
from penstock.server.address import Address
from penstock.server.connections import FAILURES, Released
from penstock.server.failures import explain

__all__ = ["Servers"]

T = TypeVar("T")
_FIRST_WAIT = 0.05
_LONGEST_WAIT = 1.0
_chance = secrets.SystemRandom()  # does not change the state of the program's generators


class Servers:
    """Interchangeable servers. Thread-safe.

    Args:
        addresses: their addresses; the first one to ask is chosen at random.
        tls: returns the SSL context, to find out why TLS fails.
    """

    def __init__(self, addresses: Sequence[Address], tls: Callable[[], ssl.SSLContext]) -> None:
        self._addresses, self._tls = addresses, tls
        self._at = secrets.randbelow(len(addresses))

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
            address = (asked and asked()) or self._addresses[at]
            try:
                return attempt(address)
            except Released:
                pass
            except (ServerForkError, ConfigError):
                raise
            except (*FAILURES, PenstockError) as error:
                failures[address] = self.explain(error, address)
                if self._addresses[at] == address and self._at == at:
                    self._at = (at + 1) % len(self._addresses)
                if len(failures) == len(self._addresses) and not any(map(_passes, failures.values())):
                    raise _together(list(failures.values())) from None
            attempts += 1
            if attempts > 1 and time.monotonic() >= until:
                raise _together(list(failures.values()) or [ServerUnavailableError("the connection was closed")])
            if (rounds := attempts - len(self._addresses)) >= 0:  # every server is tried before waiting
                time.sleep(_chance.uniform(0.0, min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(rounds, 10))))

    def explain(self, error: BaseException, address: Address) -> PenstockError:
        """Return Penstock's error for a failure."""
        if isinstance(error, PenstockError):
            return error
        return explain(error, address, self._tls() if address.tls else None)


def _passes(error: PenstockError) -> bool:
    return isinstance(error, ServerUnavailableError)


def _together(errors: list[PenstockError]) -> PenstockError:
    """Return one error for the errors of all servers."""
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    text = "; ".join(map(str, errors))
    if len(kinds) == 1:
        return kinds.pop()(text)
    return ServerUnavailableError(text) if any(map(_passes, errors)) else ServerError(text)
