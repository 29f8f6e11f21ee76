"""Names of packages: `names` imports them at first use, so that workers load only the modules they need. `missing` is
the error for a name that a package does not have.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # like typing.TYPE_CHECKING, without the slow import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

__all__ = ["missing", "names"]


def names(package: str, modules: Mapping[str, list[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package.

    Args:
        package: its ``__name__``.
        modules: the names that each module defines: in the package, or with a leading dot, beside it.
    """
    homes: dict[str, str] = {}
    for module, defined in modules.items():
        homes |= dict.fromkeys(defined, module)

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


def missing(error: AttributeError) -> Exception:
    """Return the error that a package's ``__getattr__`` raises for a name that it does not have.

    ``from package import name`` replaces an AttributeError by an error of its own. So there it is an ImportError with
    the same message.
    """
    is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    return ImportError(*error.args) if is_import else error
