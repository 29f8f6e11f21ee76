"""All tests: some in a process of their own, beside the others.

    python tests/run.py -n 2 -k manifest                arguments are pytest's

Ray's gRPC stays in a process that was connected to a cluster, and forks of it hang; its tests wait most of the time.
Lightning, transformers, datasets and servers of object stores make a process so large that each fork takes longer.
The others' processes take neighbouring tests, whose fixtures they share, and help each other at the end. Those that
fork most go first, in processes of their own: a fork copies the page tables of all that was imported and kept so far.

Tests that strike processes at random moments depend on what else the machine does. So a few failures are run again at
the end, alone, each once. The last lines name what failed beside others and passed alone: such a test, or the code, has
a race, and wants an issue. What fails twice fails, and so does what fails under ``-x`` or ``--maxfail``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent
CACHE = TESTS.parent / ".pytest_cache"
APART = {"Ray": [TESTS / "ray"], "Large libraries": [TESTS / "integration", TESTS / "tables", TESTS / "storage"]}
FORKING = [TESTS / "loader", TESTS / "faults", TESTS / "datasets"]
PATIENCE = 700  # seconds: longer than pytest's limit for one test
FAILED, NONE_SELECTED = 1, 5  # pytest's exit codes
AGAIN = 6  # failures of all parts together that may be a busy machine's


class Part:
    """Tests that one pytest runs. Which of them failed is in a cache of its own."""

    def __init__(self, name: str, selection: list[str], arguments: list[str]) -> None:
        self.name = name
        cache = CACHE / name.lower().replace(" ", "-")
        self._failures = cache / "v" / "cache" / "lastfailed"
        self._command = [sys.executable, "-m", "pytest", *selection, *arguments, "-o", f"cache_dir={cache}"]
        self._output: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        shutil.rmtree(cache, ignore_errors=True)

    def run(self) -> int:
        """Run the tests; return the exit code."""
        return subprocess.run(self._command, check=False).returncode

    def start(self) -> None:
        """Run the tests beside others'; what they print is kept."""
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(self._command, stdout=self._output)

    def code(self) -> int:
        """Return the exit code, when it is done. One that hangs where pytest-timeout cannot reach it is ended."""
        assert self._process is not None
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            print(f"{self.name}: nothing more for {PATIENCE} s after the others, ended", file=self._output)
            return 2

    def end(self) -> None:
        """Wait for no more, and print what was printed."""
        assert self._process is not None
        assert self._output is not None
        self._process.terminate()
        self._process.wait()
        self._output.seek(0)
        with self._output as output:
            print(f"{self.name}:\n{output.read()}", flush=True)

    def failed(self) -> list[str]:
        """Return the names of the tests that failed."""
        return list(json.loads(self._failures.read_text())) if self._failures.exists() else []

    def run_again(self) -> int:
        """Run the tests that failed, and nothing beside them; return the exit code."""
        print(f"{self.name}: what failed, again and alone", flush=True)
        return subprocess.run([*self._command, "-n", "0", "--last-failed"], check=False).returncode


def main(arguments: list[str]) -> int:
    """Run them; the exit code."""
    # As in conftest.py: else Ctrl-C would end the tests of a job in the background, and not this program.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # With it, each pytest would compile every test module again, with its assertions.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    share = ["--dist", "worksteal"] if "-n" in arguments else []
    ignored = [f"--ignore={folder}" for folders in (FORKING, *APART.values()) for folder in folders]
    parts = [
        Part("Loader", list(map(str, FORKING)), [*share, *arguments]),
        Part("Others", ignored, [*share, *arguments]),
    ]
    apart = [Part(name, list(map(str, folders)), [*arguments, "-n", "0"]) for name, folders in APART.items()]
    for part in apart:
        part.start()
    try:
        codes = [part.run() for part in parts]
        codes += [part.code() for part in apart]
    finally:
        for part in apart:
            part.end()
    if not stops_early(arguments):
        codes = again([*parts, *apart], codes)
    failed = [code for code in codes if code not in (0, NONE_SELECTED)]
    return failed[0] if failed else min(codes)


def again(parts: list[Part], codes: list[int]) -> list[int]:
    """Run a few failures again, alone; return the exit codes. Too many are no accident."""
    failures = [part.failed() for part in parts]
    if sum(map(len, failures)) > AGAIN:
        return codes
    codes = list(codes)
    said: list[str] = []
    for number, (part, names) in enumerate(zip(parts, failures, strict=True)):
        # Other codes say that tests were not run: a module does not import, or somebody has stopped them.
        if codes[number] != FAILED or not names:
            continue
        codes[number] = part.run_again()
        still = part.failed()
        said += [
            f"{'failed twice' if name in still else 'failed beside others, passed alone'}: {name}" for name in names
        ]
    for line in said:
        print(line, flush=True)
    return codes


def stops_early(arguments: list[str]) -> bool:
    """Whether a failure keeps others from being run: then no second run makes it good."""
    return any(re.match(r"--exitfirst$|--maxfail|-[a-z]*x", argument) for argument in arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
