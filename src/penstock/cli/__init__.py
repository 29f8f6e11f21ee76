"""The command ``penstock``: one file per command, put together in `penstock.cli.app`.

Nothing heavy is imported before a command runs, so that ``penstock --help`` answers at once.
"""

from penstock.cli.app import main

__all__ = ["main"]
