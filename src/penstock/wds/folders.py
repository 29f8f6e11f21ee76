"""A folder that is watched: `DirectoryShardList` takes the shards that are there, and those that appear later.

    wds.DataPipeline(wds.DirectoryShardList("incoming/", mode="unlink", select="oldest", timeout=600), ...)

    incoming/a.tar                 free
    incoming/b.tar._host-4711_     taken by process 4711 of this machine
    incoming/c.tar._done_          read, with mode="keep"

A shard is taken by locking and renaming it. So ranks and workers that watch one folder never read the same shard at a
time, and nothing has to split the list. A shard that was not read to its end, because the iteration was dropped or the
process died, gets its own name again and is read later. No file is ever overwritten: where a shard's name was given to
another one meanwhile, it comes back as ``a.1.tar``.

The lock belongs to the open file. A child that the reading process forks holds it as well: a shard of a process that
was killed comes back when such children have ended, too.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.errors import ConfigError, ShardIOError, StateError
from penstock.hashing import mix
from penstock.shards.urls import braces, local_path
from penstock.storage import io_error
from penstock.wds.iterators import Context, Given, Source, Step

__all__ = ["PATTERN", "DirectoryShardList", "shards_in"]

PATTERN = "*.{tar,tgz,tar.gz,tar.bz2,tar.xz,tar.zst}"
"""The names of shards in a folder."""

_DONE = "._done_"
_TAKEN = re.compile(r"\._(?P<host>.*)-\d+_$")
_EXTENSION = re.compile(r"(\.tar)?\.[^.]*$")
_LONGEST = threading.TIMEOUT_MAX


def shards_in(folder: str, pattern: str = PATTERN) -> list[str]:
    """The files in a folder that match a pattern with braces, sorted, without those that somebody has taken or read."""
    found = {path for text in braces(os.path.join(glob.escape(folder), pattern)) for path in glob.glob(text)}
    return sorted(path for path in found if not path.endswith(_DONE) and not _TAKEN.search(path))


class DirectoryShardList(Source):
    """Shards of a folder, as they come, without end.

    Args:
        path: the folder.
        pattern: the names of shards, with braces. Write a shard under another name, and rename it when it is complete.
        poll: seconds between two looks into a folder without a free shard; None ends there.
        timeout: end when there was no free shard for so many seconds.
        mode: what becomes of a shard that was read: ``"resample"`` gives it its name back, so that it comes again;
            ``"keep"`` renames it to ``NAME._done_``; ``"unlink"`` removes it.
        select: ``"random"`` draws one of those that are there, ``"oldest"`` takes the one that was written first.
        fate: None; it has no meaning in WebDataset.

    Raises:
        ConfigError: arguments that make no sense, no such folder.
        ShardIOError: (while iterating) a shard cannot be renamed or removed.
        StateError: (when it is begun) a state that was taken in the middle: the folder holds other shards now.

    Draws follow from the pipeline's seed, epoch, rank and worker, and from what is there at the time.

    A shard counts as read when the next one is asked for. So the stage that reads shards belongs right behind this one:
    with a shuffle of shards between them, shards would be removed unread. Splitters leave these shards alone.
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
        folder = local_path(os.fspath(path)) or os.fspath(path)
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no folder {folder}")
        if mode not in ("resample", "keep", "unlink"):
            raise ConfigError(f"unknown mode {mode!r}: use 'resample', 'keep' or 'unlink'")
        if select not in ("random", "oldest"):
            raise ConfigError(f"unknown selection strategy {select!r}: use 'random' or 'oldest'")
        if fate is not None:
            raise ConfigError("fate has no meaning: mode= says what becomes of a shard that was read")
        numbers = [timeout] if poll is None else [timeout, poll]
        if not all(isinstance(one, int | float) for one in numbers) or (poll is not None and not poll > 0 <= timeout):
            raise ConfigError(f"poll is None or positive, timeout 0 or more; got {poll!r}, {timeout!r}")
        self.path, self.pattern, self.poll, self.timeout = folder, pattern, poll, timeout
        self.mode, self.select = mode, select
        self._closed = threading.Event()

    def begin_source(self, context: Context, own: Any) -> Step:
        """As the first stage of a pipeline."""
        if own is not None:
            raise StateError(
                f"{self.path} is a folder that is watched: a state cannot go on in it, for it holds other shards now. "
                "Begin without a state: shards that were not read to their end come again"
            )
        self._closed.clear()
        return _Taken(self._shards(context.key("directory", common=False)))

    def close(self) -> None:
        """End the iterations, also one that waits for a shard. Idempotent."""
        self._closed.set()

    def _shards(self, key: int) -> Iterator[dict[str, str]]:
        count, since = 0, time.monotonic()
        while not self._closed.is_set():
            taken = self._take(mix(key, count))
            if taken is not None:
                count += 1
                read = False
                try:
                    yield {"url": taken.path}
                    read = True
                finally:
                    self._finish(taken, read)
                since = time.monotonic()
                continue
            left = self.timeout - (time.monotonic() - since)
            if self.poll is None or left <= 0:
                return
            self._closed.wait(min(self.poll, left, _LONGEST))

    def _take(self, draw: int) -> _Shard | None:
        """Lock and rename a free shard; None if there is none."""
        self._give_back_of_the_dead()
        free = shards_in(self.path, self.pattern)
        if self.select == "oldest":
            free = [path for _, path in sorted((_written(path), path) for path in free)]
        elif free:
            first = draw % len(free)
            free = free[first:] + free[:first]
        for name in free:  # another process may be quicker
            lock = _lock(name)
            if lock is None:
                continue
            taken = f"{name}._{socket.gethostname()}-{os.getpid()}_"
            if _rename(name, taken):
                return _Shard(taken, name, lock)
            lock.close()
        return None

    def _finish(self, shard: _Shard, read: bool) -> None:
        try:
            if read and self.mode == "unlink":
                os.unlink(shard.path)
            else:
                _release(shard.path, shard.name, _DONE if read and self.mode == "keep" else "")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ShardIOError(str(io_error(shard.path, error, "cannot remove"))) from error
        finally:
            shard.lock.close()

    def _give_back_of_the_dead(self) -> None:
        """Give shards their own names that were taken on this machine, and that nobody holds any more."""
        host = socket.gethostname()
        for path in glob.glob(os.path.join(glob.escape(self.path), "*._*-*_")):
            found = _TAKEN.search(path)
            lock = _lock(path) if found is not None and found["host"] == host else None
            if found is not None and lock is not None:
                if lock.held:
                    _release(path, path[: found.start()])
                lock.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_closed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._closed = threading.Event()


