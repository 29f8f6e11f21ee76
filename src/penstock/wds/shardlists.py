"""Lists of shards, and the stages that split them across ranks and workers.

All ranks and workers see the same list in the same order, which a shuffle changes every epoch. The list is split after
the shuffle, so a rank reads different shards every epoch.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from penstock import distributed
from penstock.distributed import Worker, World
from penstock.errors import ConfigError, StateError
from penstock.hashing import mix
from penstock.order import make_order
from penstock.storage.files import SHARD
from penstock.storage.names import braces, expand
from penstock.storage.urls import path_of
from penstock.wds.pipeline import Context, CountedStep, FirstStage, IteratorStep, Stage, Step, default_context

_MULTI_NODE = "you need to add an explicit nodesplitter to your input pipeline for multi-node training"
_EMPTY = (
    "No samples found in dataset; perhaps you have fewer shards than workers.\nTurn off using empty_check=False in the "
    "WebDataset constructor."
)
_NO_DATA = "pipeline stage received no data at all and this was declared as an error"


expand_urls = expand
"""Expands a string with braces, glob patterns and ``::`` into shards; entries of a list are expanded too."""


def expand_source(source: Any, max_urls: int = int(1e9)) -> list[str]:
    """Expand any iterable of addresses, up to ``max_urls``."""
    if isinstance(source, str | os.PathLike | list | tuple):
        return expand_urls(source)[:max_urls]
    found = []
    for _, url in zip(range(max_urls), source, strict=False):
        found.append(url["url"] if isinstance(url, Mapping) else url)
    return found


def _shards(url: Callable[[int], str], count: int, own: Any) -> Step:
    """Return a step of shards by position, up to ``count``; the state is the number of shards delivered."""
    return CountedStep(None, lambda _, had: ((n + 1, {"url": url(n)}) for n in range(had, count)), own)


class SimpleShardList(FirstStage):
    """A list of shards in order.

    Args:
        urls: as for `expand_urls`.
        seed: shuffle the shards every epoch with this seed; True uses the pipeline's seed.
        shuffle: shuffle the shards every epoch with the pipeline's seed.
    """

    def __init__(self, urls: Any, seed: int | bool | None = None, *, shuffle: bool = False) -> None:
        self.urls = expand_urls(urls)
        self.seed = seed
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.urls)

    def begin_source(self, context: Context, own: Any) -> Step:
        urls = self.urls
        if not self.shuffle and (self.seed is None or self.seed is False):
            return _shards(urls.__getitem__, len(urls), own)
        seed = context.seed if self.seed is None or isinstance(self.seed, bool) else self.seed
        order = make_order("global", len(urls), seed=mix(seed, context.turn), epoch=context.epoch)
        return _shards(lambda number: urls[int(order[np.array([number])][0])], len(urls), own)


class ResampledShards(FirstStage):
    """Shards drawn at random with replacement, independently by each rank and worker.

    Args:
        urls: as for `expand_urls`.
        nshards: shards per epoch.
        seed: combined with the pipeline's seed.
        worker_seed: a function that returns a seed for this worker, used instead of its rank and number.
        deterministic: for compatibility: draws are always a function of seed, epoch, rank and worker.
        max_urls: the largest number of addresses to take from an endless iterable.
        empty_check: raise an error for an empty list.

    As many draws as there are shards reach 63 % of them.
    """

    def __init__(
        self,
        urls: Any,
        nshards: int = sys.maxsize,
        seed: int = 0,
        worker_seed: Any = None,
        deterministic: bool = False,
        max_urls: int = int(1e6),
        empty_check: bool = True,
    ) -> None:
        self.urls = expand_source(urls, max_urls)
        if empty_check and not self.urls:
            raise ConfigError("empty_check=True, but no shards found.")
        if not hasattr(nshards, "__index__"):
            raise ConfigError(f"nshards must be a whole number of shards, not {nshards!r}: leave it out for no end")
        self.nshards, self.seed, self.worker_seed, self.deterministic = nshards, seed, worker_seed, deterministic
        self.epoch = -1

    def __iter__(self) -> Iterator[dict[str, str]]:
        self.epoch += 1
        return self.begin_source(default_context()._replace(epoch=self.epoch), None)

    def begin_source(self, context: Context, own: Any) -> Step:
        key = mix(context.key("resampled", common=self.worker_seed is not None), self.seed)
        if self.worker_seed is not None:
            key = mix(key, self.worker_seed())
        urls = self.urls
        return _shards(lambda number: urls[mix(key, number) % len(urls)], self.nshards if urls else 0, own)


ResampledShardList = ResampledShards


def shardspec(spec: Any) -> SimpleShardList:
    """Return a `SimpleShardList` of the shards that a string names."""
    return SimpleShardList(spec)


# ------------------------------------------------------------------ watched folders

PATTERN = "*.{tar,tgz,tar.gz,tar.bz2,tar.xz,tar.zst}"
"""The names of shards in a folder, as a pattern with braces."""

_DONE = "._done_"
_TAKEN = re.compile(r"\._.*-\d+_$")


def shards_in(folder: str, pattern: str = PATTERN) -> list[str]:
    """Return the files of a folder that match a pattern with braces, sorted, except claimed and finished shards."""
    inside = glob.escape(folder)
    found = {path for text in braces(pattern) for path in glob.glob(os.path.join(inside, text))}
    return sorted(path for path in found if not path.endswith(_DONE) and not _TAKEN.search(path))


class DirectoryShardList(FirstStage):
    """An endless list of the shards in a folder, including those that appear later.

    Args:
        path: the folder.
        pattern: the names of shards, with braces. Write a shard under another name and rename it when it is complete.
        poll: seconds between two scans while no shard is free; None ends the iteration instead.
        timeout: seconds without a free shard after which the iteration ends.
        mode: what happens to a finished shard: ``"resample"`` restores its name, so that it is read again;
            ``"keep"`` renames it to ``NAME._done_``; ``"unlink"`` removes it.
        select: ``"random"`` draws a free shard, ``"oldest"`` takes the one written first.
        fate: must be None; WebDataset ignores it.

    Raises:
        ConfigError: invalid arguments, or no such folder.
        ShardIOError: (while iterating) a shard cannot be renamed or removed.
        StateError: (at the start) a state taken in mid-stream: the folder's shards have changed since.

    A reader claims a shard by locking it and renaming it to ``NAME._HOST-PID_``. So ranks and workers may watch one
    folder, and no list has to be split: splitters pass these shards through. A shard that was not read to its end,
    because the iteration was dropped or the process (with the children that it forked) died, gets its name back and is
    read later. No file is overwritten: if a new shard has taken the name meanwhile, the old one returns as ``a.1.tar``.

    A shard counts as finished when the next one is requested. So the stage that reads shards must directly follow this
    one: with a shuffle of shards between them, shards would be removed unread. Draws depend on the pipeline's seed,
    epoch, rank and worker, and on the shards that exist at the time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str = PATTERN,
        poll: float | None = 1,
        timeout: float = 1e12,
        mode: str = "resample",
        select: str = "random",
        fate: None = None,
    ) -> None:
        folder = path_of(os.fspath(path)) or os.fspath(path)
        if not os.path.isdir(folder):
            raise ConfigError(f"no such folder: {folder}")
        if mode not in ("resample", "keep", "unlink"):
            raise ConfigError(f"unknown mode {mode!r}: use 'resample', 'keep' or 'unlink'")
        if select not in ("random", "oldest"):
            raise ConfigError(f"unknown selection strategy {select!r}: use 'random' or 'oldest'")
        if fate is not None:
            raise ConfigError("fate has no effect: use mode= to say what happens to a finished shard")
        numbers = [timeout] if poll is None else [timeout, poll]
        if not all(isinstance(one, int | float) for one in numbers) or (poll is not None and not poll > 0 <= timeout):
            raise ConfigError(f"poll must be None or positive, and timeout 0 or more; got {poll!r} and {timeout!r}")
        self.path, self.pattern, self.poll, self.timeout = folder, pattern, poll, timeout
        self.mode, self.select = mode, select
        self._closed = threading.Event()

    def begin_source(self, context: Context, own: Any) -> Step:
        if own is not None:
            raise StateError(
                f"{self.path} is a watched folder, whose shards may have changed: it cannot resume from a "
                "state. Start without the state: shards that were not read to their end are read again"
            )
        self._closed.clear()
        step = IteratorStep(self._shards(context.key("directory", common=False)))
        step.taken = True
        return step

    def close(self) -> None:
        """End all iterations, including one that waits for a shard. Idempotent."""
        self._closed.set()

    def _shards(self, key: int) -> Iterator[dict[str, str]]:
        count, since = 0, time.monotonic()
        try:
            while not self._closed.is_set():
                claim = self._claim(mix(key, count))
                if claim is not None:
                    count += 1
                    yield from self._read(*claim)
                    since = time.monotonic()
                    continue
                left = self.timeout - (time.monotonic() - since)
                if self.poll is None or left <= 0:
                    return
                self._closed.wait(min(self.poll, left, threading.TIMEOUT_MAX))
        except OSError as error:
            raise SHARD.error(error.filename or self.path, error, "cannot rename or remove") from error

    def _claim(self, draw: int) -> tuple[int, str, str] | None:
        """Lock and rename a free shard; return the lock, its name and its new name, or None if no shard is free."""
        own = f"._{socket.gethostname()}-"
        for taken in glob.glob(f"{glob.escape(os.path.join(self.path, ''))}*{glob.escape(own)}*_"):
            if (lock := _lock(taken, known=True)) is not None:  # its process has died
                _rename(taken, taken[: taken.rindex(own)])
                os.close(lock)
        free = shards_in(self.path, self.pattern)
        if self.select == "oldest":
            free.sort(key=_written)
        elif free:
            first = draw % len(free)
            free = free[first:] + free[:first]
        for name in free:
            if (lock := _lock(name)) is not None:
                with contextlib.suppress(FileNotFoundError):  # another process has claimed it
                    os.rename(name, f"{name}{own}{os.getpid()}_")
                    return lock, name, f"{name}{own}{os.getpid()}_"
                os.close(lock)
        return None

    def _read(self, lock: int, name: str, taken: str) -> Iterator[dict[str, str]]:
        """Yield a claimed shard; after that, release it."""
        read = False
        try:
            yield {"url": taken}
            read = True
        finally:
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, lock)
                stack.enter_context(contextlib.suppress(FileNotFoundError))
                if read and self.mode == "unlink":
                    os.unlink(taken)
                else:
                    _rename(taken, name, _DONE if read and self.mode == "keep" else "")

    def __reduce__(self) -> tuple[Any, ...]:
        # An event cannot be pickled.
        return type(self), (self.path, self.pattern, self.poll, self.timeout, self.mode, self.select)


