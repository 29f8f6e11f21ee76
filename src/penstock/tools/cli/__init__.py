"""The command ``penstock``: a file for each command; `penstock.tools.cli.app` lists them.

No large module is imported before a command runs, so that ``penstock --help`` is fast. From `main` on, Ctrl-C ends the
process without a traceback, so this module imports nothing before.
"""

from __future__ import annotations

# Like typing.TYPE_CHECKING, without the slow import of typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process. It always raises `SystemExit`, or with ``--debug`` the error itself."""
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
