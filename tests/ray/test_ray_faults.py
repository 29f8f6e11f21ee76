"""Whatever is lost on the way, every sample comes once, and bit for bit as it would have been."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_run import full_only
from ray_support import (
    STARTS,
    Counter,
    Deadly,
    Failing,
    Numbers,
    Picky,
    Shares,
    TwoArguments,
    add_node,
    alive,
    eventually,
    rows,
)

from penstock import DataLoader, RayOptions
from penstock.errors import ClusterError, WorkerError


def make(data: Any, workers: int = 2, **how: Any) -> DataLoader[Any]:
    return DataLoader(data, 4, shuffle=True, seed=1, executor="ray", num_workers=workers, **how)


def truth(data: Any) -> list[Any]:
    return rows(DataLoader(data, 4, shuffle=True, seed=1))


def truth_of(data: Any, batches: int) -> list[Any]:
    """The first ones."""
    return rows(itertools.islice(DataLoader(data, 4, shuffle=True, seed=1), batches))


def counts_of(loader: DataLoader[Any], node: Any) -> dict[str, Any]:
    """What the loader says of a node; nothing as long as no worker is there."""
    found = [counts for name, counts in loader.stats()["nodes"].items() if node.node_id[:6] in name]
    return found[0] if found else {"batches": 0, "lost": 0}


def test_a_worker_that_exits_is_replaced(cluster: Any, tmp_path: Path) -> None:
    with make(Deadly(40, (17,), 1, tmp_path)) as loader:
        assert rows(loader) == truth(Numbers(40))
        assert loader.stats()["lost_workers"] == 1


@full_only("both take the same way", but=["object"])
@pytest.mark.parametrize("kind", ["object", "memory"])
def test_an_object_that_is_lost_and_a_worker_that_ran_out_of_memory(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As Ray tells of them: the worker is replaced."""
    import ray
    from ray.exceptions import ObjectLostError, OutOfMemoryError

    raised: list[Exception] = []

    def get(ref: Any, *, timeout: float | None = None) -> Any:
        answer = real(ref, timeout=timeout)
        if isinstance(answer, list) and not raised:  # batches
            error = ObjectLostError(ref.hex(), None, "") if kind == "object" else OutOfMemoryError("too much")
            raised.append(error)
            raise error
        return answer

    with make(Numbers(40)) as loader:
        real = ray.get
        monkeypatch.setattr(ray, "get", get)
        assert rows(loader) == truth(Numbers(40))
        assert len(raised) == 1
        assert loader.stats()["lost_workers"] == 1


def test_a_batch_that_has_lost_three_workers_is_named(cluster: Any, tmp_path: Path) -> None:
    expected = truth(Numbers(40))
    order = [index for index, _ in expected]
    number = order.index(17) // 4
    samples = order[4 * number : 4 * number + 4]
    with make(Deadly(40, (17,), 99, tmp_path)) as loader:
        seen = []
        iterator = iter(loader)
        with pytest.raises(WorkerError) as caught:
            seen.extend(iterator)
        assert re.search(r"worker \d on node 127\.0\.0\.1 \(\w+\) was lost", str(caught.value))
        assert f"batch {number}, samples {samples}" in str(caught.value)
        assert rows(seen) == expected[: 4 * number]
        with pytest.raises(WorkerError, match="was lost"):
            next(iterator)
        assert loader.stats()["lost_workers"] == 3


def test_what_a_handler_of_a_signal_raises_comes_as_it_is(cluster: Any) -> None:
    """Ray makes a SystemError of it."""

    class Tick(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Tick

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with make(Numbers(40, seconds=0.1), 1) as loader:
            iterator = iter(loader)
            next(iterator)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Tick):
                for _ in iterator:
                    pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_errors_keep_their_type_and_tell_where(cluster: Any) -> None:
    data = Failing(20, 7, "")
    with make(data) as loader:
        for kind, expected in ("two", RuntimeError), ("unpicklable", ValueError), ("key", KeyError):
            data.kind = kind
            loader.set_epoch(0)
            seen, caught = [], []
            iterator = iter(loader)
            while True:
                try:
                    seen.append(next(iterator))
                except StopIteration:
                    break
                except Exception as error:
                    caught.append(error)
            assert len(caught) == 1
            assert isinstance(caught[0], expected)
            text = f"{caught[0]} {' '.join(caught[0].__notes__)}"
            assert "in DataLoader Ray worker" in text
            assert "while loading sample 7" in text
            assert "Traceback" in text
            if kind == "two":
                assert TwoArguments.__name__ in text
            assert len(rows(seen)) == 16


def test_a_batch_that_ends_three_workers_is_named(cluster: Any) -> None:
    with make(Failing(20, 7, "final")) as loader:
        with pytest.raises(WorkerError, match=r"was lost \(.*while it made .*batch \d, samples"):
            list(loader)
        assert loader.stats()["lost_workers"] == 3


def test_a_data_set_that_nodes_cannot_load_is_an_error(cluster: Any) -> None:
    data = Picky(40)
    with make(data, 1) as loader:
        assert rows(loader) == truth(Numbers(40))
        data.broken = True
        with pytest.raises(ClusterError, match=r"(?s)3 workers in a row could not be started .* no such table"):
            list(loader)
    assert eventually(lambda: not alive())


