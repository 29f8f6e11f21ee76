"""Handlers of errors in stages.

``handler(error)`` returns True to skip the sample (or shard), returns False to end the stream, or raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from penstock.errors import NotAllowedError

Handler = Callable[[Exception], bool]


def decide(handler: Handler, error: Exception) -> bool:
    """Call a handler. `NotAllowedError` is no fault of the sample, so it is always raised."""
    if isinstance(error, NotAllowedError) or isinstance(error.__cause__, NotAllowedError):
        raise error
    return bool(handler(error))


def reraise_exception(exn: Exception) -> bool:
    """Raise the error."""
    raise exn


def ignore_and_continue(exn: Exception) -> bool:
    """Skip the sample."""
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Warn, and skip the sample."""
    warnings.warn(repr(exn), stacklevel=2)
    return True


def ignore_and_stop(exn: Exception) -> bool:
    """End the stream."""
    return False


def warn_and_stop(exn: Exception) -> bool:
    """Warn, and end the stream."""
    warnings.warn(repr(exn), stacklevel=2)
    return False
