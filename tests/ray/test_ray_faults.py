"""Whatever is lost on the way, every sample comes once, and bit for bit as it would have been."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from ray_support import (
    STARTS,
    Counter,
    Deadly,
    Failing,
    Numbers,
    Shares,
    SlowNode,
    TwoArguments,
    add_node,
    alive,
    all_joined,
    eventually,
    rows,
    workers_of,
)

from penstock import DataLoader, RayOptions
from penstock.errors import WorkerError


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


def test_batches_are_made_once_more_on_another_node(ray_environment: None) -> None:
    """If there is one with workers: the worker that is late may be late because its node is gone."""
    from penstock.loader.executors.ray.cluster import Node
    from penstock.loader.executors.ray.executor import RayExecutor
    from penstock.loader.executors.ray.member import Member

    gone, other = (Node(name * 56, name, 1 << 20) for name in "ab")
    late, neighbour, far = (Member(number, None) for number in range(3))
    late.node = neighbour.node = gone
    far.node = other
    far.seconds = 9.0  # the neighbour would be done before it
    ready = [late, neighbour, far]
    executor: Any = SimpleNamespace(
        _state=SimpleNamespace(typical=0.1),
        _actors=SimpleNamespace(ready=lambda: ready),
        _fits=lambda member: True,
    )
    assert RayExecutor._choose_member(executor) in (late, neighbour)
    assert RayExecutor._choose_member(executor, but=late) is far
    ready.remove(far)
    assert RayExecutor._choose_member(executor, but=late) is neighbour


@full_only("both take the same way", but=["False"])
@pytest.mark.parametrize("hedge", [True, False])
def test_a_worker_that_exits_is_replaced(cluster: Any, tmp_path: Path, hedge: bool) -> None:
    """With hedging the batch may have been made elsewhere, and the pass have ended, before Ray tells of the loss."""
    with make(Deadly(40, (17,), 1, tmp_path), ray_options=RayOptions(hedge=hedge)) as loader:
        assert rows(loader) == truth(Numbers(40))
        stats = loader.stats()
        assert stats["lost_workers"] == 1 or (hedge and stats["hedged_batches"] >= 1)


@full_only("both take the same way", but=["object"])
@pytest.mark.parametrize("kind", ["object", "memory"])
def test_an_object_that_is_lost_and_a_worker_that_ran_out_of_memory(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As Ray tells of them: the worker of the first one is kept, that of the other one replaced."""
    import ray
    from ray.exceptions import ObjectLostError, OutOfMemoryError

    raised: list[Exception] = []

    def get(ref: Any, *, timeout: float | None = None) -> Any:
        if timeout is not None and not raised:  # an answer, not the greeting of a worker
            error = ObjectLostError(ref.hex(), None, "") if kind == "object" else OutOfMemoryError("too much")
            raised.append(error)
            raise error
        return real(ref, timeout=timeout)

    with make(Numbers(40)) as loader:
        real = ray.get
        monkeypatch.setattr(ray, "get", get)
        assert rows(loader) == truth(Numbers(40))
        assert len(raised) == 1
        assert loader.stats()["lost_workers"] == (kind == "memory")


@full_only("every worker starts four times")
def test_a_sample_that_takes_every_worker_along_is_named(cluster: Any, tmp_path: Path) -> None:
    with make(Deadly(40, (17,), 99, tmp_path)) as loader:
        seen = []
        iterator = iter(loader)
        with pytest.raises(WorkerError, match=r"sample 17 takes its worker with it.*on node 127\.0\.0\.1 \("):
            seen.extend(iterator)
        seen.extend(iterator)  # the next call goes on behind it
        assert len(rows(seen)) == 36
        assert set(rows(seen)) < set(truth(Numbers(40)))


def test_the_error_policy_passes_over_it(cluster: Any, tmp_path: Path) -> None:
    """Two of a batch, of which one is skipped and one replaced: those beside them are what they were."""
    expected = truth(Numbers(40))
    (one, _), (other, _) = expected[17:19]
    policy = {one: "skip", other: "replace"}
    with make(Deadly(40, (one, other), 99, tmp_path), on_error=lambda failure: policy[failure.index]) as loader:
        found = rows(loader)
        assert found[:17] == expected[:17]
        assert found[17][0] not in policy
        assert found[18:] == expected[19:]
        assert loader.stats()["errors"]["types"] == {"WorkerError": 2}


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


def test_what_is_no_exception_is_said_of_its_sample(cluster: Any) -> None:
    with make(Failing(20, 7, "final"), on_error="skip") as loader:
        with pytest.warns(UserWarning, match="sample 7 ends its call by GeneratorExit"):
            assert len(rows(loader)) == 19
        assert loader.stats()["lost_workers"] == 0


