"""The command line: its commands, ``--version``, and how it ends.

Exit codes of all commands: 0 done; 1 the work failed, or a check found something; 2 a command line that makes no sense;
130 Ctrl-C; 141 nobody reads the output any more (``| head``). An error is one line on stderr, with ``--debug`` a
traceback.
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

_BROKEN_PIPE = 141  # 128 and the number of SIGPIPE, as a shell has it
_EXAMPLES = """\
Examples:
  penstock doctor /data               what is missing here, what to do about it
  penstock manifest check train.txt   what is wrong with a list of samples
  penstock profile train.py:loader    what limits a loader, what to set

penstock COMMAND --help has the options and an example of each command."""


class _Penstock(Catalog):
    catalog = {
        "doctor": Entry(
            "penstock.tools.cli.doctor",
            "Start here",
            "Look at this machine: what is missing, what to do.",
            "penstock doctor /data/imagenet ~/scratch",
        ),
        "demo": Entry(
            "penstock.tools.cli.demo",
            "Start here",
            "Train on real images, be killed twice, lose nothing.",
            "penstock demo --quick",
        ),
        "manifest": Entry("penstock.tools.cli.manifest", "Data", "Look at, index and check lists of samples."),
        "clips": Entry("penstock.tools.cli.clips", "Data", "Prepare files of video or sound for training on clips."),
        "images": Entry("penstock.tools.cli.images", "Data", "Prepare the images that a manifest names."),
        "shards": Entry("penstock.tools.cli.shards", "Data", "Index, look at, check, pack, cut and join tar shards."),
        "tokenize": Entry(
            "penstock.tools.cli.tokenize",
            "Data",
            "Tokenize text into files, by all cores or a cluster.",
            "penstock tokenize 'part-*.parquet' --tokenizer tokenizer.json --out tokens",
        ),
        "lengths": Entry(
            "penstock.tools.cli.lengths",
            "Data",
            "Count the lengths of documents, for packing.",
            "penstock lengths 'part-*.parquet' --tokenizer tokenizer.json --out lengths.npy",
        ),
        "cache": Entry("penstock.tools.cli.cache", "Data", "Look after local copies of remote objects."),
        "profile": Entry(
            "penstock.tools.cli.profile",
            "Speed and order",
            "What limits a loader, and what this machine wants.",
            "penstock profile train.py:loader --step-ms 120 --html report.html",
        ),
        "plan": Entry(
            "penstock.tools.cli.plan",
            "Speed and order",
            "What a run will need, from a few numbers.",
            "penstock plan --samples 1.28M --bytes 110kB --ranks 64 --step-ms 200",
        ),
        "ledger": Entry(
            "penstock.tools.cli.ledger",
            "Speed and order",
            "Which rows were in a step of a job, and in which steps a row came.",
            "penstock ledger train.py:loader --state run.pt --step 12345",
        ),
        "shuffle-quality": Entry(
            "penstock.tools.cli.shuffle_quality",
            "Speed and order",
            "How well orders mix a manifest, and what they read.",
            "penstock shuffle-quality train.txt --ranks 8 --buffer 10000",
        ),
        "bench": Entry(
            "penstock.tools.cli.bench", "Speed and order", "Measure with your own files which library is best."
        ),
        "serve": Entry(
            "penstock.tools.cli.serve",
            "Services",
            "Serve manifests to training jobs, over Arrow Flight.",
            "penstock serve train.txt val.txt --port 8815 --metrics-port 9400",
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


# Typer's own options for completion have no value by default, and to find that out it would import pydantic.
@app.callback()
def _options(
    *,
    version: Annotated[bool, _eager("--version", _print_version, "Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    install_completion: Annotated[
        bool, _eager("--install-completion", _install_completion, "Complete words with TAB: bash, zsh, fish.")
    ] = False,
    show_completion: Annotated[
        bool, _eager("--show-completion", _show_completion, "Print what that would install.")
    ] = False,
) -> None:
    _Settings.debug = debug


def main() -> NoReturn:
    """Run the command line of this process; always leaves by `SystemExit`, or by the error with ``--debug``."""
    completion: Any = typer.completion
    completion.completion_init()  # for the shells that typer knows
    try:
        try:
            app(prog_name="penstock")
        except SystemExit as end:
            for reason in _reasons(end):  # typer and rich leave with exit code 1 for some of these
                if isinstance(reason, BrokenPipeError):
                    raise reason from None
                if isinstance(reason, KeyboardInterrupt):
                    sys.exit(INTERRUPTED)
            if sys.stdout is not None:  # as with >&-
                sys.stdout.flush()
            raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed
        sys.exit(_BROKEN_PIPE)
    except (PenstockError, OSError) as error:
        if _Settings.debug:
            raise
        typer.secho(f"error: {error if isinstance(error, PenstockError) else _told(error)}", fg="red", err=True)
        sys.exit(1)
    sys.exit(0)  # typer has left before


def _reasons(error: BaseException | None) -> Iterator[BaseException]:
    """What an exception was raised for, from the last to the first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _told(error: OSError) -> str:
    """A failure of the system as people say it."""
    reason = error.strerror or f"{type(error).__name__}: {error}"
    return reason if error.filename is None else f"{os.fsdecode(error.filename)}: {reason}"
