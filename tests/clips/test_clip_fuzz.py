"""Files of video and sound that are changed at random: each is a clip or the error of its row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreter_support import FULL, run

SCRIPT = Path(__file__).with_name("clip_fuzz.py")
FILES = 10_000 if FULL else 500
MEGABYTES = 1100  # of a process: what one that indexes may take at most; a worker that has imported torch has 400
SECONDS = 20.0


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("kind", ["video", "sound"])
def test_a_clip_or_an_error(kind: str) -> None:
    done = run([str(SCRIPT), kind, "0", str(FILES)], timeout=900, alone=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["clips"] + found["skipped"] == FILES
    assert set(found["errors"]) == {"ClipError"}
    assert found["ended"] == 0
    assert found["megabytes"] < MEGABYTES
    assert found["seconds"] < SECONDS
    assert FILES // 4 < found["refused"] < found["skipped"] < FILES * 3 // 4  # the mutations leave enough to decode
