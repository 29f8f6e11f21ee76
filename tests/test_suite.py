"""What the tests do with the environment that they are started in."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

CODE = """
import runpy, signal, subprocess, sys
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
runpy.run_path(sys.argv[1])
child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
subprocess.run([sys.executable, "-c", child], check=True)
signal.raise_signal(signal.SIGINT)
"""


def test_ctrl_c_works_though_a_shell_has_it_ignored() -> None:
    """In the tests, and in programs that they start."""
    command = ["bash", "-c", "trap '' INT; exec \"$@\"", "bash", sys.executable, "-c", CODE]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("conftest.py"))], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n"
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")