def _lock(path: str, *, known: bool = False) -> int | None:
    """Lock a file and return its descriptor; None if another iteration of any process holds it, or if it is gone.

    ``known``: also return None where files cannot be locked (Windows, some file systems): the shards of dead processes
    stay claimed there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if known or isinstance(error, BlockingIOError):
            os.close(descriptor)
            return None
    return descriptor


def _rename(taken: str, name: str, ending: str = "") -> None:
    """Give a shard its name, plus an ending, or the next free name."""
    extension = (re.search(r"(\.tar)?\.[^./]*$", name) or [""])[0]
    base = name.removesuffix(extension)
    for number in itertools.count():
        free = f"{base}.{number}{extension}{ending}" if number else name + ending
        try:
            os.link(taken, free)  # unlike a rename, a link never overwrites a file
            os.unlink(taken)
        except FileExistsError:
            continue
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            if os.path.lexists(free):
                continue
            os.rename(taken, free)
        return


def _written(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:  # another process has claimed it, which the rename will notice
        return 0.0


# ------------------------------------------------------------------ splitting


class _Named(Stage):
    """A stage that programs use without calling it. It pickles by name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __reduce__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


class _Split(_Named):
    """A stage that keeps every n-th item, and every item that already belongs only to this worker.

    Args:
        name: its name in this module.
        part: returns (index, total) of this rank and worker.
    """

    def __init__(self, name: str, part: Callable[[World, Worker], tuple[int, int]]) -> None:
        super().__init__(name)
        self.part = part

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        index, total = (0, 1) if source.taken else self.part(context.world, context.worker)
        step = CountedStep(source, lambda src, had: _every(src, had, index, total), own)
        step.taken = source.taken
        return step

    def __call__(self, src: Iterable[Any], group: Any = None) -> Iterator[Any]:
        index, total = self.part(distributed.current(process_group=group), distributed.worker())
        return (item for _, item in _every(src, 0, index, total))


