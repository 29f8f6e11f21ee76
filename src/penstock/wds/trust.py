"""What runs code that comes with the data, and is refused until a program says that it trusts it.

    wds.allow("pipe")                                        for this program
    wds.WebDataset("pipe:cat a.tar", allow=("pipe",))        for one data set

``"pipe"``: addresses that begin with ``pipe:`` are run by a shell. ``"pickle"``: fields with the extensions pkl, pickle
and pyd are unpickled. ``"torch"``: pth fields are loaded with whatever objects they hold (without it, tensors alone).
What is allowed travels to worker processes with the pipeline. ``wds.utils.enforce_security = True`` refuses all of it,
and files of this machine as shards, whatever is allowed.
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
    """From now on these are allowed in this program.

    Args:
        kinds: of ``"pipe"``, ``"pickle"``, ``"torch"``.

    Raises:
        ConfigError: another name.
    """
    _allowed.update(checked(kinds))


def allowed(kind: str, extra: Collection[str] = ()) -> bool:
    """Whether something is allowed, by the program or by ``extra``, and not refused by the secure mode."""
    return not utils.enforce_security and (kind in _allowed or kind in extra)


def check_local(path: str) -> None:
    """Refuse a file of this machine in the secure mode.

    Raises:
        NotAllowedError: the secure mode is on.
    """
    if utils.enforce_security:
        raise refuse("file", path)


def checked(kinds: Collection[str]) -> frozenset[str]:
    """The names as a set. Raises ConfigError for one that is none of them."""
    found = frozenset((kinds,) if isinstance(kinds, str) else kinds)
    if unknown := sorted(found - set(KINDS)):
        raise ConfigError(f"cannot allow {', '.join(map(repr, unknown))}: use some of {', '.join(KINDS)}")
    return found


def refuse(kind: str, what: str) -> NotAllowedError:
    """The error about something that is not allowed."""
    if utils.enforce_security:
        return NotAllowedError(
            f"{what}: this {_WHAT[kind]}, and is refused while penstock.wds.utils.enforce_security is True"
        )
    return NotAllowedError(
        f'{what}: this {_WHAT[kind]}, and is refused unless you trust it: call penstock.wds.trust("{kind}"), or give '
        f'allow=("{kind}",)'
    )
