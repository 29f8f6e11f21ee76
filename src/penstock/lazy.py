"""`names`: public names of a package, imported at first use, so that workers load only the modules they need."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without the slow import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

__all__ = ["names"]


def names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package.

    Args:
        package: its ``__name__``.
        homes: maps each name to the module that defines it: in the package, or with a leading dot, beside it.
    """

    def getattr_(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{home}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return getattr_, dir_
