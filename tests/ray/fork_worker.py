"""Workers of Ray, forked from an interpreter that has imported torch and Penstock, which is most of their start.

A node runs this file instead of Ray's ``setup_worker.py``. It hands what it was given to the interpreter of `forking`,
whose fork becomes the worker, and waits for the end of it and of its forks. Workers with a runtime environment start as
Ray starts them. The others have one seed of hashes.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interpreter_support import ALONE, become, receive, send

NAME = "PENSTOCK_TEST_WORKERS"
"""Environment variable: name of the interpreter's socket, an abstract one."""

# Not Ray, which reads what its node tells a worker when it is imported.
_PROGRAM = """
import gc
import google.protobuf.json_format, jsonschema, msgpack, psutil, requests, yaml
import torch, penstock.loader.dataloader, fork_worker
gc.collect()
gc.freeze()
exec(fork_worker.serve({name!r}))
"""


@contextmanager
def forking() -> Iterator[None]:
    """An interpreter whose forks become workers of nodes that are given `setup_worker`."""
    if ALONE:
        yield
        return
    name = os.environ[NAME] = f"penstock-test-{os.getpid()}-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", _PROGRAM.format(name=name)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, text=True, **pipes) as process:  # Ctrl-C is not for it
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()


def setup_worker() -> str | None:
    """What a node runs to start a worker; None is Ray's own."""
    return __file__ if NAME in os.environ else None


def serve(name: str) -> Any:
    """Fork for each request, until standard input ends; in the fork, return the worker's program."""
    import select

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + name)
    listener.listen(64)
    print("ready", flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection = listener.accept()[0]
        try:
            asked = receive(connection)
        except (EOFError, OSError):
            asked = None  # its node was killed meanwhile
        if asked is not None:
            request, files = asked
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray does
                listener.close()
                connection.detach()  # the system closes it at the worker's end
                return become(files, *request, True)
            for file in files:
                os.close(file)
        connection.close()
    os._exit(0)


def _start(given: list[str]) -> None:
    """Have a worker forked, and wait until it has ended; or become Ray's own way to start it."""
    kept = [word for word in given if not word.startswith(("--language=", "--serialized-runtime-env-context="))]
    others = {word for word in given if word not in kept}
    if others <= {"--language=PYTHON", "--serialized-runtime-env-context=", "--serialized-runtime-env-context={}"}:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("\0" + os.environ[NAME])
            # In a session of its own: after its end the node kills its process group.
            send(connection, [kept, os.getcwd(), dict(os.environ), True], [0, 1, 2])
            connection.recv(1)
    else:
        os.execv(sys.executable, [sys.executable, str(Path(given[0]).with_name("setup_worker.py")), *given])


if __name__ == "__main__":
    _start(sys.argv[1:])
