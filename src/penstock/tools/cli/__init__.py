"""The command ``penstock``: one file per command, listed in `penstock.tools.cli.app`.

No large module is imported before a command runs, so that ``penstock --help`` is fast. Ctrl-C ends the process without
a traceback once `main` runs, so this module imports nothing before that.
"""

from __future__ import annotations

# Like typing.TYPE_CHECKING, without the slow import of typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run this process's command line. Always raises `SystemExit`, or with ``--debug`` the error itself."""
    try:
        from penstock.tools.cli.interrupt import AtOnce, end_at_once

        with AtOnce():
            from penstock.tools.cli.app import main as run
        try:
            run()
        finally:
            # Ctrl-C in the interpreter's exit handlers would print a traceback.
            end_at_once()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
