"""The report of ``penstock manifest sizes`` on widths and heights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.tools.cli.manifest_options import byte_size, console, duration, pairs, shown

if TYPE_CHECKING:
    from penstock.images.sizes import SizeError

__all__ = ["print_sizes", "size_figures"]

Lengths = npt.NDArray[np.int32]


def size_figures(widths: Lengths, heights: Lengths) -> dict[str, dict[str, float] | None]:
    """Return minimum, maximum and median of the widths and heights of readable images; None if there are none."""
    good = widths > 0
    return {
        name: {"min": int(lengths.min()), "max": int(lengths.max()), "median": float(np.median(lengths))}
        if lengths.size
        else None
        for name, lengths in (("width", widths[good]), ("height", heights[good]))
    }


def print_sizes(
    name: str, output: Path, seconds: float, widths: Lengths, heights: Lengths, errors: Sequence[SizeError]
) -> None:
    """Print a table, then the errors."""
    count, good = len(widths), widths > 0
    rows = [
        ("images", f"{count:,} in {duration(seconds)}: {count / seconds:,.0f} images/s"),
        ("written", f"{shown(str(output))} ({byte_size(output.stat().st_size)})"),
    ]
    for what, found in size_figures(widths, heights).items():
        if found is not None:
            rows.append((what, f"{found['min']:,} to {found['max']:,}, median {found['median']:,.0f}"))
    if good.any():
        rows.append(("wider than high", f"{np.mean(widths[good] > heights[good]):.1%}"))
    out = console()
    out.print(pairs(shown(name), rows))
    for error in errors:
        out.print(f"row {error.row}: {shown(error.message)}")
    if not good.all():
        missing = count - int(np.count_nonzero(good))
        out.print(f"{missing:,} of {count:,} images have no size (written as 0 x 0)", style="red")
