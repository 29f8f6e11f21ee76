"""Whatever is lost on the way, every sample comes once, and bit for bit as it would have been."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_support import (
    Counter,
    Deadly,
    Failing,
    Numbers,
    Shares,
    SlowNode,
    TwoArguments,
    add_node,
    alive,
    eventually,
    rows,
)

from penstock import DataLoader, RayOptions
from penstock.errors import WorkerError

pytestmark = pytest.mark.timeout(240)


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


@pytest.mark.parametrize("hedge", [True, False])
def test_a_node_that_is_removed_in_mid_epoch(cluster: Any, hedge: bool) -> None:
    """With hedging its batches are made elsewhere before its loss is even known."""
    node = add_node(cluster, 9)
    removed = 0
    try:
        with make(Numbers(100_000, seconds=0.01), 7, ray_options=RayOptions(hedge=hedge)) as loader:
            batches, gaps, last = [], [], time.monotonic()
            for number, batch in enumerate(loader):
                gaps.append(time.monotonic() - last)
                batches.append(batch)
                if not removed and counts_of(loader, node)["batches"] > 3:
                    removed = number
                    cluster.remove_node(node, allow_graceful=False)
                if removed and number > removed + 60 and counts_of(loader, node)["lost"]:
                    break
                last = time.monotonic()
            assert rows(batches) == truth_of(Numbers(100_000), len(batches))
            print(f"hedge={hedge}, longest gap: {max(gaps[removed + 1 :]):.2f} s")
            assert max(gaps[removed + 1 :]) < (5 if hedge else 20)
            assert loader.stats()["lost_workers"] >= 1
    finally:
        if not removed:
            cluster.remove_node(node, allow_graceful=False)


def test_a_worker_that_exits_is_replaced(cluster: Any, tmp_path: Path) -> None:
    with make(Deadly(40, 17, 1, tmp_path)) as loader:
        assert rows(loader) == truth(Numbers(40))
        assert loader.stats()["lost_workers"] == 1


def test_a_sample_that_takes_every_worker_along_is_named(cluster: Any, tmp_path: Path) -> None:
    with make(Deadly(40, 17, 99, tmp_path)) as loader:
        seen = []
        iterator = iter(loader)
        with pytest.raises(WorkerError, match=r"sample 17 takes its worker with it.*on node 127\.0\.0\.1 \("):
            seen.extend(iterator)
        seen.extend(iterator)  # the next call goes on behind it
        assert len(rows(seen)) == 36
        assert set(rows(seen)) < set(truth(Numbers(40)))


@pytest.mark.parametrize("action", ["skip", "replace"])
def test_the_error_policy_passes_over_it(cluster: Any, tmp_path: Path, action: str) -> None:
    with make(Deadly(40, 17, 99, tmp_path), on_error=action) as loader:
        found = rows(loader)
        expected = truth(Numbers(40))
        kept = [pair for pair in expected if pair[0] != 17]
        assert [pair for pair in found if pair in kept] == kept
        assert len(found) == (39 if action == "skip" else 40)
        assert loader.stats()["errors"]["types"] == {"WorkerError": 1}


@pytest.mark.parametrize(("kind", "expected"), [("two", RuntimeError), ("unpicklable", ValueError), ("key", KeyError)])
def test_errors_keep_their_type_and_tell_where(cluster: Any, kind: str, expected: type[Exception]) -> None:
    with make(Failing(20, 7, kind)) as loader:
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


def test_a_worker_that_does_not_answer_is_given_up(cluster: Any) -> None:
    """As behind a network that is cut: nothing is heard, nothing is closed."""
    data = Numbers(120, seconds=0.01)
    with make(data, 2, ray_options=RayOptions(deadline=2.0, hedge=False)) as loader:
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


def test_a_slow_worker_does_not_hold_up_the_others(cluster: Any) -> None:
    """Its batches are made once more elsewhere, and it gets less to do."""
    took, hedged = {}, {}
    for kind in (Numbers, SlowNode):
        with make(kind(160, seconds=0.02), 3) as loader:
            iterator = iter(loader)
            batches = [next(iterator)]
            begin = time.monotonic()
            batches += list(iterator)
            took[kind] = time.monotonic() - begin
            hedged[kind] = loader.stats()["hedged_batches"]
            assert rows(batches) == truth(Numbers(160))
    print(f"without {took[Numbers]:.2f} s, with a straggler {took[SlowNode]:.2f} s, hedged {hedged[SlowNode]}")
    assert hedged[SlowNode] >= 1
    assert took[SlowNode] < 0.8 * 40 / 3 * 0.8  # what it would take if everything waited for it


def test_a_sample_of_seven_seconds(cluster: Any) -> None:
    data = Numbers(24, slow={5: 7.0})
    with make(data) as loader:
        assert rows(loader) == truth(Numbers(24))


def test_time_is_up(cluster: Any) -> None:
    data = Numbers(24, slow={5: 3.0})
    with DataLoader(data, 4, seed=1, executor="ray", num_workers=2, timeout=60) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        loader_timeout = iterator._batches  # type: ignore[attr-defined]
        loader_timeout._rules = loader_timeout._rules._replace(timeout=0.5)
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds: worker .* owes batch 1"):
            next(iterator)
        loader_timeout._rules = loader_timeout._rules._replace(timeout=60)
        batches += list(iterator)
        assert rows(batches) == rows(DataLoader(Numbers(24), 4, seed=1))


def test_more_workers_than_cpus(cluster: Any) -> None:
    with make(Numbers(60, seconds=0.002), 9) as loader:
        assert rows(loader) == truth(Numbers(60))
        assert sum(node["workers"] for node in loader.stats()["nodes"].values()) <= 6
    assert eventually(lambda: not alive())


def test_a_node_that_joins_in_mid_epoch_is_used(cluster: Any) -> None:
    node, batches = None, []
    with make(Numbers(100_000, seconds=0.01), 8) as loader:
        for batch in loader:
            batches.append(batch)
            if node is None:
                node = add_node(cluster, 7)
            if counts_of(loader, node)["batches"] > 3:
                break
        assert rows(batches) == truth_of(Numbers(100_000), len(batches))
    assert node is not None
    cluster.remove_node(node)


def test_workers_become_more_and_fewer(cluster: Any) -> None:
    options = RayOptions(min_workers=1, max_workers=3)
    with make(Numbers(4000, seconds=0.01), 1, ray_options=options) as loader:
        most = 0
        for _ in loader:  # the consumer does nothing but wait
            most = max(most, len(loader._engine.ray._desk.actors.members))  # type: ignore[union-attr]
            if most == 3:
                break
        assert most == 3
        loader.set_epoch(0)
        begin = time.monotonic()
        for batch in loader:  # and now it is the slow one
            time.sleep(0.15)
            assert len(batch["index"]) == 4
            if len(loader._engine.ray._desk.actors.members) < 3:  # type: ignore[union-attr]
                break
            assert time.monotonic() - begin < 60


def test_streams_cannot_go_on_without_a_worker(cluster: Any) -> None:
    for data in (Shares(400), Counter(400)):
        with DataLoader(data, 4, executor="ray", num_workers=2) as loader:
            iterator = iter(loader)
            next(iterator)
            import ray

            (actor,) = [m.actor for m in loader._engine.ray._desk.actors.members.values() if m.number == 1]  # type: ignore[union-attr]
            ray.kill(actor)
            with pytest.raises(WorkerError, match=r"worker 1 on node .* was lost"):
                list(iterator)


def test_ctrl_c_leaves_a_loader_that_can_be_used(cluster: Any) -> None:
    data = Numbers(24, seconds=0.2)
    with make(data) as loader:
        iterator = iter(loader)
        next(iterator)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            list(iterator)
        timer.join()
        loader.set_epoch(0)
        assert rows(loader) == truth(Numbers(24))
    assert eventually(lambda: not alive())
    assert torch.get_num_threads() >= 1
