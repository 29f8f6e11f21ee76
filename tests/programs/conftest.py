"""Puts this folder on the path, and finds the programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder with the repositories; skips where there is none."""
    folder = os.environ.get("PENSTOCK_TEST_PROGRAMS")
    if not folder or not Path(folder).is_dir():
        pytest.skip("PENSTOCK_TEST_PROGRAMS names no folder of programs (tests/programs/get.py makes one)")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def written(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all programs read."""
    from program_data import write_data

    folder = tmp_path_factory.mktemp("programs") / "data"
    write_data(data_dir / "imagenet-sample", folder)
    return folder
