"""Values of tables against those of `datasets`: column type by column type, and schemas that hypothesis draws."""

from __future__ import annotations

import datetime
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

import penstock as ps
from penstock.errors import ConfigError, DataFileError

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

List, Value = datasets.List, datasets.Value

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
FLOATS = ("float16", "float32", "float64")


def plain(value: Any) -> Any:
    """Arrays as lists and NumPy's numbers as Python's, NaN as a word: what is left is what the values are."""
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value]
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    value = value.item() if isinstance(value, np.generic) else value
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def saved(folder: Path, values: dict[str, list[Any]], features: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """A data set of `datasets` as it is saved, and the table of its folder."""
    theirs = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    theirs.save_to_disk(str(folder), **options)
    return theirs, ps.TableFiles(folder)


def check(theirs: Any, table: ps.TableFiles) -> None:
    """The rows are those of `datasets`; in any order, and by batches; and the same one by one."""
    expected = [plain(theirs[k]) for k in range(len(theirs))]
    assert len(table) == len(expected)
    assert table.columns == theirs.column_names
    assert [plain(row) for row in table.records(range(len(table)))] == expected
    order = np.random.default_rng(0).integers(0, len(table), 2 * len(table))
    rows = table.records(order)
    assert [plain(row) for row in rows] == [expected[k] for k in order]
    for row, k in zip(rows, order.tolist(), strict=True):
        assert repr(table[k]) == repr(row), "a value depends on its neighbours"


def test_every_kind_of_column(tmp_path: Path) -> None:
    n = 7
    rng = np.random.default_rng(0)
    features: dict[str, Any] = {f"x_{name}": Value(name) for name in (*INTEGERS, *FLOATS, "bool", "string", "binary")}
    values: dict[str, list[Any]] = {f"x_{name}": list(range(k, k + n)) for k, name in enumerate(INTEGERS)}
    values |= {f"x_{name}": [v + 0.5 for v in range(n)] for name in FLOATS}
    values |= {"x_bool": [v % 3 == 0 for v in range(n)], "x_string": [f"word {v}ü" for v in range(n)]}
    values["x_binary"] = [bytes([v, 0, 255]) for v in range(n)]
    more: dict[str, tuple[Any, list[Any]]] = {
        "label": (datasets.ClassLabel(names=["cat", "dog"]), [v % 2 for v in range(n)]),
        "nulls": (Value("int64"), [None if v == 2 else v for v in range(n)]),
        "no_text": (Value("string"), [None if v == 2 else str(v) for v in range(n)]),
        "fixed": (List(Value("float32"), length=20), rng.random((n, 20), np.float32).tolist()),
        "ragged": (List(Value("int32")), [list(range(v)) for v in range(n)]),
        "alike": (List(Value("int16")), [[v, v + 1] for v in range(n)]),
        "null_lists": (List(Value("int64")), [None if v == 1 else [v] * v for v in range(n)]),
        "flags": (List(Value("bool")), [[True] * v for v in range(n)]),
        "deep": (List(List(Value("float64"))), [[[1.0] * v, [2.0]] for v in range(n)]),
        "square": (datasets.Array2D((2, 3), "float32"), rng.random((n, 2, 3), np.float32).tolist()),
        "growing": (datasets.Array3D((None, 2, 2), "int32"), [np.ones((v, 2, 2), np.int32).tolist() for v in range(n)]),
        "words": (List(Value("string")), [["a"] * v for v in range(n)]),
        "struct": (
            {"a": Value("int32"), "b": {"c": List(Value("float32"))}},
            [{"a": v, "b": {"c": [v]}} for v in range(n)],
        ),
        "structs": (List({"a": Value("int64")}), [[{"a": w} for w in range(v)] for v in range(n)]),
        "day": (Value("date32"), [datetime.date(2024, 1, v + 1) for v in range(n)]),
        "time": (Value("timestamp[us]"), [datetime.datetime(2024, 1, 1, 0, v) for v in range(n)]),
        "nothing": (Value("null"), [None] * n),
        "large": (Value("large_string"), ["x" * v for v in range(n)]),
    }
    features |= {name: feature for name, (feature, _) in more.items()}
    values |= {name: column for name, (_, column) in more.items()}
    theirs, table = saved(tmp_path / "d", values, features, num_shards=3)
    check(theirs, table)
    for name in (*INTEGERS, *FLOATS):
        assert table[3][f"x_{name}"].dtype == np.dtype(name)
    row = table[3]
    assert (row["square"].shape, row["square"].dtype) == ((2, 3), np.float32)
    assert (row["growing"].shape, row["growing"].dtype) == ((3, 2, 2), np.int32)
    assert (row["fixed"].shape, row["ragged"].dtype) == ((20,), np.int32)
    assert table.class_names("label") == ["cat", "dog"]
    row["fixed"][:] = 0  # values are nobody else's
    row["ragged"][:] = 0
    assert table[3]["fixed"].any()
    numbers = theirs.with_format("numpy")
    for k in range(n):
        for name in ("fixed", "square", "growing", "alike", "label", "x_float32", "x_int64"):
            assert np.array_equal(numbers[k][name], table[k][name])


def test_batches_are_those_of_the_default_collate(tmp_path: Path) -> None:
    n = 40
    features = {
        "x": Value("float32"),
        "flag": Value("bool"),
        "text": Value("string"),
        "row": List(Value("int16"), length=9),
        "pair": List(Value("float64")),
        "square": datasets.Array2D((2, 3), "float32"),
        "inner": {"a": Value("int8"), "b": Value("string")},
    }
    values: dict[str, list[Any]] = {
        "x": list(range(n)),
        "flag": [v % 3 == 0 for v in range(n)],
        "text": [str(v) for v in range(n)],
        "row": [[v] * 9 for v in range(n)],
        "pair": [[v, 2.0 * v] for v in range(n)],
        "square": [np.full((2, 3), v).tolist() for v in range(n)],
        "inner": [{"a": v, "b": "b"} for v in range(n)],
    }
    saved(tmp_path / "d", values, features, num_shards=2)
    dataset = ps.TableDataset(tmp_path / "d", seed=1)
    assert dataset.makes_batches
    expected = default_collate(dataset.__getitems__(range(16)))
    batch = next(iter(ps.DataLoader(dataset, batch_size=16)))
    assert repr(batch) == repr(expected)
    assert list(batch) == list(features)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_shapes_hold_whoever_has_imported_datasets(tmp_path: Path, kind: str) -> None:
    """`datasets` registers its extension types with Arrow; without it the same files have storage and metadata."""
    tensor = pa.fixed_shape_tensor(pa.int32(), (2, 2))
    storage = pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.int32(), 4))
    square = pa.array([[[1], [2]], [[3], [4]]], pa.list_(pa.list_(pa.float32())))
    written = {b"ARROW:extension:metadata": b'[[2, 1], "float32"]'}
    written[b"ARROW:extension:name"] = b"datasets.features.features.Array2DExtensionType.unknown"
    schema = pa.schema([pa.field("t", tensor), pa.field("s", square.type, metadata=written)])
    batch = pa.record_batch([pa.ExtensionArray.from_storage(tensor, storage), square], schema=schema)
    path = tmp_path / f"a.{kind}"
    if kind == "arrow":
        with pa.ipc.new_stream(path, schema) as out:
            out.write(batch)
    else:
        pq.write_table(pa.Table.from_batches([batch]), path)
    table = ps.TableFiles(path)
    assert table[1]["t"].tolist() == [[5, 6], [7, 8]]
    assert table[1]["s"].tolist() == [[3], [4]]
    loader = ps.DataLoader(ps.TableDataset(table, shuffle="none"), batch_size=2)
    assert next(iter(loader))["t"].shape == (2, 2, 2)


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_views_of_text(tmp_path: Path, ending: str) -> None:
    """As polars writes them: of Arrow's types those whose rows it cannot take."""
    words = [f"a word that is longer than a view holds, {k}" if k % 3 else None for k in range(20)]
    table = pa.table({"w": pa.array(words, pa.string_view()), "b": pa.array([b"x", None] * 10, pa.binary_view())})
    path = tmp_path / f"views.{ending}"
    if ending == "parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        with pa.ipc.new_file(path, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    rows = ps.TableFiles(path).records([19, 0, 8, 7, 1])
    assert [row["w"] for row in rows] == [words[k] for k in (19, 0, 8, 7, 1)]
    assert [row["b"] for row in rows] == [None, b"x", b"x", None, None]
    texts = ps.TableDataset(path, columns=["w"], shuffle="block", load=lambda sample: str(sample["w"]))
    assert sorted(text for batch in ps.DataLoader(texts, batch_size=6) for text in batch) == sorted(map(str, words))