def test_rows_that_a_lost_worker_lacked_are_not_sent_to_it(ray_environment: None) -> None:
    """Its answer may be taken in together with the news of its end."""
    from penstock.loader.executors.base import Again
    from penstock.loader.executors.ray.executor import RayExecutor
    from penstock.loader.executors.ray.jobs import RayBatch
    from penstock.loader.executors.ray.member import Member

    executor: Any = SimpleNamespace(
        _want=lambda *_: None,
        _actors=SimpleNamespace(members={0: Member(0, None)}),  # the one in its place
    )
    batch = RayBatch(0, None)  # type: ignore[arg-type]
    call: Any = SimpleNamespace(member=Member(0, None))
    answer = ("rows", ("key", [1]), None, 0.0, 0)
    assert RayExecutor._understand(executor, batch, call, answer, []) == [Again([batch])]
    batch.calls.append(call)  # another worker is at it already
    assert RayExecutor._understand(executor, batch, call, answer, []) == []


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


@pytest.mark.clock
def test_a_slow_node_does_not_hold_up_the_others(cluster: Any) -> None:
    """Its batches are made once more elsewhere, and it gets less to do, since it is known how long it took for them."""
    data, took, hedged = SlowNode(160, seconds=0.02), [], []
    options = RayOptions(num_cpus=2, label_selector={"number": "in(0,1)"})  # a worker on each
    with make(data, 2, ray_options=options) as loader:
        assert all_joined(loader, 2)
        slow, other = loader._engine.ray._state.actors.ready()  # type: ignore[union-attr]
        assert slow.node != other.node
        data.node = slow.node.id
        for more in (0.0, 0.18):
            data.more = more
            loader.set_epoch(0)
            iterator = iter(loader)
            batches = [next(iterator)]
            begin = time.monotonic()
            batches += list(iterator)
            took.append(time.monotonic() - begin)
            hedged.append(loader.stats()["hedged_batches"])
            assert rows(batches) == truth(Numbers(160))
    print(f"without {took[0]:.2f} s, with a straggler {took[1]:.2f} s, hedged {hedged[1] - hedged[0]}")
    print(f"seconds of a batch: {slow.seconds:.2f}, elsewhere {other.seconds:.2f}")
    assert hedged[1] - hedged[0] >= 1
    assert took[1] < 0.8 * 40 / 3 * 0.8  # what it would take if everything waited for one of three
    assert slow.seconds > 2 * other.seconds  # though a copy of each of its batches was there before it


@full_only("waits for real time-outs; test_a_worker_that_does_not_answer has one")
def test_time_is_up_and_a_sample_of_seven_seconds(cluster: Any) -> None:
    data = Numbers(24, slow={5: 7.0})
    with DataLoader(data, 4, seed=1, executor="ray", num_workers=2, timeout=60) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        window = iterator._batches  # type: ignore[attr-defined]
        window._policy = window._policy._replace(timeout=0.5)
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.5 seconds: worker .* owes batch 1"):
            next(iterator)
        window._policy = window._policy._replace(timeout=60)
        begin = time.monotonic()
        batches += list(iterator)
        assert time.monotonic() - begin > 5
        assert rows(batches) == rows(DataLoader(Numbers(24), 4, seed=1))


@full_only("workers that start and end for ten seconds")
@pytest.mark.clock
def test_workers_become_more_and_fewer(cluster: Any) -> None:
    options = RayOptions(min_workers=1, max_workers=2)
    with make(Numbers(40_000, seconds=0.01), 1, ray_options=options) as loader:
        end = time.monotonic() + STARTS
        for _ in loader:  # the consumer does nothing but wait
            if workers_of(loader) == 2 or time.monotonic() > end:
                break
        assert workers_of(loader) == 2
        loader.set_epoch(0)
        begin = time.monotonic()
        for batch in loader:  # and now it is the slow one
            time.sleep(0.15)  # with others at work on this machine, too
            assert len(batch["index"]) == 4
            if len(loader._engine.ray._state.actors.members) < 2:  # type: ignore[union-attr]
                break
            assert time.monotonic() - begin < 60


@full_only("starts of more workers")
def test_streams_cannot_go_on_without_a_worker(cluster: Any) -> None:
    for data in (Shares(400), Counter(400)):
        with DataLoader(data, 4, executor="ray", num_workers=2) as loader:
            iterator = iter(loader)
            next(iterator)
            import ray

            (actor,) = [m.actor for m in loader._engine.ray._state.actors.members.values() if m.number == 1]  # type: ignore[union-attr]
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


