"""Lengths of samples, from an array, a mapped ``.npy`` file, or the areas of images.

Indexing with a slice or an array of rows returns int64 arrays. Arrays are not copied; files are mapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import SamplerError, StateError
from penstock.order.permutation import Indices
from penstock.samplers.identity import fingerprint_of
from penstock.storage.class_index import digest_of
from penstock.storage.mapped import MappedFiles, inspect_file

if TYPE_CHECKING:
    from penstock.images.sizes import Sizes

__all__ = ["SampleLengths", "check_integers", "check_sizes", "lengths_of"]


class SampleLengths:
    """One integer for each sample.

    Args:
        count: number of samples.
        read: returns an array with the integers of a slice or an array of samples.
    """

    def __init__(self, count: int, read: Callable[[Any], Any]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: Any, /) -> Indices:
        """Return the lengths of a slice or an array of samples."""
        lengths: Indices = self._read(part).astype(np.int64)
        return lengths

    @cached_property
    def digest(self) -> str:
        """A hash of all lengths, the same for every dtype and source. Takes one pass over them."""
        return digest_of(self)


def lengths_of(source: Any, *, data: Any = None) -> SampleLengths:
    """Return the lengths in a user's argument.

    Args:
        source: an array, the path of an ``.npy`` file, or `Sizes`, whose areas are the lengths.
        data: the dataset whose samples have these lengths, if it is known.

    Raises:
        SamplerError: the lengths are not a one-dimensional array of integers, or not one for each sample.
        StateError: the sizes were measured from another manifest than the manifest of the data.
        DataFileError, DataFileIOError: the file cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        file = inspect_file(source, None)
        check_integers(file.path, np.dtype(file.dtype), file.shape)
        lengths = SampleLengths(file.shape[0], partial(_in_file, MappedFiles([file])))
    elif hasattr(source, "widths") and hasattr(source, "heights"):
        check_sizes(source, data)
        lengths = SampleLengths(len(source.widths), partial(_areas, source))
    else:
        array = np.asarray(source)
        check_integers("lengths", array.dtype, array.shape)
        lengths = SampleLengths(len(array), array.__getitem__)
    if data is not None and len(data) != len(lengths):
        raise SamplerError(f"there are {len(lengths)} lengths for a dataset of {len(data)} samples: pass one for each")
    return lengths


def check_integers(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raise a SamplerError unless an array with this name has one dimension, and integers unless it is empty."""
    if len(shape) != 1 or (shape[0] and dtype.kind not in "iu"):
        raise SamplerError(
            f"{name} must be a one-dimensional array of integers, one per sample, got {dtype} of shape {shape}"
        )


def check_sizes(sizes: Any, data: Any) -> None:
    """Raise a StateError if image sizes were measured from another manifest than the manifest of the data."""
    here, there = fingerprint_of(data), getattr(sizes, "fingerprint", None)
    if here is not None and there is not None and here != there:
        raise StateError(
            f"these image sizes belong to another manifest or to an older version of it: the sizes have the "
            f"fingerprint {there}, the dataset has {here}; measure again with: penstock manifest sizes FILE"
        )


def _in_file(files: MappedFiles, part: Any) -> Any:
    return files.array(0)[part]


def _areas(sizes: Sizes, part: Any) -> Any:
    return sizes.widths[part].astype(np.int64) * sizes.heights[part]