def test_dictionaries_and_unions(tmp_path: Path) -> None:
    words = pa.array(["a", "b", None, "a"]).dictionary_encode()
    batches = [pa.record_batch({"w": words}), pa.record_batch({"w": pa.array(["c"] * 4).dictionary_encode()})]
    for k, batch in enumerate(batches):
        with pa.ipc.new_file(tmp_path / f"{k}.arrow", batch.schema) as out:
            out.write(batch)
    with pa.ipc.new_stream(tmp_path / "s.arrow", batch.schema) as out:
        out.write(batch)
    with pytest.raises(DataFileError, match="dictionaries in a stream"):
        ps.TableFiles(tmp_path / "s.arrow")
    pq.write_table(pa.Table.from_batches(batches[:1]), tmp_path / "a.parquet")
    assert [row["w"] for row in ps.TableFiles(f"{tmp_path}/[01].arrow").records([7, 0, 2, 1])] == ["c", "a", None, "b"]
    assert [row["w"] for row in ps.TableFiles(tmp_path / "a.parquet").records([1, 2])] == ["b", None]
    union = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])
    batch = pa.record_batch({"u": union, "x": pa.array([1, 2])})
    with pa.ipc.new_stream(tmp_path / "u.arrow", batch.schema) as out:
        out.write(batch)
    with pytest.raises(ConfigError, match=r"column 'u' has the type .*union.*leave it out with columns="):
        ps.TableFiles(tmp_path / "u.arrow")
    assert ps.TableFiles(tmp_path / "u.arrow", columns=["x"])[1] == {"x": 2}