@full_only("a second node to start; hedging is in test_a_slow_node, too", but=["False"])
@pytest.mark.parametrize("hedge", [False, True])  # in this order: behind it the cluster takes the node for alive
def test_a_node_that_joins_and_one_that_is_lost_in_mid_epoch(cluster: Any, hedge: bool) -> None:
    """There are more workers than CPUs until it joins. With hedging (there from the beginning, which is quicker) its
    batches are made elsewhere before its loss is even known.
    """
    node: Any = add_node(cluster, 9) if hedge else None
    removed = 0
    try:
        options = RayOptions(hedge=hedge, label_selector={"number": "in(0,9)"})
        with make(Numbers(100_000, seconds=0.01), 3 if hedge else 4, ray_options=options) as loader:
            batches, gaps, last = [], [], time.monotonic()
            for number, batch in enumerate(loader):
                gaps.append(time.monotonic() - last)
                batches.append(batch)
                if node is None:
                    assert sum(n["workers"] for n in loader.stats()["nodes"].values()) <= 2
                    node = add_node(cluster, 9)
                nodes = loader.stats()["nodes"].values()  # both: a copy goes to the other one
                if not removed and node and len(nodes) == 2 and min(seen["batches"] for seen in nodes) > 3:
                    removed = number
                    cluster.remove_node(node, allow_graceful=False)
                if removed and number > removed + 60 and (hedge or counts_of(loader, node)["lost"]):
                    break
                last = time.monotonic()
            assert rows(batches) == truth_of(Numbers(100_000), len(batches))
            print(f"hedge={hedge}, longest gap: {max(gaps[removed + 1 :]):.2f} s")
            assert max(gaps[removed + 1 :]) < (5 if hedge else 20)
            assert hedge or loader.stats()["lost_workers"] >= 1
    finally:
        if node is not None and not removed:
            cluster.remove_node(node, allow_graceful=False)


def test_the_largest_of_the_last_batches_bounds_those_in_flight(ray_environment: None) -> None:
    from penstock.loader.executors.ray.budget import Budget

    budget = Budget(1000, None)
    for nbytes in (100, 10):
        budget.learn(nbytes)
    assert (budget.depth(9, nodes=1), budget.on_node(1000)) == (3, 3)
    for _ in range(7):
        budget.learn(10)
    assert (budget.depth(9, nodes=1), budget.on_node(1000)) == (9, 30)


def test_workers_become_fewer_only_if_every_batch_was_ready(
    ray_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.loader.executors.ray.elastic import Elastic

    now = [0.0]
    monkeypatch.setattr("penstock.loader.executors.ray.elastic.time", SimpleNamespace(monotonic=lambda: now[0]))

    def changes(full: list[bool]) -> list[int]:
        elastic = Elastic(1, 4)
        result = []
        for one in full:
            now[0] += 0.2
            result.append(elastic.observe(0.0, one, 2, 0))
        return result

    assert changes([True] * 20) == [0] * 19 + [-1]
    assert changes([False] + [True] * 19) == [0] * 20


def test_three_batches_tell_how_long_one_takes(ray_environment: None) -> None:
    from penstock.loader.executors.ray.budget import Budget
    from penstock.loader.executors.ray.elastic import Elastic
    from penstock.loader.executors.ray.jobs import RayRunState

    nobody: Any = None
    desk = RayRunState(nobody, Budget(1000, None), Elastic(1, 1))
    found = []
    for seconds in (1.0, 5.0, 2.0):
        desk.took(seconds)
        found.append(desk.typical)
    assert found == [0.0, 0.0, 2.0]


def test_a_slot_is_left_where_the_user_holds_many_batches(ray_environment: None) -> None:
    from penstock.loader.executors.process.pack import pack
    from penstock.loader.executors.ray.receive_buffer import ReceiveBuffer

    packed = pack(torch.arange(5000), None)
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in packed.beside]
    landing = ReceiveBuffer()
    held = [landing.land(packed.data, arrays) for _ in range(5)]
    assert [way for _, way in held] == ["ring"] * 3 + ["fresh"] * 2
    assert all(torch.equal(batch, torch.arange(5000)) for batch, _ in held)


def test_rows_that_came_once_more_are_kept_longest(ray_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.loader.executors.ray import remote_manifest

    monkeypatch.setattr(remote_manifest, "_KEPT", 2)
    for rows_sent in ({0: "a", 1: "b"}, {0: "a"}, {2: "c"}):
        remote_manifest.keep_rows(pickle.dumps({"kept longest": rows_sent}))
    manifest = remote_manifest.RemoteRows("kept longest", 3, "", "")
    assert manifest.records([0, 2]) == ["a", "c"]
    with pytest.raises(remote_manifest.RowsWanted):
        manifest.records([1])
