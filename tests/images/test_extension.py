"""Where the C extension has to be there: without it its tests are skipped, and nobody would notice."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from penstock.images import native


def test_it_is_built_where_it_can_be() -> None:
    """`.ci/run` says that compiler and headers are there, by PENSTOCK_TEST_EXTENSION=required."""
    if os.environ.get("PENSTOCK_TEST_EXTENSION") == "required":
        assert native.is_available(), "penstock.images._jpeg was not built: pip install -v -e . says why"


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="the system does not list what its processor can do")
def test_it_knows_whether_the_processor_has_avx2() -> None:
    """A wrong "no" halves the speed and changes nothing else, so no other test would see it."""
    if not native.is_available():
        pytest.skip("without the C extension")
    listed = platform.machine() == "x86_64" and " avx2 " in Path("/proc/cpuinfo").read_text()
    assert bool(native._jpeg.AVX2) == listed
