"""Lets the tests of shards import what they share; the server of the tests of storage."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def server() -> Iterator[Any]:
    """It serves objects over HTTP, and fails as asked."""
    path = Path(__file__).parents[1] / "storage" / "http_support.py"
    spec = importlib.util.spec_from_file_location("shards_http_support", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shards_http_support"] = module
    spec.loader.exec_module(module)
    with module.Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield made
        made.release.set()
        made.shutdown()
        thread.join(10)
