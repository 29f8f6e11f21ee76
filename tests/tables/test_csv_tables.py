"""CSV and TSV files as tables: the values of pandas, errors that name the line, and changes that are noticed."""

from __future__ import annotations

import csv
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import DataFileChangedError, DataFileError, DataFileIOError, ManifestError
from penstock.tables import csv as csv_tables

one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(path, ns=(0, 0))
    return path


def rows(source: Any, **options: Any) -> list[Any]:
    return list(ps.TableDataset(source, shuffle="none", **options))  # type: ignore[arg-type]


def test_columns_have_the_types_of_their_values(tmp_path: Path) -> None:
    text = 'text,n,score,good,day\n"a, ""b""\nc",1,0.5,true,2024-01-02\n,,2,false,2024-01-03\n'
    path = write(tmp_path / "a.csv", text)
    dataset = ps.open(path, shuffle="none")
    assert isinstance(dataset, ps.TableDataset)
    assert dataset[0] == {"text": 'a, "b"\nc', "n": 1, "score": 0.5, "good": True, "day": "2024-01-02"}
    assert dataset[1] == {"text": "", "n": None, "score": 2.0, "good": False, "day": "2024-01-03"}
    assert [str(field.type) for field in dataset.table.schema] == ["string", "int64", "double", "bool", "string"]
    batch = next(iter(ps.DataLoader(ps.open(path, columns=["score", "text"], shuffle="none"), 2)))
    assert (batch["score"].tolist(), batch["text"]) == ([0.5, 2.0], ['a, "b"\nc', ""])


def test_tab_separated_values_line_ends_and_marks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "\ufeffa\tb\r\nx y\t1\r\n\r\nz\t2")
    assert rows(path) == [{"a": "x y", "b": 1}, {"a": "z", "b": 2}]


cells = st.text(st.sampled_from('ab ,\n"é#'), max_size=6)


@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=8))
@one_file
def test_what_the_csv_module_writes_is_read_back(tmp_path: Path, content: list[tuple[str, str]]) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([("x", "y"), *((f"t{a}", f"t{b}") for a, b in content)])
    path = write(tmp_path / f"{len(os.listdir(tmp_path))}.csv", out.getvalue())
    assert rows(path) == [{"x": f"t{a}", "y": f"t{b}"} for a, b in content]


def test_long_texts_one_column_and_quotes_inside(tmp_path: Path) -> None:
    text = "word " * 100_000
    path = write(tmp_path / "a.csv", f'text\n"{text}"\n5" disk\n"a\n"')
    assert rows(path) == [{"text": text}, {"text": '5" disk'}, {"text": "a\n"}]


