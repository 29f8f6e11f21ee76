"""The command line: commands, global options and exit codes.

Exit codes of all commands: 0 success; 1 failure, or a check found problems; 2 invalid command line; 130 Ctrl-C; 141 the
reader of the output has exited (``| head``). An error is printed as one line on stderr; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import typer
import typer.completion

from penstock.errors import PenstockError
from penstock.tools.cli.interrupt import INTERRUPTED
from penstock.tools.cli.layout import App, Catalog, Entry

__all__ = ["app", "main"]

_BROKEN_PIPE = 141  # 128 + the number of SIGPIPE, as in shells
_EXAMPLES = """\
Examples:
  penstock doctor /data               check this machine and its packages
  penstock manifest check train.txt   find the errors in a list of samples
  penstock profile train.py:loader    find what limits a loader

penstock COMMAND --help shows the options of a command, with an example."""


class _Penstock(Catalog):
    catalog = {
        "doctor": Entry(
            "penstock.tools.cli.doctor",
            "Start here",
            "Check this machine: problems, and how to solve them.",
            "penstock doctor /data/imagenet ~/scratch",
        ),
        "demo": Entry(
            "penstock.tools.cli.demo",
            "Start here",
            "Train on real images through two kills, and lose no sample.",
            "penstock demo --quick",
        ),
        "manifest": Entry("penstock.tools.cli.manifest", "Data", "Show, index and check lists of samples."),
        "clips": Entry("penstock.tools.cli.clips", "Data", "Index video or audio files for training on clips."),
        "images": Entry("penstock.tools.cli.images", "Data", "Index the images of a manifest for fast crops."),
        "shards": Entry("penstock.tools.cli.shards", "Data", "Index, show, check and write tar shards."),
        "tokenize": Entry(
            "penstock.tools.cli.tokenize",
            "Data",
            "Tokenize text into files, on all cores or a cluster.",
            "penstock tokenize 'part-*.parquet' --tokenizer tokenizer.json --out tokens",
        ),
        "lengths": Entry(
            "penstock.tools.cli.lengths",
            "Data",
            "Count the lengths of documents, for packing.",
            "penstock lengths 'part-*.parquet' --tokenizer tokenizer.json --out lengths.npy",
        ),
        "cache": Entry("penstock.tools.cli.cache", "Data", "Show, check and clear local copies of remote objects."),
        "profile": Entry(
            "penstock.tools.cli.profile",
            "Speed and order",
            "Find what limits a loader, and its best setting here.",
            "penstock profile train.py:loader --step-ms 120 --html report.html",
        ),
        "plan": Entry(
            "penstock.tools.cli.plan",
            "Speed and order",
            "Estimate the needs of a run from a few numbers.",
            "penstock plan --samples 1.28M --bytes 110kB --ranks 64 --step-ms 200",
        ),
        "ledger": Entry(
            "penstock.tools.cli.ledger",
            "Speed and order",
            "List the rows in a step of a job, or the steps with a row.",
            "penstock ledger train.py:loader --state run.pt --step 12345",
        ),
        "shuffle-quality": Entry(
            "penstock.tools.cli.shuffle_quality",
            "Speed and order",
            "Measure how well orders mix a manifest.",
            "penstock shuffle-quality train.txt --ranks 8 --buffer 10000",
        ),
        "bench": Entry("penstock.tools.cli.bench", "Speed and order", "Compare libraries that read clips of videos."),
        "serve": Entry(
            "penstock.tools.cli.serve",
            "Services",
            "Serve manifests to training jobs over Arrow Flight.",
            "penstock serve train.txt val.txt --metrics-port 9400",
        ),
    }


app = App(
    name="penstock",
    help="Data loading for PyTorch at any scale: constant memory, reproducible order, exact resume.",
    cls=_Penstock,
    epilog=_EXAMPLES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        print(f"penstock {__version__}")
        raise typer.Exit


def _install_completion(ctx: typer.Context, param: typer.CallbackParam, wanted: bool) -> None:
    if wanted:
        typer.completion.install_callback(ctx, param, wanted)


def _show_completion(ctx: typer.Context, param: typer.CallbackParam, wanted: bool) -> None:
    if wanted:
        typer.completion.show_callback(ctx, param, wanted)


class _Settings:
    debug = False


def _eager(name: str, callback: Callable[..., None], help_text: str) -> Any:
    return typer.Option(name, callback=callback, is_eager=True, help=help_text)


# Typer's own options for completion have no default value, which makes typer import pydantic.
@app.callback()
def _options(
    *,
    version: Annotated[bool, _eager("--version", _print_version, "Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    install_completion: Annotated[
        bool, _eager("--install-completion", _install_completion, "Install completion with TAB for bash, zsh or fish.")
    ] = False,
    show_completion: Annotated[
        bool, _eager("--show-completion", _show_completion, "Print the completion script.")
    ] = False,
) -> None:
    _Settings.debug = debug


def main() -> NoReturn:
    """Run this process's command line. Always raises `SystemExit`, or with ``--debug`` the error itself."""
    completion: Any = typer.completion
    completion.completion_init()
    try:
        try:
            app(prog_name="penstock")
        except SystemExit as end:
            for reason in _reasons(end):  # typer and rich exit with code 1 for some of these
                if isinstance(reason, BrokenPipeError):
                    raise reason from None
                if isinstance(reason, KeyboardInterrupt):
                    sys.exit(INTERRUPTED)
            if sys.stdout is not None:  # None after >&-
                sys.stdout.flush()
            raise
    except BrokenPipeError:
        # The interpreter flushes the rest of the output when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)
    except (PenstockError, OSError) as error:
        if _Settings.debug:
            raise
        typer.secho(f"error: {error if isinstance(error, PenstockError) else _told(error)}", fg="red", err=True)
        sys.exit(1)
    sys.exit(0)  # only for the type checker: typer has exited before


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _told(error: OSError) -> str:
    """Return the message of a system error, with the file's name."""
    reason = error.strerror or f"{type(error).__name__}: {error}"
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"
