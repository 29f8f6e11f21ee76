"""Programs written for ModelTC/rank_dataset: their loops, their rows, and errors where they cannot go on."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from full_run import full_only
from torch.utils.data import DataLoader

import penstock as ps
from penstock.compat.rank_dataset import (
    BaseDataset,
    DistributedSampler,
    RandomSampler,
    RankDataset,
    RankServerDataset,
    ServerDataset,
    barrier,
    get_rank,
    get_world_size,
)
from penstock.errors import ConfigError, ManifestError, PartitionError, ServerAuthError, ServerError
from penstock.server import Server

# name, line, what the filename and label are
LINES = [
    ("one digit", "a1.jpg 1", ("a1.jpg", "1")),
    ("two digits", "b10.jpg 12", ("b10.jpg", "12")),
    ("three digits", "c.jpg 100", ("c.jpg", "100")),
    ("negative", "d.jpg -1", ("d.jpg", "-1")),
    ("two spaces", "e.jpg  3", ("e.jpg", "3")),
    ("tab", "f.jpg\t4", ("f.jpg", "4")),
    ("spaces in the path", "g h i.jpg 5", ("g h i.jpg", "5")),
    ("text", "j.jpg cat", ("j.jpg", "cat")),
    ("umlaut", "ü.jpg 7", ("ü.jpg", "7")),
    ("long", "x" * 100_000 + ".jpg 8", ("x" * 100_000 + ".jpg", "8")),
]


@pytest.fixture
def meta(tmp_path: Path) -> str:
    path = tmp_path / "train.txt"
    path.write_text("".join(f"class{i // 10}/img{i}.jpg {i // 10}\n" for i in range(103)))
    return str(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_every_line_is_read_right(tmp_path: Path, end: str, last: bool) -> None:
    path = tmp_path / "meta.txt"
    text = end.join(line for _, line, _ in LINES) + (end if last else "")
    path.write_bytes(text.replace("e.jpg", f"{end}e.jpg", 1).encode())  # a blank line in the middle
    dataset = RankDataset(str(path), is_test=True)
    assert len(dataset) == len(LINES)
    for row, (name, _, (filename, label)) in enumerate(LINES):
        assert dataset[row] == [filename, label, row], name
    base = BaseDataset(str(path))
    assert len(base) == len(LINES)
    assert [base[row] for row in range(len(base))] == [line for _, line, _ in LINES]


def test_the_loop_of_the_readme(meta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every epoch and mini-epoch a new data set, sampler and loader."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    orders = set()
    for epoch in range(3):
        seen: Counter[int] = Counter()
        sizes = set()
        for mini_epoch_idx in range(4):
            for rank in range(3):
                monkeypatch.setenv("RANK", str(rank))
                dataset = RankDataset(
                    meta,
                    is_test=False,
                    reload_cfg={"mini_epoch": 4, "seed": epoch, "mini_epoch_idx": mini_epoch_idx, "group": 1},
                )
                loader = DataLoader(
                    dataset,
                    batch_size=8,
                    shuffle=False,
                    num_workers=0,
                    sampler=RandomSampler(dataset),
                    pin_memory=False,
                )
                rows = []
                for filename, label, index in loader:
                    assert [f"class{n}" for n in label] == [name.split("/")[0] for name in filename]
                    rows += index.tolist()
                sizes.add(len(rows))
                seen.update(rows)
                orders.add(tuple(sorted(rows)))
        assert sizes == {9}
        assert set(seen) == set(range(103))
        assert sum(seen.values()) == 108
    assert len(orders) == 36


def test_groups_are_dealt_to_all_ranks(meta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    for rank in range(5):
        monkeypatch.setenv("RANK", str(rank))
        dataset = RankDataset(meta, reload_cfg={"group": 5})
        labels = {label for _, label, _ in (dataset[i] for i in range(len(dataset)))}
        assert len(labels) > 5


def test_the_penstock_loader_takes_them_too(meta: str) -> None:
    dataset = RankDataset(meta)
    rows = [row for _, _, batch in ps.DataLoader(dataset, batch_size=10, num_workers=2) for row in batch.tolist()]
    assert sorted(rows) == list(range(103))
    assert dataset.pure


def test_global_generators_are_left_alone(meta: str) -> None:
    before = str(np.random.get_state()), random.getstate()
    dataset = RankDataset(meta, reload_cfg={"seed": 3})
    [dataset[i] for i in range(len(dataset))]
    assert (str(np.random.get_state()), random.getstate()) == before


def test_is_test_gives_every_rank_everything_in_order(meta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        dataset = RankDataset(meta, is_test=True)
        assert [dataset[i][2] for i in range(len(dataset))] == list(range(103))


def test_distributed_sampler(meta: str) -> None:
    base = BaseDataset(meta)
    parts = [list(DistributedSampler(base, world_size=4, rank=rank)) for rank in range(4)]
    assert {len(part) for part in parts} == {26}
    assert set().union(*parts) == set(range(103))
    sampler = DistributedSampler(base, world_size=4, rank=1)
    sampler.set_epoch(3)
    assert list(sampler) == parts[1]
    assert list(DistributedSampler([1, 2, 3], world_size=8, rank=7))  # more ranks than samples


def test_utilities_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (get_rank(), get_world_size()) == (0, 1)
    barrier()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (get_rank(), get_world_size()) == (2, 4)


@pytest.fixture
def server(meta: str) -> Iterator[tuple[str, int]]:
    """Address and port of ``penstock serve train.txt``."""
    with Server({"train": meta}) as server:
        address, port = server.address.removeprefix("grpc://").split(":")
        yield address, int(port)


def test_every_line_from_a_server(meta: str, server: tuple[str, int]) -> None:
    local = BaseDataset(meta)
    for name in ("train.txt", "/elsewhere/train.txt", ""):
        served = ServerDataset(name, *server)
        assert served.get_meta_num() == len(served) == 103
        assert [served.get_meta(row) for row in (0, 57, -1)] == [local[row] for row in (0, 57, 102)]
    assert [line for batch in DataLoader(served, batch_size=8) for line in batch] == [local[i] for i in range(103)]


def test_the_loop_of_the_readme_with_a_server(
    meta: str, server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the file's data set, where ``group`` is the same; and two jobs that do not meet."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    for epoch in range(2):
        for mini_epoch_idx in range(4):
            config = {"mini_epoch": 4, "seed": epoch, "mini_epoch_idx": mini_epoch_idx, "group": 1}
            served = RankServerDataset(meta, *server, is_test=False, reload_cfg={**config, "cache_size": 5})
            other = RankServerDataset(meta, *server, reload_cfg={**config, "seed": 7})
            local = RankDataset(meta, reload_cfg=config)
            expected = [local[i] for i in range(9)]
            assert [served[i] for i in range(len(served))] == expected != [other[i] for i in range(len(other))]
            loader = DataLoader(served, batch_size=4, sampler=RandomSampler(served))
            assert sorted(row for _, _, rows in loader for row in rows.tolist()) == sorted(row[2] for row in expected)


def test_other_defaults_and_tests_with_a_server(
    meta: str, server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    local = RankDataset(meta, reload_cfg={"group": 10})
    served = RankServerDataset(meta, *server, timeout=5)
    assert [served[i] for i in range(52)] == [local[i] for i in range(52)]
    everything = RankServerDataset(meta, *server, is_test=True)
    assert [everything[i] for i in range(103)] == [[f"class{i // 10}/img{i}.jpg", str(i // 10), i] for i in range(103)]


def test_a_server_with_a_token(meta: str, tmp_path: Path) -> None:
    (tmp_path / "token.txt").write_text("s3cret\n")
    with Server({"train": meta}, token="s3cret") as server:
        address, port = server.address.removeprefix("grpc://").split(":")
        for kind in (ServerDataset, RankServerDataset):
            with pytest.raises(ServerAuthError):
                kind(meta, address, int(port))
            for access in ({"token": "s3cret"}, {"token_file": tmp_path / "token.txt"}):
                assert len(kind(meta, address, int(port), **access)) == 103


def test_subclasses_that_read_a_list_of_rows_are_told_what_to_read(meta: str, server: tuple[str, int]) -> None:
    class OfLines(BaseDataset):
        def __getitem__(self, idx: int) -> str:
            return self.metas[idx]

    class OfRows(RankDataset):
        def __getitem__(self, idx: int) -> object:
            return self.metas[idx]

    class OfServedRows(RankServerDataset):
        def __getitem__(self, idx: int) -> object:
            return self.metas[idx]

    for made, item in ((OfLines(meta), "its line"), (OfRows(meta), "filename"), (OfServedRows(meta, *server), "label")):
        with pytest.raises(AttributeError, match=rf"call super\(\).__getitem__\(idx\).*{item}"):
            made[0]


class OwnLines(BaseDataset):
    """Makes the list of rows itself."""

    def parse(self) -> None:
        self.metas = Path(self.meta_file).read_text().splitlines()

    def __getitem__(self, idx: int) -> str:
        return self.metas[idx]


def test_subclasses_may_make_a_list_of_rows(meta: str) -> None:
    made = OwnLines(meta)
    assert pickle.loads(pickle.dumps(made))[3] == made[3] == BaseDataset(meta)[3]


@full_only("waits for real time-outs")
def test_servers_that_cannot_help(meta: str, server: tuple[str, int]) -> None:
    for kind in (ServerDataset, RankServerDataset):
        with pytest.raises(ServerError, match=r"none.*train"):
            kind("none.txt", *server)
        with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
            kind(meta, "127.0.0.1", 9, timeout=1)
    with pytest.raises(ConfigError, match=r"reload_cfg has no cache: it takes mini_epoch.*cache_size"):
        RankServerDataset(meta, *server, reload_cfg={"cache": 3})


def test_bad_input(meta: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reload_cfg has no mini_epochs: it takes mini_epoch, seed"):
        RankDataset(meta, reload_cfg={"mini_epochs": 3})
    with pytest.raises(PartitionError, match="mini_epoch 4 is outside the epoch's 4"):
        RankDataset(meta, reload_cfg={"mini_epoch": 4, "mini_epoch_idx": 4})
    for kind in (BaseDataset, RankDataset):
        with pytest.raises(ManifestError, match=r"none\.txt"):
            kind(str(tmp_path / "none.txt"))
    (tmp_path / "empty.txt").write_text("")
    assert len(RankDataset(str(tmp_path / "empty.txt"))) == 0


def test_more_padding_than_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "three.txt"
    path.write_text("a 0\nb 1\nc 2\n")
    monkeypatch.setenv("WORLD_SIZE", "8")
    seen = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        dataset = RankDataset(str(path), reload_cfg={"mini_epoch": 1})
        assert len(dataset) == 1
        seen.append(dataset[0][2])
    assert Counter(seen).most_common() == [(seen[0], 3), (seen[1], 3), (seen[2], 2)]
