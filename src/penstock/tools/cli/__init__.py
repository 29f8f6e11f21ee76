"""The command ``penstock``: one file per command, put together in `penstock.tools.cli.app`.

Nothing heavy is imported before a command runs, so that ``penstock --help`` answers at once. Ctrl-C ends the process
quietly from `main` on, so this module imports nothing outside of it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # that of typing, whose import takes a while
if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process; always leaves by `SystemExit`, or by the error with ``--debug``."""
    try:
        from penstock.tools.cli.interrupt import AtOnce, end_at_once

        with AtOnce():
            from penstock.tools.cli.app import main as run
        try:
            run()
        finally:
            end_at_once()  # what runs at the end of the interpreter would print a traceback
    except KeyboardInterrupt:
        raise SystemExit(130) from None
