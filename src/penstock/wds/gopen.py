"""Binary streams by address: files, commands, stores, and a program's own schemes.

    with wds.gopen("pipe:zcat shard.tgz") as stream: ...        after wds.allow("pipe")
    wds.gopen_schemes["mine"] = lambda url, mode, bufsize: ...

Files are opened by path. Objects in stores (http, https, s3, gs, az, hf, ais, ...) are read through
`penstock.storage`, which resumes at the next byte after a failure.
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
from penstock.storage import is_remote, open_source
from penstock.storage.files import CheckedFile
from penstock.storage.urls import path_of
from penstock.wds.utils import allowed, check_local, refuse

_HARMLESS = (0, 141, -13)  # success, or killed by SIGPIPE because the reader stopped
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_STORES = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "ais", "sftp", "ftp")


class Pipe:
    """The output or input of a shell command, as a file.

    When an exception leaves the ``with`` block, a command that reads gets SIGTERM (with all of its processes), so that
    it does not mistake a partial input for the whole and upload it. For this the command runs in its own session,
    without the terminal. If this program is killed, it cannot send a signal: the command sees the end of its input.

    Args:
        command: run by a shell.
        mode: ``"rb"`` or ``"wb"``.
        bufsize: bytes of the buffer.

    Raises:
        ShardIOError: (an IOError, at the end) the command failed; not raised if the pipe was closed earlier.
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
        """Read bytes of the output."""
        data = self._stream.read(*args)
        if not data and args != (0,):
            self._end()
        return data

    def write(self, data: bytes) -> int:
        """Write bytes to the input."""
        return self._stream.write(data)

    def flush(self) -> None:
        """Pass the buffered bytes to the command."""
        self._stream.flush()

    def _end(self) -> None:
        status = self._process.wait()
        if status not in _HARMLESS:
            raise ShardIOError(f"pipe:{self.command}: the command ended with status {status}")

    def close(self) -> None:
        """Close the pipe, which stops a command that still writes, and wait for the command. Idempotent."""
        if not self._stream.closed:
            writing = self._stream is self._process.stdin
            self._stream.close()
            if writing:
                self._end()
            else:
                self._process.wait()

    def abandon(self) -> None:
        """End the command, then close its unfinished input. Idempotent."""
        if self._stream is self._process.stdin and not self._stream.closed:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
        with contextlib.suppress(OSError):  # the buffered bytes have no reader, and a failed status is expected
            self.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the command has ended already
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
        raise ConfigError(f"{url}: gopen cannot write to stores; write through pipe:, or upload the file afterwards")
    return cast(BinaryIO, open_source(url).stream())


Opener = Callable[..., Any]

gopen_schemes: dict[str, Opener] = {"pipe": _open_pipe, **dict.fromkeys(_STORES, _open_store)}
"""``opener(url, mode, bufsize)`` by scheme; programs may add their own."""


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, *, allow: Collection[str] = (), **kw: Any) -> BinaryIO:
    """Open a binary stream.

    Args:
        url: a path, ``-`` for standard input or output, or an address with one of `gopen_schemes`.
        mode: ``"rb"`` or ``"wb"``.
        bufsize: bytes of the buffer.
        allow: ``("pipe",)`` to run ``pipe:`` commands.
        kw: passed to the opener.

    Raises:
        NotAllowedError: a command is not allowed, or a file is opened in secure mode.
        ConfigError: (a ValueError) the scheme is unknown.
        OSError: the address cannot be opened.
        ShardChangedError: (while reading) the file has changed.
    """
    if url == "-":
        return sys.stdin.buffer if mode[0] == "r" else sys.stdout.buffer
    path = path_of(url)
    if path is not None:
        check_local(path)
        if mode == "rb" and bufsize > 0:
            return io.BufferedReader(CheckedFile(path), bufsize)
        return cast(BinaryIO, open(path, mode, buffering=bufsize))
    opener = _opener_of(url)
    if opener is None:
        raise ConfigError(
            f"{url}: no gopen handler defined for this scheme; known schemes: {', '.join(sorted(gopen_schemes))}"
        )
    if url.startswith("pipe:") and opener is _open_pipe and not allowed("pipe", allow):
        raise refuse("pipe", url)
    return cast(BinaryIO, opener(url, mode, bufsize, **kw))


def _opener_of(url: str) -> Opener | None:
    """Return the opener of an address that is not a local file; None for an unknown scheme."""
    scheme = url.partition(":")[0]
    if scheme in gopen_schemes or not is_remote(url):
        return gopen_schemes.get(scheme)
    try:
        from fsspec.registry import known_implementations
    except ImportError:
        return None
    return _open_store if scheme in known_implementations else None


def has_own_opener(url: str) -> bool:
    """Return whether only `gopen` can open an address: a command, standard input, or a program's own scheme."""
    return url == "-" or (path_of(url) is None and _opener_of(url) is not _open_store)