class _Lock(NamedTuple):
    """A file that this process holds open."""

    descriptor: int
    held: bool
    """Whether it is locked; not on file systems without locks, where shards of the dead stay taken."""

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)


class _Shard(NamedTuple):
    """A shard that was taken: where it lies now, its own name, and the lock."""

    path: str
    name: str
    lock: _Lock


class _Taken(Given):
    """Shards that this process has taken for itself."""

    taken = True


def _lock(path: str) -> _Lock | None:
    """Lock a file; None if another iteration has it, wherever it runs, or if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ShardIOError(str(io_error(path, error))) from error
    if sys.platform == "win32":
        return _Lock(descriptor, held=False)
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks
        return _Lock(descriptor, held=False)
    return _Lock(descriptor, held=True)


def _rename(path: str, name: str) -> bool:
    """Whether there was such a file to rename."""
    try:
        os.rename(path, name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ShardIOError(str(io_error(path, error, "cannot rename"))) from error
    return True


def _release(taken: str, name: str, ending: str = "") -> None:
    """Give a shard its name again, with an ending, or the next one that is free."""
    base, extension = name, ""
    if found := _EXTENSION.search(os.path.basename(name)):
        base, extension = name[: len(name) - len(found[0])], found[0]
    for number in itertools.count():
        free = f"{base}.{number}{extension}{ending}" if number else name + ending
        try:
            os.link(taken, free)  # which overwrites nothing, as renaming would
        except FileExistsError:
            continue
        except FileNotFoundError:
            return
        except OSError:  # a file system without links
            if os.path.lexists(free):
                continue
            _rename(taken, free)
            return
        os.unlink(taken)
        return


def _written(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:  # somebody has taken it; who renames it sees that
        return 0.0
