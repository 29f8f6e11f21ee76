"""Shards in a store, resume after kill -9, and gloo ranks that meet at every step."""

from __future__ import annotations

import gzip
import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import Popen, run
from shard_support import write_shards

import penstock as ps
from penstock import wds
from penstock.errors import ShardError
from penstock.storage import Cache, Storage


def label(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def no_label(value: Any) -> Any:
    raise ValueError("a broken value")


def test_shards_over_http(server: Any, tmp_path: Path) -> None:
    urls = []
    for path in write_shards(tmp_path, [5, 6]):
        for suffix, content in (("", Path(path).read_bytes()), (".gz", gzip.compress(Path(path).read_bytes()))):
            address = server.put(f"{os.path.basename(path)}{suffix}", content)
            urls += [address] if not suffix else []
    storage = Storage(cache=Cache(tmp_path / "cache"))
    dataset = ps.ShardDataset(ps.ShardSet(urls, storage=storage), shuffle="none", load=label)
    assert [dataset[i] for i in range(11)] == list(range(11))
    assert dataset.shards[0]["__url__"] == urls[0]
    loader = ps.DataLoader(dataset, batch_size=4, num_workers=2, executor="process")
    assert [n for batch in loader for n in batch.tolist()] == list(range(11))
    assert [path.suffix for path in (tmp_path / "cache").rglob("*.pidx")] == []
    for kind in ("", ".gz"):
        stream = ps.StreamShards([url + kind for url in urls], shuffle="none", load=label, storage=storage)
        assert list(stream) == list(range(11))


def test_signatures_are_not_printed(server: Any, tmp_path: Path) -> None:
    data = Path(write_shards(tmp_path, [3])[0]).read_bytes()
    cut, whole = (f"{server.put(name, put)}?signature=hush" for name, put in (("a.tar", data[:700]), ("b.tar", data)))
    storage = Storage(cache=Cache(tmp_path / "cache"))
    for make in (
        lambda: list(ps.StreamShards(cut, storage=storage)),
        lambda: ps.ShardSet(cut, storage=storage),
        lambda: list(ps.DataLoader(ps.ShardDataset(cut, storage=storage))),
        lambda: list(ps.StreamShards(whole, decode={"cls": bytes.fromhex}, storage=storage)),  # type: ignore[dict-item]
        lambda: list(ps.DataLoader(ps.ShardDataset(whole, decode={"cls": json.loads}, load=no_label, storage=storage))),
        lambda: list(ps.DataLoader(ps.ImageDataset(ps.ShardDataset(whole, storage=storage)))),
        lambda: list(wds.WebDataset(whole, shardshuffle=False).decode(wds.handle_extension("cls", no_label))),
    ):
        with pytest.raises(Exception, match=r"[ab]\.tar") as caught:
            make()
        assert "hush" not in "".join(traceback.format_exception(caught.value))


def test_pipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="neither a file nor in a store"):
        list(ps.StreamShards("pipe:cat x.tar"))


PROGRAM = """
import json, os, signal, sys, time
import penstock as ps

def label(sample):
    return int(sample["cls"])

def train(out, workers, paths):
    dataset = ps.ShardDataset(paths, load=label, seed=7, rank=0, world_size=1)
    options = {"executor": "process"} if workers else {}
    loader = ps.DataLoader(dataset, batch_size=3, num_workers=workers, **options)
    if os.path.exists(out):
        loader.load_state_dict(json.load(open(out)))
    with open(out + ".log", "a", buffering=1) as file:
        for batch in loader:
            with open(out + ".tmp", "w") as state:
                json.dump({**loader.state_dict()}, state)
            file.write(json.dumps(batch.tolist()) + "\\n")
            os.replace(out + ".tmp", out)
            time.sleep(0.01)

def lines(name):
    return len(open(name).readlines()) if os.path.exists(name) else 0

# Each run is a process of its own, which has begun nothing; two are killed, and the last one is not.
for workers in (0, 2):
    out = f"{sys.argv[1]}-{workers}"
    for wanted in (5, 17, None):
        pid = os.fork()
        if not pid:
            os.setsid()
            train(out, workers, sys.argv[2:])
            os._exit(0)
        deadline = time.monotonic() + 400
        while wanted and time.monotonic() < deadline and lines(out + ".log") < wanted:
            time.sleep(0.005)
        if wanted:
            os.killpg(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (-signal.SIGKILL if wanted else 0)
"""


@full_only("a program that is killed; test_shard_dataset.py resumes, too")
def test_resume_after_kill(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [40, 41, 20])
    program, out = tmp_path / "program.py", tmp_path / "state"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run([str(program), str(out), *map(str, paths)], env=environment, timeout=HANG)
    assert done.returncode == 0, done.stderr
    # Killed between a line of the log and its state, a batch is had again; it is the same one.
    for workers in (0, 2):
        batches = [tuple(json.loads(line)) for line in Path(f"{out}-{workers}.log").read_text().splitlines()]
        assert len(batches) - len(set(batches)) <= 2
        seen = Counter(number for batch in set(batches) for number in batch)
        assert seen == Counter(range(101))


GLOO = """
import json, sys
import torch, torch.distributed as dist
import penstock as ps

def label(sample):
    return int(sample["cls"])

if __name__ == "__main__":
    rank, world, store, sets = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for paths in sets:
        loader = ps.DataLoader(ps.ShardDataset(paths, load=label, seed=1), batch_size=2)
        seen = torch.zeros(50, dtype=torch.int64)
        for batch in loader:
            step = torch.zeros(50, dtype=torch.int64)
            step.index_add_(0, batch, torch.ones_like(batch))
            dist.all_reduce(step)
            seen += step
        assert int(seen.min()) == 1 and int(seen.sum()) == -(-50 // world) * world, seen
    dist.destroy_process_group()
"""


def test_gloo_ranks_never_wait(tmp_path: Path) -> None:
    sets = []
    for number, counts in enumerate([[50], [30, 1, 19], [6, 7, 6, 7, 6, 6, 6, 6]]):
        (tmp_path / str(number)).mkdir()
        sets.append(write_shards(tmp_path / str(number), counts))
    program = tmp_path / "program.py"
    program.write_text(GLOO)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        Popen([str(program), str(rank), "3", str(tmp_path / "store"), json.dumps(sets)], env=environment)
        for rank in range(3)
    ]
    assert [rank.wait(HANG) for rank in ranks] == [0, 0, 0]
