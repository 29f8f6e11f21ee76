"""`DirectoryShardList`: reads the shards of a watched folder, including those that appear later.

    wds.DataPipeline(wds.DirectoryShardList("incoming/", mode="unlink", select="oldest", timeout=600), ...)

    incoming/a.tar                 free
    incoming/b.tar._host-4711_     claimed by process 4711 of this machine
    incoming/c.tar._done_          read, with mode="keep"

A reader claims a shard by locking and renaming it. So ranks and workers that watch one folder never read the same
shard at the same time, and no list has to be split. A shard that was not read to its end, because the iteration was
dropped or the process died, gets its original name back and is read later. No file is ever overwritten: if a new shard
has taken the name meanwhile, the old one returns as ``a.1.tar``.

The lock belongs to the open file, which children forked by the reading process share: the shard of a killed process
returns only when such children have ended, too.
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
from penstock.storage import io_error
from penstock.storage.names import braces, path_of
from penstock.wds.iterators import Context, IteratorStep, Source, Step

__all__ = ["PATTERN", "DirectoryShardList", "shards_in"]

PATTERN = "*.{tar,tgz,tar.gz,tar.bz2,tar.xz,tar.zst}"
"""The names of shards in a folder, as a pattern with braces."""

_DONE = "._done_"
_TAKEN = re.compile(r"\._(?P<host>.*)-\d+_$")
_EXTENSION = re.compile(r"(\.tar)?\.[^.]*$")
_LONGEST = threading.TIMEOUT_MAX


def shards_in(folder: str, pattern: str = PATTERN) -> list[str]:
    """Return the files of a folder that match a pattern with braces, sorted, except claimed and finished shards."""
    inside = glob.escape(folder)
    found = {path for text in braces(pattern) for path in glob.glob(os.path.join(inside, text))}
    return sorted(path for path in found if not path.endswith(_DONE) and not _TAKEN.search(path))


class DirectoryShardList(Source):
    """An endless list of the shards in a folder.

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

    Draws depend on the pipeline's seed, epoch, rank and worker, and on the shards that exist at the time.

    A shard counts as finished when the next one is requested. So the stage that reads shards must directly follow this
    one: with a shuffle of shards between them, shards would be removed unread. Splitters pass these shards through.
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
        """Open the list as the first stage of a pipeline."""
        if own is not None:
            raise StateError(
                f"{self.path} is a watched folder, whose shards may have changed: it cannot resume from a "
                "state. Start without the state: shards that were not read to their end are read again"
            )
        self._closed.clear()
        return _ClaimedShards(self._shards(context.key("directory", common=False)))

    def close(self) -> None:
        """End all iterations, including one that waits for a shard. Idempotent."""
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
        """Lock and rename a free shard; return None if no shard is free."""
        self._give_back_of_the_dead()
        free = shards_in(self.path, self.pattern)
        if self.select == "oldest":
            free = [path for _, path in sorted((_written(path), path) for path in free)]
        elif free:
            first = draw % len(free)
            free = free[first:] + free[:first]
        for name in free:  # another process may claim it first
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
        """Restore the names of shards that dead processes of this machine had claimed."""
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
    """Whether it is locked. False on file systems without locks, where shards of dead processes stay claimed."""

    def close(self) -> None:
        """Release the lock."""
        os.close(self.descriptor)


class _Shard(NamedTuple):
    """A claimed shard: its current path, its original name, and the lock."""

    path: str
    name: str
    lock: _Lock


class _ClaimedShards(IteratorStep):
    """Shards that this process has claimed, which splitters must not split."""

    taken = True


def _lock(path: str) -> _Lock | None:
    """Lock a file; return None if another iteration of any process holds it, or if it is gone."""
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
    """Rename a file, and return whether it existed."""
    try:
        os.rename(path, name)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ShardIOError(str(io_error(path, error, "cannot rename"))) from error
    return True


def _release(taken: str, name: str, ending: str = "") -> None:
    """Restore the name of a shard, plus an ending, or the next free name."""
    base, extension = name, ""
    if found := _EXTENSION.search(os.path.basename(name)):
        base, extension = name[: len(name) - len(found[0])], found[0]
    for number in itertools.count():
        free = f"{base}.{number}{extension}{ending}" if number else name + ending
        try:
            os.link(taken, free)  # unlike a rename, a link never overwrites a file
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
    except FileNotFoundError:  # another process has claimed it, which the rename will notice
        return 0.0
