"""Streams by address: files, commands, stores, and schemes of one's own.

    with wds.gopen("pipe:zcat shard.tgz") as stream: ...        after wds.allow("pipe")
    wds.gopen_schemes["mine"] = lambda url, mode, bufsize: ...

Files are opened as they are named; what stores hold (http, https, s3, gs, az, hf, ais, ...) comes through
`penstock.storage`, which goes on at the byte after a failure.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from typing import Any, BinaryIO, cast

from penstock.errors import ConfigError, ShardIOError
from penstock.shards.files import CheckedFile
from penstock.shards.urls import local_path
from penstock.storage import is_remote, open_source
from penstock.wds.trust import allowed, check_local, refuse

__all__ = ["Pipe", "gopen", "gopen_schemes"]

_HARMLESS = (0, 141, -13)  # ended, or stopped because nobody reads on
_GRACE = 5.0  # seconds that a command is given to end when it is told to
_STORES = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "ais", "sftp", "ftp")


class Pipe:
    """A command's output, or input, as a file.

    A command that reads is told to end (SIGTERM, to all of its processes) where an exception leaves the ``with``: it
    must not take what it has for the whole, and upload that. For this it runs in a session of its own, without the
    terminal. A program that is killed has no time to tell; then the command sees the end of its input.

    Args:
        command: run by a shell.
        mode: ``"rb"`` or ``"wb"``.
        bufsize: bytes of the buffer.

    Raises:
        ShardIOError: (an IOError, at the end) the command failed. Not if it was closed before its end.
    """

    def __init__(self, command: str, mode: str = "rb", bufsize: int = 8192) -> None:
        self.command = command
        reading = mode[0] == "r"
        given: dict[str, Any] = {"stdout" if reading else "stdin": subprocess.PIPE}
        self._process = subprocess.Popen(
            command, shell=True, bufsize=max(bufsize, 1 << 16), start_new_session=not reading, **given
        )
        self._stream = cast(BinaryIO, self._process.stdout if reading else self._process.stdin)

    def read(self, *args: Any) -> bytes:
        """Bytes of the output."""
        data = self._stream.read(*args)
        if not data and args != (0,):
            self._end()
        return data

    def write(self, data: bytes) -> int:
        """Bytes for the input."""
        return self._stream.write(data)

    def flush(self) -> None:
        """Hand on what is in the buffer."""
        self._stream.flush()

    def _end(self) -> None:
        status = self._process.wait()
        if status not in _HARMLESS:
            raise ShardIOError(f"pipe:{self.command}: the command ended with status {status}")

    def close(self) -> None:
        """Close, and wait for the command; one that still writes is stopped by that. Idempotent."""
        if not self._stream.closed:
            writing = self._stream is self._process.stdin
            self._stream.close()
            if writing:
                self._end()
            else:
                self._process.wait()

    def abandon(self) -> None:
        """Close with the input unfinished: the command is ended before it sees that. Idempotent."""
        if self._stream is self._process.stdin and not self._stream.closed:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
        with contextlib.suppress(OSError):  # what is in the buffer finds no reader, and a status that says so
            self.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def _open_pipe(url: str, mode: str = "rb", bufsize: int = 8192) -> BinaryIO:
    return cast(BinaryIO, Pipe(url.partition(":")[2], mode, bufsize))


def _open_store(url: str, mode: str = "rb", bufsize: int = 8192) -> BinaryIO:
    if mode[0] != "r":
        raise ConfigError(f"{url}: objects in stores are only read; to write one use pipe:, or upload the file")
    return cast(BinaryIO, open_source(url).stream())


Opener = Callable[..., Any]

gopen_schemes: dict[str, Opener] = {"pipe": _open_pipe, **dict.fromkeys(_STORES, _open_store)}
"""``opener(url, mode, bufsize)`` by scheme; programs may add theirs."""


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, *, allow: Collection[str] = (), **kw: Any) -> BinaryIO:
    """A binary stream.

    Args:
        url: a path, ``-`` for standard input or output, or an address with one of `gopen_schemes`.
        mode: ``"rb"`` or ``"wb"``.
        bufsize: bytes of the buffer.
        allow: ``("pipe",)`` to run ``pipe:`` commands.
        kw: handed to the opener.

    Raises:
        NotAllowedError: a command that is not allowed, or a file in the secure mode.
        ConfigError: (a ValueError) no such scheme.
        OSError: it cannot be opened.
        ShardChangedError: (while reading) somebody has written to the file.
    """
    if url == "-":
        return sys.stdin.buffer if mode[0] == "r" else sys.stdout.buffer
    path = local_path(url)
    if path is not None:
        check_local(path)
        if mode == "rb" and bufsize > 0:
            return io.BufferedReader(CheckedFile(path), bufsize)
        return cast(BinaryIO, open(path, mode, buffering=bufsize))
    scheme = url.partition(":")[0]
    opener = gopen_schemes.get(scheme)
    if opener is None and is_remote(url) and scheme in _known():
        opener = _open_store
    if opener is None:
        raise ConfigError(f"{url}: no gopen handler defined; there are {', '.join(sorted(gopen_schemes))}")
    if scheme == "pipe" and opener is _open_pipe and not allowed("pipe", allow):
        raise refuse("pipe", url)
    return cast(BinaryIO, opener(url, mode, bufsize, **kw))


def _known() -> Collection[str]:
    try:
        from fsspec.registry import known_implementations
    except ImportError:
        return ()
    found: Collection[str] = known_implementations
    return found


def has_own_opener(url: str) -> bool:
    """Whether an address is to be opened by `gopen` alone: a command, standard input, or a scheme of the program's."""
    if url == "-":
        return True
    if local_path(url) is not None:
        return False
    scheme = url.partition(":")[0]
    return not is_remote(url) or gopen_schemes.get(scheme, _open_store) is not _open_store
