"""The exception types of Penstock.

Every error that Penstock raises on purpose is a `PenstockError` and also the built-in type that a program written for
torch would catch (`ValueError`, `OSError`, `RuntimeError`), so ``except ValueError`` keeps working. Errors of *user*
code (a dataset's ``__getitem__``, a ``collate_fn``) are not wrapped: they keep their type, and `BaseException.add_note`
adds the context. StopIteration is an exception: see `escaped`.

Messages name the file, the line or row, the rank where it matters, and the remedy.
"""

from __future__ import annotations

__all__ = [
    "ClipError",
    "ClusterError",
    "ConfigError",
    "DataFileChangedError",
    "DataFileError",
    "DataFileIOError",
    "ImageError",
    "LengthUnknownError",
    "ManifestChangedError",
    "ManifestError",
    "ManifestIOError",
    "NotAllowedError",
    "NotCachedError",
    "OrderError",
    "PartitionError",
    "PenstockError",
    "RingError",
    "SamplerError",
    "ServerAuthError",
    "ServerChangedError",
    "ServerError",
    "ServerForkError",
    "ServerLimitError",
    "ServerTLSError",
    "ServerUnavailableError",
    "ShardChangedError",
    "ShardError",
    "ShardIOError",
    "StateError",
    "StorageAuthError",
    "StorageChangedError",
    "StorageError",
    "StorageNotFoundError",
    "StorageUnavailableError",
    "TicketError",
    "TooManyErrors",
    "TruncatedShardError",
    "UnknownClassesError",
    "UnknownDataSetError",
    "WorkerError",
]


def escaped(stop: StopIteration) -> RuntimeError:
    """Return the error to raise in place of a StopIteration that is not the end of an iterator, as generators do.

    Otherwise it would end an epoch early, as if all samples had been delivered.
    """
    text = f": {stop}" if str(stop) else ""
    error = RuntimeError(f"StopIteration was raised, but not by an iterator at its end{text}")
    for note in getattr(stop, "__notes__", ()):
        error.add_note(note)
    return error


class PenstockError(Exception):
    """The base of every error that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """An invalid argument, or an invalid combination of arguments."""


class LengthUnknownError(PenstockError, TypeError):
    """A length that is not known yet. It is a `TypeError`, as ``len`` raises for objects without a length."""


class UnknownClassesError(ConfigError, AttributeError):
    """The classes of a dataset whose source does not name them. ``hasattr(dataset, "classes")`` is False."""


class OrderError(PenstockError, ValueError):
    """A permutation or shuffle that cannot be built, or an order version that this release does not support."""


class PartitionError(PenstockError, ValueError):
    """A rank outside the world, a negative size, or a partition that cannot be resumed with the requested options."""


class SamplerError(PenstockError, ValueError):
    """Weights, groups or counts from which no sample can be drawn."""


class StateError(PenstockError, ValueError):
    """A state of other data, another order or another layout. The message names the difference."""


class ManifestError(PenstockError, ValueError):
    """A manifest with bad content: a line that does not parse, a binary file, a missing column."""


class ManifestChangedError(ManifestError):
    """The file behind an open manifest was truncated, rewritten or replaced."""


class ManifestIOError(ManifestError, OSError):
    """A manifest or its index that cannot be read or written: missing, a folder, no permission, disk full."""


class NotAllowedError(PenstockError, ValueError):
    """Data that would run code when it is read (a command, a pickle), which the program has not allowed."""


class ShardError(PenstockError, ValueError):
    """A tar shard, or its index, with bad content. The message names the shard and the byte."""


class TruncatedShardError(ShardError):
    """A shard that ends in the middle of a member, or without its end mark."""


class ShardChangedError(ShardError):
    """A shard that was truncated, rewritten or touched while it was open."""


class ShardIOError(ShardError, OSError):
    """A shard or an index that cannot be read or written: missing, a folder, no permission, disk full."""


class DataFileError(PenstockError, ValueError):
    """A file of tokens, numbers or bytes with bad content: truncated, of another type. The message names the file."""


class DataFileChangedError(DataFileError):
    """A data file that was truncated, rewritten or replaced since it was opened."""


class DataFileIOError(DataFileError, OSError):
    """A data file that cannot be read: missing, a folder, no permission."""


class ImageError(PenstockError, ValueError):
    """An image that is missing, empty, too small for the requested crop, or cannot be decoded."""


class ClipError(PenstockError, ValueError):
    """A video or audio file that is missing, damaged, of an unknown format, or too short for the requested clip."""


class TooManyErrors(PenstockError, RuntimeError):
    """More samples failed to load than a loader's ``on_error`` allows."""


class RingError(PenstockError, MemoryError):
    """Too little memory for the batches in flight. The message says how much is needed and how much is free."""


class ClusterError(PenstockError, RuntimeError):
    """A cluster that is unreachable, has no room for workers, or runs other versions. The message says which."""


class WorkerError(PenstockError, RuntimeError):
    """A worker that was killed, exited, or did not answer in time. The message names the worker and its samples."""


class TicketError(PenstockError, ValueError):
    """A request to a metadata server that is malformed, or asks for rows that do not exist."""


class ServerError(PenstockError, RuntimeError):
    """A failure between a client and a metadata server. The message names the server."""


class ServerUnavailableError(ServerError, ConnectionError):
    """No server answered in time: none runs, or it restarts, hangs or cannot be reached."""


class ServerLimitError(ServerError):
    """A request beyond what the server allows. The message names the limit."""


class ServerAuthError(ServerError, PermissionError):
    """A token that is missing or wrong."""


class ServerTLSError(ServerError, ConnectionError):
    """A TLS handshake that failed: an expired or unknown certificate, or TLS on one side only."""


class ServerForkError(ServerError):
    """A client used in a process that was forked after gRPC was used, where gRPC would hang."""


class UnknownDataSetError(ServerError, LookupError):
    """A dataset that the server does not serve. The message lists the names it serves."""


class ServerChangedError(ServerError):
    """A server whose data differs from the data of the job, or that does not know that version (fingerprint)."""


class StorageError(PenstockError, OSError):
    """An object in a store that cannot be read, or an unusable cache folder. The message names it."""


class NotCachedError(StorageError):
    """An object that the cache does not store, because it would evict copies that are needed sooner."""


class StorageNotFoundError(StorageError, FileNotFoundError):
    """An object that does not exist."""


class StorageAuthError(StorageError, PermissionError):
    """Credentials that are missing, wrong, or lack permission for this object."""


class StorageChangedError(StorageError):
    """An object that was replaced while it was open. The message names the difference."""


class StorageUnavailableError(StorageError, ConnectionError):
    """A store that keeps failing, or does not answer in time. The message names object, attempt and rank."""
