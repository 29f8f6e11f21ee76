"""Commands as users run them, and the programs that they name."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from typer.testing import CliRunner

from penstock.tools.cli.app import app

_NUMBERS = itertools.count()


def said(*arguments: object, code: int = 0) -> str:
    """Return what a command prints, with single spaces, if it ends with this exit code; what it raises is raised."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return re.sub(r"[ \t]+", " ", result.stdout)


def refusal(*arguments: object) -> str:
    """Return why a command fails, in one line."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code
    return re.sub(r"[\s│]+", " ", f"{result.output} {result.exception}")


def write_program(folder: Path, text: str) -> str:
    """Write a program into a folder, and return the name of its file."""
    # A process imports a module of each name once.
    name = f"program_{next(_NUMBERS)}.py"
    (folder / name).write_text(text)
    return name
