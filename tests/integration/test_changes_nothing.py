"""Accelerate, Lightning and Transformers stay what they are where our loaders are made, prepared and trained from."""

from __future__ import annotations

from pathlib import Path

import pytest
from busy_support import HANG
from example_support import LIBRARIES
from interpreter_support import run

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")


def test_no_attribute_of_a_framework_is_another_object(tmp_path: Path) -> None:
    program = Path(__file__).with_name("changes_nothing.py")
    done = run(["-W", "ignore", str(program), str(tmp_path)], imports=LIBRARIES, timeout=HANG)
    assert done.returncode == 0, done.stderr
