"""`ScanProcesses`: scans media files in child processes with limits on memory and CPU time.

Media files may be untrusted. If a demuxer uses too much memory, hangs or crashes, only its file gets an error. A child
process opens no files: it requests bytes from its parent.

    parent                                 child
    -- name, size ------------------>
    <-- offset, size ---------------       repeated
    -- bytes ----------------------->
    <-- coding, packets, or error ---
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from typing import Any, NamedTuple

from penstock.clips.media import ByteSource
from penstock.errors import ClipError, ConfigError, DataFileIOError
from penstock.processes import end_with_parent
from penstock.storage.urls import shown

__all__ = ["ScanProcesses", "serve"]

_MEMORY = 1 << 30  # bytes
_SECONDS = 60  # CPU seconds for a small file
_BYTES_OF_SECOND = 100_000  # bytes per further CPU second: for some codecs all frames are decoded
_PATIENCE = 1.0  # seconds to wait for the end of a process
_TRIES = 2  # a second try, because the system may have been short of memory

_PROGRAM = "import sys; sys.path[:] = {path!r}; from penstock.clips.scan_process import serve; serve({fd}, {parent})"


class ScanProcesses:
    """Child processes that scan files, one file at a time each. They start on demand.

    Args:
        module: a module of `penstock.clips`, whose ``scan`` computes coding and packets from a file's bytes.
        seconds: CPU seconds that a small file may take; large files may take more.

    Safe in threads: each scanning thread uses its own process. Leaving the context kills all processes, even those that
    are in use. Memory: about 45 MB per process, at most 1 GiB.
    """

    def __init__(self, module: str, *, seconds: int = _SECONDS) -> None:
        self._module, self._seconds = module, seconds
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._is_closed = False

    def __enter__(self) -> ScanProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
            for process in (*self._idle, *self._busy):
                process.kill()
            for process in self._idle:
                process.close()

    def scan(self, source: ByteSource, name: str) -> tuple[Any, Any]:
        """Return the coding and the packets of a file.

        Args:
            source: the file.
            name: its name, for messages.

        Raises:
            ClipError: it is damaged, or exceeds the limits.
            ConfigError: PyAV cannot be imported.
            DataFileIOError: processes cannot be started, or are killed.
            StorageError: it cannot be read.
        """
        request = _Request(self._module, name, source.size, self._seconds + source.size // _BYTES_OF_SECOND)
        for tries_left in reversed(range(_TRIES)):
            process = self._acquire()
            try:
                answer = process.scan(request, source)
            except _EndedError as error:
                how = self._discard(process)
                if how != -signal.SIGXCPU and tries_left:
                    continue
                words = f"{shown(name)!r} cannot be indexed: {_exit_reason(how, request)}"
                # SIGKILL comes from the user or from a system out of memory, so the file is not to blame.
                raise (DataFileIOError if how == -signal.SIGKILL else ClipError)(words) from error
            except BaseException:
                process.kill()
                self._discard(process)
                raise
            else:
                self._release(process)
                if answer.error:
                    raise (ClipError if answer.is_of_file else ConfigError)(answer.error)
                return answer.coding, answer.packets
        raise AssertionError

    def _acquire(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise ConfigError("files cannot be scanned: the scan processes were closed")
            process = self._idle.pop() if self._idle else _Process()
            self._busy.add(process)
            return process

    def _release(self, process: _Process) -> None:
        with self._lock:
            self._busy.discard(process)
            if not self._is_closed:
                self._idle.append(process)
                return
        process.close()

    def _discard(self, process: _Process) -> int:
        with self._lock:
            self._busy.discard(process)
        return process.close()


class _Request(NamedTuple):
    module: str
    name: str
    size: int
    seconds: int


class _Answer(NamedTuple):
    coding: Any = None
    packets: Any = None
    error: str = ""
    is_of_file: bool = True


class _EndedError(Exception):
    """A scan process has ended."""


class _Process:
    """A scan process."""

    def __init__(self) -> None:
        try:
            self._connection, theirs = Pipe()
            self._process = self._start(theirs)
        except OSError as error:
            raise DataFileIOError(f"a process that scans files cannot be started: {error.strerror}") from error

    def _start(self, theirs: Connection) -> subprocess.Popen[bytes]:
        with theirs:
            program = _PROGRAM.format(path=list(map(str, sys.path)), fd=theirs.fileno(), parent=os.getpid())
            # In its own process group, so that Ctrl-C reaches only the parent.
            return subprocess.Popen(
                [get_executable(), "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def scan(self, request: _Request, source: ByteSource) -> _Answer:
        """Return the answer to a request. Raises `_EndedError`, and the errors of the source."""
        message = self._exchange(request)
        while not isinstance(message, _Answer):
            offset, size = message
            message = self._exchange(source.read_at(offset, size))
        return message

    def _exchange(self, words: _Request | bytes) -> Any:
        """Send a request or bytes, and return the reply."""
        try:
            if isinstance(words, bytes):
                self._connection.send_bytes(words)
            else:
                self._connection.send(words)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise _EndedError from error

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> int:
        """Close the connection, wait for the process to end and return its exit code, as in `subprocess.Popen`."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_PATIENCE)
        self._process.kill()
        return self._process.wait()


