"""A watched folder: which shards are read, in which order, what happens to them, and when the list ends."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from interpreter_support import run
from wds_support import classes, worker, world, write_shards

import penstock as ps
import penstock.wds as wds
from penstock.errors import ConfigError, StateError


def shards(folder: Path, count: int = 3) -> list[str]:
    """Shards of ten samples, the last one being the oldest."""
    write_shards(folder, count)
    paths = sorted(folder.glob("*.tar"))
    for age, path in enumerate(paths):
        os.utime(path, (1_000_000_000 - age, 1_000_000_000 - age))
    return [path.name for path in paths]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def open_files() -> list[str]:
    """The paths that this process has open."""
    return [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]


def taken(source: Any) -> Iterator[str]:
    """The own names of the shards that come."""
    for shard in source:
        assert os.path.exists(shard["url"])
        yield os.path.basename(shard["url"]).partition("._")[0]


def test_the_oldest_comes_first_and_each_is_removed_after_it_was_read(tmp_path: Path) -> None:
    own = shards(tmp_path)
    source = taken(wds.DirectoryShardList(tmp_path, mode="unlink", select="oldest", poll=None))
    for left in (2, 1, 0):
        assert next(source) == own[left]
        assert names(tmp_path)[:left] == own[:left]
        assert len(names(tmp_path)) == left + 1  # the one in hand is there, under another name
    assert next(source, None) is None
    assert names(tmp_path) == []


def test_what_is_kept_is_marked_and_not_read_again(tmp_path: Path) -> None:
    own = shards(tmp_path)
    for pattern in ("*.tar", "*"):
        dataset = wds.WebDataset(
            wds.DirectoryShardList(f"{tmp_path}/", pattern, mode="keep", poll=None), empty_check=False
        )
        assert sorted(classes(dataset)) == (list(range(30)) if pattern == "*.tar" else [])
        assert names(tmp_path) == [f"{name}._done_" for name in own]


@pytest.mark.parametrize(("mode", "left"), [("resample", "a.tar"), ("keep", "a.tar._done_")])
def test_a_folder_of_such_a_name_leaves_nothing_open(tmp_path: Path, mode: str, left: str) -> None:
    (tmp_path / "a.tar").mkdir()
    source = taken(wds.DirectoryShardList(tmp_path, mode=mode, poll=None))
    assert next(source) == "a.tar"
    next(source, None)
    del source
    gc.collect()
    assert names(tmp_path) == [left]
    assert not any(path.startswith(str(tmp_path)) for path in open_files())


def test_resampled_shards_come_again_in_an_order_of_the_seed(tmp_path: Path) -> None:
    own = shards(tmp_path)

    def drawn(seed: int) -> list[str]:
        pipeline = wds.DataPipeline(wds.DirectoryShardList(tmp_path), lambda src: taken(src), seed=seed)
        return [name for _, name in zip(range(40), pipeline, strict=False)]

    assert set(drawn(0)) == set(own)
    assert drawn(0) == drawn(0) != drawn(1)
    assert names(tmp_path) == own


def test_what_is_dropped_gets_its_name_again(tmp_path: Path) -> None:
    own = shards(tmp_path, 1)
    for mode in ("unlink", "keep", "resample"):
        with wds.WebDataset(wds.DirectoryShardList(tmp_path, mode=mode)) as dataset:
            items = iter(dataset)
            next(items)
            assert names(tmp_path) != own
            del items
        assert names(tmp_path) == own


def test_a_shard_that_appears_is_read_and_closing_ends_the_wait(tmp_path: Path) -> None:
    source = wds.DirectoryShardList(tmp_path, mode="unlink", poll=0.01)
    found: list[dict[str, Any]] = []
    complete, ended = threading.Event(), threading.Event()

    def read() -> None:
        for sample in wds.WebDataset(source, empty_check=False):
            found.append(sample)
            if len(found) == 20:
                complete.set()
        ended.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in shards(elsewhere, 2):  # complete before they are here
        (elsewhere / name).rename(tmp_path / name)
    assert complete.wait(30)
    assert sorted(classes(found)) == list(range(20))
    source.poll = 1000.0
    source.close()
    assert ended.wait(30)
    thread.join()
    assert names(tmp_path) == ["elsewhere"]


def test_the_timeout_counts_from_the_last_shard(tmp_path: Path) -> None:
    shards(tmp_path)
    source = wds.DirectoryShardList(tmp_path, mode="unlink", poll=1000, timeout=0.01)
    assert len(list(taken(source))) == 3
    assert list(wds.DirectoryShardList(tmp_path, poll=1000, timeout=0)) == []


def test_shards_of_a_process_that_died_come_again(tmp_path: Path) -> None:
    own = shards(tmp_path)
    program = (
        "import os, sys, penstock.wds as wds\n"
        "items = iter(wds.DirectoryShardList(sys.argv[1], mode='unlink', select='oldest'))\n"
        "next(items)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert run(["-c", program, str(tmp_path)], env=environment, timeout=HANG).returncode == -9
    assert names(tmp_path)[:2] == own[:2]
    assert names(tmp_path)[2].startswith(f"{own[2]}._")
    (tmp_path / "b.tar._elsewhere-1_").write_bytes(b"")  # of another machine
    # Of somebody who lives, perhaps where processes have other numbers: the lock tells.
    held = tmp_path / f"c.tar._{os.uname().nodename}-99999999999999999999_"
    held.write_bytes(b"")
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list(taken(wds.DirectoryShardList(tmp_path, mode="unlink", select="oldest", poll=None))) == own[::-1]
        assert names(tmp_path) == ["b.tar._elsewhere-1_", held.name]
    assert list(taken(wds.DirectoryShardList(tmp_path, mode="unlink", poll=None))) == ["c.tar"]


@pytest.mark.parametrize("mode", ["resample", "keep", "unlink"])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_shard_of_the_same_name_is_not_overwritten(tmp_path: Path, mode: str, dropped: bool) -> None:
    """A producer may use a name again as soon as it is free."""
    (tmp_path / "a.tar").write_text("first")
    (tmp_path / "a.tar._done_").write_text("done before")
    items = iter(wds.DirectoryShardList(tmp_path, mode=mode, select="oldest", poll=None))
    next(items)
    (tmp_path / "a.tar").write_text("second")
    if dropped:
        del items
        gc.collect()
    else:
        next(items)
    found = {path.read_text(): path.name for path in tmp_path.iterdir()}
    assert {"second", "done before"} <= set(found)
    if mode == "unlink" and not dropped:
        assert "first" not in found
    else:
        # With "resample" it is taken again at once, being the oldest.
        assert found["first"].startswith("a.1.tar._done_" if mode == "keep" and not dropped else "a.1.tar")


@pytest.mark.parametrize("wrong", [{"timeout": None}, {"poll": "1"}, {"poll": 0}, {"timeout": -1}])
def test_times_that_are_none(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="poll must be None or positive, and timeout 0 or more"):
        wds.DirectoryShardList(tmp_path, **wrong)


def test_workers_share_a_folder(tmp_path: Path) -> None:
    shards(tmp_path, 6)
    dataset = wds.WebDataset(wds.DirectoryShardList(tmp_path, mode="unlink", poll=None), empty_check=False)
    with ps.DataLoader(dataset, batch_size=4, num_workers=2, executor="process", collate_fn=list) as loader:
        assert sorted(n for batch in loader for n in classes(batch)) == list(range(60))
    assert names(tmp_path) == []


def test_splitters_leave_a_worker_what_it_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path, 4)
    stages = (wds.single_node_only, wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples())
    with world(monkeypatch, 1, 2), worker(monkeypatch, 1, 3):
        source = wds.DirectoryShardList(tmp_path, mode="unlink", poll=None)
        assert sorted(classes(wds.DataPipeline(source, *stages))) == list(range(40))


def test_a_state_cannot_go_on(tmp_path: Path) -> None:
    shards(tmp_path)
    dataset = wds.WebDataset(wds.DirectoryShardList(tmp_path, poll=None, mode="keep"))
    next(iter(dataset))
    state = dataset.state_dict()
    dataset.close()
    again = wds.WebDataset(wds.DirectoryShardList(tmp_path, poll=None, mode="keep"))
    again.load_state_dict(state)
    with pytest.raises(StateError, match="is a watched folder"):
        next(iter(again))
    assert len(list(pickle.loads(pickle.dumps(again)))) == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "move"}, "unknown mode 'move'"),
        ({"select": "newest"}, "unknown selection strategy 'newest'"),
        ({"fate": "unlink"}, "fate has no effect"),
        ({"poll": 0}, "poll must be None or positive"),
        ({"timeout": -1}, "timeout 0 or more"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wds.DirectoryShardList(tmp_path, **options)
    with pytest.raises(ConfigError, match="no such folder"):
        wds.DirectoryShardList(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be shuffled"):
        wds.WebDataset(wds.DirectoryShardList(tmp_path), shardshuffle=True)
