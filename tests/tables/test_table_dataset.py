"""`TableDataset` and `penstock.open`: orders, executors and states; folders of `datasets`; Parquet; images; damage."""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from entries_support import opened
from full_run import full_only
from http_support import Server
from loader_conformance import check_elastic, check_end_of_pass, check_resume
from loader_support import EXECUTORS, plain
from PIL import Image

import penstock as ps
from penstock.errors import (
    ConfigError,
    DataFileChangedError,
    DataFileError,
    DataFileIOError,
    ImageError,
    PenstockError,
    StateError,
    StorageError,
)
from penstock.storage import Storage
from penstock.tables.found_files import table_files
from penstock.tools.cli.manifest_options import Reading
from penstock.tools.cli.profile_source import load_path

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N = 61


def rows(begin: int, end: int) -> pa.Table:
    """Rows that say their number in each column."""
    numbers = range(begin, end)
    return pa.table(
        {
            "number": pa.array(numbers, pa.int32()),
            "row": pa.array([[float(k)] * 10 for k in numbers], pa.list_(pa.float32(), 10)),
            "text": pa.array([f"row {k}" for k in numbers], pa.string()),
            "some": pa.array([[k] * 3 for k in numbers], pa.list_(pa.int64())),
        }
    )


def write(path: Path, table: pa.Table, size: int = 7, **options: Any) -> Path:
    """A file in the format that its name says: an Arrow stream, a file with a footer (``.ipc``), Parquet."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=size, **options)
        return path
    make = pa.ipc.new_file if path.suffix == ".ipc" else pa.ipc.new_stream
    with make(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table, max_chunksize=size)
    return path


KINDS = {
    "stream": (".arrow", {}),
    "file": (".ipc", {}),
    "compressed": (".arrow", {"compression": "zstd"}),
    "parquet": (".parquet", {}),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """N rows in three files, one of them empty."""
    folder = tmp_path_factory.mktemp(request.param)
    ending, options = KINDS[request.param]
    for k, (begin, end) in enumerate([(0, 40), (40, 40), (40, N)]):
        write(folder / f"part-{k}{ending}", rows(begin, end), **options)
    return folder


def make(folder: Path, rank: int = 0, world: int = 1, **options: Any) -> Any:
    return ps.TableDataset(folder, rank=rank, world_size=world, **{"seed": 2, **options})


def number(sample: dict[str, Any]) -> int:
    assert sample["text"] == f"row {sample['number']}"
    return int(sample["number"])


number.pure = True  # type: ignore[attr-defined]


def test_rows_in_any_order(folder: Path) -> None:
    table = ps.TableFiles(folder)
    assert len(table) == N
    expected = rows(0, N).to_pylist()
    picked = [*range(N), -1, 5, 5, 39, 40, 0]
    assert [{name: plain(np.asarray(v).tolist()) for name, v in row.items()} for row in table.records(picked)] == [
        expected[k] for k in picked
    ]
    assert table.take(picked).to_pylist() == [expected[k] for k in picked]
    assert table.records([]) == []
    assert table.take([]).num_rows == 0
    for index in (N, -N - 1):
        with pytest.raises(IndexError):
            table[index]
    few = ps.TableFiles(folder, columns=["text", "number"], cache_bytes=1)
    assert list(few[50].items()) == [("text", "row 50"), ("number", 50)]
    assert few.fingerprint == table.fingerprint
    assert pickle.loads(pickle.dumps(few)).records([3, 50]) == few.records([3, 50])


@full_only("as the others", but=["stream", "parquet"])
def test_every_executor_makes_the_same_batches(folder: Path) -> None:
    def run(executor: str) -> list[Any]:
        dataset = make(folder) if executor == "inline" else pickle.loads(pickle.dumps(make(folder)))
        loader = ps.DataLoader(dataset, batch_size=8, executor=executor, num_workers=EXECUTORS[executor])
        return [plain(batch) for _ in range(2) for batch in loader]

    expected = run("inline")
    assert len(expected) == 16
    assert {k for batch in expected[:8] for k in batch["number"]} == set(range(N))
    for batch in expected:
        for k, row, text, some in zip(*batch.values(), strict=True):
            assert (text, row, some) == (f"row {k}", [float(k)] * 10, [k] * 3)
    assert run("thread") == expected
    assert run("process") == expected
    theirs = torch.utils.data.DataLoader(make(folder), 8)
    assert [plain(batch) for batch in theirs] == expected[:8]
    block = [k for batch in ps.DataLoader(make(folder, shuffle="block"), 8) for k in batch["number"].tolist()]
    assert sorted(block) == list(range(N))
    assert block != list(range(N))


@full_only("as the others", but=["parquet"])
def test_states(folder: Path) -> None:
    def loader(rank: int = 0, world: int = 1, **options: Any) -> Any:
        return ps.DataLoader(make(folder, rank, world, load=number, **options), batch_size=4)

    check_resume(lambda: loader(mini_epochs=2), positions=range(0, 25, 4))
    check_end_of_pass(loader)
    check_elastic(loader, lambda batch: batch.tolist(), N, [(2, 2), (3, 1), (1, 3)])
    state = make(folder).state_dict(5)
    grown = ps.TableDataset([*sorted(folder.iterdir()), *folder.glob("part-0*")], seed=2, rank=0, world_size=1)
    with pytest.raises(StateError, match="fingerprint"):
        grown.load_state_dict(state)
    grown.load_state_dict(state, allow_growth=True)


def test_row_groups_are_decoded_once_while_they_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows(0, 400), size=40)
    size = max(ps.TableFiles(path).take(range(k, k + 40)).nbytes for k in range(0, 400, 40))

    def decoded(cache_bytes: int, **options: Any) -> int:
        dataset = ps.TableDataset(path, cache_bytes=cache_bytes, load=number, **options)
        assert sorted(k for batch in ps.DataLoader(dataset, 10) for k in batch.tolist()) == list(range(400))
        return int(dataset.table.decoded)

    assert decoded(100 * size) == decoded(1, shuffle="none") == 10
    few = 5 * size
    assert ps.TableFiles(path, cache_bytes=few).blocks() == (40, 2)
    assert decoded(few, shuffle="block") <= 11  # one to see how large they are
    assert decoded(few) > 80
    state = opened(ps.TableDataset(path, cache_bytes=few, shuffle="block").state_dict())
    assert (state["block_size"], state["window"]) == (40, 2)
    table = ps.TableFiles(path)
    threads = [threading.Thread(target=table.records, args=([k],)) for k in (5, 7, 9, 11) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.decoded == 1


@full_only("more than a thousand files")
def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{k:03}.arrow", rows(3 * k, 3 * k + 3)) for k in range(300)]
    table = ps.TableFiles(files)
    order = np.random.default_rng(0).permutation(900)
    for columns in (table, ps.TableFiles(files, columns=["some"])):
        found = columns.records(order)
        assert [int(row["some"][2]) for row in found] == order.tolist()
        assert len(columns._open) <= 256
        assert len(columns._kept._values) <= 256
    assert [int(row["number"]) for row in table.records(order)] == order.tolist()


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_large_rows_hold_one_row_group_at_a_time(tmp_path: Path, kind: str) -> None:
    each = [bytes([k % 251]) * 8192 for k in range(1280)]
    struct = pa.array([{"data": data} for data in each])  # read through Arrow's own objects
    path = write(tmp_path / f"a.{kind}", pa.table({"row": struct}), size=64)
    table, before = ps.TableFiles(path, cache_bytes=1), pa.default_memory_pool().max_memory()
    order = np.random.default_rng(0).permutation(1280)[:100]
    assert [row["row"]["data"] for row in table.records(order)] == [each[k] for k in order]
    assert pa.default_memory_pool().max_memory() - before < 6 << 20  # of 10 MB
    assert [row["row"]["data"] for row in table.records(range(60, 70))] == each[60:70]


def jpeg(value: int, size: int = 16) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), (value,) * 3).save(out, "PNG")
    return out.getvalue()


def test_images(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(jpeg(11))
    structs = [{"bytes": jpeg(k), "path": None} for k in range(11)]
    structs += [{"bytes": None, "path": str(tmp_path / "out.png")}]
    table = pa.table({"image": structs, "label": range(12), "more": ["x"] * 12})
    path = write(tmp_path / "a.parquet", table, size=5)
    rgb = pickle.loads(pickle.dumps(ps.TableFiles(path, columns=["label", "image"], images_from=tmp_path)))
    for k, row in enumerate(rgb.records(range(12))):
        assert (row["image"].shape, row["image"].dtype, int(row["image"][0, 0, 0])) == ((16, 16, 3), np.uint8, k)
    assert ps.TableFiles(path, images="pil")[7]["image"].getpixel((0, 0)) == (7, 7, 7)
    assert ps.TableFiles(path, images="bytes", images_from=tmp_path)[11]["image"] == jpeg(11)
    batch = next(iter(ps.DataLoader(ps.TableDataset(rgb, shuffle="none"), 12)))
    assert batch["image"][:, 3, 3, 1].tolist() == batch["label"].tolist() == list(range(12))
    images = ps.ImageDataset(ps.TableDataset(path, images_from=tmp_path, seed=3), size=8, row=True)
    for options in ({}, {"num_workers": 2, "executor": "process"}):
        seen = []
        for pixels, labels, row in ps.DataLoader(images, batch_size=4, **options):
            assert pixels.shape == (4, 3, 8, 8)
            assert pixels[:, 0, 0, 0].tolist() == labels.tolist() == row.tolist()
            seen += labels.tolist()
        assert sorted(seen) == list(range(12))
    assert ps.ImageDataset(ps.TableFiles(path, columns=["image", "more"]))[3][1] == "x"
    pixels, _ = next(iter(load_path(str(path), how=Reading(), batch_size=4, size=8)))  # of `penstock profile`
    assert pixels.shape == (4, 3, 8, 8)
    bad = pa.table(
        {"img": [{"bytes": b"no image", "path": "a.png"}, None, {"bytes": None, "path": "b.png"}], "y": [1] * 3}
    )
    bad = bad.append_column("z", bad["y"])
    path = write(tmp_path / "bad.arrow", bad)
    with pytest.raises(ImageError, match=r"bad\.arrow, row 0 \(a\.png\)"):
        ps.TableFiles(path)[0]
    assert ps.TableFiles(path)[1]["img"] is None
    with pytest.raises(DataFileError, match=r"'b\.png' are not in the table"):
        ps.TableFiles(path)[2]
    with pytest.raises(ImageError, match="row 1: a row without an image"):
        ps.ImageDataset(ps.TableFiles(path, columns=["img", "y"]))[1]
    for source, message in (
        (ps.TableFiles(path), "which of y, z"),
        (ps.TableFiles(path, columns=["y"]), "no column of"),
    ):
        with pytest.raises(ConfigError, match=message):
            ps.ImageDataset(source)[0]


def test_images_outside_the_table_come_from_one_folder(tmp_path: Path) -> None:
    """Otherwise, who publishes a table could read any file and any address."""
    for name in ("in/a.png", "b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(3))
    paths = ["a.png", str(tmp_path / "in/a.png"), "../b.png", str(tmp_path / "b.png"), "http://127.0.0.1:9/a.png"]
    write(tmp_path / "t.parquet", pa.table({"img": [{"bytes": None, "path": path} for path in paths], "y": range(5)}))
    closed = ps.open(tmp_path / "t.parquet", images="bytes", shuffle="none", rank=0, world_size=1)
    for row in range(5):
        with pytest.raises(DataFileError, match=rf"row {row}: the bytes of .* images_from= of ps\.open"):
            closed[row]
    opened = ps.open(tmp_path / "t.parquet", size=8, images_from=tmp_path / "in", shuffle="none", rank=0, world_size=1)
    assert [int(opened[row][0].max()) for row in range(2)] == [3, 3]
    for row in range(2, 5):
        with pytest.raises(DataFileError, match=rf"row {row}: .* is not a file in images_from="):
            opened[row]
    with pytest.raises(ConfigError, match="images_from= takes a folder or an address"):
        ps.open(tmp_path / "t.parquet", images_from=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["12:30.png", "cam:1/a.png", "..a.png", "a b%20.png"])
def test_odd_names_of_images_outside_the_table(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(jpeg(3))
    write(tmp_path / "t.parquet", pa.table({"img": [{"bytes": None, "path": name}], "y": [0]}))
    (image, _), *_ = ps.open(tmp_path / "t.parquet", size=8, images_from=tmp_path, rank=0, world_size=1)
    assert int(image.max()) == 3


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.arrow", "..%2fa.arrow", "c:a.arrow", "file:/a.arrow"])
def test_descriptions_name_files_of_their_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.arrow", pa.table({"x": [1]}))
    folder = tmp_path / "saved"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": None}))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name, "train"]}))
    for split in ("train", name):
        with pytest.raises(DataFileError, match=r"json names .*, which is not within its folder"):
            ps.TableFiles(folder, split=split)


def test_images_of_datasets_are_theirs(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b"])})
    values = {"img": [{"bytes": jpeg(k, 8), "path": None} for k in range(4)], "fine_label": [0, 1, 0, 1]}
    theirs = datasets.Dataset.from_dict(values, features=features)
    theirs.save_to_disk(str(tmp_path / "d"))
    ours = ps.TableFiles(tmp_path / "d")
    assert ours.image_columns == ["img"]
    for k in range(4):
        assert np.array_equal(np.asarray(theirs[k]["img"]), ours[k]["img"])
        assert ps.ImageDataset(ours)[k][1] == theirs[k]["fine_label"]
    cast = theirs.cast_column("img", datasets.Image(decode=False))
    assert cast[2]["img"]["bytes"] == ps.TableFiles(tmp_path / "d", images="bytes")[2]["img"]


def test_folders_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    train = datasets.Dataset.from_dict({"x": list(range(20))})
    shuffled = train.shuffle(seed=0).select(range(9))  # an order that saving makes rows of
    both = datasets.DatasetDict({"train": train, "validation": shuffled})
    both.save_to_disk(str(tmp_path / "both"), num_shards={"train": 11, "validation": 1})
    for split, expected in (("train", train), ("validation", shuffled), ("dev", shuffled)):
        table = ps.TableFiles(tmp_path / "both", split=split)
        assert [int(row["x"]) for row in table.records(range(len(table)))] == expected["x"][:]
        assert (
            datasets.load_from_disk(str(tmp_path / "both"))[split if split != "dev" else "validation"]["x"][:]
            == expected["x"][:]
        )
    for split, message in ((None, "train, validation: name one with split="), ("test", "no split 'test'")):
        with pytest.raises(ConfigError, match=message):
            ps.TableFiles(tmp_path / "both", split=split)
    opened = ps.open(tmp_path / "both", split="train", shuffle="none")
    assert isinstance(opened, ps.TableDataset)
    assert int(opened[10]["x"]) == 10
    assert len(ps.open(tmp_path / "both" / "train")) == 20  # type: ignore[arg-type]
    state = tmp_path / "both" / "train" / "state.json"
    said = json.loads(state.read_text())
    state.write_text(json.dumps({**said, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DataFileError, match="flatten_indices"):
        ps.TableFiles(tmp_path / "both", split="train")
    state.write_text("{")
    with pytest.raises(DataFileError, match="is not JSON"):
        ps.TableFiles(tmp_path / "both", split="train")
    cache = tmp_path / "cache"
    datasets.Dataset.from_generator(lambda: ({"x": k} for k in range(5)), cache_dir=str(cache))
    train.to_json(str(tmp_path / "x.json"))
    loaded = datasets.load_dataset("json", data_files=str(tmp_path / "x.json"), cache_dir=str(tmp_path / "jc"))["train"]
    loaded.map(lambda row: {"y": row["x"]})  # leaves a cache-*.arrow there
    inside = Path(loaded.cache_files[0]["filename"]).parent
    assert any(name.startswith("cache-") for name in os.listdir(inside))
    assert ps.TableFiles(inside).records(range(20)) == [{"x": k} for k in range(20)]
    [generated] = cache.rglob("*.arrow")
    assert len(ps.open(generated)) == 5  # type: ignore[arg-type]


def test_names_of_splits(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00002-ab12.parquet", "data/train-00001-of-00002-cd34.parquet"):
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "hub" / name, rows(0, 3))
    write(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", rows(0, 5))
    (tmp_path / "hub" / "README.md").write_text("")
    assert [len(ps.TableFiles(tmp_path / "hub", split=split)) for split in ("train", "test")] == [6, 5]
    with pytest.raises(ConfigError, match="the splits test, train: name one"):
        ps.open(tmp_path / "hub")
    for names, split, expected in (
        (["a.parquet", "b.parquet"], None, 2),
        (["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"], None, 2),
        (["squad-train.arrow", "squad-validation.arrow"], "train", 1),
        (["squad-train-00000-of-00002.arrow", "squad-train-00001-of-00002.arrow", "squad-test.arrow"], "train", 2),
        (["default/train/0000.parquet", "default/train/0001.parquet", "default/dev/0000.parquet"], "validation", 1),
        (["train.parquet", "cache-0123456789abcdef.arrow", ".x.parquet"], None, 1),
        (["a.parquet", "test.parquet"], "test", 1),
    ):
        folder = tmp_path / "-".join([*names, "folder"]).replace("/", "_")[:80]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        assert len(table_files(folder, split)) == expected, names
    with pytest.raises(ConfigError, match="these are files"):
        table_files(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", "train")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataFileIOError, match=r"without state\.json"):
        ps.TableFiles(tmp_path / "none")


def test_elsewhere(tmp_path: Path) -> None:
    storage = Storage(cache=tmp_path / "copies")
    memory = fsspec.filesystem("memory")
    local = write(tmp_path / "a.parquet", rows(0, 30))
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        memory.pipe(f"/tables/test/data/{name}.parquet", local.read_bytes())
    dataset = ps.TableDataset("memory://tables/test", split="train", storage=storage, shuffle="none", load=number)
    assert [dataset[k] for k in range(30)] == list(range(30))
    with pytest.raises(ConfigError, match="test, train"):
        ps.TableFiles("memory://tables/test", storage=storage)
    assert isinstance(ps.open("memory://tables/test/data/train-*.parquet", storage=storage), ps.TableDataset)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        stream = write(tmp_path / "a.arrow", rows(0, 9)).read_bytes()
        server.put("d/state.json", json.dumps({"_data_files": [{"filename": "data-0.arrow"}], "_split": None}).encode())
        url = server.put("d/data-0.arrow", stream)
        assert len(ps.TableFiles(url.rpartition("/")[0], storage=storage)) == 9
        assert len(ps.open(url, storage=storage)) == 9  # type: ignore[arg-type]
        with pytest.raises(StorageError, match="need a store that can be listed"):
            ps.TableFiles(url.partition("/d/")[0] + "/e", storage=storage)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_through_the_door(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows(0, 10))
    table = ps.open(tmp_path / "a.parquet", columns=["text"], shuffle="none")
    assert isinstance(table, ps.TableDataset)
    assert table[3] == {"text": "row 3"}
    manifest = pa.table({"path": ["a.jpg", "b.jpg"], "label": [1, 2], "score": [0.5, 1.0]})
    write(tmp_path / "m.parquet", manifest)
    for options in (
        {},
        {"columns": ["path", "label"]},
        {"columns": {"path": "path", "label": "label"}},
        {"label": None},
    ):
        assert isinstance(ps.open(tmp_path / "m.parquet", **options), ps.RankDataset)
    assert isinstance(ps.open(tmp_path / "m.parquet", columns=["score"]), ps.TableDataset)
    assert ps.TableDataset(tmp_path / "m.parquet", shuffle="none")[1]["path"] == "b.jpg"


def test_damage(tmp_path: Path) -> None:
    stream, file, parquet = (write(tmp_path / f"a.{kind}", rows(0, 30)) for kind in ("arrow", "ipc", "parquet"))
    cut = tmp_path / "cut.arrow"
    for path in (stream, file, parquet):
        data = path.read_bytes()
        for size in (0, 3, 8, len(data) // 2, len(data) - 9, len(data) - 8, len(data) - 1):
            cut.write_bytes(data[:size])
            with pytest.raises(DataFileError, match=r"cut\.arrow.*(truncated|written to its end)"):
                ps.TableFiles(cut)
    cut.write_text("text" * 100)
    with pytest.raises(DataFileError, match="is not an Arrow file"):
        ps.TableFiles(cut)
    other = write(tmp_path / "b.arrow", rows(0, 3).set_column(0, "number", pa.array([1.0, 2.0, 3.0])))
    with pytest.raises(DataFileError, match=r"b\.arrow: column 'number' has the type double, and int32"):
        ps.TableFiles([stream, other])
    assert len(ps.TableFiles([stream, other], columns=["text"])) == 33
    with pytest.raises(DataFileError, match=r"d\.arrow has other columns"):
        ps.TableFiles([stream, write(tmp_path / "d.arrow", rows(0, 3).select(["text"]))])
    for options, message in (
        ({"columns": ["none"]}, "no column 'none'; there are number, row, text, some"),
        ({"columns": "text"}, "list of names"),
        ({"columns": []}, "at least one"),
        ({"images": "cv"}, "unknown images"),
        ({"cache_bytes": 0}, "cache_bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            ps.TableFiles(stream, **options)
    with pytest.raises(ConfigError, match="is already open"):
        ps.TableDataset(ps.TableFiles(stream), images="rgb")
    with pytest.raises(DataFileIOError, match="no such file"):
        ps.TableFiles(tmp_path / "none.parquet")
    broken = bytearray(parquet.read_bytes())
    broken[4:200] = b"\xff" * 196
    cut.write_bytes(broken)
    with pytest.raises(DataFileError, match=r"cut\.arrow, row group 0, is damaged"):
        ps.TableFiles(cut)[0]
    for path in (stream, parquet):
        check_changes(path)


def check_changes(path: Path) -> None:
    """A file that is cut while it is open."""
    dataset = ps.TableDataset(path)
    handle = pickle.dumps(dataset)
    assert dataset[0]
    os.truncate(path, 256)
    for read in (lambda: dataset[0], lambda: next(iter(ps.DataLoader(dataset, 4))), lambda: pickle.loads(handle)[0]):
        with pytest.raises(DataFileChangedError, match=f"{path.name} was changed"):
            read()


def test_what_does_not_collate_names_its_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"x": [1, None, 3], "y": [[1], [1, 2], []]}))
    assert [row["x"] for row in ps.TableFiles(path).records(range(3))] == [1, None, 3]
    for column in ("x", "y"):
        loader = ps.DataLoader(ps.TableDataset(path, columns=[column], shuffle="none"), 3)
        with pytest.raises((TypeError, RuntimeError)) as caught:
            next(iter(loader))
        assert not isinstance(caught.value, PenstockError)
        assert f"in the column '{column}'" in "".join(caught.value.__notes__)
