"""All tests: those of Ray in a process of their own, beside the others.

    python tests/run.py -n 2 -k manifest                arguments are pytest's

Ray's gRPC stays in a process that was connected to a cluster, and forks of it hang; its tests wait most of the time.
The others' processes take neighbouring tests, whose fixtures they share, and help each other at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

RAY = Path(__file__).parent / "ray"
NONE_SELECTED = 5  # pytest's exit code


def main(arguments: list[str]) -> int:
    """Run them; the exit code."""
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile("w+") as output:
        alone = subprocess.Popen([*pytest, str(RAY), *arguments, "-n", "0"], stdout=output)
        try:
            share = ["--dist", "worksteal"] if "-n" in arguments else []
            others = [*pytest, f"--ignore={RAY}", *share, *arguments]
            codes = [subprocess.run(others, check=False).returncode, alone.wait()]
        finally:
            alone.terminate()
            alone.wait()
        output.seek(0)
        print("Ray:", output.read(), sep="\n")
    failed = [code for code in codes if code not in (0, NONE_SELECTED)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
