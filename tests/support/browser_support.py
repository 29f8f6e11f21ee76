"""Headless Chromium, where there is one: `BROWSER` is its program or None, `browse` what it writes about a page."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from busy_support import HANG

_NAMES = (
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable", "chrome"),
)
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


def browse(url: str, folder: Path, *options: str, size: tuple[int, int] = (1160, 900)) -> str:
    """Standard output of the browser after six of its seconds on the page; its files are kept in the folder."""
    command = [
        *(str(BROWSER), "--headless", "--disable-gpu", "--hide-scrollbars"),
        f"--user-data-dir={folder / 'user'}",
        f"--window-size={size[0]},{size[1]}",
        "--virtual-time-budget=6000",
    ]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []  # which it refuses to have as root
    done = subprocess.run([*command, *options, url], capture_output=True, text=True, timeout=HANG, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Content Security Policy" not in done.stderr
    return done.stdout
