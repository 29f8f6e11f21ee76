"""``RankDataset(preload=True)``: the same items, from memory that exists once a rank."""

from __future__ import annotations

import gc
import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from full_run import full_only
from interpreter_support import METHODS, run
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import DataLoader, Manifest, RankDataset
from penstock.errors import ManifestChangedError

N = 90


def as_text(folder: Path) -> Manifest:
    path = folder / "meta.txt"
    path.write_text("".join(f"a b/{i}.jpg\t{i % 7}\r\n" for i in range(N)))
    return Manifest.open(path, root="/data")


def as_jsonl(folder: Path) -> Manifest:
    path = folder / "meta.jsonl"
    path.write_text("".join(f'{{"path": "{i}.jpg", "label": {i % 7}, "score": {i / 2}}}\n' for i in range(N)))
    return Manifest.open(path, columns=["path", "label:int", "score:float"])


def as_parquet(folder: Path) -> Manifest:
    path = folder / "meta.parquet"
    table = pa.table({"path": [f"{i}.jpg" for i in range(N)], "label": [i % 7 for i in range(N)]})
    pq.write_table(table, path, row_group_size=20)
    return Manifest.open(path, cache_dir=folder)


def as_several(folder: Path) -> Manifest:
    for part in range(3):
        (folder / f"part{part}.txt").write_text("".join(f"{part}/{i}.jpg {i}\n" for i in range(N // 3)))
    return Manifest.open(str(folder / "part*.txt"))


def slices() -> set[int]:
    """Inodes of the gathered slices that this process keeps alive, by a mapping or a descriptor."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:penstock-rows" in line:
            found.add(int(line.split()[4]))
    for number in os.listdir("/proc/self/fd"):
        try:
            if "memfd:penstock-rows" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(os.stat(f"/proc/self/fd/{number}").st_ino)
        except OSError:
            continue
    return found


def settled() -> None:
    """Wait until nothing is gathered in the background."""
    end = time.monotonic() + 20
    while any(thread.name == "penstock-preload" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)


class Reporting(RankDataset):
    """Each item says where its process has the rows from."""

    def __getitems__(self, indices: Any) -> list[Any]:
        return [(item, slices()) for item in super().__getitems__(indices)]


@pytest.mark.parametrize("make", [as_text, as_jsonl, as_parquet, as_several])
@pytest.mark.parametrize("options", [{}, {"shuffle": "none"}, {"group": 5}])
def test_items_and_order_are_the_same(
    tmp_path: Path, make: Callable[[Path], Manifest], options: dict[str, Any]
) -> None:
    manifest = make(tmp_path)
    plain, gathered = (
        RankDataset(manifest, rank=1, world_size=4, mini_epochs=2, seed=1, preload=preload, **options)
        for preload in (False, True)
    )
    for _ in range(5):
        count = len(plain)
        assert gathered.__getitems__(range(count)) == plain.__getitems__(range(count))
        assert gathered[3] == plain[3]
        assert gathered.records([2, 0, 2]) == plain.records([2, 0, 2])
        assert plain.next_mini_epoch() == gathered.next_mini_epoch()


@pytest.mark.parametrize(("n", "world"), [(0, 1), (1, 4), (3, 2)])
def test_few_rows(tmp_path: Path, n: int, world: int) -> None:
    manifest = as_text(tmp_path)[:n]
    for rank in range(world):
        for remainder in ("pad", "drop", "uneven"):
            both = [
                RankDataset(manifest, rank=rank, world_size=world, remainder=remainder, preload=preload)
                for preload in (False, True)
            ]
            assert [list(dataset) for dataset in both] == [[*both[0]]] * 2  # type: ignore[call-overload,misc]


def test_resume_within_a_gathered_slice(tmp_path: Path) -> None:
    manifest = as_text(tmp_path)
    make = lambda: RankDataset(manifest, rank=1, world_size=3, mini_epochs=2, seed=1, preload=True)  # noqa: E731
    dataset = make()
    whole = dataset.__getitems__(range(15))
    for count in (0, 1, 14, 15):
        other = make()
        other.load_state_dict(dataset.state_dict(count))
        assert len(other) == 15 - count
        assert other.__getitems__(range(len(other))) == whole[count:]
    alone = RankDataset(manifest, rank=0, world_size=1, mini_epochs=2, seed=1, preload=True)
    plain = RankDataset(manifest, rank=0, world_size=1, mini_epochs=2, seed=1)
    for other in (alone, plain):
        other.load_state_dict(dataset.state_dict(4))
    assert alone.__getitems__(range(39)) == plain.__getitems__(range(39))


def test_the_next_mini_epoch_is_gathered_in_the_background(tmp_path: Path) -> None:
    gc.collect()  # what other tests left to the collector must not go in the middle of this one
    before = slices()
    dataset = RankDataset(as_text(tmp_path), mini_epochs=3, preload=True)
    assert slices() <= before, "nothing before it is needed"
    len(dataset)
    settled()
    for _ in range(7):
        held = slices() - before
        assert len(held) == 2, "the slice at hand and the next one"
        dataset.next_mini_epoch()
        dataset[0]
        assert len(slices() - before) <= 3, "one more while it is written"
        settled()
        assert len((slices() - before) & held) == 1, "what was gathered in the background is used"


def test_nothing_is_left_when_the_data_set_goes(tmp_path: Path) -> None:
    """At once, not when the garbage collector comes round."""
    manifest = as_text(tmp_path)
    gc.collect()
    gc.disable()
    try:
        before = slices()
        for _ in range(3):
            dataset = RankDataset(manifest, mini_epochs=3, preload=True)
            dataset[0]
            dataset.next_mini_epoch()
            dataset[0]
        del dataset
        settled()
        assert slices() <= before
    finally:
        gc.enable()


def test_rows_are_read_without_pandas(tmp_path: Path) -> None:
    """pyarrow imports it for the sake of arrays that may be pandas': 50 MiB in every worker."""
    pytest.importorskip("pandas")
    as_text(tmp_path)
    program = (
        "import sys; from penstock import Manifest, RankDataset\n"
        "data = RankDataset(Manifest.open(sys.argv[1]), rank=0, world_size=2, shuffle='global', seed=1, preload=True)\n"
        "assert len([data[3], *data.__getitems__(range(9))]) == 10\n"
        "print('pandas' in sys.modules)"
    )
    done = run(["-c", program, str(tmp_path / "meta.txt")], timeout=100)
    assert (done.stdout, done.stderr) == ("False\n", "")


@full_only("workers for each", but=["True-fork", "False-forkserver"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_map_the_rows_and_hold_nothing_themselves(tmp_path: Path, method: str, persistent: bool) -> None:
    if method == "spawn" and not persistent:
        pytest.skip("slow, and the same as forkserver")
    manifest = as_text(tmp_path)
    dataset = Reporting(manifest, mini_epochs=3, seed=1, preload=True)
    plain = RankDataset(manifest, mini_epochs=3, seed=1)
    loader = TorchDataLoader(
        dataset,
        10,
        num_workers=1,
        persistent_workers=persistent,
        multiprocessing_context=method,
        collate_fn=list,
    )
    for mini_epoch in (0, 1, 2, 0):
        plain.set_mini_epoch(mini_epoch)
        dataset.set_mini_epoch(mini_epoch)
        got = [item for batch in loader for item in batch]
        assert [item for item, _ in got] == plain.__getitems__(range(30))
        settled()
        ours = slices()
        theirs = got[-1][1]
        assert theirs & ours
        # A fork inherits the slice that was being written in the background, and keeps it while it lives.
        assert len(theirs - ours) <= (method == "fork"), "a slice of its own, or one that is over"


def test_workers_need_no_set_epoch_before(tmp_path: Path) -> None:
    """A loop that never calls ``set_epoch`` shares the rows as well: the loader asks for a length first."""
    manifest = as_text(tmp_path)
    for method in ("fork", "forkserver"):
        dataset = Reporting(manifest, seed=1, preload=True)
        loader = TorchDataLoader(dataset, 30, num_workers=2, multiprocessing_context=method, collate_fn=list)
        reports = [report for batch in loader for _, report in batch]
        assert len(reports) == N
        assert all(reports)
        assert set().union(*reports) <= slices()


def test_errors_of_the_background_arrive(tmp_path: Path) -> None:
    path = tmp_path / "meta.txt"
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(N)))
    dataset = RankDataset(Manifest.open(path), mini_epochs=2, preload=True, seed=1)
    len(dataset)
    settled()
    path.write_text("other.jpg 1\n" * N)
    dataset.next_mini_epoch()  # gathered before the change
    assert dataset[0][0] != "other.jpg"
    with pytest.raises(ManifestChangedError):
        dataset.next_mini_epoch()


def test_progress_bar_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = as_text(tmp_path)
    RankDataset(manifest, preload=True)[0]
    assert capsys.readouterr().err == ""
    RankDataset(manifest, preload=True, progress=True)[0]
    assert re.search("preloading rows", capsys.readouterr().err)


def test_under_our_loader_in_every_executor(tmp_path: Path) -> None:
    manifest = as_text(tmp_path)
    found = []
    for preload in (False, True):
        for how in ({}, {"num_workers": 2, "executor": "thread"}, {"num_workers": 2, "persistent_workers": True}):
            dataset = RankDataset(manifest, rank=0, world_size=2, mini_epochs=2, seed=1, preload=preload)
            loader = DataLoader(dataset, batch_size=7, **how)  # type: ignore[arg-type,var-annotated]
            found.append([[batch[2].tolist() for batch in loader] for _ in range(3)])
    assert all(batches == found[0] for batches in found)


def test_a_pickled_copy_never_gets_the_rows_of_another_data_set(tmp_path: Path) -> None:
    """Descriptors have numbers that are used again, and two data sets may stand at the same place of an epoch."""
    manifest = as_text(tmp_path)

    def make(rank: int, *, preload: bool = True) -> RankDataset:
        return RankDataset(manifest, rank=rank, world_size=2, seed=1, preload=preload)

    first = make(0)
    expected = list(first)
    copied = pickle.dumps(first)
    del first
    gc.collect()
    others = [make(1) for _ in range(3)]
    assert [other[0] for other in others] == [make(1, preload=False)[0]] * 3
    assert list(pickle.loads(copied)) == expected


def test_many_threads_at_many_places(tmp_path: Path) -> None:
    """More places at a time than slices are kept for: slower, and right."""
    manifest = as_text(tmp_path)
    dataset = RankDataset(manifest, rank=0, world_size=1, mini_epochs=6, seed=1, preload=True)
    plain = RankDataset(manifest, rank=0, world_size=1, mini_epochs=6, seed=1)
    places, expected = [], []
    for _ in range(6):
        places.append(dataset.place)
        expected.append(plain.load_samples(range(len(plain)), None))
        dataset.next_mini_epoch()
        plain.next_mini_epoch()

    def read(number: int) -> bool:
        which = number % 6
        return dataset.load_samples(range(len(expected[which])), None, places[which]) == expected[which]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(read, range(60)))
