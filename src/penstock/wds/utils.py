"""Utilities that programs import: permissions, ranks and workers, seeds, and repetition.

Features that run code from the data are refused unless the program allows them:

    wds.allow("pipe")                                        for this program
    wds.WebDataset("pipe:cat a.tar", allow=("pipe",))        for one dataset

``"pipe"``: a shell runs addresses that begin with ``pipe:``. ``"pickle"``: fields with the extensions pkl, pickle and
pyd are unpickled. ``"torch"``: pth fields may hold any object (without it, tensors only). Permissions are passed to
worker processes with the pipeline. ``wds.utils.enforce_security = True`` refuses all three, and local files as shards,
whatever is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from penstock import distributed
from penstock.errors import ConfigError, NotAllowedError
from penstock.hashing import mix

enforce_security = False
"""Whether secure mode is on; set it with ``wds.utils.enforce_security = True``.

Secure mode refuses ``pipe:`` commands, pickles and torch objects even if they are allowed. It also refuses local files
as shards, since the author of the shard list could otherwise read any file. It is passed to workers with a pipeline."""

KINDS = ("pipe", "pickle", "torch")

_WHAT = {
    "pipe": "runs a command by a shell",
    "pickle": "unpickles data, which runs whatever code it names",
    "torch": "loads objects other than tensors, which runs whatever code they name",
    "file": "opens a file of this machine",
}

_allowed: set[str] = set()


def allow(*kinds: str) -> None:
    """Allow features in this program from now on.

    Args:
        kinds: ``"pipe"``, ``"pickle"``, ``"torch"``.

    Raises:
        ConfigError: unknown name.
    """
    _allowed.update(checked(kinds))


def allowed(kind: str, extra: Collection[str] = ()) -> bool:
    """Return whether the program or ``extra`` allows a feature and secure mode does not refuse it."""
    return not enforce_security and (kind in _allowed or kind in extra)


def check_local(path: str) -> None:
    """Refuse a local file in secure mode.

    Raises:
        NotAllowedError: secure mode is on.
    """
    if enforce_security:
        raise refuse("file", path)


def checked(kinds: Collection[str]) -> frozenset[str]:
    """Return the names as a set. Raises ConfigError for an unknown name."""
    found = frozenset((kinds,) if isinstance(kinds, str) else kinds)
    if unknown := sorted(found - set(KINDS)):
        raise ConfigError(f"cannot allow {', '.join(map(repr, unknown))}: use some of {', '.join(KINDS)}")
    return found


def refuse(kind: str, what: str) -> NotAllowedError:
    """Return the error for a feature that is not allowed."""
    if enforce_security:
        return NotAllowedError(
            f"{what}: this {_WHAT[kind]}, and is refused while penstock.wds.utils.enforce_security is True"
        )
    return NotAllowedError(
        f'{what}: this {_WHAT[kind]}, and is refused unless you trust it: call penstock.wds.allow("{kind}"), or give '
        f'allow=("{kind}",)'
    )


class PipelineStage:
    """The base class of custom stages: ``run(src)`` gets an iterator and returns one."""

    def invoke(self, *args: Any, **kw: Any) -> Any:
        """Call `run`; subclasses may override either."""
        raise NotImplementedError(f"{type(self).__name__} needs run(src), which returns an iterator")

    def run(self, src: Any = None) -> Any:
        """Turn one iterator into another."""
        return self.invoke(src)


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Return (rank, world size, worker, number of workers)."""
    world, worker = distributed.current(process_group=group), distributed.worker()
    return world.rank, world.world_size, worker.id, worker.total


def pytorch_worker_seed(group: Any = None) -> int:
    """Return a number that differs between workers: rank * 1000 + worker."""
    rank, _, worker, _ = pytorch_worker_info(group=group)
    return rank * 1000 + worker


def make_seed(*args: Any) -> int:
    """Hash the arguments to 31 bits, the same in every process."""
    return mix(*(int.from_bytes(repr(arg).encode(), "little") for arg in args)) >> 33


def guess_batchsize(batch: Any) -> int:
    """Return the length of a batch: that of its first field if it is a tuple or list."""
    return len(batch[0] if isinstance(batch, tuple | list) else batch)


def repeatedly(
    source: Iterable[Any],
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[..., int] = guess_batchsize,
) -> Iterator[Any]:
    """Repeat the items of a source: ``nepochs`` times, or up to ``nbatches`` items or ``nsamples`` samples."""
    epochs = batches = samples = 0
    while True:
        begun = batches
        for item in source:
            yield item
            batches += 1
            if nbatches is not None and batches >= nbatches:
                return
            if nsamples is not None:
                samples += batchsize(item)
                if samples >= nsamples:
                    return
        epochs += 1
        if batches == begun or (nepochs is not None and epochs >= nepochs):
            return
