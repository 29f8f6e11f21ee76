"""Version 0.1's orders, batches, generator keys and tails, case by case: see make.py, which made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from digest_cases import GROUPS, compute
from interpreter_support import FULL

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("digests.json").read_text())
EVERY = 1 if FULL else 5


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_has_changed_since_0_1(group: str) -> None:
    if group.startswith("torch") and not torch.__version__.startswith(f"{RECORDED['torch']}."):
        pytest.skip(f"torch {RECORDED['torch']} made these orders, and this is {torch.__version__}")
    computed = compute(group, EVERY)
    assert set(computed) <= set(RECORDED[group])
    assert len(computed) == len(range(0, len(RECORDED[group]), EVERY))
    differing = [name for name, value in computed.items() if RECORDED[group][name] != value]
    assert not differing, f"{len(differing)} of {len(computed)} cases differ: {differing}"
