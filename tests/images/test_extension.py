"""Where the C extension has to be there: without it its tests are skipped, and nobody would notice."""

from __future__ import annotations

import os

from penstock.images import native


def test_it_is_built_where_it_can_be() -> None:
    """`.ci/run` says that compiler and headers are there, by PENSTOCK_TEST_EXTENSION=required."""
    if os.environ.get("PENSTOCK_TEST_EXTENSION") == "required":
        assert native.is_available(), "penstock.images._jpeg was not built: pip install -v -e . says why"
