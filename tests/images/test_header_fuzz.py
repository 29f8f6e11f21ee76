"""Headers that are changed at random: our parsers and the decoders see one size, or nothing is decoded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from interpreter_support import FULL, run

SCRIPT = Path(__file__).with_name("header_fuzz.py")
FILES = 20_000 if FULL else 8_000
DECODED_EVERY = 1 if FULL else 10
MEGABYTES = 200


def fuzz(kind: str) -> dict[str, Any]:
    """What `header_fuzz.py` found, in an interpreter of its own, whose memory is that of the decoders."""
    environment = {**os.environ, "OPENCV_LOG_LEVEL": "SILENT"}
    arguments = [str(SCRIPT), kind, "0", str(FILES), str(DECODED_EVERY)]
    done = run(arguments, timeout=900, alone=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kind", ["jpeg", "other"])
def test_one_size_or_no_pixels(kind: str) -> None:
    found = fuzz(kind)
    assert found["found"] == 0, found["contradictions"]
    assert found["megabytes"] < MEGABYTES
    assert found["sized"] > FILES // 4  # the mutations leave enough of a header
    assert found["refused"] > FILES // DECODED_EVERY // 4
    readers = ("simplejpeg", "opencv", "pillow", "region") if kind == "jpeg" else ("opencv", "pillow", "region")
    assert min(found["decoded"][name] for name in readers) > FILES // DECODED_EVERY // 20
