"""Permissions for features that run code from the data, refused unless the program allows them.

    wds.allow("pipe")                                        for this program
    wds.WebDataset("pipe:cat a.tar", allow=("pipe",))        for one dataset

``"pipe"``: a shell runs addresses that begin with ``pipe:``. ``"pickle"``: fields with the extensions pkl, pickle and
pyd are unpickled. ``"torch"``: pth fields may hold any object (without it, tensors only). Permissions are passed to
worker processes with the pipeline. ``wds.utils.enforce_security = True`` refuses all three, and local files as shards,
whatever is allowed.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.errors import ConfigError, NotAllowedError
from penstock.wds import utils

__all__ = ["KINDS", "allow", "allowed", "check_local", "checked", "refuse"]

KINDS = ("pipe", "pickle", "torch")

_WHAT = {
    "pipe": "runs a command by a shell",
    "pickle": "unpickles data, which runs whatever code it names",
    "torch": "loads objects other than tensors, which runs whatever code they name",
    "file": "opens a file of this machine",
}

_allowed: set[str] = set()


def allow(*kinds: str) -> None:
    """Allow features in this program from now on.

    Args:
        kinds: ``"pipe"``, ``"pickle"``, ``"torch"``.

    Raises:
        ConfigError: unknown name.
    """
    _allowed.update(checked(kinds))


def allowed(kind: str, extra: Collection[str] = ()) -> bool:
    """Return whether the program or ``extra`` allows a feature and secure mode does not refuse it."""
    return not utils.enforce_security and (kind in _allowed or kind in extra)


def check_local(path: str) -> None:
    """Refuse a local file in secure mode.

    Raises:
        NotAllowedError: secure mode is on.
    """
    if utils.enforce_security:
        raise refuse("file", path)


def checked(kinds: Collection[str]) -> frozenset[str]:
    """Return the names as a set. Raises ConfigError for an unknown name."""
    found = frozenset((kinds,) if isinstance(kinds, str) else kinds)
    if unknown := sorted(found - set(KINDS)):
        raise ConfigError(f"cannot allow {', '.join(map(repr, unknown))}: use some of {', '.join(KINDS)}")
    return found


def refuse(kind: str, what: str) -> NotAllowedError:
    """Return the error for a feature that is not allowed."""
    if utils.enforce_security:
        return NotAllowedError(
            f"{what}: this {_WHAT[kind]}, and is refused while penstock.wds.utils.enforce_security is True"
        )
    return NotAllowedError(
        f'{what}: this {_WHAT[kind]}, and is refused unless you trust it: call penstock.wds.allow("{kind}"), or give '
        f'allow=("{kind}",)'
    )