def _exit_reason(code: int, request: _Request) -> str:
    """Describe why a process ended."""
    if code == -signal.SIGXCPU:
        return f"that takes more than {request.seconds:,} s of CPU time, for {request.size:,} bytes"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process that read it has ended ({how}), {_TRIES} times"


def serve(handle: int, parent: int) -> None:
    """Scan files for the parent process until it closes the connection. The main function of a scan process.

    Args:
        handle: file descriptor of the connection.
        parent: process ID of the parent.
    """
    end_with_parent(parent)
    _limit(resource.RLIMIT_DATA, _MEMORY)
    with Connection(handle) as connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            request: _Request = connection.recv()
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + request.seconds)
            connection.send(_answer(connection, request))


def _limit(what: int, most: int) -> None:
    hardest = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hardest == resource.RLIM_INFINITY else min(most, hardest), hardest))


def _answer(connection: Connection, request: _Request) -> _Answer:
    try:
        coding, packets = importlib.import_module(f"penstock.clips.{request.module}").scan(
            _RemoteSource(connection, request.size), request.name
        )
        return _Answer(coding, packets)
    except ClipError as error:
        return _Answer(error=str(error))
    except (EOFError, ConnectionError):  # the parent closed the connection
        raise
    except ImportError as error:
        return _Answer(error=f"PyAV cannot be imported ({error}): pip install 'penstock[clips]'", is_of_file=False)
    except Exception as error:  # a damaged file may cause any error
        what = f"{type(error).__name__}: {error}"
        return _Answer(error=f"{shown(request.name)!r} cannot be indexed: {what}")


class _RemoteSource:
    """A file that the parent process has open. It is read in blocks, and some of them are cached."""

    fingerprint = ""

    _BLOCK = 1 << 20
    _KEPT = 8

    def __init__(self, connection: Connection, size: int) -> None:
        self._connection, self.size = connection, size
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on; fewer only at the end of the file."""
        end = min(offset + size, self.size)
        first = offset // self._BLOCK
        blocks = [self._block(number) for number in range(first, -(-end // self._BLOCK))]
        data = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return data[offset - first * self._BLOCK : end - first * self._BLOCK]

    def _block(self, number: int) -> bytes:
        block = self._blocks.pop(number, None)
        if block is None:
            begin = number * self._BLOCK
            self._connection.send((begin, min(self._BLOCK, self.size - begin)))
            block = self._connection.recv_bytes()
            if len(self._blocks) >= self._KEPT:
                self._blocks.popitem(last=False)
        self._blocks[number] = block
        return block
