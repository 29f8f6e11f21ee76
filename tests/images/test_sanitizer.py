"""The tests of the C extension once more, 100,000 damaged files among them, with AddressSanitizer watching every access
of our code to memory, and UndefinedBehaviorSanitizer its arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter_support import FULL

SCRIPT = Path(__file__).with_name("address_sanitizer.py")


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="compiles the extension, and runs its tests again; PENSTOCK_TEST_FULL=1")
def test_no_access_beside_memory_and_no_undefined_arithmetic() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
