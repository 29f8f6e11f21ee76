"""The command line: its commands, ``--version``, and what an error looks like.

A `PenstockError` is one line on stderr and exit code 1, with ``--debug`` a traceback; Ctrl-C is exit code 130; a
command line that makes no sense is exit code 2.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli import bench, cache, demo, doctor, manifest, serve, shards
from penstock.errors import PenstockError

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    help="Data loading for PyTorch at any scale: constant memory, reproducible order, exact resume.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench", help="Measure on this machine, with your own files.")
app.add_typer(cache.app, name="cache", help="Look after local copies of remote objects.")
app.add_typer(manifest.app, name="manifest", help="Look at, index and check lists of samples.")
app.add_typer(shards.app, name="shards", help="Index, look at, check, pack, cut and join tar shards.")
app.command("serve", epilog="Example:  penstock serve train.txt val.txt --port 8815 --metrics-port 9400")(serve.command)
app.command("demo")(demo.command)
app.command("doctor")(doctor.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"penstock {version('penstock')}")
        raise typer.Exit


class _Settings:
    debug = False


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    _Settings.debug = debug


def main() -> None:
    """Run the command line of this process; always leaves by `SystemExit`, or by the error with ``--debug``."""
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        if _Settings.debug:
            raise
        from rich.console import Console

        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
