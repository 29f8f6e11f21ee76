"""The entries of a state, for tests that look into one or damage one, and its way through a checkpoint of torch's."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from penstock.plan.cursor import STATE_VERSION

__all__ = ["closed", "opened", "through_checkpoint"]


def opened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state, without its version."""
    (packed,) = state.values()
    entries = json.loads(packed) if isinstance(packed, str) else dict(packed[0])
    assert entries.pop("version") == STATE_VERSION
    return entries  # type: ignore[no-any-return]


def closed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with these entries."""
    return {"penstock": ({"version": STATE_VERSION, **entries},)}


def through_checkpoint(begun: Any, fresh: Any, folder: Path) -> int:
    """Save an object and load another from it, in one process. Return the bytes of the checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(single process|save_state_dict|load_state_dict|no_dist)")
        dcp.save({"object": begun}, checkpoint_id=folder, no_dist=True)
        dcp.load({"object": fresh}, checkpoint_id=folder, no_dist=True)
    return sum(path.stat().st_size for path in folder.iterdir())
