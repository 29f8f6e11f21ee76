"""Acceptance: errors and dead workers are torch's, or better where a comment says so."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import FULL, run
from leak_support import wait_gone
from pairwise import each_value
from torch.utils.data import DataLoader as TorchDataLoader
from torch_suite_support import (
    FAST,
    OURS,
    WORKERS,
    BadStream,
    Dies,
    Exits,
    Raises,
    Range,
    bad_worker,
    end,
    outcomes,
)

import penstock as ps

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

HERE = str(Path(__file__).parent)


# 5. Exceptions.


def errors(kind: Any, how: dict[str, Any]) -> list[Any]:
    """Of each sample the value, or the type and the text of its error."""
    found: list[Any] = []
    iterator = iter(kind(Raises(11), batch_size=None, **how))
    for _ in range(30):
        try:
            found.append(next(iterator))
        except StopIteration:
            end(iterator)
            return found
        except Exception as error:
            found.append((type(error), str(error)))
    raise AssertionError("no end")


TEXTS = ["no such key", "7: odd", "stubborn", "locked", "No such file", "bad byte", "too large", "", "past the end"]


@pytest.mark.parametrize("how", [*FAST, "forkserver"])
def test_each_error_has_its_type_and_text_and_the_next_sample_follows(how: str) -> None:
    """torch's types in the workers' place; where an error cannot cross processes, torch gives a RuntimeError with the
    text (`UnicodeDecodeError`, constructors with other arguments), and so do we, or its own type.
    """
    process = OURS[how].get("executor") == "process"
    torchs = errors(TorchDataLoader, WORKERS[how] if process else {})
    ours = errors(ps.DataLoader, OURS[how])
    assert len(ours) == len(torchs) == 11
    assert [ours[0], ours[10]] == [torchs[0], torchs[10]] == [0, 10]
    own = [found[0] for found in errors(TorchDataLoader, {})[1:10]]
    for found, expected, real, text in zip(ours[1:10], torchs[1:10], own, TEXTS, strict=True):
        assert found[0] in (expected[0], real)
        assert text in found[1]


@pytest.mark.parametrize("how", FAST)
@pytest.mark.parametrize("batch_size", [2, 3])
def test_every_failing_batch_raises_once(how: str, batch_size: int) -> None:
    expected = outcomes(TorchDataLoader(Raises(20), batch_size=batch_size))
    found = outcomes(ps.DataLoader(Raises(20), batch_size=batch_size, **OURS[how]))
    failed = [isinstance(outcome, type) for outcome in expected]
    assert [isinstance(outcome, type) for outcome in found] == failed
    assert [a for a, bad in zip(found, failed, strict=True) if not bad] == [
        a for a, bad in zip(expected, failed, strict=True) if not bad
    ]


@pytest.mark.parametrize("how", [*FAST, "forkserver"])
def test_errors_of_iter_and_of_worker_init_arrive_by_the_first_next(how: str) -> None:
    with pytest.raises(LookupError, match="no stream here"):
        next(iter(ps.DataLoader(BadStream(), **OURS[how])))
    if how != "inline":
        for data in (Range(9), BadStream()):
            with pytest.raises(ArithmeticError, match=r"worker [01] will not"):
                next(iter(ps.DataLoader(data, worker_init_fn=bad_worker, **OURS[how])))


@pytest.mark.parametrize("how", ["inline", "thread", "fork"])
def test_errors_of_samplers_come_behind_what_was_planned(how: str) -> None:
    class Broken:
        def __iter__(self) -> Any:
            yield from range(4)
            raise ZeroDivisionError("the sampler broke")

    loader: Any = ps.DataLoader(Range(9), sampler=Broken(), batch_size=2, **OURS[how])
    iterator = iter(loader)
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(ZeroDivisionError, match="the sampler broke"):
        next(iterator)
    end(iterator)


@pytest.mark.parametrize("how", ["fork", "persistent"])
def test_errors_say_where_in_the_worker_they_happened(how: str) -> None:
    iterator = iter(ps.DataLoader(Raises(3), batch_size=None, **OURS[how]))
    next(iterator)
    with pytest.raises(KeyError) as caught:
        next(iterator)
    end(iterator)
    said = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert "Traceback" in said
    assert "torch_suite_support.py" in said
    assert "worker" in said


# 6. Dead workers.


def died(loader: Any) -> str:
    """The error of a pass in which a worker dies, which comes within ten seconds."""
    begin = time.monotonic()
    iterator = iter(loader)
    with pytest.raises(RuntimeError) as caught:
        for _ in iterator:
            pass
    assert time.monotonic() - begin < 30
    end(iterator)
    return str(caught.value)


@full_only("workers for each", but=["9-fork", "11-persistent", "15-fork"])
@pytest.mark.parametrize("how", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow), "persistent"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_worker_killed_by_a_signal_is_an_error_that_names_it(how: str, number: int) -> None:
    if how in ("forkserver", "spawn") and (number != signal.SIGKILL or (how == "spawn" and not FULL)):
        pytest.skip("one signal is enough there; for spawn PENSTOCK_TEST_FULL=1")
    loader: Any = ps.DataLoader(Dies(20, 5, number), **OURS[how])
    text = died(loader)
    assert "is killed by signal" in text
    assert any(word in text for word in (signal.Signals(number).name, signal.strsignal(number) or "?"))
    assert "pid" in text


@pytest.mark.parametrize("how", ["fork", "persistent"])
def test_a_worker_that_exits_is_an_error(how: str) -> None:
    assert "exited unexpectedly" in died(ps.DataLoader(Exits(20), **OURS[how]))


@pytest.mark.parametrize("how", ["fork", "persistent"])
def test_after_a_death_the_loader_works_again(how: str) -> None:
    data = Dies(12, 5, signal.SIGKILL)
    loader: Any = ps.DataLoader(data, **OURS[how])
    died(loader)
    data.at = -1
    assert [int(batch) for batch in loader] == list(range(12))


# 7 and 8. Whole programs.

PROGRAM = """
import gc, os, resource, signal, sys, threading, time
sys.path[:0] = {path!r}
from torch_suite_support import *
import penstock as ps
class Slow(Range):
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((100,), index)
class Fails(Slow):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("a bad sample")
        return super().__getitem__(index)
