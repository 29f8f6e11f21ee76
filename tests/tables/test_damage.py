"""Tables that were damaged inside: an error that names the file, as far as it can be told, and never a crash."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import penstock as ps
from penstock.errors import DataFileError, ImageError
from penstock.tables.lru import LruCache

LISTS: list[Any] = [[7, 7, 7], None, [7, 7], [7] * 9]


def arrow(path: Path, table: pa.Table) -> Path:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def test_offsets_that_lead_outside_are_not_followed(tmp_path: Path) -> None:
    path = arrow(tmp_path / "a.arrow", pa.table({"x": pa.array(LISTS, pa.list_(pa.int64()))}))
    assert [None if row["x"] is None else len(row["x"]) for row in ps.TableFiles(path).records(range(4))] == [
        3,
        None,
        2,
        9,
    ]
    data = path.read_bytes()
    offsets = pa.array([0, 3, 3, 5, 14], pa.int32()).buffers()[1].to_pybytes()[:20]
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, pa.array([0, 3, 1 << 30, 5, 14], pa.int32()).buffers()[1].to_pybytes()[:20]))
    with pytest.raises(DataFileError, match=r"a\.arrow"):
        ps.TableFiles(path).records([1, 2])


def test_pages_with_a_checksum_are_checked(tmp_path: Path) -> None:
    path, number = tmp_path / "a.parquet", (123456789).to_bytes(8, "little")
    table = pa.table({"x": pa.array([123456789] * 4)})
    pq.write_table(
        table, path, use_dictionary=False, compression=None, write_page_checksum=True, write_statistics=False
    )
    assert [row["x"] for row in ps.TableFiles(path).records(range(4))] == [123456789] * 4
    path.write_bytes(path.read_bytes().replace(number, (123456788).to_bytes(8, "little"), 1))
    with pytest.raises(DataFileError, match=r"a\.parquet, row group 0, is damaged"):
        ps.TableFiles(path).records([2])


def test_text_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": ["words"] * 3}), path, use_dictionary=False, compression=None, write_statistics=False)
    path.write_bytes(path.read_bytes().replace(b"words", b"w\xffrds"))
    with pytest.raises(DataFileError, match=r"a\.parquet, row group 0, is damaged"):
        ps.TableFiles(path).records([0])


def test_columns_that_only_later_files_have(tmp_path: Path) -> None:
    files = [
        arrow(tmp_path / "a.arrow", pa.table({"x": [1]})),
        arrow(tmp_path / "b.arrow", pa.table({"x": [1], "z": [2]})),
    ]
    for sources in (files, files[::-1]):
        with pytest.raises(DataFileError, match="columns"):
            ps.TableFiles(sources)
    assert len(ps.TableFiles(files, columns=["x"])) == 2


def test_lists_of_tensors_that_differ_in_length(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 2))
    inside = pa.ExtensionArray.from_storage(kind, pa.array([[1.0] * 4] * 3, pa.list_(pa.float32(), 4)))
    lists = pa.ListArray.from_arrays(pa.array([0, 0, 1, 3], pa.int32()), inside)
    path = arrow(tmp_path / "a.arrow", pa.table({"x": lists}))
    assert [len(row["x"]) for row in ps.TableFiles(path).records(range(3))] == [0, 1, 2]


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_postscript_is_not_run(tmp_path: Path) -> None:
    program = io.BytesIO()
    Image.new("RGB", (8, 8)).save(program, "EPS")
    rows = pa.array([{"bytes": program.getvalue(), "path": "a.jpg"}], IMAGE)
    path = arrow(tmp_path / "a.arrow", pa.table({"image": rows}))
    for images in ("pil", "rgb"):
        with pytest.raises(ImageError, match=r"a\.jpg.*PostScript" if images == "pil" else r"a\.jpg"):
            ps.TableFiles(path, images=images)[0]


def test_images_are_called_by_their_own_file_and_row(tmp_path: Path) -> None:
    good = arrow(tmp_path / "a.arrow", pa.table({"image": pa.array([None], IMAGE)}))
    rows = [{"bytes": b"no image", "path": None}, {"bytes": None, "path": "c.png"}]
    bad = arrow(tmp_path / "b.arrow", pa.table({"image": pa.array(rows, IMAGE)}))
    table = ps.TableFiles([good, bad])
    with pytest.raises(ImageError, match=r"b\.arrow, row 0'") as caught:
        table[1]
    assert "a.arrow" not in str(caught.value)
    with pytest.raises(DataFileError, match=r"b\.arrow, row 1: the bytes of 'c\.png'"):
        table[2]


def test_what_was_made_twice_after_a_failure_counts_once() -> None:
    kept: LruCache[int] = LruCache(2)
    begun, asked, failed, late, done = (threading.Event() for _ in range(5))

    class Key:
        def __hash__(self) -> int:
            if threading.current_thread() is waiter:
                asked.set()
            return 0

    def fail() -> tuple[int, int]:
        begun.set()
        failed.wait(5)
        raise OSError

    def make() -> tuple[int, int]:
        late.set()
        done.wait(5)
        return 1, 1

    def first() -> None:
        with pytest.raises(OSError):
            kept.get(key, fail)

    key, failing = Key(), threading.Thread(target=first)
    waiter = threading.Thread(target=kept.get, args=(key, make))
    failing.start()
    assert begun.wait(5)
    waiter.start()
    assert asked.wait(5)
    kept.drop([])  # when that is through, it waits for the one that is going to fail
    failed.set()
    assert late.wait(5)
    assert kept.get(key, lambda: (1, 1)) == 1
    done.set()
    failing.join()
    waiter.join()
    kept.get("another", lambda: (2, 1))
    assert kept.get(key, lambda: (3, 1)) == 1  # there is room for both
