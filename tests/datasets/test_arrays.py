"""`ArrayDataset`, `LoadArray`, `LoadBytes`: NumPy files and raw bytes through the same door."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreter_support import METHODS
from loader_conformance import check_elastic, check_resume
from loader_support import EXECUTORS, plain

import penstock as ps
from penstock.errors import ConfigError, DataFileChangedError, DataFileError, DataFileIOError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNTS = [11, 0, 1, 18]
N = sum(COUNTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in ``f-*.npy``, whose first number is the row, and ``l-*.npy`` with their labels, cut elsewhere."""
    folder, begin = tmp_path_factory.mktemp("arrays"), 0
    for k, count in enumerate(COUNTS):
        rows = np.random.default_rng(k).random((count, 3, 500), dtype=np.float32)
        rows[:, 0, 0] = range(begin, begin + count)
        begin += count
        np.save(folder / f"f-{k}.npy", rows)
    np.save(folder / "l-0.npy", np.arange(20) * 2)
    np.save(folder / "l-1.npy", np.arange(20, N) * 2)
    return folder


def make(folder: Path, rank: int = 0, world: int = 1, **options: Any) -> Any:
    labels = f"{folder}/l-*.npy"
    return ps.ArrayDataset(f"{folder}/f-*.npy", labels=labels, rank=rank, world_size=world, **{"seed": 2, **options})


def test_items_are_the_rows(folder: Path) -> None:
    rows = np.concatenate([np.load(folder / f"f-{k}.npy") for k in range(4)])
    dataset = make(folder, shuffle="none")
    assert len(dataset) == N
    for index in range(N):
        features, label = dataset[index]
        assert np.array_equal(features.numpy(), rows[index])
        assert (label.item(), label.shape) == (2 * index, ())
    features, labels = next(iter(ps.DataLoader(dataset, batch_size=N)))
    assert np.array_equal(features.numpy(), rows)
    assert labels.tolist() == list(range(0, 2 * N, 2))
    alone = ps.ArrayDataset(folder / "f-0.npy", shuffle="none")
    assert np.array_equal(next(iter(ps.DataLoader(alone, batch_size=11))).numpy(), rows[:11])
    swapped = folder.parent / "swapped.npy"
    np.save(swapped, np.arange(5, dtype=">i4"))
    assert [int(row) for row in ps.ArrayDataset(swapped, shuffle="none")] == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]
    assert ps.ArrayDataset(swapped).__getitems__([0])[0].dtype == torch.int32


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor_makes_the_same_batches(folder: Path, executor: str) -> None:
    def run(executor: str, **options: Any) -> list[Any]:
        loader = ps.DataLoader(
            make(folder), batch_size=7, executor=executor, num_workers=EXECUTORS[executor], **options
        )
        return [plain(batch) for _ in range(2) for batch in loader]

    expected = run("inline")
    assert run(executor) == expected
    assert all(2 * row[0][0] == label for rows, labels in expected for row, label in zip(rows, labels, strict=True))
    theirs = torch.utils.data.DataLoader(make(folder), 7)
    assert [plain(batch) for batch in theirs] == expected[:5]
    if executor == "process":
        assert run(executor, multiprocessing_context=METHODS[-1]) == expected


def test_states(folder: Path) -> None:
    def loader(rank: int = 0, world: int = 1, **options: Any) -> Any:
        return ps.DataLoader(make(folder, rank, world, load=number, **options), batch_size=4)

    check_resume(lambda: loader(mini_epochs=2))
    check_elastic(loader, lambda batch: batch.tolist(), N, [(2, 2), (3, 1), (1, 3)])
    with pytest.raises(StateError, match="fingerprint"):
        ps.ArrayDataset(folder / "f-0.npy", seed=2).load_state_dict(make(folder).state_dict())