def pids(iterator):
    print("pids", *[worker.pid for worker in getattr(iterator, "_workers", [])], flush=True)
how = {how!r}
if __name__ == "__main__":
{body}
"""

HALF_WAY = """
loader = ps.DataLoader(Slow(1000), **how)
iterator = iter(loader)
next(iterator)
pids(iterator)
"""

BODIES = {
    "kept alive to the end": (HALF_WAY, 0),
    "dropped half way": (HALF_WAY + "del iterator\ndel loader\ngc.collect()", 0),
    "error": (HALF_WAY + "raise RuntimeError('the program broke')", 1),
    "error while the workers are blocked": (HALF_WAY + "time.sleep(1)\nraise RuntimeError('the program broke')", 1),
    "exit": (HALF_WAY + "sys.exit(3)", 3),
    "exit in a loop": (
        "for k, batch in enumerate(ps.DataLoader(Slow(1000), **how)):\n    if k == 3:\n        sys.exit(4)",
        4,
    ),
    "hard exit": (HALF_WAY + "os._exit(5)", 5),
    "killed": (HALF_WAY + "os.kill(os.getpid(), signal.SIGKILL)", -9),
    "terminated": (HALF_WAY + "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)", -15),
    "a cycle": (HALF_WAY + "gc.disable()\nloop = [iterator, loader]\nloop.append(loop)\ndel loop, iterator, loader", 0),
    "in a global's attribute": (HALF_WAY + "sys.modules['torch'].my_iterator = iterator", 0),
    "bad sample": (
        "iterator = iter(ps.DataLoader(Fails(1000), **how))\npids(iterator)\nfor batch in iterator:\n    pass",
        1,
    ),
    "many indices queued": (
        "iterator = iter(ps.DataLoader(Range(10_000_000), batch_size=200_000, collate_fn=len, **how))\nnext(iterator)\n"
        "pids(iterator)\nraise RuntimeError('the program broke')",
        1,
    ),
    "never exhausted": (
        "loader = ps.DataLoader(Slow(1000), **how)\nfor _ in range(3):\n    iterator = iter(loader)\n"
        "    next(iterator)\npids(iterator)",
        0,
    ),
    "exhausted": ("loader = ps.DataLoader(Slow(20), **how)\nfor _ in range(2):\n    assert len(list(loader)) == 20", 0),
    "several": (
        "iterators = [iter(ps.DataLoader(Slow(100), **how)) for _ in range(3)]\n"
        "for iterator in iterators:\n    next(iterator)\n    pids(iterator)",
        0,
    ),
    "a fork of the program": (
        HALF_WAY + "child = os.fork()\nif child == 0:\n    del iterator\n    gc.collect()\n    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\nassert next(iterator) is not None",
        0,
    ),
    "in a thread": (
        "def run():\n    iterator = iter(ps.DataLoader(Slow(1000), **how))\n    next(iterator)\n    pids(iterator)\n"
        "    raise SystemExit\nthread = threading.Thread(target=run)\nthread.start()\nthread.join()",
        0,
    ),
}

LEAVE = {
    "inline": {},
    "thread": OURS["thread"],
    "threads persist": OURS["threads persist"],
    "process": OURS["fork"],
    "persistent": OURS["persistent"],
}


def run_program(body: str, how: dict[str, Any]) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    path = [HERE, *[entry for entry in sys.path if entry.endswith("src")]]
    text = PROGRAM.format(path=path, how=how, body=textwrap.indent(body, "    "))
    done = run(["-W", "ignore", "-c", text], timeout=HANG)
    lines = [line for line in done.stdout.splitlines() if line.startswith("pids")]
    return done, [int(pid) for line in lines for pid in line.split()[1:]]


@full_only(
    "a program for each",
    but=[
        "error-persistent",
        "exhausted-inline",
        "several-process",
        "exit in a loop-process",
        "dropped half way-thread",
        "a fork of the program-thread",
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "how"), each_value(BODIES, ["process", "thread", "persistent", "threads persist", "inline"])
)
def test_programs_end_and_leave_nothing(name: str, how: str) -> None:
    """With the exit code of the program, at once, without a word that is not the program's, and no worker is left."""
    body, code = BODIES[name]
    begin = time.monotonic()
    done, pids = run_program(body, LEAVE[how])
    assert done.returncode == code, done.stderr
    assert len(pids) in (0, 2, 6) if how in ("process", "persistent") else not pids
    assert not wait_gone(pids, 5)
    assert time.monotonic() - begin < 45
    if code == 1:
        assert done.stderr.count("Traceback") <= 2
        assert "RuntimeError: the program broke" in done.stderr or "KeyError: " in done.stderr
    elif code >= 0:
        assert done.stderr == ""