def test_a_type_fits_all_values_not_only_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_tables, "_BLOCK", 64)
    head = "".join(f"{k},{k},true,,\n" for k in range(40))
    path = write(tmp_path / "a.csv", f"a,b,c,d,e\n{head}0.5,x,maybe,7,\n")
    found = rows(path)
    assert found[0] == {"a": 0.0, "b": "0", "c": "true", "d": "", "e": ""}
    assert found[40] == {"a": 0.5, "b": "x", "c": "maybe", "d": "7", "e": ""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a,b\n1,2\n"x\ny",2\n1,2,3\n', r"line 5: expected 2 fields, found 3: '1,2,3'"),
        ("a,b\n1,2\n1\n", "line 3: expected 2 fields, found 1: '1'"),
        ('a,b\n1,2\n1,"2\n', "line 3: a quoted field in the record that starts here is never closed"),
        ('a,b\n1,"2', "line 2: a quoted field in the record that starts here is never closed"),
        ('a,b\n5" x,2\n1,"2""\n3,4\n', "line 3: a quoted field in the record that starts here is never closed"),
        ("a,a\n1,2\n", "names its columns, each once, and this one is 'a,a'"),
        ("a,\n1,2\n", "names its columns"),
        ("x.jpg,3,4\n", r"names its columns.* 'x.jpg,3,4'.*header=False"),
        ("", r"names its columns.* ''"),
        (b"a,b\ny,1\nx\xff,2\n", r"line 3: not UTF-8: 'x\\udcff,2'"),
        (b"a,b\nx\0,2\n", "is a binary file.*; a table is text"),
        (b"\x1f\x8b\x08\x00", r"is compressed \(gzip\); decompress it first: a table is plain text"),
        (b"PAR1" * 8, r"is not text but parquet; rename it to end in \.parquet"),
        (f'a,b\n"{"x" * 200_000}",1\n1,2,3\n', "line 3: expected 2 fields, found 3: '1,2,3'"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(DataFileError, match=rf"bad\.csv.*{message}") as caught:
        ps.TableDataset(path)
    assert "manifest" not in str(caught.value) or "as a manifest" in str(caught.value)
    with pytest.raises(DataFileIOError, match="no such file"):
        ps.TableDataset(tmp_path / "none.csv")


def test_a_record_that_is_too_long(tmp_path: Path) -> None:
    lines = "\n".join("x" * (12 << 20) for _ in range(3))
    path = write(tmp_path / "bad.csv", f'a,b\n1,2\n"{lines}",2\n')
    with pytest.raises(DataFileError, match=r"bad\.csv, line 3: field larger than field limit \(16777216\)"):
        ps.TableDataset(path)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "penstock").mkdir()
    write(tmp_path / "penstock" / "manifests", "")
    with pytest.raises(DataFileIOError, match=r"a\.csv.*set XDG_CACHE_HOME") as caught:
        ps.TableDataset(write(tmp_path / "a.csv", "x,y\n1,2\n"))[0]
    assert "cache_dir" not in str(caught.value)


def test_a_changed_file_is_noticed_and_converted_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "x,y\n1,2\n")
    dataset = ps.TableDataset(path)
    copy = write(tmp_path / "b.csv", path.read_bytes())
    assert ps.TableDataset(copy).fingerprint == dataset.fingerprint
    assert pickle.loads(pickle.dumps(dataset))[0] == {"x": 1, "y": 2}
    path.write_text("x,y\n3,4\n5,6\n")
    with pytest.raises(DataFileChangedError, match=r"a\.csv"):
        dataset[0]
    with pytest.raises(DataFileChangedError, match=r"a\.csv"):
        pickle.loads(pickle.dumps(dataset))[0]
    assert rows(path) == [{"x": 3, "y": 4}, {"x": 5, "y": 6}]


def test_several_files_and_workers(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{k}.csv", f"x,y\n{k},a{k}\n{k + 10},b{k}\n") for k in range(3)]
    dataset = ps.open(str(tmp_path / "*.csv"), seed=1)
    assert isinstance(dataset, ps.TableDataset)
    expected = [batch["y"] for batch in ps.DataLoader(dataset, 2)]
    assert [batch["y"] for batch in ps.DataLoader(dataset, 2, num_workers=2)] == expected
    assert sorted(text for batch in expected for text in batch) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert rows(paths)[3] == {"x": 11, "y": "b1"}


def test_lists_of_paths_and_labels_are_manifests(tmp_path: Path) -> None:
    for text in ("path,label\na.jpg,3\n", "label,path,note\n3,a.jpg,x\n", "a.jpg,3\n"):
        dataset = ps.open(write(tmp_path / "a.csv", text))
        assert isinstance(dataset, ps.RankDataset)
        assert dataset[0] == ("a.jpg", 3, 0)
    path = write(tmp_path / "a.csv", "file,class\na.jpg,cat\n")
    assert isinstance(ps.open(path), ps.TableDataset)
    assert ps.open(path, columns={"path": "file", "label": "class"}, label="str")[0] == ("a.jpg", "cat", 0)
    with pytest.raises(ManifestError, match=r"looks like a header.*columns="):
        ps.open(path, size=8)
    with pytest.raises(ManifestError, match="no such file"):
        ps.open(tmp_path / "none.csv")