def test_a_worker_that_does_not_answer_is_given_up(cluster: Any) -> None:
    """As behind a network that is cut: nothing is heard, nothing is closed."""
    data = Numbers(120, seconds=0.01)
    with make(data, 2, ray_options=RayOptions(deadline=2.0)) as loader:
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(4)]
        pid = int(batches[-1]["pid"][0])
        os.kill(pid, signal.SIGSTOP)
        try:
            batches += list(iterator)
        finally:
            os.kill(pid, signal.SIGKILL) if _exists(pid) else None
        assert rows(batches) == truth(Numbers(120))
        assert loader.stats()["lost_workers"] >= 1


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@full_only("waits for real time-outs; test_a_worker_that_does_not_answer has one")
def test_time_is_up_and_a_sample_of_seven_seconds(cluster: Any) -> None:
    data = Numbers(24, slow={5: 7.0})
    with DataLoader(data, 4, seed=1, executor="ray", num_workers=2, timeout=60) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        flow = iterator._batches._flow  # type: ignore[attr-defined]
        flow.config = replace(flow.config, timeout=0.5)
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds: worker .* owes batch 1"):
            next(iterator)
        flow.config = replace(flow.config, timeout=60)
        begin = time.monotonic()
        batches += list(iterator)
        assert time.monotonic() - begin > 5
        assert rows(batches) == rows(DataLoader(Numbers(24), 4, seed=1))


@full_only("starts of more workers")
def test_streams_cannot_go_on_without_a_worker(cluster: Any) -> None:
    for data in (Shares(8000), Counter(8000)):
        with DataLoader(data, 4, executor="ray", num_workers=2) as loader:
            iterator = iter(loader)
            for _ in range(2):  # one of each worker, so that both have started
                next(iterator)
            import ray

            (actor,) = [one.actor for one in loader._workers.executor._actors if one.number == 1]  # type: ignore[union-attr]
            ray.kill(actor)
            with pytest.raises(WorkerError, match=r"worker 1 on node .* was lost"):
                list(iterator)


def test_ctrl_c_leaves_a_loader_that_can_be_used(cluster: Any) -> None:
    data = Numbers(48, seconds=0.05)
    with make(data) as loader:
        iterator = iter(loader)
        next(iterator)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            list(iterator)
        timer.join()
        loader.set_epoch(0)
        assert rows(loader) == truth(Numbers(48))
    assert eventually(lambda: not alive())
    assert torch.get_num_threads() >= 1


@pytest.mark.clock
def test_close_ends_the_wait_of_another_thread(cluster: Any) -> None:
    """At once, and nobody is left, or started after it."""
    end: list[BaseException] = []

    def consume(iterator: Any) -> None:
        try:
            for _ in range(100):
                next(iterator)
        except BaseException as error:
            end.append(error)

    with make(Numbers(40, seconds=5.0), 1) as loader:
        consumer = threading.Thread(target=consume, args=(iter(loader),), daemon=True)
        consumer.start()
        assert eventually(lambda: bool(loader.stats()["nodes"]), STARTS)
        begin = time.monotonic()
        loader.close()
        consumer.join(10)
        assert time.monotonic() - begin < 5
        assert isinstance(end[0], WorkerError)
        assert "its DataLoader was closed" in str(end[0])
        assert eventually(lambda: not alive())


def test_close_ends_a_pass_that_is_held(cluster: Any) -> None:
    """At once, and whoever asks for more is told so; the next pass has new workers."""
    loader = make(Numbers(40), 1)
    held = iter(loader)
    next(held)
    for _ in range(2):
        loader.close()
        assert eventually(lambda: not alive())
        with pytest.raises(WorkerError, match="its DataLoader was closed"):
            next(held)
    loader.set_epoch(0)
    assert rows(loader) == truth(Numbers(40))
    loader.close()


def test_a_node_that_joins_and_one_that_is_lost_in_mid_epoch(cluster: Any) -> None:
    """There are more workers than CPUs until it joins."""
    node: Any = None
    removed = 0
    try:
        options = RayOptions(label_selector={"number": "in(0,9)"})
        with make(Numbers(100_000, seconds=0.01), 4, ray_options=options) as loader:
            batches, gaps, last = [], [], time.monotonic()
            for number, batch in enumerate(loader):
                gaps.append(time.monotonic() - last)
                batches.append(batch)
                if node is None:
                    assert sum(n["workers"] for n in loader.stats()["nodes"].values()) <= 2
                    node = add_node(cluster, 9)
                nodes = loader.stats()["nodes"].values()  # both, so that the other one takes over
                if not removed and len(nodes) == 2 and min(seen["batches"] for seen in nodes) > 3:
                    removed = number
                    cluster.remove_node(node, allow_graceful=False)
                if removed and number > removed + 60 and counts_of(loader, node)["lost"]:
                    break
                last = time.monotonic()
            assert rows(batches) == truth_of(Numbers(100_000), len(batches))
            print(f"longest gap: {max(gaps[removed + 1 :]):.2f} s")
            assert max(gaps[removed + 1 :]) < 20
            assert loader.stats()["lost_workers"] >= 1
    finally:
        if node is not None and not removed:
            cluster.remove_node(node, allow_graceful=False)
