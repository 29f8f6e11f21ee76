"""Programs for tests, in forks of an interpreter that has imported torch and Penstock, which takes longer than they do.

A program is the top level of ``__main__`` in a process of its own, whose parent is this one; it ends as interpreters
do, but what was imported before it is taken apart with ``destroys=True`` only, since that takes longer. `Popen` and
`run` are those of `subprocess`, with text; their first argument is what follows the name of the interpreter on a
command line::

    done = run(["-W", "ignore", "-c", "import torch; print(torch.ones(3))"], timeout=60)

Programs that need more, ``imports=["lightning"]``, are forked from another interpreter that has imported that, too.
Those whose memory counts have one of their own, ``alone=True``; with ``PENSTOCK_TEST_FULL=1`` each has.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import multiprocessing.process
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

FULL = os.environ.get("PENSTOCK_TEST_FULL") == "1"
ALONE = FULL or sys.platform != "linux"  # who takes in orphans is Linux's own

METHODS = ["fork", "forkserver", *(["spawn"] if FULL else [])]
"""Start methods that tests repeat themselves under. A spawned worker imports everything anew, and is given what one of
the forkserver is given."""

SERVES = ["penstock.server.service"]
"""What programs with servers import."""

_START = """
import sys
sys.path.insert(0, {folder!r})
import interpreter_support
interpreter_support.leave_imports()
import torch, penstock.loader.dataloader, penstock.loader.executors.threads
import penstock.loader.executors.process.executor{imports}
exec(interpreter_support.serve({connection}))
"""
_HEADER = 8  # digits: the length of a request, or a process id
_PR_SET_CHILD_SUBREAPER = 36


class Popen(subprocess.Popen[str]):
    """A program: ``["-W", "ignore", "-c", text]``; or ``-m`` with a package, or a script, and arguments."""

    def __init__(
        self,
        arguments: list[str],
        *,
        imports: Iterable[str] = (),
        alone: bool = False,
        destroys: bool = False,
        **options: Any,
    ) -> None:
        self._imports, self._alone, self._destroys = tuple(imports), alone, destroys
        super().__init__([sys.executable, *arguments], text=True, **options)

    if not ALONE:
        # What `subprocess` does to start a process, private: arguments and duties as in Python 3.11.
        def _execute_child(self, args: list[str], *options: Any) -> None:
            if self._alone:
                return super()._execute_child(args, *options)  # type: ignore[misc]
            _, _, _, _, cwd, env, _, _, _, *pipes = options[:15]
            session = options[20]
            files = [number if given == -1 else given for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
            environment = dict(os.environ if env is None else env)
            try:
                request = [args[1:], os.path.abspath(cwd or os.curdir), environment, bool(session), self._destroys]
                self.pid = _here(self._imports).start(request, files)
                self._child_created = True
            finally:
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(arguments: list[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program until it ends, and whoever has its pipes; raises `subprocess.TimeoutExpired`."""
    with Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


class _Interpreter:
    """Imports once, and forks for each program. Ends with the process that started it."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._connection, theirs = socket.socketpair()
        self._lock = threading.Lock()
        more = "".join(f", {name}" for name in imports)
        program = _START.format(folder=str(Path(__file__).parent), imports=more, connection=theirs.fileno())
        command = [sys.executable, "-c", program]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        _receive(self._connection, 1)

    def start(self, request: list[Any], files: list[int]) -> int:
        """Process id of the program. It is an orphan when it begins, and this process takes it in."""
        with self._lock:
            take_in = ctypes.CDLL(None, use_errno=True).prctl
            assert take_in(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
            try:
                send(self._connection, request, files)
                return int(_receive(self._connection, _HEADER))
            finally:
                take_in(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_started: dict[tuple[int, tuple[str, ...]], _Interpreter] = {}


def _here(imports: tuple[str, ...]) -> _Interpreter:
    """That of this process with these imports; a fork starts one of its own."""
    key = os.getpid(), imports
    if key not in _started:
        _started[key] = _Interpreter(imports)
    return _started[key]


def send(connection: socket.socket, request: list[Any], files: list[int]) -> None:
    """Ask for a fork: the arguments of `become`, the first one, standard input, output and error, apart."""
    data = json.dumps(request).encode()
    socket.send_fds(connection, [b"%08d" % len(data)], files)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[list[Any], list[int]] | None:
    """What was sent, and the files; None at the end. Raises EOFError in the middle."""
    header, files, _, _ = socket.recv_fds(connection, _HEADER, 3)
    if not header:
        return None
    try:
        return json.loads(_receive(connection, int(header))), files
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise EOFError("the other side has ended")
        received += more
    return received


# In that interpreter.

_imported: list[str] = []


def leave_imports() -> None:
    """At the end of a program, leave alone what was imported before it. Called first, this is the last to be run.

    To take torch apart takes 200 ms of a processor: each page of memory that is touched is copied first.
    """
    atexit.register(_leave_imports)


def _leave_imports() -> None:
    if _imported:
        for name in _imported:
            sys.modules.pop(name, None)
        # Nor are objects of C++ destroyed.
        ctypes.CDLL(None).on_exit(ctypes.CDLL(None)._exit, None)


def keep_imports() -> None:
    """Let nothing that has been imported be work of the garbage collector, or be freed."""
    for name, module in sys.modules.items():
        if name.partition(".")[0] not in ("sys", "builtins", "__main__", "penstock"):
            _imported.append(name)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch has many
    gc.collect()
    gc.freeze()


def serve(number: int) -> Any:
    """Fork for each request; in the fork, return the program."""
    connection = socket.socket(fileno=number)
    keep_imports()
    connection.sendall(b"+")
    while True:
        asked = receive(connection)
        if asked is None:
            os._exit(0)
        request, files = asked
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            program = os.fork()
            if program:
                os.write(tell, b"%08d" % program)
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            connection.close()
            os.close(told)
            os.close(tell)
            return become(files, *request)
        os.waitpid(between, 0)
        connection.sendall(os.read(told, _HEADER))
        for each in (told, tell, *files):
            os.close(each)


def become(
    files: list[int], arguments: list[str], folder: str, environment: dict[str, str], session: bool, destroys: bool
) -> Any:
    """Make of this process what `python *arguments` is at the first line of its program; its code."""
    if destroys:
        _imported.clear()
    if session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    with suppress(KeyError):
        sys.modules["numpy"].random.seed()
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update(__name__="__main__", __builtins__=sys.modules["builtins"], __doc__=None, __spec__=None, __loader__=None)
    name, *rest = arguments
    sys.path.remove(str(Path(__file__).parent))
    words = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [word for word in words if word and word not in sys.path]
    if name == "-c":
        text, *rest = rest
        sys.path[0] = ""
        sys.argv = ["-c", *rest]
        return compile(text, "<string>", "exec", dont_inherit=True)
    if name == "-m":
        package, *rest = rest
        sys.path[0] = folder
        spec = importlib.util.find_spec(f"{package}.__main__")
        main.update(__spec__=spec, __package__=package, __file__=spec.origin)
        sys.argv = [spec.origin, *rest]
        return spec.loader.get_code(spec.name)
    sys.path[0] = str(Path(name).absolute().parent)
    sys.argv = arguments
    main["__file__"] = str(Path(name).absolute())
    return compile(Path(name).read_bytes(), name, "exec", dont_inherit=True)
