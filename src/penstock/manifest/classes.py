"""`HasClasses`: the class names of labels, as in torchvision's datasets.

dataset = penstock.open("data/imagenet", size=224)
dataset.classes[label], dataset.class_to_idx["n01440764"]
"""

from __future__ import annotations

from functools import cached_property

from penstock.errors import UnknownClassesError

__all__ = ["HasClasses", "unknown_classes"]


def unknown_classes(dataset: object) -> UnknownClassesError:
    """Return the error for a dataset whose classes have no names."""
    return UnknownClassesError(
        f"the class names of this {type(dataset).__name__} are unknown: they come from a folder of class folders, "
        "from a ClassLabel column of a table, or, for a list of files, from the argument classes=[...] of "
        "penstock.open and Manifest.open"
    )


class HasClasses:
    """A dataset whose labels may have class names. A program may assign its own ``classes``."""

    def class_names(self) -> list[str] | None:
        """Return the class names by label, or None if the source does not define them."""
        raise NotImplementedError

    @cached_property
    def classes(self) -> list[str]:
        """The class names: label i is ``classes[i]``.

        Raises:
            UnknownClassesError: the source does not define them.
        """
        names = self.class_names()
        if names is None:
            raise unknown_classes(self)
        return names

    @cached_property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class name.

        Raises:
            UnknownClassesError: the source does not define the names.
        """
        return {name: label for label, name in enumerate(self.classes)}
