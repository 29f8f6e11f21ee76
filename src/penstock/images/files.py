"""Recognise image files by extension. `penstock.wds` has its own list, which is WebDataset's."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["EXTENSIONS", "FORMS", "Form", "is_image"]

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

Form = Literal["rgb", "pil", "bytes"]
"""The form of images in samples of tables and MDS folders."""
FORMS: tuple[Form, ...] = get_args(Form)


def is_image(name: str) -> bool:
    """Return whether a file name has the extension of an image.

    >>> is_image("class/1.JPEG"), is_image("notes.txt")
    (True, False)
    """
    return name.lower().endswith(EXTENSIONS)
