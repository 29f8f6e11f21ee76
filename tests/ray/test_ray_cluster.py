"""Which cluster a loader attaches to, where its workers are, and what is left of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from ray_support import STARTS, Numbers, alive, eventually, rows

from penstock import DataLoader, RayOptions
from penstock.errors import ClusterError

PROGRAM = """
import os, signal, sys, time
sys.path[:0] = {path!r}
from penstock import DataLoader, RayOptions
from ray_support import Numbers, rows, workers_of

def begin(name):
    options = RayOptions({address!r}, name=name)
    loader = DataLoader(Numbers(40_000, seconds=0.01), 4, seed=1, executor="ray", num_workers=2, ray_options=options)
    iterator = iter(loader)
    while workers_of(loader) < 2:  # else the second one may come too late for Ray to know it
        next(iterator)
    print("first", flush=True)
    return loader, iterator

"""


def states(prefix: str) -> dict[str, str]:
    """By name, the state of actors, by Ray's state API."""
    import ray
    from ray.util.state import list_actors

    address = ray.get_runtime_context().gcs_address
    return {
        actor.name: actor.state for actor in list_actors(address, limit=1000) if (actor.name or "").startswith(prefix)
    }


def gone(prefix: str) -> bool:
    return set(states(prefix).values()) <= {"DEAD"}


@contextmanager
def program(code: str, cluster: Any) -> Iterator[subprocess.Popen[str]]:
    """Another program on the cluster."""
    head = PROGRAM.format(path=sys.path[:4], address=cluster.address)
    command = [sys.executable, "-c", head + textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True) as found:
        try:
            yield found
        finally:
            found.kill()


def wait_for(word: str, process: subprocess.Popen[str]) -> None:
    """Until the program has said it."""
    assert process.stdout is not None
    lines = []
    while word not in (line := process.stdout.readline()):
        lines.append(line)
        assert line, "".join(lines)


def test_workers_have_names_and_keep_to_their_labels(cluster: Any) -> None:
    options = RayOptions(label_selector={"number": "1"}, name="labelled")
    with DataLoader(Numbers(16), 4, executor="ray", num_workers=2, ray_options=options) as loader:
        assert len(rows(loader)) == 16
        both = [f"labelled-{digits}" for digits in sorted({name.split("-")[1] for name in states("labelled-")})]
        assert eventually(lambda: states("labelled-") == {f"{both[0]}-{k}": "ALIVE" for k in range(2)}, STARTS)
        (node,) = loader.stats()["nodes"]
        expected = next(n for n in cluster.worker_nodes if n._ray_params.labels.get("number") == "1")
        assert expected.node_id[:6] in node
    assert eventually(lambda: gone("labelled-"))


def test_nodes_in_the_report(cluster: Any, capsys: Any) -> None:
    with DataLoader(Numbers(80, seconds=0.005), 4, executor="ray", num_workers=2) as loader:
        rows(loader)
        loader.report()
        nodes = len(loader.stats()["nodes"])
    out = capsys.readouterr().out
    assert "DataLoader: ray, 2 workers" in out
    assert 1 <= nodes == out.count("node 127.0.0.1 (")


@full_only("three loaders in a program of its own; the program that is killed is the hardest")
def test_no_worker_is_left(cluster: Any) -> None:
    """While the program goes on: behind `close()`, without the loader, after Ctrl-C."""

    def ended(name: str) -> bool:
        return len(states(name)) == 2 and gone(name)  # Ray may tell of none for a moment

    code = """
        loader, iterator = begin("left-closed")
        loader.close()
        sys.stdin.readline()
        loader, iterator = begin("left-dropped")
        del loader, iterator
        sys.stdin.readline()
        loader, iterator = begin("left-interrupted")
        for _ in iterator:
            pass
    """
    with program(code, cluster) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for name in ("closed", "dropped"):
            wait_for("first", process)
            assert eventually(lambda name=name: ended(f"left-{name}"))  # type: ignore[misc]
            process.stdin.write("\n")
            process.stdin.flush()
        wait_for("first", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) != 0
        assert "KeyboardInterrupt" in process.stdout.read()
        assert eventually(lambda: ended("left-interrupted"))


@full_only("a program of its own for each end", but=["killed"])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ended", "pass"),
        ("raised", "raise RuntimeError('as planned')"),
        ("killed", "os.kill(os.getpid(), signal.SIGKILL)"),
    ],
)
def test_no_worker_outlives_the_program(cluster: Any, name: str, code: str) -> None:
    with program(f"loader, iterator = begin('left-{name}')\n{code}", cluster) as process:
        wait_for("first", process)
        assert eventually(lambda: gone(f"left-{name}"))
        assert len(states(f"left-{name}")) == 2


def test_attaching(cluster: Any) -> None:
    """The cluster at hand is used, and no other one may be named."""
    for address in (None, "auto", cluster.address):
        with DataLoader(Numbers(4), 4, executor="ray", num_workers=1, ray_options=RayOptions(address)) as loader:
            assert len(list(loader)) == 1
    with pytest.raises(
        ClusterError, match=r"is connected to the Ray cluster at .*, and RayOptions names 127\.0\.0\.1:1:"
    ):
        next(iter(DataLoader(Numbers(4), executor="ray", num_workers=1, ray_options=RayOptions("127.0.0.1:1"))))


