"""All tests: some in a process of their own, beside the others.

    python tests/run.py -n 2 -k manifest                arguments are pytest's

Ray's gRPC stays in a process that was connected to a cluster, and forks of it hang; its tests wait most of the time.
Lightning, transformers, datasets and servers of object stores make a process so large that each fork takes longer.
The others' processes take neighbouring tests, whose fixtures they share, and help each other at the end. Those that
fork most go first, in processes of their own: a fork copies the page tables of all that was imported and kept so far.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent
APART = {"Ray": [TESTS / "ray"], "Large libraries": [TESTS / "integration", TESTS / "tables", TESTS / "storage"]}
FORKING = [TESTS / "loader", TESTS / "faults", TESTS / "datasets"]
PATIENCE = 700  # seconds: longer than pytest's limit for one test
NONE_SELECTED = 5  # pytest's exit code
PYTEST = [sys.executable, "-m", "pytest"]


class Apart:
    """Tests in a process of their own, and what it prints."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self._name = name
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [*PYTEST, *map(str, APART[name]), *arguments, "-n", "0"]
        self._process = subprocess.Popen(command, stdout=self._output)

    def code(self) -> int:
        """Its exit code, when it is done. One that hangs where pytest-timeout cannot reach it is ended."""
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            print(f"{self._name}: nothing more for {PATIENCE} s after the others, ended", file=self._output)
            return 1

    def end(self) -> None:
        """Wait for no more, and print what it has printed."""
        self._process.terminate()
        self._process.wait()
        self._output.seek(0)
        with self._output as output:
            print(f"{self._name}:\n{output.read()}")


def main(arguments: list[str]) -> int:
    """Run them; the exit code."""
    # As in conftest.py: else Ctrl-C would end the tests of a job in the background, and not this program.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    apart = [Apart(name, arguments) for name in APART]
    try:
        share = ["--dist", "worksteal"] if "-n" in arguments else []
        ignored = [f"--ignore={folder}" for folders in (FORKING, *APART.values()) for folder in folders]
        parts = [[str(folder) for folder in FORKING], ignored]
        codes = [subprocess.run([*PYTEST, *part, *share, *arguments], check=False).returncode for part in parts]
        codes += [one.code() for one in apart]
    finally:
        for one in apart:
            one.end()
    failed = [code for code in codes if code not in (0, NONE_SELECTED)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