def _every(src: Iterable[Any], had: int, index: int, total: int) -> Iterator[tuple[int, Any]]:
    for number, item in enumerate(src, had):
        if number % total == index:
            yield number + 1, item


def _single(world: World, worker: Worker) -> tuple[int, int]:
    if world.world_size > 1:
        raise ConfigError(f"{_MULTI_NODE}: nodesplitter=penstock.wds.split_by_node")
    return 0, 1


class _Check(_Named):
    """A stage that raises an error if there are no items."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name)
        self.message = message

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        return CountedStep(source, self._all, own)

    def _all(self, src: Iterable[Any], had: int) -> Iterator[tuple[int, Any]]:
        for had, item in enumerate(src, had + 1):  # noqa: B020
            yield had, item
        if not had:
            raise ConfigError(self.message)


split_by_node = _Split("split_by_node", lambda world, worker: (world.rank, world.world_size))
"""Keeps the items whose number, modulo the number of ranks, is this rank."""
split_by_worker = _Split("split_by_worker", lambda world, worker: (worker.id, worker.total))
"""Keeps the items whose number, modulo the number of the loader's workers, is this worker."""
single_node_only = _Split("single_node_only", _single)
"""Keeps all items on one rank; raises a `ConfigError` with advice on several ranks."""
non_empty = _Check("non_empty", _NO_DATA)
"""Keeps all items; raises `ConfigError` if there are none."""
check_empty = _Check("check_empty", _EMPTY)
"""The same for samples; its message says that there may be fewer shards than workers."""


class resampled(Stage):
    """A stage that draws ``n`` items, or endlessly, from a short list, at random with replacement."""

    def __init__(self, n: int = sys.maxsize) -> None:
        self.n = n

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Return a `Step` over the source, which is read to its end."""
        items = list(source)
        key = context.key("resampled", common=False)

        def draws(_: Step, had: int) -> Iterator[tuple[int, Any]]:
            while items and had < self.n:
                yield had + 1, items[mix(key, had) % len(items)]
                had += 1

        return _RereadStep(source, draws, own)


class _RereadStep(CountedStep):
    """A step that reads its whole source whenever it is opened."""

    def cursor(self) -> list[Any]:
        *before, count = super().cursor()
        return [*([None] * len(before)), count]