@pytest.mark.clock
def test_no_room(cluster: Any) -> None:
    options = RayOptions(resources={"unicorns": 1}, start_timeout=1.5)
    begin = time.monotonic()
    with pytest.raises(ClusterError, match=r"2 of 2 workers could not be started in .*unicorns"):
        next(iter(DataLoader(Numbers(4), executor="ray", num_workers=2, ray_options=options)))
    assert time.monotonic() - begin < 10
    assert eventually(lambda: not alive())


@full_only("a runtime environment of its own")
def test_other_versions_are_named(cluster: Any, tmp_path: Path) -> None:
    """A node with another Penstock, as its workers import it."""
    (tmp_path / "sitecustomize.py").write_text("import penstock\npenstock.__version__ = '0.0.7'\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    options = RayOptions(runtime_env={"env_vars": {"PYTHONPATH": path}})
    with pytest.raises(ClusterError, match=r"node 127\.0\.0\.1 .* runs penstock 0\.0\.7 \(here "):
        next(iter(DataLoader(Numbers(4), executor="ray", num_workers=1, ray_options=options)))


def rank(number: int, address: str, pipe: Any) -> None:
    """One of two ranks, with workers of its own."""
    import torch.distributed as dist

    import penstock as ps

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=pipe[1], rank=number, world_size=2)
    data = Numbers(40)
    sampler = ps.DistributedSampler(data, shuffle="global", seed=3)
    options = RayOptions(address, name=f"rank{number}")
    with DataLoader(data, 4, sampler=sampler, executor="ray", num_workers=1, ray_options=options) as loader:
        pipe[0].put((number, [rows(loader) for _ in range(2)], [rows(DataLoader(data, 4, sampler=sampler))]))
        dist.barrier()
    dist.destroy_process_group()


@full_only("two spawned programs; workers of a loader know nothing of ranks")
def test_two_ranks(cluster: Any, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=rank, args=(number, cluster.address, (results, f"file://{tmp_path}/store")))
        for number in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = sorted(results.get(timeout=HANG) for _ in ranks)
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
    for epoch in range(2):
        shares = [dict(epochs[epoch]) for _, epochs, _ in found]
        assert set(shares[0]) | set(shares[1]) == set(range(40))
        assert not set(shares[0]) & set(shares[1])
    assert eventually(lambda: gone("rank"))


@full_only("a program of its own")
def test_a_program_that_leaves_the_cluster_and_comes_back(cluster: Any) -> None:
    """Its workers have ended with the connection: the pass is over, and the next one has new ones."""
    code = """
        import ray
        from penstock.errors import ClusterError
        loader, iterator = begin("returned")
        ray.shutdown()
        try:
            next(iterator)
        except ClusterError as error:
            assert "ray.shutdown() was called" in str(error), error
        else:
            raise AssertionError("no error")
        assert not ray.is_initialized()
        loader.set_epoch(0)
        assert rows([next(iter(loader))]) == rows(DataLoader(Numbers(400), 4, seed=1))[:4]
        print("done")
    """
    with program(code, cluster) as process:
        wait_for("done", process)
        assert process.wait(HANG) == 0


@full_only("a program that waits for Ray's time-outs")
@pytest.mark.clock
def test_nobody_is_there(ray_environment: None) -> None:
    """Said at once, and nothing is started."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    code = f"""
        import os, ray, sys
        sys.path[:0] = {sys.path[:4]!r}
        from penstock import DataLoader, RayOptions
        from penstock.errors import ClusterError
        from ray_support import Numbers
        for named, variable in ({address!r}, ""), (None, {address!r}):
            os.environ["RAY_ADDRESS"] = variable
            try:
                iter(DataLoader(Numbers(4), executor="ray", num_workers=1, ray_options=RayOptions(named)))
            except ClusterError as error:
                assert "ray start --head" in str(error), error
            else:
                raise AssertionError("no error")
            assert not ray.is_initialized()
    """
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=HANG)
    assert time.monotonic() - begin < 40


@full_only("a cluster of its own; the guide's code starts one, too")
def test_a_local_cluster_when_it_is_asked_for(ray_environment: None) -> None:
    """Two loaders share it; it ends with the program."""
    code = f"""
        import ray, sys
        sys.path[:0] = {sys.path[:4]!r}
        from penstock import DataLoader, RayOptions
        from ray_support import Numbers, rows
        local = RayOptions("local")
        one, two = (DataLoader(Numbers(8), 4, seed=1, executor="ray", num_workers=1, ray_options=local) for _ in "ab")
        pairs = list(zip(one, two))
        assert rows(a for a, _ in pairs) == rows(b for _, b in pairs) == rows(DataLoader(Numbers(8), 4, seed=1))
        print(ray.get_runtime_context().gcs_address)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=HANG, text=True)
    assert done.returncode == 0, done.stderr
    host, _, port = done.stdout.split()[-1].rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0
