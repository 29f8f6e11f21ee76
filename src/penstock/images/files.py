"""Recognise image files by extension. `penstock.wds` has its own list, which is WebDataset's."""

from __future__ import annotations

__all__ = ["EXTENSIONS", "is_image"]

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def is_image(name: str) -> bool:
    """Return whether a file name has the extension of an image.

    >>> is_image("class/1.JPEG"), is_image("notes.txt")
    (True, False)
    """
    return name.lower().endswith(EXTENSIONS)
