"""Check the file for ``--plot``."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import ConfigError

__all__ = ["check_plot"]


def check_plot(path: Path) -> None:
    """Check, before any work, that the plot can be written.

    Raises:
        ConfigError: the file cannot be written, or its extension is not a known format.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"cannot draw into {str(path)!r}: the folder {str(path.parent)!r} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot draw into {str(path)!r}: it is a folder, or not writable")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        return
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in known:
        raise ConfigError(f"cannot draw into {str(path)!r}: its extension must be one of {', '.join(known)}")
