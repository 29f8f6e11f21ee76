"""How busy the machine is, for tests that expect something in time: their seconds are those of one that is not."""

from __future__ import annotations

import hashlib
import time

HANG = 400.0
"""Seconds after which a program or an answer counts as hanging. It is no bound on speed: alone each takes a fraction of
it. pytest's own limit for a test is longer (pyproject.toml)."""


def slowness() -> float:
    """How many times longer than alone computing takes at the moment; 1 where nobody else wants the core."""
    begin, used = time.perf_counter(), time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # a tenth of a second, without Python's lock
    return max(1.0, (time.perf_counter() - begin) / (time.thread_time() - used))
