"""Fetch the programs that the tests of this folder run: repositories at their commits, and libraries they import.

    python tests/programs/get.py FOLDER
    PENSTOCK_TEST_PROGRAMS=FOLDER PENSTOCK_TEST_FULL=1 python -m pytest tests/programs

Of a repository only the parts that are needed are fetched: 20 MB in all, and 50 MB of libraries.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from published import PROGRAMS, Program

LIBRARIES = [
    *("timm", "ftfy", "wcwidth", "webdataset==0.2.86", "braceexpand", "torchdata", "spmd_types"),
    *("tyro", "docstring-parser", "typeguard", "shtab"),
]


def clone(program: Program, folder: Path, source: str) -> None:
    """Fetch one commit of a repository, without its history, and check out the parts that are needed."""
    folder.mkdir(parents=True)
    for command in (
        ["init", "--quiet"],
        ["sparse-checkout", "set", "--no-cone", *(f"/{path}" for path in program.paths)],
        ["fetch", "--quiet", "--depth=1", "--filter=blob:none", f"{source}/{program.repository}", program.commit],
        ["-c", "advice.detachedHead=false", "checkout", "--quiet", "FETCH_HEAD"],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


def install(folder: Path) -> None:
    """Install the libraries, and the torchvision that belongs to this torch; what these need is in our environment."""
    major, minor = map(int, torch.__version__.split(".")[:2])
    assert major == 2, "which torchvision belongs to this torch?"
    libraries = [f"torchvision==0.{minor + 15}.*", *LIBRARIES]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *libraries], check=True)


def main() -> None:
    """Fetch what is not there."""
    parser = argparse.ArgumentParser(description="Fetch the programs that tests/programs runs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default="https://github.com", help="where the repositories are")
    options = parser.parse_args()
    for program in PROGRAMS.values():
        if not (options.folder / program.name).exists():
            clone(program, options.folder / program.name, options.source)
    if not (options.folder / "packages").exists():
        install(options.folder / "packages")


if __name__ == "__main__":
    main()
