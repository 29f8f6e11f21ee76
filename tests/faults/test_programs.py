"""Whole programs: Ctrl-C, kill -9, the end of the interpreter. No process is left, and nothing is said in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from faults_support import ORPHAN_GRACE_S
from full_run import full_only
from interpreter_support import FULL, METHODS
from leak_support import alive, wait_gone
from program_support import Program

HOW: dict[str, dict[str, Any]] = {
    "thread": {"num_workers": 2, "executor": "thread"},
    "fork": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "threads inside": {"num_workers": 1, "threads_per_worker": 3},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
}


# Ctrl-C, which goes to the whole group of processes.


@full_only("a program for each", but=["fork", "thread"])
@pytest.mark.parametrize("how", ["thread", "fork", "threads inside", *(["forkserver"] if FULL else [])])
def test_ctrl_c_in_next_ends_the_program(how: str, tmp_path: Path) -> None:
    body = """
    iterator = iter(DataLoader(Slow(1000, 0.05), **how))
    next(iterator)
    pids(iterator) if hasattr(iterator, "_workers") else None
    say("ready")
    for batch in iterator:
        pass
    """
    with Program(tmp_path, body, HOW[how]) as program:
        program.wait_for("ready")
        time.sleep(0.3)
        os.killpg(program.process.pid, signal.SIGINT)
        code = program.end(10)
        assert code in (-signal.SIGINT, 130, 1)
        assert not wait_gone(program.pids, 2)
        assert program.err.count("Traceback (most recent call last)") == 1, program.err
        assert "KeyboardInterrupt" in program.err


STARTS = {
    # In the fork, before it is a worker.
    "fork": "multiprocessing.util.register_after_fork(Range, lambda _: once(folder) and interrupt())",
    # While the data set is unpickled, which imports what it needs.
    "spawn": "data.start = folder",
    "forkserver": "data.start = folder",
}


@full_only("a forkserver of its own", but=["fork"])
@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_while_a_worker_starts(method: str, tmp_path: Path) -> None:
    """It is told of by the program alone, which can go on; and workers, and what they start, can be interrupted."""
    # A fork server's second worker may still import when the first one interrupts: nothing holds the signal back there.
    count = 1 if method == "forkserver" else 2
    body = f"""
    import multiprocessing.util
    folder, data = {str(tmp_path)!r}, Starting(6)
    {STARTS[method]}
    loader = DataLoader(data, num_workers={count}, multiprocessing_context={method!r})
    try:
        iterator = iter(loader)
        pids(iterator)
        time.sleep(30)
    except KeyboardInterrupt:
        say("caught")
    iterator = None
    assert [int(batch) for batch in loader] == list(range(6))
    say("children", *multiprocessing.active_children())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    raise SystemExit(0 if os.path.exists(os.path.join(folder, "begun")) else 9)
    """
    with Program(tmp_path, body, {}) as program:
        assert program.end(60) == 0, program.out + program.err
        said = program.out.splitlines()
        assert "caught" in said
        assert said[-1] == "children"
        assert not wait_gone(program.pids, 2)
        assert program.err == ""


@full_only("a program for each", but=["fork"])
@pytest.mark.parametrize("how", ["thread", "fork", "persistent"])
def test_after_ctrl_c_the_loader_can_be_used_again(how: str, tmp_path: Path) -> None:
    body = """
    loader = DataLoader(Slow(60, 0.02), 2, **how)
    expected = [batch.tolist() for batch in DataLoader(Range(60), 2)]
    for round in range(3):
        try:
            iterator = iter(loader)
            next(iterator)
            pids(iterator) if hasattr(iterator, "_workers") else None
            say(f"ready{round}")
            for batch in iterator:
                pass
            for _ in range(100):
                time.sleep(0.1)
        except KeyboardInterrupt:
            say("caught")
        del iterator
        assert [batch.tolist() for batch in loader] == expected
        say(f"whole{round}")
    loader.close()
    say("children", *children())
    """
    with Program(tmp_path, body, HOW[how]) as program:
        for number in range(3):
            program.wait_for(f"ready{number}")
            time.sleep(0.05 + 0.1 * number)
            os.killpg(program.process.pid, signal.SIGINT)
            program.wait_for(f"whole{number}", 20)
        assert program.end(10) == 0, program.err
        assert program.out.count("caught") == 3
        assert program.err == ""
        assert not wait_gone(program.pids, 2)


@full_only("waits for real time-outs")
def test_ctrl_c_twice_while_a_worker_hangs(tmp_path: Path) -> None:
    """The second one hits the wait for the worker that hangs."""
    body = """
    iterator = iter(DataLoader(Slow(9, stuck=frozenset({1})), num_workers=2))
    next(iterator)
    pids(iterator)
    say("ready")
    next(iterator)
    """
    with Program(tmp_path, body, {}) as program:
        program.wait_for("ready")
        time.sleep(0.2)
        for _ in range(3):
            if program.process.poll() is None:
                os.killpg(program.process.pid, signal.SIGINT)
            time.sleep(0.7)
        assert program.end(12) != 0
        assert not wait_gone(program.pids, 2)


@full_only("random moments for seconds", but=["True"])
@pytest.mark.parametrize("persistent", [False, True])
def test_interrupts_at_any_moment_lose_nothing_and_hang_nobody(persistent: bool, tmp_path: Path) -> None:
    """KeyboardInterrupt comes between any two instructions of next(). Whoever goes on with the same iterator gets what
    is left, in order, or is told to begin a new one; a batch that was interrupted on its way may be missing. And the
    loader works afterwards.
    """
    body = """
    import random
    rng = random.Random(2)
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    loader = DataLoader(Big(300, 3000), 2, **how)
    caught = rounds = 0
    begin = time.monotonic()
    while rounds < 6 or caught < 12:
        rounds += 1
        iterator, got = iter(loader), []
        while True:
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.004 + 1e-5)
                    batch = next(iterator)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    got.append(int(batch[0, 0]))
                    del batch
                except (StopIteration, RuntimeError):
                    break
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:  # out of the lines above, too
                caught += 1
            if time.monotonic() - begin > 15:
                say("slow", rounds, caught, len(got))
                sys.exit(5)
        assert got == sorted(set(got)), got
        say("had", len(got))
        iterator = None
    expected = [[2.0 * k, 2.0 * k + 1] for k in range(150)]
    assert [batch[:, 0].tolist() for batch in loader] == expected
    """
    with Program(tmp_path, body, {"num_workers": 2, "persistent_workers": persistent}) as program:
        assert program.end(30) == 0, program.out + program.err


# kill -9.

ORPHANS = {
    "idle": "time.sleep(99)",
    "busy": "for batch in iterator:\n        pass",
    "an unrelated child": (
        "if os.fork() == 0:\n        say('pids', os.getpid())\n        signal.alarm(60)\n        time.sleep(99)\n    "
        "time.sleep(99)"
    ),
}


@full_only("a program for each", but=["fork-busy", "persistent-busy"])
@pytest.mark.parametrize(
    ("how", "after"),
    [
        *[("fork", after) for after in ORPHANS],
        ("persistent", "busy"),
        ("threads inside", "idle"),
        ("forkserver", "an unrelated child"),
    ],
)
def test_workers_of_a_killed_program_end(how: str, after: str, tmp_path: Path) -> None:
    """Two loaders at once; the second one's workers are forked while the first one's pipes are open."""
    body = f"""
    loaders = [DataLoader(Slow(1000, 0.05), **how), DataLoader(Big(1000, 4000, 0.01), 20, **how)]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    pids(*iterators)
    say("ready")
    {ORPHANS[after]}
    """
    with Program(tmp_path, body, HOW[how], by_themselves=True) as program:
        program.wait_for("ready")
        time.sleep(0.3)
        workers = program.pids[: 2 if how == "threads inside" else 4]
        os.kill(program.process.pid, signal.SIGKILL)
        program.end()
        assert not wait_gone(workers, 3)
        assert "Traceback" not in program.err


@pytest.mark.skipif(not FULL, reason="its import of torch takes longer than the rest; PENSTOCK_TEST_FULL=1")
def test_spawned_workers_of_a_killed_program_end(tmp_path: Path) -> None:
    body = """
    iterator = iter(DataLoader(Slow(1000, 0.05), **how))
    next(iterator)
    pids(iterator)
    say("ready")
    time.sleep(99)
    """
    how = {"num_workers": 1, "multiprocessing_context": "spawn"}
    with Program(tmp_path, body, how, by_themselves=True) as program:
        program.wait_for("ready", 60)
        os.kill(program.process.pid, signal.SIGKILL)
        program.end()
        assert not wait_gone(program.pids, 3)
        assert "Traceback" not in program.err


@full_only("waits for real time-outs", but=["fork"])
@pytest.mark.parametrize("how", ["fork", "threads inside", *(["forkserver"] if FULL else [])])
def test_workers_that_hang_end_with_a_killed_program(how: str, tmp_path: Path) -> None:
    """Though user code does not return, and another process holds their pipes: a fork by a library in C, of which
    Python knows nothing.
    """
    body = """
    iterator = iter(DataLoader(Slow(9, stuck=frozenset(range(9))), **how))
    pids(iterator)
    time.sleep(0.5)
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        signal.alarm(30)
        signal.pause()
    say("child", child)
    say("ready")
    time.sleep(99)
    """
    with Program(tmp_path, body, HOW[how]) as program:
        program.wait_for("ready")
        words = program.out.split()
        child = int(words[words.index("child") + 1])
        os.kill(program.process.pid, signal.SIGKILL)
        program.end()
        assert not wait_gone(program.pids, 7)
        assert alive(child), "the pipes were not held for so long"
        assert "Traceback" not in program.err


def test_workers_outlive_the_thread_that_started_them(tmp_path: Path) -> None:
    """The kernel tells them when it ends, as if their parent had ended."""
    body = """
    made = []
    def start():
        made.append(iter(DataLoader(Slow(60, 0.01), **how)))
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    pids(*made)
    time.sleep(0.3)
    say("got", len(list(made[0])))
    """
    with Program(tmp_path, body, HOW["fork"], env={**os.environ, ORPHAN_GRACE_S: "0"}) as program:
        assert program.end(30) == 0, program.out + program.err
        assert "got 60" in program.out


def test_a_worker_whose_parent_died_before_it_could_watch_it_ends() -> None:
    """As one that is spawned, which takes seconds to come so far."""
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait(30)
    code = f"""