def test_a_state_belongs_to_the_labels_too(folder: Path, tmp_path: Path) -> None:
    def dataset(labels: Any) -> Any:
        return ps.ArrayDataset(f"{folder}/f-*.npy", labels=labels, seed=2)

    state = make(folder).state_dict(5)
    others = tmp_path / "others.npy"
    np.save(others, np.arange(N) * 2 + 1)
    for labels in (others, None):
        with pytest.raises(StateError, match="fingerprint"):
            dataset(labels).load_state_dict(state)
    assert len({dataset(labels).fingerprint for labels in (others, None, f"{folder}/l-*.npy")}) == 3
    same = pickle.loads(pickle.dumps(make(folder)))
    same.load_state_dict(state)
    assert same.state_dict() == state


def test_growth_of_rows_and_labels(tmp_path: Path) -> None:
    for k, count in enumerate((6, 4)):
        np.save(tmp_path / f"f-{k}.npy", np.arange(count) + 10 * k)
        np.save(tmp_path / f"l-{k}.npy", np.arange(count) + 10 * k)
    np.save(tmp_path / "m-0.npy", np.arange(6) + 1)
    np.save(tmp_path / "m-1.npy", np.arange(4))
    np.save(tmp_path / "n-0.npy", np.arange(10))

    def dataset(labels: str, last: str = "*") -> Any:
        return ps.ArrayDataset(f"{tmp_path}/f-{last}.npy", labels=f"{tmp_path}/{labels}.npy")

    state = dataset("l-0", "0").state_dict(2)
    with pytest.raises(StateError):
        dataset("l-*").load_state_dict(state)
    grown = dataset("l-*")
    grown.load_state_dict(state, allow_growth=True)
    assert grown.state_dict() == state  # it names the rows with which the epoch began, so it loads again
    dataset("l-*").load_state_dict(grown.state_dict(), allow_growth=True)
    for labels in ("m-*", "n-0"):
        with pytest.raises(StateError, match="fingerprint"):
            dataset(labels).load_state_dict(state, allow_growth=True)


def number(item: Any) -> int:
    return int(item[0][0, 0])


number.pure = True  # type: ignore[attr-defined]


def test_changed_and_odd_files(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(64))
    dataset = ps.ArrayDataset(path)
    handle = pickle.dumps(dataset)
    assert int(dataset[0]) in range(64)
    os.truncate(path, 256)
    for read in (lambda: dataset[0], lambda: next(iter(ps.DataLoader(dataset, 4))), lambda: pickle.loads(handle)[0]):
        with pytest.raises(DataFileChangedError, match=r"a\.npy was changed"):
            read()
    with pytest.raises(DataFileError, match="truncated"):
        ps.ArrayDataset(path)
    for name, array in (
        ("b", np.zeros((4, 3))),
        ("c", np.zeros((4, 3), np.float32)),
        ("f", np.asfortranarray(np.eye(3))),
    ):
        np.save(tmp_path / f"{name}.npy", array)
    np.save(tmp_path / "s.npy", np.array(["a", "b"]))
    np.save(tmp_path / "r.npy", np.zeros(3, [("x", "i4")]))
    np.save(tmp_path / "n.npy", np.float32(3))
    np.savez(tmp_path / "z.npz", a=np.zeros(3))
    (tmp_path / "z.npz").rename(tmp_path / "z.npy")
    (tmp_path / "a.txt").write_text("a\n")
    for source, options, error, message in (
        ([tmp_path / "b.npy", tmp_path / "c.npy"], {}, DataFileError, r"c\.npy has rows of float32 \(3,\)"),
        (tmp_path / "f.npy", {}, DataFileError, "Fortran order"),
        (tmp_path / "s.npy", {}, DataFileError, "no tensors"),
        (tmp_path / "r.npy", {}, DataFileError, "array of numbers"),
        (tmp_path / "n.npy", {}, DataFileError, "array of numbers"),
        (tmp_path / "z.npy", {}, DataFileError, "array of numbers"),
        (tmp_path / "a.txt", {}, ConfigError, "LoadBytes"),
        (tmp_path / "none.npy", {}, DataFileIOError, "no such file"),
        (tmp_path / "b.npy", {"labels": tmp_path / "f.npy"}, DataFileError, "Fortran"),
        (tmp_path / "b.npy", {"labels": [tmp_path / "b.npy"] * 2}, DataFileError, "4 rows, but labels for 8"),
    ):
        with pytest.raises(error, match=message):
            ps.ArrayDataset(source, **options)


