"""The exception types of Penstock.

Every error that Penstock raises on purpose is a `PenstockError` and also the built-in type that a program written for
torch would catch (`ValueError`, `OSError`, `RuntimeError`), so ``except ValueError`` goes on working. Errors of *user*
code (a dataset's ``__getitem__``, a ``collate_fn``) are not wrapped: they keep their own type and get context by
`BaseException.add_note`.

Messages name the file, the line or row, the rank where it matters, and what to do about it.
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


class PenstockError(Exception):
    """The base of every error that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """An argument, or a combination of arguments, that makes no sense."""


class LengthUnknownError(PenstockError, TypeError):
    """A length that nobody knows yet. To ``len`` it is what an object without a length raises."""


class UnknownClassesError(ConfigError, AttributeError):
    """``classes`` of a data set whose source says no names. To ``hasattr`` there is no such attribute."""


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


class NotAllowedError(PenstockError, ValueError):
    """Something that would run code out of the data, and that the program has not allowed."""


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
    """Such a file that was truncated, rewritten or replaced since it was opened."""


class DataFileIOError(DataFileError, OSError):
    """Such a file that cannot be read: missing, a folder, no permission."""


class ImageError(PenstockError, ValueError):
    """An image that is missing, empty, too small for what is asked of it, or cannot be decoded."""


class ClipError(PenstockError, ValueError):
    """A file of video or sound that is missing, damaged, of no known kind, or too short for what is asked of it."""


class TooManyErrors(PenstockError, RuntimeError):
    """More samples could not be loaded than a loader's ``on_error`` allows."""


class RingError(PenstockError, MemoryError):
    """Too little memory for the batches that a loader holds in flight. The message says how much is needed and left."""


class ClusterError(PenstockError, RuntimeError):
    """A cluster that cannot be reached, has no room for workers, or runs other versions. The message says which."""


class WorkerError(PenstockError, RuntimeError):
    """A worker that was killed, ended, or does not answer in time. The message names the worker and its samples."""


class TicketError(PenstockError, ValueError):
    """A request to a metadata server that is malformed, or asks for rows that cannot be."""


class ServerError(PenstockError, RuntimeError):
    """What went wrong between a client and a metadata server. The message names the server."""


class ServerUnavailableError(ServerError, ConnectionError):
    """No server answered in time: not there, restarting, hung, or not reachable."""


class ServerLimitError(ServerError):
    """A request beyond what the server allows. The message names the limit."""


class ServerAuthError(ServerError, PermissionError):
    """A token that is missing or wrong."""


class ServerTLSError(ServerError, ConnectionError):
    """A TLS handshake that failed: an expired or unknown certificate, or TLS on one side only."""


class ServerForkError(ServerError):
    """A client used in a process that was forked after gRPC had been used: gRPC would hang there."""


class UnknownDataSetError(ServerError, LookupError):
    """A name that the server does not serve. The message lists those that it does."""


class ServerChangedError(ServerError):
    """A server that holds other data than the job began with, or that does not know its version (fingerprint)."""


class StorageError(PenstockError, OSError):
    """An object in a store that cannot be read, or a cache folder that cannot be used. The message names it."""


class NotCachedError(StorageError):
    """An object of which the cache keeps no copy, since that would displace copies that are needed sooner."""


class StorageNotFoundError(StorageError, FileNotFoundError):
    """There is no such object."""


class StorageAuthError(StorageError, PermissionError):
    """Credentials that are missing, wrong, or not enough for this object."""


class StorageChangedError(StorageError):
    """An object that was replaced while it was open. The message says what differs."""


class StorageUnavailableError(StorageError, ConnectionError):
    """A store that goes on failing, or does not answer in time. The message names object, attempt and rank."""