import time
from penstock.processes import end_with_parent
end_with_parent({parent.pid})
time.sleep(20)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG, check=False).returncode == 1


# The end of the interpreter. More programs: test_torch_suite_faults.

ENDS = {
    "in __del__": (
        """
    class Holder:
        def __init__(self):
            self.loader = DataLoader(Slow(1000, 0.01), **how)
            self.iterator = iter(self.loader)
            next(self.iterator)
        def __del__(self):
            next(self.iterator)
            self.loader.close()
            del self.iterator
    holder = Holder()
    pids(holder.iterator) if how.get("executor") != "thread" else None
    del holder
    """,
        0,
    ),
    "in a thread that goes on": (
        """
    def run():
        # Integers: a daemon thread in torch's own code at the end of the interpreter would abort it, whoever loads.
        for batch in DataLoader(Slow(100_000, 0.01), collate_fn=first, **how):
            pass
    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.5)
    sys.exit(6)
    """,
        6,
    ),
    "kept by a module": (
        """
    sys.kept = iter(DataLoader(Big(1000), 2, **how))
    sys.batches = [next(sys.kept) for _ in range(5)]
    """,
        0,
    ),
    "kept by an atexit function": (
        """
    import atexit
    iterator = iter(DataLoader(Slow(1000, 0.01), **how))
    next(iterator)
    atexit.register(lambda: iterator)
    """,
        0,
    ),
    "in a fork that uses it": (
        """
    loader = DataLoader(Big(40, 20_000), 2, **how)
    def right():
        return [batch[:, 0].tolist() for batch in loader] == [[2.0 * k, 2.0 * k + 1] for k in range(20)]
    assert right()
    child = os.fork()
    if child == 0:
        signal.alarm(15)
    assert right() and right()
    if child == 0:
        sys.exit(0)
    assert right()
    assert os.waitpid(child, 0)[1] == 0
    """,
        0,
    ),
    "in forks that end": (
        """
    iterator = iter(DataLoader(Slow(60, 0.01), **how))
    next(iterator)
    for end in (lambda: sys.exit(0), lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL)):
        child = os.fork()
        if child == 0:
            del iterator
            gc.collect()
            end()
        os.waitpid(child, 0)
        next(iterator)
    assert len(list(iterator)) == 56
    """,
        0,
    ),
    "next in a fork": (
        """
    iterator = iter(DataLoader(Slow(60, 0.01), **how))
    next(iterator)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            for batch in iterator:
                pass
        except RuntimeError as error:
            say("refused", error)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 59
    """,
        0,
    ),
    "with a stopped worker": (
        """
    iterator = iter(DataLoader(Slow(60, 0.01), **how))
    next(iterator)
    pids(iterator) if how.get("executor") != "thread" else None
    for worker in getattr(iterator, "_workers", []) if how.get("executor") != "thread" else []:
        os.kill(worker.pid, signal.SIGSTOP)
    """,
        0,
    ),
}


@full_only("a program for each", but=["fork", "thread-in __del__", "thread-in a thread that goes on"])
@pytest.mark.parametrize(
    ("how", "name"),
    [
        *[("fork", name) for name in ENDS],
        *[("persistent", name) for name in ("in __del__", "in forks that end", "in a thread that goes on")],
        *[("thread", name) for name in ("in __del__", "in a thread that goes on", "in a fork that uses it")],
    ],
)
def test_the_end_of_a_program(name: str, how: str, tmp_path: Path) -> None:
    body, code = ENDS[name]
    with Program(tmp_path, body, HOW[how], destroys=True) as program:
        assert program.end(25) == code, program.out + program.err
        assert program.err == ""
        assert not wait_gone(program.pids, 2)
        assert not wait_gone(program.group(), 2)