@full_only("another forkserver; test_programs_end has fork")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("name", ["kept alive to the end", "error", "killed", "bad sample", "exit in a loop"])
def test_programs_end_under_other_start_methods(name: str, method: str, tmp_path: Path) -> None:
    if (method == "spawn" or name != "killed") and not FULL:
        pytest.skip("as with fork, above; PENSTOCK_TEST_FULL=1")
    body, code = BODIES[name]
    path = [HERE, *[entry for entry in sys.path if entry.endswith("src")]]
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(path=path, how=OURS[method], body=textwrap.indent(body, "    ")))
    done = run(["-W", "ignore", str(file)], timeout=HANG)
    pids = [int(pid) for line in done.stdout.splitlines() if line.startswith("pids") for pid in line.split()[1:]]
    assert done.returncode == code, done.stderr
    assert not wait_gone(pids, 5)
    assert code != 0 or done.stderr == ""


@pytest.mark.parametrize("how", ["fork", "persistent"])
def test_workers_of_a_dropped_iterator_end_with_code_0(how: str) -> None:
    loader: Any = ps.DataLoader(Range(1000), **OURS[how])
    iterator = iter(loader)
    next(iterator)
    workers = list(iterator._workers)
    del iterator, loader
    gc.collect()
    for worker in workers:
        worker.join(10)
    assert [worker.exitcode for worker in workers] == [0, 0]


@full_only("waits for real time-outs", but=["process"])
@pytest.mark.parametrize("how", ["thread", "process", "persistent"])
def test_a_program_whose_worker_is_slow_times_out_and_ends(how: str) -> None:
    body = (
        "class Sleeps(Range):\n    def __getitem__(self, index):\n        time.sleep(4 if index else 0)\n"
        "        return index\n"
        "iterator = iter(ps.DataLoader(Sleeps(9), timeout=1, **how))\nnext(iterator)\nnext(iterator)"
    )
    begin = time.monotonic()
    done, _ = run_program(body, LEAVE[how])
    assert done.returncode == 1
    assert "DataLoader timed out after 1 seconds" in done.stderr
    assert time.monotonic() - begin < 30


@full_only("thousands of batches", but=["process"])
@pytest.mark.parametrize("how", ["process", "persistent"])
def test_batches_that_are_kept_need_no_descriptors(how: str) -> None:
    """torch stops here with advice about ``ulimit -n``; we go on."""
    body = (
        "iterator = iter(ps.DataLoader(Slow(300), prefetch_factor=4, **how))\nkept = [next(iterator)]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\nkept += list(iterator)\n"
        "assert [int(batch[0, 0]) for batch in kept] == list(range(300))\nassert len(os.listdir('/proc/self/fd')) < 60"
    )
    done, _ = run_program(body, LEAVE[how])
    assert done.returncode == 0, done.stderr


def test_no_descriptors_left_for_workers_is_an_error_that_says_so() -> None:
    body = (
        "used = len(os.listdir('/proc/self/fd'))\nresource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))\n"
        "how['num_workers'] = 16\nnext(iter(ps.DataLoader(Slow(30), **how)))"
    )
    done, _ = run_program(body, LEAVE["process"])
    assert done.returncode == 1
    assert "ulimit -n" in done.stderr or "Too many open files" in done.stderr
