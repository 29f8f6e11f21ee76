"""`check`: everything that is wrong, with line numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError
from penstock.manifest import check

WriteFile = Callable[..., Path]


def test_a_good_file_has_no_problems(write: WriteFile, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    (tmp_path / "b.jpg").touch()
    seen: list[tuple[int, int]] = []
    path = write("a.jpg 1\nb.jpg 2\n")
    report = check(path, files=True, root=tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert (report.rows, report.count, report.sources, seen) == (2, 0, [str(path)], [(2, 2)])


def test_all_kinds_of_problems(write: WriteFile, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    path = write(b"a.jpg 1\n\nb.jpg x\nalone\n\xff.jpg 3\na.jpg 4\n\na.jpg 5\nb.jpg y\n")
    report = check(path, files=True, root=tmp_path)
    name = str(path)
    assert {kind: problem.count for kind, problem in report.problems.items()} == {
        "utf-8": 1,
        "label": 2,
        "fields": 1,
        "missing": 1,
        "duplicate": 2,
    }
    assert report.problems["label"].examples == [
        f"{name}, line 3: label 'x' is not an integer: 'b.jpg x'",
        f"{name}, line 9: label 'y' is not an integer: 'b.jpg y'",
    ]
    assert report.problems["fields"].examples[0].startswith(f"{name}, line 4: expected 'path label (int)'")
    assert report.problems["utf-8"].examples == [f"{name}, line 5: not UTF-8: '\\udcff.jpg 3'"]
    assert report.problems["missing"].examples[0].startswith(f"{name}, line 5: no such file: ")
    assert report.problems["duplicate"].examples == [
        f"{name}, line 6: 'a.jpg' is also the path of row 0",
        f"{name}, line 8: 'a.jpg' is also the path of row 0",
    ]


def test_counts_go_on_where_examples_end(write: WriteFile) -> None:
    report = check(write("a x\n" * 10_000 + "b 1\n" * 10_000), examples=3)
    assert (report.problems["label"].count, len(report.problems["label"].examples)) == (10_000, 3)
    assert (report.problems["duplicate"].count, len(report.problems["duplicate"].examples)) == (9_999, 3)
    assert not report.ok
    assert report.count == 19_999


def test_duplicates_across_sources(write: WriteFile, tmp_path: Path) -> None:
    pq.write_table(pa.table({"path": ["x", "b"], "label": [1, 2]}), tmp_path / "t.parquet")
    last = write("c 1\nx 3\n")
    report = check([write("a 1\nb 2\n"), tmp_path / "t.parquet", last])
    assert report.problems["duplicate"].examples == [
        f"{tmp_path}/t.parquet, row 1: 'b' is also the path of row 1",
        f"{last}, line 2: 'x' is also the path of row 2",
    ]
    assert check([write("a 1\na 2\n")], duplicates=False).ok


def test_lines_of_duplicates_are_those_of_their_own_source(write: WriteFile) -> None:
    first, second = write("a 1\na 2\n", name="first.txt"), write("long-name-b 1\nb 1\na 2\n", name="second.txt")
    assert check([first, second]).problems["duplicate"].examples == [
        f"{first}, line 2: 'a' is also the path of row 0",
        f"{second}, line 3: 'a' is also the path of row 0",
    ]


def test_bad_rows_of_a_mapped_arrow_file(tmp_path: Path) -> None:
    table = pa.table({"path": ["a", None, "b", ""], "label": [1, 2, None, 4]})
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    report = check(tmp_path / "t.arrow")
    assert report.problems["row"].count == 3
    assert [text.split(", ")[1] for text in report.problems["row"].examples] == [
        "row 1: path is null",
        "row 2: label is null",
        "row 3: path is empty",
    ]


def test_what_cannot_be_opened_is_in_the_report(write: WriteFile, tmp_path: Path) -> None:
    for source, options, message in (
        (write(b"\0\0"), {}, "is a binary file"),
        (tmp_path / "none.txt", {}, "there is no such file"),
        (write("a 1\n\n"), {"blank": "error"}, "line 2: blank line"),
        (write('a,"1\n', suffix=".csv"), {}, "never closed"),
    ):
        report = check(source, **options)  # type: ignore[arg-type]
        assert list(report.problems) == ["unreadable"]
        assert message in report.problems["unreadable"].examples[0]
    with pytest.raises(ConfigError):
        check(write("a 1\n"), label="nonsense")
