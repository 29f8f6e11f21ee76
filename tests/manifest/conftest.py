"""Fixtures of the manifest's tests: files with chosen bytes, and programs in processes of their own."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from busy_support import HANG

_numbers = itertools.count()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write(content)`` makes a new file, an hour old; ``name=`` names it."""

    def function(content: bytes | str, name: str | None = None, suffix: str = ".txt", age: float = 3600.0) -> Path:
        path = tmp_path / (name if name is not None else f"source{next(_numbers)}{suffix}")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        make_older(path, age)
        return path

    return function


def make_older(path: Path, age: float) -> None:
    """Set a file's times to ``age`` seconds before they were, so that nobody has to wait for the clock to move on."""
    status = path.stat()
    then = status.st_mtime_ns - int(age * 1e9)
    os.utime(path, ns=(then, then))


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_python(program, *arguments)`` runs a program in a new interpreter and returns what it printed."""

    def function(program: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
        if check and result.returncode:
            raise AssertionError(f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result

    return function
