"""`Servers`: which of several servers to ask, and what to do when one fails: ask the next, and then wait a little.

The wait doubles, up to a second, and is random, so that a thousand clients of a server that comes back do not come at
once. An error that will not go away by itself (a wrong token, other data) is raised once every server has given one.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable, Sequence
from typing import TypeVar

import tenacity

from penstock.errors import ConfigError, PenstockError, ServerError, ServerForkError, ServerUnavailableError
from penstock.server.address import Address
from penstock.server.connections import FAILURES, Released
from penstock.server.failures import explain

__all__ = ["Servers"]

T = TypeVar("T")
_FIRST_WAIT = 0.05
_LONGEST_WAIT = 1.0
_chance = secrets.SystemRandom()  # the program's own generators are not touched


class _Again(Exception):
    """Worth another try."""


class Servers:
    """Interchangeable servers. Safe in threads.

    Args:
        addresses: of the servers; the first to be asked is drawn by lot.
        tls: how the client checks certificates, for finding out why TLS fails.
    """

    def __init__(self, addresses: Sequence[Address], tls: Callable[[], ssl.SSLContext]) -> None:
        self._addresses, self._tls = addresses, tls
        self._at = secrets.randbelow(len(addresses))

    def insist(
        self, attempt: Callable[[Address], T], patience: float, asked: Callable[[], Address | None] | None = None
    ) -> T:
        """What ``attempt(address)`` gives for one of the servers.

        Args:
            attempt: may raise `FAILURES`, errors of ours, and `Released` for being called once more.
            patience: seconds until no more attempts are made.
            asked: the server that the attempt will go to whatever it is given, if there is such a one.

        Raises:
            PenstockError: what the servers did.
        """
        failures: dict[Address, PenstockError] = {}

        def once() -> T:
            at = self._at
            address = (asked and asked()) or self._addresses[at]
            try:
                return attempt(address)
            except Released:
                raise _Again from None
            except (ServerForkError, ConfigError):
                raise
            except (*FAILURES, PenstockError) as error:
                failures[address] = self.explain(error, address)
                if self._addresses[at] == address and self._at == at:
                    self._at = (at + 1) % len(self._addresses)
            if len(failures) == len(self._addresses) and not any(map(_passes, failures.values())):
                raise _together(list(failures.values()))
            raise _Again

        try:
            return once()  # in nearly all cases
        except _Again:
            pass
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Again),
            wait=self._wait,
            stop=tenacity.stop_after_delay(patience),
            reraise=True,
        )
        try:
            return retrying(once)
        except _Again:
            pass
        raise _together(list(failures.values())) if failures else ServerUnavailableError("the connection was closed")

    def explain(self, error: BaseException, address: Address) -> PenstockError:
        """The error of ours that it means."""
        if isinstance(error, PenstockError):
            return error
        return explain(error, address, self._tls() if address.tls else None)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        rounds = state.attempt_number - len(self._addresses)
        if rounds < 0:
            return 0.0  # first ask everybody
        return _chance.uniform(0.0, min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(rounds, 10)))


def _passes(error: PenstockError) -> bool:
    return isinstance(error, ServerUnavailableError)


def _together(errors: list[PenstockError]) -> PenstockError:
    """One error for those of all servers."""
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    text = "; ".join(map(str, errors))
    if len(kinds) == 1:
        return kinds.pop()(text)
    return ServerUnavailableError(text) if any(map(_passes, errors)) else ServerError(text)
