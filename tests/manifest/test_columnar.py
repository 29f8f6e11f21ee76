"""Parquet and Arrow: round trips, conversion, types."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ManifestChangedError, ManifestError
from penstock.manifest import Manifest

one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


def write_arrow(table: pa.Table, path: Path, rows: int = 1000, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_stream(table: pa.Table, path: Path, rows: int = 1000) -> Path:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_parquet(table: pa.Table, path: Path, rows: int = 1000) -> Path:
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_compressed(table: pa.Table, path: Path, rows: int = 1000) -> Path:
    return write_arrow(table, path, rows, "zstd")


writers = pytest.mark.parametrize(
    ("writer", "name"),
    [
        (write_arrow, "t.arrow"),
        (write_compressed, "t.feather"),
        (write_stream, "t.ipc"),
        (write_parquet, "t.parquet"),
    ],
)
Writer = Callable[..., Path]


def example_table(rows: int = 100) -> pa.Table:
    return pa.table(
        {
            "w": [None if k % 7 == 0 else k / 2 for k in range(rows)],
            "label": pa.array(range(rows), pa.int16()),
            "path": pa.array([f"dir{k % 3}/é{k}.jpg" for k in range(rows)]).dictionary_encode(),
            "tag": [f"t{k}" for k in range(rows)],
        }
    )


@writers
def test_rows_in_any_order(writer: Writer, name: str, tmp_path: Path) -> None:
    table = example_table()
    path = writer(table, tmp_path / name, 7)
    manifest = Manifest.open(path, columns=["path", "label", "w", "tag"], root="/r")
    expected = [
        (f"/r/{row['path']}", row["label"], k, {"w": row["w"], "tag": row["tag"]})
        for k, row in enumerate(table.to_pylist())
    ]
    assert list(manifest) == expected
    indices = [99, 0, 50, 50, -1, 7, 6]
    assert manifest.records(indices) == [expected[k] for k in indices]
    taken = manifest.take(indices)
    assert taken.schema == manifest.schema
    assert taken["path"].to_pylist() == [expected[k][0] for k in indices]
    assert taken["label"].to_pylist() == [expected[k][1] for k in indices]
    assert taken["w"].to_pylist() == [expected[k][3]["w"] for k in indices]
    assert [manifest[k] for k in indices] == [expected[k] for k in indices]
    batch = manifest.gather([3, 98])
    assert manifest.parse(batch, [3, 98]) == [expected[3], expected[98]]
    assert manifest.take([]).num_rows == 0
    assert manifest.records([]) == []
    with pytest.raises(ManifestError, match="no raw text"):
        manifest.raw([0])


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=4), st.integers(-(2**63), 2**63 - 1)), max_size=20),
    st.integers(1, 8),
)
@one_file
def test_parquet_round_trip(tmp_path: Path, rows: list[tuple[str, int]], group: int) -> None:
    path = tmp_path / f"{len(os.listdir(tmp_path))}.parquet"
    table = pa.table(
        {"path": pa.array([r[0] for r in rows], pa.string()), "label": pa.array([r[1] for r in rows], pa.int64())}
    )
    os.utime(write_parquet(table, path, group), ns=(0, 0))
    assert [(r.path, r.label) for r in Manifest.open(path)] == rows


@writers
def test_converted_once_and_kept(writer: Writer, name: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = writer(example_table(), tmp_path / name)
    first = Manifest.open(path, cache_dir=cache)
    made = {p.name: p.stat().st_ino for p in cache.iterdir()}
    assert len(made) == 1
    assert Manifest.open(path, cache_dir=cache).fingerprint == first.fingerprint
    assert {p.name: p.stat().st_ino for p in cache.iterdir()} == made
    expected = first[5]
    kept = cache / next(iter(made))
    kept.write_bytes(kept.read_bytes()[:-20])
    assert Manifest.open(path, cache_dir=cache)[5] == expected
    kept.write_bytes(b"garbage" * 40)
    assert Manifest.open(path, cache_dir=cache)[5] == expected


@writers
def test_the_fingerprint_is_of_content_and_options(writer: Writer, name: str, tmp_path: Path) -> None:
    path = writer(example_table(), tmp_path / name)
    first = Manifest.open(path)
    (tmp_path / "sub").mkdir()
    copy = tmp_path / "sub" / name
    copy.write_bytes(path.read_bytes())
    assert Manifest.open(copy, root="/elsewhere").fingerprint == first.fingerprint
    assert Manifest.open(path, label="float").fingerprint != first.fingerprint
    writer(example_table(101), path)
    with pytest.raises(ManifestChangedError):
        first.take([0])
    assert Manifest.open(path).fingerprint != first.fingerprint


def test_an_arrow_file_stays_in_place_without_memory_of_its_own(tmp_path: Path) -> None:
    table = pa.table({"path": [f"p{k}" for k in range(200_000)], "label": np.arange(200_000)})
    path = write_arrow(table, tmp_path / "t.arrow", 50_000)
    before = pa.total_allocated_bytes()
    manifest = Manifest.open(path)
    assert manifest.records([199_999, 0])[0].label == 199_999
    assert pa.total_allocated_bytes() - before < 100_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.arrow", "t.arrow.pstk"]


def test_label_types(tmp_path: Path) -> None:
    table = pa.table(
        {
            "path": ["a", "b"],
            "label": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())),
            "u": pa.array([1, 2**63], pa.uint64()),
            "name": ["x", "y"],
        }
    )
    path = write_parquet(table, tmp_path / "t.parquet")
    assert Manifest.open(path, label="int[2]")[1].label == (3, 4)
    assert Manifest.open(path, columns={"path": "path", "label": "u"}, label="float")[1].label == 2.0**63
    assert Manifest.open(path, columns={"path": "path", "label": "name"}, label="str")[1].label == "y"
    with pytest.raises(ManifestError, match=r"row 1: label 9223372036854775808 is not int"):
        Manifest.open(path, columns={"path": "path", "label": "u"})
    with pytest.raises(ManifestError, match=r"column 'name' has the type string, not int"):
        Manifest.open(path, columns={"path": "path", "label": "name"})
    with pytest.raises(ManifestError, match=r"no column 'class'; there are path, label, u, name"):
        Manifest.open(path, columns={"path": "path", "label": "class"})
    with pytest.raises(ManifestError, match=r"row 0: label .* is not int\[3\]"):
        Manifest.open(path, label="int[3]")


@writers
@pytest.mark.parametrize(
    ("paths", "labels", "message"),
    [
        (["a", None], [1, 2], "row 1: path is null"),
        (["a", "b", ""], [1, 2, 3], "row 2: path is empty"),
        (["a", "b"], [None, 2], "row 0: label is null"),
    ],
)
def test_nulls_are_errors(
    writer: Writer, name: str, paths: list[str | None], labels: list[int | None], message: str, tmp_path: Path
) -> None:
    table = pa.table({"path": pa.array(paths, pa.string()), "label": pa.array(labels, pa.int64())})
    path = writer(table, tmp_path / name)
    with pytest.raises(ManifestError, match=message):
        Manifest.open(path).take(range(len(paths)))


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1", b"ARROW1\0\0", b"garbage" * 100])
def test_what_is_no_such_file(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=r"t\.(parquet|arrow) is not an? (Parquet|Arrow) file"):
        Manifest.open(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_damaged_parquet_page_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    table = pa.table({"path": [os.urandom(8).hex() for _ in range(5000)], "label": np.arange(5000)})
    path = write_parquet(table, tmp_path / "t.parquet")
    data = bytearray(path.read_bytes())
    data[100:5000] = bytes(4900)
    path.write_bytes(data)
    with pytest.raises(ManifestError, match=r"t\.parquet"):
        Manifest.open(path, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_type_that_arrow_cannot_take_is_an_error_with_the_file(tmp_path: Path) -> None:
    write_arrow(pa.table({"path": pa.array(["a", "b"], pa.string_view()), "label": [0, 1]}), tmp_path / "v.arrow")
    manifest = Manifest.open(tmp_path / "v.arrow")
    for read in (lambda: manifest[0], lambda: manifest.records([1, 0]), lambda: manifest.take([0])):
        with pytest.raises(ManifestError, match=r"v\.arrow .*string_view"):
            read()


def test_arguments_for_lines_make_no_sense(tmp_path: Path) -> None:
    path = write_parquet(example_table(), tmp_path / "t.parquet")
    for options in ({"header": True}, {"blank": "error"}, {"comment": "#"}):
        with pytest.raises(ConfigError, match="is not supported by the format 'parquet'"):
            Manifest.open(path, **options)  # type: ignore[arg-type]
