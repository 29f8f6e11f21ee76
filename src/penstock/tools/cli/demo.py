"""``penstock demo``: a training run on real images that is killed twice and loses no sample.

The demo itself is ``examples/demo`` of a checkout, with its images. An installed package has neither, and finds them by
``--data``. This module defines the command's options.
"""

from __future__ import annotations

import importlib
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from penstock.errors import ConfigError

__all__ = ["command"]

_ARCHIVE = "cifar10-small.tar.xz"


def command(
    data: Annotated[
        Path | None,
        typer.Option(help="The folder examples/data of a checkout, if it is not found automatically."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder of images, logs and the plot.")] = Path("demo-output"),
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of each training run: 5, or 2 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use a fifth of the images and one seed.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, and all else to standard error.")
    ] = False,
) -> None:
    """Train on real images, with two kills and resumes on other numbers of ranks, and count the samples."""
    from rich.console import Console

    from penstock.tools.cli.manifest_options import print_json

    started = time.perf_counter()
    archive, program, folder = _files_in(_data_of_checkout() if data is None else data)
    demo = _load(folder)
    console = Console(highlight=False, stderr=as_json)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        report = demo.run(console, demo.plan_for(epochs, quick=quick), archive, program, out)
    finally:
        signal.signal(signal.SIGTERM, before)
        console.show_cursor()
    seconds = time.perf_counter() - started
    console.print(f"The demo took {seconds:.0f} s.")
    if as_json:
        print_json({**report, "seconds": seconds})
    if not report["ok"]:
        raise typer.Exit(1)


def _terminated(number: int, frame: Any) -> NoReturn:
    # SystemExit leaves every `with` block, so that no training process is left running.
    sys.exit(128 + number)


def _data_of_checkout() -> Path:
    """Return the folder of the images in the checkout that this file is in."""
    data = Path(__file__).resolve().parents[4] / "examples" / "data"
    if not (data / _ARCHIVE).is_file():
        raise ConfigError(
            "the demo and its images are in a checkout of Penstock, not in an installed package: run `make demo` in a "
            "checkout, or set --data to its folder examples/data"
        )
    return data


def _files_in(data: Path) -> tuple[Path, Path, Path]:
    """Return the archive of images, the training program, and the folder of the demo."""
    examples = data.resolve().parent
    archive, program, folder = data / _ARCHIVE, examples / "train_ddp.py", examples / "demo"
    for path in (archive, program, folder / "demo.py"):
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist: set --data to the folder examples/data of a checkout of Penstock"
            )
    return archive, program, folder


def _load(folder: Path) -> Any:
    """Import the demo. Its files import each other as top-level modules, so add their folder to sys.path."""
    sys.path.insert(0, str(folder))
    return importlib.import_module("demo")
