"""Which files are images, by their names; `penstock.wds` has WebDataset's list, of what it decodes."""

from __future__ import annotations

__all__ = ["EXTENSIONS", "is_image"]

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def is_image(name: str) -> bool:
    """Whether a file of this name is taken for an image.

    >>> is_image("class/1.JPEG"), is_image("notes.txt")
    (True, False)
    """
    return name.lower().endswith(EXTENSIONS)
