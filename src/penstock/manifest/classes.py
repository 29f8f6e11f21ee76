"""`HasClasses`: the names of the classes that labels stand for, as torchvision's data sets have them.

dataset = penstock.open("data/imagenet", size=224)
dataset.classes[label], dataset.class_to_idx["n01440764"]
"""

from __future__ import annotations

from functools import cached_property

from penstock.errors import UnknownClassesError

__all__ = ["HasClasses", "unknown_classes"]


def unknown_classes(dataset: object) -> UnknownClassesError:
    """Return the error for a data set whose classes have no names."""
    return UnknownClassesError(
        f"nobody said what the classes of this {type(dataset).__name__} are called: names come with a folder of class "
        "folders, with a ClassLabel column of a table, or for a list of files with the argument classes=[...] of "
        "penstock.open and Manifest.open"
    )


class HasClasses:
    """A data set whose labels may have names. A program may assign ``classes`` of its own."""

    def class_names(self) -> list[str] | None:
        """Return the names of the classes by label; None if the source does not say them."""
        raise NotImplementedError

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes: label i is ``classes[i]``.

        Raises:
            UnknownClassesError: the source does not say them.
        """
        names = self.class_names()
        if names is None:
            raise unknown_classes(self)
        return names

    @cached_property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class by its name.

        Raises:
            UnknownClassesError: the source does not say the names.
        """
        return {name: label for label, name in enumerate(self.classes)}
