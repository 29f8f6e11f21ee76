"""What runs code that comes with the data, and is refused until a program says that it trusts it.

    wds.allow("pipe")                                        for this program
    wds.WebDataset("pipe:cat a.tar", allow=("pipe",))        for one data set

``"pipe"``: addresses that begin with ``pipe:`` are run by a shell. ``"pickle"``: fields with the extensions pkl, pickle
and pyd are unpickled. ``"torch"``: pth fields are loaded with whatever objects they hold (without it, tensors alone).
What is allowed travels to worker processes with the pipeline.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.errors import ConfigError, NotAllowedError

__all__ = ["KINDS", "allow", "allowed", "checked", "refuse"]

KINDS = ("pipe", "pickle", "torch")

_WHAT = {
    "pipe": "runs a command by a shell",
    "pickle": "unpickles data, which runs whatever code it names",
    "torch": "loads objects other than tensors, which runs whatever code they name",
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
    """Whether something is allowed, by the program or by ``extra``."""
    return kind in _allowed or kind in extra


def checked(kinds: Collection[str]) -> frozenset[str]:
    """The names as a set. Raises ConfigError for one that is none of them."""
    found = frozenset((kinds,) if isinstance(kinds, str) else kinds)
    if unknown := sorted(found - set(KINDS)):
        raise ConfigError(f"cannot allow {', '.join(map(repr, unknown))}: use some of {', '.join(KINDS)}")
    return found


def refuse(kind: str, what: str) -> NotAllowedError:
    """The error about something that is not allowed."""
    return NotAllowedError(
        f'{what}: this {_WHAT[kind]}, and is refused unless you trust it: call penstock.wds.allow("{kind}"), or give '
        f'allow=("{kind}",)'
    )
