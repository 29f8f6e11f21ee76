"""Workers of Ray, forked from an interpreter that has imported torch and Penstock, which is most of their start.

A node runs this file instead of Ray's ``setup_worker.py``. It hands what it was given to the interpreter of `forking`,
whose fork becomes the worker, and waits for the end of it. Workers with a runtime environment start as Ray starts them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLACE = "PENSTOCK_TEST_WORKERS"
"""Environment variable: path of the interpreter's socket."""

_HEADER = 8  # digits: the length of a request


@contextmanager
def forking(folder: Path) -> Iterator[None]:
    """An interpreter whose forks become workers of nodes that are given `setup_worker`."""
    import subprocess

    from interpreter_support import ALONE, Popen

    if ALONE:
        yield
        return
    os.environ[PLACE] = str(folder / "workers")
    # Not Ray, which reads what its node tells a worker when it is imported.
    imports = ["google.protobuf.json_format", "jsonschema", "msgpack", "psutil", "requests", "yaml"]
    program = f"import fork_worker\nexec(fork_worker.serve({os.environ[PLACE]!r}))"
    with Popen(["-c", program], imports=imports, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()


def setup_worker() -> str | None:
    """What a node runs to start a worker; None is Ray's own."""
    return __file__ if PLACE in os.environ else None


def serve(path: str) -> Any:
    """Fork for each request, until standard input ends; in the fork, return the worker's program."""
    import select
    import signal

    from interpreter_support import become

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection = listener.accept()[0]
        header, files, _, _ = socket.recv_fds(connection, _HEADER, 3)
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(int(header)))
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            connection.detach()  # the system closes it at the worker's end
            return become(files, *request, session=False)
        connection.close()
        for file in files:
            os.close(file)
    os._exit(0)


def _ask(arguments: list[str]) -> None:
    """Have a worker forked, and wait until it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[PLACE])
        request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [b"%08d" % len(request)], [0, 1, 2])
        connection.sendall(request)
        connection.recv(1)


if __name__ == "__main__":
    given = sys.argv[1:]
    plain = [word for word in given if not word.startswith(("--language=", "--serialized-runtime-env-context="))]
    if "--language=PYTHON" in given and not any(
        word.startswith("--serialized-runtime-env-context=") and word.partition("=")[2] not in ("", "{}")
        for word in given
    ):
        _ask(plain)
    else:
        setup = Path(given[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(setup), *given])
