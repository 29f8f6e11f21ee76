"""`ServerDataset`: all rows of a served manifest. And both kinds under loaders, ours and torch's, in every executor."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch.utils.data
from busy_support import HANG, slowness
from dataset_support import Counting, serving, whole, write_kinds
from entries_support import opened
from full_run import full_only
from interpreter_support import FULL, METHODS, run
from loader_conformance import check_chain, check_elastic, check_end_of_pass, check_load_into_used, check_resume
from loader_support import draw_load
from torch.utils.data import DataLoader as TorchDataLoader

import penstock as ps
from penstock import DataLoader, ImageDataset, Manifest, MPDataset, RankDataset, RankServerDataset, ServerDataset
from penstock.errors import ConfigError, ServerForkError
from penstock.images import native
from penstock.images.entries import write_index
from penstock.images.transforms import CenterCrop
from penstock.server import Client, Server

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.* has no state_dict")

N = 61
HOW: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"num_workers": 2, "executor": "thread"},
    "processes": {"num_workers": 2},
    "process with threads": {"num_workers": 1, "threads_per_worker": 3},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver", "persistent_workers": True},
}


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "meta.txt"
    path.write_text("".join(f"class_{i // 10}/img {i}.jpg {i // 10}\n" for i in range(N)))
    return path


@pytest.fixture(scope="module")
def manifest(meta: Path) -> Manifest:
    return Manifest.open(meta)


@pytest.fixture(scope="module")
def address(meta: Path) -> Iterator[str]:
    """Of a server in another process."""
    with serving(meta=meta) as (address, _):
        yield address


class TestServerDataset:
    def test_every_format(self, tmp_path: Path) -> None:
        kinds = write_kinds(tmp_path)
        with Server(kinds) as server:
            for name, manifest in kinds.items():
                served = ServerDataset(server.address, name, load=whole, page_rows=7)
                every = list(manifest)
                assert len(served) == len(manifest)
                assert [served[i] for i in range(len(served))] == every
                assert served.__getitems__([3, -1, 3, 0]) == [every[3], every[-1], every[3], every[0]]
                assert served.records(range(5)) == every[:5]
                assert served.manifest.fingerprint == manifest.fingerprint
                plain = ServerDataset(server.address, name)
                assert plain[4] == (every[4].path, every[4].label, every[4].row)
                for outside in (len(every), -len(every) - 1):
                    with pytest.raises(IndexError):
                        served[outside]

    def test_round_trips(self, tmp_path: Path) -> None:
        path = tmp_path / "many.txt"
        path.write_text("".join(f"{i:08d}.jpg {i}\n" for i in range(20_000)))
        seen = Counting()
        with Server({"many": path}, observer=seen) as server:
            served = ServerDataset(server.address, page_rows=1000)
            rng = np.random.default_rng(0)
            for count in range(1, 11):
                rows = rng.integers(0, len(served), 256).tolist()
                assert [row for _, _, row in served.__getitems__(rows)] == rows
                assert seen.messages == count, "one a batch"
            before = seen.messages
            assert [served[i][2] for i in range(3500)] == list(range(3500))
            assert seen.messages - before == 4, "pages"
            served.close()

    def test_under_samplers(self, address: str, manifest: Manifest) -> None:
        served = ServerDataset(address)
        assert not served.fork_safe
        for make in (
            lambda data: ps.DistributedSampler(data, 2, 1, shuffle="global", seed=4),
            lambda data: ps.RandomSampler(data, shuffle="block", block_size=5, window=2, seed=1),
        ):
            remote = DataLoader(served, 8, sampler=make(served))
            assert items(remote) == [(r.path, r.label, r.row) for r in manifest.records(list(make(manifest)))]
            assert opened(remote.state_dict())["fingerprint"] == manifest.fingerprint

    def test_pickles(self, address: str) -> None:
        served = ServerDataset(Client(address, timeout=3), "meta", load=draw_load)
        served[0]
        copied = pickle.loads(pickle.dumps(served))
        assert [record.row for record in copied.records(range(N))] == list(range(N))
        assert copied.pure

    def test_own_items(self, address: str) -> None:
        class Own(ServerDataset):
            def __getitem__(self, index: int) -> int:
                return int(super().records([index])[0].row) * 2

        own = Own(address)
        assert not own.pure
        assert next(iter(DataLoader(own, 30))).tolist() == [2 * i for i in range(30)]

    def test_bad_sizes(self, address: str) -> None:
        with pytest.raises(ConfigError, match="positive"):
            ServerDataset(address, page_rows=0)


def items(loader: Any) -> list[Any]:
    return [item for batch in loader for item in zip(*(list(map(plain, part)) for part in batch), strict=True)]


def plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


class TestLoaders:
    @full_only("workers for each", but=["persistent", "forkserver"])
    @pytest.mark.parametrize("how", list(HOW))
    def test_ours(self, address: str, manifest: Manifest, how: str) -> None:
        options: dict[str, Any] = {"rank": 1, "world_size": 2, "mini_epochs": 2, "seed": 1, "load": draw_load}
        local = DataLoader(RankDataset(manifest, **options), 4)
        dataset = RankServerDataset(address, **options, page_rows=5)
        len(dataset), dataset[3]  # gRPC has been used here
        served = DataLoader(dataset, 4, **HOW[how])
        for _ in range(4):
            assert items(served) == items(local)

    def test_workers_are_not_forked(self, address: str) -> None:
        assert multiprocessing.get_start_method() == "fork"
        dataset = RankServerDataset(address, rank=0, world_size=1, load=started_how)
        fixed = RankServerDataset(address, rank=0, world_size=1, load=started_how, shuffle="none")
        for data in (dataset, torch.utils.data.Subset(fixed, range(5)), torch.utils.data.ConcatDataset([dataset])):
            [*_, kinds] = [set(batch) for batch in DataLoader(data, 5, num_workers=1)]
            assert kinds == {"ForkServerProcess"}
            with pytest.raises(ConfigError, match=r"cannot be forked.*forkserver"):
                iter(DataLoader(data, 5, num_workers=1, multiprocessing_context="fork"))
        images = ImageDataset(RankServerDataset(address))
        with pytest.raises(ConfigError, match="ImageDataset cannot be forked"):
            iter(DataLoader(images, 5, num_workers=1, multiprocessing_context="fork", executor="process"))

    @full_only("workers for each", but=["fork-3"])
    @pytest.mark.parametrize(
        ("method", "workers"),
        [("fork", 1), ("fork", 3), ("forkserver", 2), *([("spawn", 1)] if FULL else [])],
    )
    def test_torchs_with_persistent_workers(self, address: str, manifest: Manifest, method: str, workers: int) -> None:
        """Also forked, from a process that has connections."""
        options: dict[str, Any] = {"rank": 1, "world_size": 2, "mini_epochs": 2, "seed": 1}
        served, local = RankServerDataset(address, **options, page_rows=5), RankDataset(manifest, **options)
        first = [item for i in (0, 4, 8) for item in served.__getitems__(range(i, i + 4))]
        loader = TorchDataLoader(
            served, 4, num_workers=workers, persistent_workers=True, multiprocessing_context=method, collate_fn=list
        )
        for epoch in (0, 3):
            for dataset in (served, local):
                dataset.set_epoch(epoch)
            for mini_epoch in range(2):
                for dataset in (served, local):
                    dataset.set_mini_epoch(mini_epoch)
                assert [item for batch in loader for item in batch] == local.__getitems__(range(len(local)))
                assert served.__getitems__(range(5)) == local.__getitems__(range(5)), "goes on here as well"
        assert first == RankDataset(manifest, **options).__getitems__(range(12))

    @full_only("workers for each", but=["fork"])
    @pytest.mark.parametrize("method", ["fork", "forkserver"])
    def test_torchs_over_all_rows(self, address: str, manifest: Manifest, method: str) -> None:
        served = ServerDataset(address, page_rows=5)
        assert [served[i][2] for i in range(20)] == list(range(20))
        loader = TorchDataLoader(
            served, 8, shuffle=True, num_workers=2, multiprocessing_context=method, collate_fn=list
        )
        for _ in range(2):
            assert sorted(row for batch in loader for _, _, row in batch) == list(range(N))

    def test_ours_with_workers_that_are_not_forked(self, address: str, manifest: Manifest) -> None:
        served = RankServerDataset(address, seed=1, load=draw_load)
        loader = DataLoader(served, 8, num_workers=1, multiprocessing_context=METHODS[-1])
        assert items(loader) == items(DataLoader(RankDataset(manifest, seed=1, load=draw_load), 8))

    def test_everything_that_takes_a_manifest(self, address: str, manifest: Manifest) -> None:
        remote = Client(address).manifest("meta")
        for local, served in (
            (RankDataset(manifest, seed=1), RankDataset(remote, seed=1)),
            (MPDataset(manifest, batch_size=8, seed=1), MPDataset(remote, batch_size=8, seed=1)),
        ):
            expected = items(DataLoader(local, 8))
            assert items(DataLoader(served, 8)) == expected
            assert items(DataLoader(served, 8, num_workers=2, persistent_workers=True)) != []
            with pytest.raises(ConfigError, match="cannot be forked"):
                iter(DataLoader(served, 8, num_workers=1, multiprocessing_context="fork"))

    def test_a_fork_while_grpc_runs_says_so(self, meta: Path) -> None:
        """A server in the trainer's own process."""
        with Server({"meta": meta}) as server:
            served = ServerDataset(server.address)
            loader = TorchDataLoader(served, 8, num_workers=1, multiprocessing_context="fork", timeout=60)
            with pytest.raises(ServerForkError, match="forkserver"):
                list(loader)
            assert served[5][2] == 5

    def test_images(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        for i in range(12):
            cv2.imwrite(str(tmp_path / f"{i}.jpg"), rng.integers(0, 256, (8, 10, 3), dtype=np.uint8))
        (tmp_path / "images.txt").write_text("".join(f"{i}.jpg {i}\n" for i in range(12)))
        manifest = Manifest.open(tmp_path / "images.txt", root=tmp_path)
        with Server({"images": manifest}) as server:
            for local, served in (
                (RankDataset(manifest, seed=2), RankServerDataset(server.address, seed=2)),
                (manifest, ServerDataset(server.address)),
            ):
                expected, got = (
                    [
                        (images.tolist(), labels.tolist())
                        for images, labels in DataLoader(
                            ImageDataset(source, flip=True), 5, seed=2, num_workers=workers
                        )
                    ]
                    for source, workers in ((local, 0), (served, 2))
                )
                assert got == expected
            with pytest.raises(ConfigError, match="this ServerDataset has its own load="):
                ImageDataset(ServerDataset(server.address, load=draw_load))

    @pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")
    def test_images_by_an_index_of_entries(self, tmp_path: Path) -> None:
        """That of the files, also where a view of them is served."""
        for i in range(6):
            image = np.random.default_rng(i).integers(0, 256, (40, 50, 3), dtype=np.uint8)
            cv2.imwrite(str(tmp_path / f"{i}.jpg"), image)
        (tmp_path / "images.txt").write_text("".join(f"{i}.jpg {i}\n" for i in range(6)))
        manifest = Manifest.open(tmp_path / "images.txt", root=tmp_path)
        path = write_index(manifest).path
        chain = [CenterCrop(10)]
        with Server({"images": manifest, "some": manifest[1:6:2]}) as server:
            for name, rows in (("images", range(6)), ("some", range(1, 6, 2))):
                served = ServerDataset(server.address, name)
                images = ImageDataset(served, transform=chain, index=path)
                for number, row in enumerate(rows):
                    data = (tmp_path / f"{row}.jpg").read_bytes()
                    assert images.load.index is not None
                    assert images.load.index.entries(row, data) is not None
                    assert torch.equal(images[number][0], ImageDataset(manifest, transform=chain)[row][0])
            with pytest.raises(ConfigError, match="a manifest of a server has no default path"):
                ImageDataset(served, transform=chain, index=True)


def started_how(record: Any) -> str:
    """``load=`` that says what kind of process it runs in."""
    return type(multiprocessing.current_process()).__name__


class TestConformance:
    """The suite of everything that has a place."""

    def make(self, address: str, **how: Any) -> DataLoader[Any]:
        options: dict[str, Any] = {"rank": 1, "world_size": 2, "mini_epochs": 3, "seed": 1}
        return DataLoader(RankServerDataset(address, **options, load=draw_load, page_rows=3), batch_size=4, **how)

    def test_resume_at_every_batch(self, address: str) -> None:
        check_resume(lambda: self.make(address), passes=4)

    @full_only("workers at each position", but=["threads"])
    @pytest.mark.parametrize("how", ["threads", "processes"])
    def test_resume_in_other_executors(self, address: str, how: str) -> None:
        check_resume(lambda: self.make(address, **HOW[how]), positions=[0, 2, 5], other=lambda: self.make(address))

    def test_resume_on_the_file(self, address: str, manifest: Manifest) -> None:
        options: dict[str, Any] = {"rank": 1, "world_size": 2, "mini_epochs": 3, "seed": 1, "load": draw_load}
        check_resume(
            lambda: self.make(address), other=lambda: DataLoader(RankDataset(manifest, **options), batch_size=4)
        )

    def test_the_rest_of_the_suite(self, address: str) -> None:
        check_end_of_pass(lambda: self.make(address))
        check_load_into_used(lambda: self.make(address))
        check_chain(lambda: self.make(address), [1, 2, 1])

    @full_only("ranks for each", but=["uneven-stages0", "pad-stages1"])
    @pytest.mark.parametrize("stages", [[(2, 3), (1, 4), (3, 0)], [(1, 5), (4, 0)]])
    @pytest.mark.parametrize("remainder", ["pad", "uneven"])
    def test_other_numbers_of_ranks(self, address: str, stages: list[tuple[int, int]], remainder: str) -> None:
        def make(rank: int, world: int) -> DataLoader[Any]:
            dataset = RankServerDataset(
                address, rank=rank, world_size=world, mini_epochs=2, seed=1, remainder=remainder, page_rows=3
            )
            return DataLoader(dataset, batch_size=3)

        check_elastic(make, lambda batch: batch[2].tolist(), N, stages, padded=remainder == "pad")


def test_a_server_that_dies_is_not_noticed(meta: Path, manifest: Manifest) -> None:
    seen = Counting()
    with Server({"meta": meta}) as first, Server({"meta": meta}, observer=seen) as second:
        served = RankServerDataset([first.address, second.address], seed=1, page_rows=5, rank=0, world_size=1)
        local = RankDataset(manifest, seed=1, rank=0, world_size=1)
        had: list[Any] = []
        for start in range(0, N, 3):
            if start == 30:
                first.close(grace=0)
            had += served.__getitems__(range(start, min(start + 3, N)))
        assert had == local.__getitems__(range(N))
        assert served.__getitems__([5, 50, 0]) == local.__getitems__([5, 50, 0])
        assert seen.sent > 0
        served.close()


@pytest.mark.clock
def test_a_server_that_is_killed_and_comes_back(meta: Path, manifest: Manifest) -> None:
    local = DataLoader(RankDataset(manifest, seed=1, load=draw_load), 2)
    with ExitStack() as servers:
        address, kill = servers.enter_context(serving(meta=meta))
        served = DataLoader(RankServerDataset(address, seed=1, load=draw_load, page_rows=4), 2)
        longest = 0.0
        for epoch in range(2):
            had = []
            iterator = iter(served)
            for number in range(len(served)):
                if number == 10 + epoch:
                    kill()
                    port = int(address.rpartition(":")[2])
                    address, kill = servers.enter_context(serving(port, meta=meta))
                before = time.perf_counter()
                had.append(next(iterator))
                longest = max(longest, time.perf_counter() - before)
            assert items(had) == items(local)
        assert longest < 3 or longest < 3 * slowness()


@full_only("a race that runs for seconds")
def test_many_threads_at_many_places(address: str, manifest: Manifest) -> None:
    served = RankServerDataset(address, seed=1, mini_epochs=2, page_rows=4)
    local = RankDataset(manifest, seed=1, mini_epochs=2)
    places, expected = [], []
    for _ in range(4):
        places.append(served.place)
        expected.append(local.__getitems__(range(len(local))))
        served.next_mini_epoch()
        local.next_mini_epoch()
    wrong: list[Any] = []

    def read(number: int) -> None:
        rng = random.Random(number)
        for _ in range(150):
            which = rng.randrange(4) if rng.random() < 0.2 else number % 4
            begin = rng.randrange(25)
            for start in range(begin, begin + 5 * rng.randrange(3) + 1, 3):
                rows = range(start, min(start + 3, 30))
                if (got := served.load_samples(rows, None, places[which])) != expected[which][rows.start : rows.stop]:
                    wrong.append((which, rows, got))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    served.close()


_READER = """
import re, sys
from penstock import RankServerDataset
def anonymous():
    return int(re.search(r"^Anonymous: +(\\d+)", open("/proc/self/smaps_rollup").read(), re.M)[1]) >> 10
dataset = RankServerDataset(sys.argv[1], rank=0, world_size=1)
for start in range(0, 50_000, 250):
    dataset.__getitems__(range(start, start + 250))
begin, most = anonymous(), 0
for start in range(50_000, len(dataset), 250):
    dataset.__getitems__(range(start, start + 250))
    if start % 50_000 == 0:
        most = max(most, anonymous())
print(most - begin)
"""


@full_only("much memory; an interpreter of its own")
def test_memory_of_a_process_that_reads_all(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(
        "".join(f"{'folder/with/a/long/name/' * 6}{i:010d}/image_{i:010d}.jpg {i % 1000}\n" for i in range(150_000))
    )
    with Server({"long": path}) as server:
        done = subprocess.run(
            [sys.executable, "-c", _READER, server.address], capture_output=True, text=True, timeout=HANG, check=False
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16, f"{done.stdout} MiB more, of {path.stat().st_size >> 20}"


@full_only("an interpreter of its own")
def test_grpc_is_not_imported_before_it_is_used() -> None:
    program = (
        "import sys, penstock, penstock.compat.rank_dataset; penstock.RankServerDataset; penstock.ServerDataset; "
        "assert 'pyarrow.flight' not in sys.modules"
    )
    done = run(["-c", program], timeout=HANG)
    assert done.returncode == 0, done.stderr
