"""The exception types of Penstock.

Every error that Penstock raises on purpose is a `PenstockError` and also the built-in type that a program written for
torch would catch (`ValueError`, `OSError`, `RuntimeError`), so ``except ValueError`` goes on working. Errors of *user*
code (a dataset's ``__getitem__``, a ``collate_fn``) are not wrapped: they keep their own type and get context by
`BaseException.add_note`.

Messages name the file, the line or row, the rank where it matters, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "ImageError",
    "ManifestChangedError",
    "ManifestError",
    "ManifestIOError",
    "OrderError",
    "PartitionError",
    "PenstockError",
    "RingError",
    "SamplerError",
    "StateError",
    "TooManyErrors",
    "WorkerError",
]


class PenstockError(Exception):
    """The base of every error that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """An argument, or a combination of arguments, that makes no sense."""


class OrderError(PenstockError, ValueError):
    """A permutation or shuffle that cannot be built, or an order version this build does not know."""


class PartitionError(PenstockError, ValueError):
    """A rank outside the world, a negative size, or a partition that cannot be resumed the way it was asked to."""


class SamplerError(PenstockError, ValueError):
    """Weights, groups or counts that no sampler can draw from."""


class StateError(PenstockError, ValueError):
    """A state that belongs to other data, another order or another layout. The message says what differs."""


class ManifestError(PenstockError, ValueError):
    """A manifest with bad content: a line that does not parse, a binary file, a missing column."""


class ManifestChangedError(ManifestError):
    """The file behind an open manifest was truncated, rewritten or replaced."""


class ManifestIOError(ManifestError, OSError):
    """A manifest or its index that cannot be read or written: missing, a folder, no permission, disk full."""


class ImageError(PenstockError, ValueError):
    """An image that is missing, empty or cannot be decoded."""


class TooManyErrors(PenstockError, RuntimeError):
    """More samples could not be loaded than a loader's ``on_error`` allows."""


class RingError(PenstockError, MemoryError):
    """Too little memory for the batches that a loader holds in flight. The message says how much is needed and left."""


class WorkerError(PenstockError, RuntimeError):
    """A worker that was killed, ended, or does not answer in time. The message names the worker and its samples."""