SCALARS = {
    **{name: (Value(name), st.integers(0, 100)) for name in INTEGERS},
    **{name: (Value(name), st.floats(-100, 100, width=16)) for name in FLOATS},
    "bool": (Value("bool"), st.booleans()),
    "string": (Value("string"), st.text(max_size=5)),
    "binary": (Value("binary"), st.binary(max_size=5)),
}


@st.composite
def columns(draw: Any, depth: int = 2) -> tuple[Any, Any]:
    """A feature, and a strategy for its values."""
    kind = draw(st.sampled_from(["scalar", "scalar", *(["list", "fixed", "struct"] if depth else [])]))
    if kind == "scalar":
        return SCALARS[draw(st.sampled_from(sorted(SCALARS)))]
    feature, values = draw(columns(depth - 1))
    if kind == "list":
        return List(feature), st.none() | st.lists(values, max_size=3)
    if kind == "fixed":
        return List(feature, length=2), st.lists(values, min_size=2, max_size=2)
    return {"a": feature, "b": Value("int8")}, st.fixed_dictionaries({"a": values, "b": st.none() | st.integers(0, 9)})


@settings(max_examples=examples(15, 60))
@given(data=st.data())
def test_schemas_that_are_drawn(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(columns(), min_size=1, max_size=3))
    count = data.draw(st.integers(1, 9))
    features = {f"c{k}": feature for k, (feature, _) in enumerate(drawn)}
    lists = st.lists
    values = {
        f"c{k}": data.draw(lists(v | st.none(), min_size=count, max_size=count)) for k, (_, v) in enumerate(drawn)
    }
    theirs = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    written, size = theirs.with_format("arrow")[:], data.draw(st.integers(1, 4))
    with tempfile.TemporaryDirectory() as folder:
        with pa.ipc.new_stream(f"{folder}/d.arrow", written.schema) as out:
            out.write_table(written, max_chunksize=size)
        pq.write_table(written, f"{folder}/d.parquet", row_group_size=size)
        table = ps.TableFiles(f"{folder}/d.arrow")
        check(theirs, table)
        again = ps.TableFiles(f"{folder}/d.parquet", cache_bytes=1)
        assert [repr(row) for row in again.records(range(count))] == [repr(row) for row in table.records(range(count))]
