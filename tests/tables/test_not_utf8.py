"""Columns that say they are text and are not UTF-8, as other writers leave them: Arrow itself does not look."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import DataFileError, ManifestError

BAD = [b"plain", b"caf\xe9", None, b"\xff\xfe"]


def text(values: list[bytes | None], kind: pa.DataType) -> pa.Array:
    """Bytes as a column of text, unchecked."""
    binary = pa.large_binary() if kind == pa.large_string() else pa.binary()
    return pa.array(values, binary).view(kind)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("nulls", [False, True])
def test_tables(tmp_path: Path, kind: pa.DataType, nulls: bool) -> None:
    values = BAD if nulls else [b"plain", b"caf\xe9", b"more"]
    columns = {"text": text(values, kind), "label": pa.array(range(len(values)))}
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    table = ps.TableFiles(path)
    if nulls:  # such batches go Arrow's way, and are checked as a whole
        words = r"a\.arrow.* is damaged: .*UTF8 sequence at string index 1"
    else:
        assert table.records([0])[0]["text"] == "plain"
        words = r"a\.arrow, row 1: column 'text' .* not UTF-8\. Write"
    with pytest.raises(DataFileError, match=words):
        table.records([0, 1])
    assert [row["label"] for row in ps.TableFiles(path, columns=["label"]).records([1])] == [1]


@pytest.mark.parametrize(
    "inner",
    [
        lambda a: pa.StructArray.from_arrays([a], ["x"]),
        lambda a: pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), a),
    ],
)
def test_text_inside_of_others(tmp_path: Path, inner: object) -> None:
    array = inner(text([b"plain", b"caf\xe9", b"more"], pa.string()))  # type: ignore[operator]
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), pa.schema([("text", array.type)])) as writer:
        writer.write_table(pa.table({"text": array}))
    with pytest.raises(DataFileError, match=r"a\.arrow.* is damaged: .*UTF8 sequence at string index 1"):
        ps.TableFiles(path).records([2, 1])


@pytest.mark.parametrize("suffix", ["arrow", "feather", "parquet"])
def test_manifests(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"path": ["a", "b", "c"], "label": text([b"plain", b"caf\xe9", b"more"], pa.string())})
    path = tmp_path / f"train.{suffix}"
    if suffix == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    elif suffix == "feather":
        feather.write_feather(table, str(path), compression="lz4")
    else:
        pq.write_table(table, path)
    with pytest.raises(ManifestError, match=rf"train\.{suffix}"):
        manifest = ps.Manifest.open(path, label="str", cache_dir=tmp_path)
        assert manifest[0].label == "plain"
        with pytest.raises(ManifestError, match=rf"train\.{suffix}, row 1: label is not UTF-8"):
            manifest[1]
        manifest.records([0, 1, 2])
