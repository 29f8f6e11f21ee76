"""Planned uses of objects, by columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.storage.planned_use import NEVER, Use


def uses(urls: list[str], first: Any, last: Any, again: Any = NEVER, copied: Any = True) -> list[Use]:
    """Return the uses of objects with these URLs; scalars apply to all of them."""
    columns = [np.broadcast_to(np.asarray(given), len(urls)).tolist() for given in (first, last, again, copied)]
    return [Use(*row) for row in zip(urls, *columns, strict=True)]