def test_through_the_door(tmp_path: Path) -> None:
    tokens = tmp_path / "t.bin"
    np.arange(100, dtype=np.uint16).tofile(tokens)
    dataset = ps.open(tokens, dtype="uint16", sequence_length=10)
    assert isinstance(dataset, ps.TokenDataset)
    assert len(dataset) == 10
    for number_ in range(4):
        np.save(tmp_path / f"{number_} a.npy", np.full((2, 2), number_))
    rows = ps.open(f"{tmp_path}/*.npy", shuffle="none")
    assert isinstance(rows, ps.ArrayDataset)
    assert len(rows) == 8
    files = ps.open(tmp_path, shuffle="none")
    assert isinstance(files, ps.RankDataset)
    batch = next(iter(ps.DataLoader(files, batch_size=4)))
    assert torch.equal(batch, torch.arange(4)[:, None, None].expand(4, 2, 2))
    np.save(tmp_path / "5.npy", np.zeros(1))
    assert len(ps.open(tmp_path)) == 5  # type: ignore[arg-type]
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{number_} a.npy {number_}\n" for number_ in range(4)) + "t.bin 9\nnone 9\n")
    arrays = ps.open(listed, root=tmp_path, shuffle="none", load=ps.LoadArray(row=True))
    assert arrays.pure
    assert [(int(a[0, 0]), label, row) for a, label, row in (arrays[k] for k in range(4))] == [
        (k, k, k) for k in range(4)
    ]
    for index, error, message in (
        (4, DataFileError, r"t\.bin is not an \.npy file"),
        (5, DataFileIOError, "no such file"),
    ):
        with pytest.raises(error, match=message):
            arrays[index]
    raw = ps.open(listed, root=tmp_path, shuffle="none", load=ps.LoadBytes())
    assert raw[4] == (tokens.read_bytes(), 9)
    with pytest.raises(DataFileIOError, match="no such file"):
        raw[5]


def test_parts_of_bytes_are_those_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("".join(f"{k}.raw\n" for k in range(12)))
    for k in range(12):
        (tmp_path / f"{k}.raw").write_bytes(bytes(range(10 * k)))

    def run(**options: Any) -> list[Any]:
        manifest = ps.Manifest.open(tmp_path / "list.txt", root=tmp_path, label=None)
        loader = ps.DataLoader(ps.RankDataset(manifest, seed=1, load=ps.LoadBytes(size=40)), batch_size=3, **options)
        return [batch.tolist() for _ in range(2) for batch in loader]

    expected = run()
    assert run(num_workers=2, executor="process") == run(num_workers=2, executor="thread") == expected
    for part in (part for batch in expected for part in batch):
        size = next((i for i in range(1, 40) if part[i] != part[i - 1] + 1), 40)
        assert part == list(range(part[0], part[0] + size)) + [0] * (40 - size) or not any(part)
    assert any(part[0] > 0 for batch in expected for part in batch)
    with pytest.raises(ConfigError, match="positive"):
        ps.LoadBytes(size=0)


def test_a_folder_of_arrays_reads_back_their_names(tmp_path: Path) -> None:
    names = [" a.npy", "a.npy", "\ta.npy", "\ufeffb.npy", "a b.npy"]
    for number, name in enumerate(names):
        np.save(tmp_path / name, np.array([number]))
    found = [int(array) for array in ps.open(tmp_path, shuffle="none", rank=0, world_size=1)]
    assert found == [names.index(name) for name in sorted(names)]
