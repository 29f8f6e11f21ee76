"""CSV and TSV against Python's csv module."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ManifestError
from penstock.manifest import Manifest
from penstock.manifest.lines import LineIndex
from penstock.manifest.scan import LineRules
from penstock.storage import SourceFile

WriteFile = Callable[..., Path]
one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

cells = st.text(st.sampled_from('ab ,\t\n\r"é#'), max_size=6)
table = st.lists(st.tuples(cells.filter(bool), cells, cells), min_size=1, max_size=8)


def write_rows(out: io.StringIO, rows: list[tuple[str, str, str]], **options: str) -> None:
    """As the csv module does, which forgets that a carriage return needs quotes."""
    careful = any("\r" in cell for row in rows for cell in row)
    csv.writer(out, quoting=csv.QUOTE_ALL if careful else csv.QUOTE_MINIMAL, **options).writerows(rows)  # type: ignore


@given(
    table, st.sampled_from([",", "\t"]), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.sampled_from([1, 5, 4096])
)
@example([("a", "\n\n", '"')], ",", "\r\n", False, 1)
@one_file
def test_what_the_csv_module_writes_is_read_back(
    write: WriteFile, rows: list[tuple[str, str, str]], delimiter: str, end: str, header: bool, buffer: int
) -> None:
    out = io.StringIO()
    write_rows(out, [("path", "label", "note")] * header + rows, delimiter=delimiter, lineterminator=end)
    path = write(out.getvalue().removesuffix(end), suffix=".csv" if delimiter == "," else ".tsv")
    LineIndex(SourceFile(str(path)), LineRules(delimiter, "\r", header=header), suffix=".small", buffer=buffer)
    manifest = Manifest.open(path, columns=["path", "label", "note"], label="str", header=header)
    assert [(r.path, r.label, r.extra["note"]) for r in manifest] == rows
    assert [manifest[k].path for k in range(len(rows))] == [row[0] for row in rows]
    assert manifest.take(range(len(rows)))["note"].to_pylist() == [row[2] for row in rows]
    small = (path.parent / (path.name + ".small")).read_bytes()
    sidecar = next(p for p in path.parent.iterdir() if p.name.startswith(path.name) and p.suffix == ".pstk")
    assert small[128:] == sidecar.read_bytes()[128:]


messy = st.lists(st.sampled_from(['"', '"', ",", "\n", "a", "é", " ", "#"]), max_size=30).map("".join)


@given(messy, st.sampled_from([1, 2, 5, 4096]))
@example('a 5" disk,1\nb,2\n', 4)
@example('"a"b"c,\n"\nd', 4096)
@example('a\n"b', 2)
@one_file
def test_records_of_any_text_are_those_of_the_csv_module(write: WriteFile, text: str, buffer: int) -> None:
    source = SourceFile(str(write(text, suffix=".csv")))
    rules = LineRules(",", "\r")
    # The csv module takes an unclosed quote to the end of the file; we call that an error.
    with_end = list(csv.reader(io.StringIO(text + '\nend,"', newline="")))
    unclosed = with_end[-1:] != [["end", ""]]
    if unclosed:
        with pytest.raises(ManifestError, match="never closed"):
            LineIndex(source, rules, buffer=buffer)
        return
    expected = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    index = LineIndex(source, rules, buffer=buffer)
    raw = [value.decode() for value in index.raw(np.arange(index.rows)).to_pylist()]
    assert [next(csv.reader(io.StringIO(value, newline=""))) for value in raw] == expected
    assert [index.one(k) for k in range(index.rows)] == raw


@given(table)
@one_file
def test_comments_and_blank_lines_between_records(write: WriteFile, rows: list[tuple[str, str, str]]) -> None:
    rows = [row for row in rows if not row[0].startswith("#")]
    out = io.StringIO()
    for row in rows:
        out.write('# it is 5" wide, "you know\n\n')
        write_rows(out, [row], lineterminator="\n")
    out.write("#")
    path = write(out.getvalue(), suffix=".csv")
    manifest = Manifest.open(path, columns=["path", "label", "note"], label="str", comment="#", header=False)
    assert [(r.path, r.label, r.extra["note"]) for r in manifest] == rows
    assert [manifest[k].extra["note"] for k in range(len(rows))] == [row[2] for row in rows]


def test_columns_by_name_and_by_position(write: WriteFile) -> None:
    path = write("image_file,y,w\na.jpg,1,0.5\nb.jpg, 2,1\n", suffix=".csv")
    manifest = Manifest.open(path, columns={"path": "image_file", "label": "y", "w:float": "w"})
    assert list(manifest) == [("a.jpg", 1, 0, {"w": 0.5}), ("b.jpg", 2, 1, {"w": 1.0})]
    manifest = Manifest.open(write("a.jpg,,3\n", suffix=".csv"), columns=["path", "_", "label"])
    assert manifest[0] == ("a.jpg", 3, 0, {})
    manifest = Manifest.open(write("a.jpg,3,4\n", suffix=".csv"), columns=["path", "label"], label="int[2]")
    assert manifest[0].label == (3, 4)
    manifest = Manifest.open(write("path,label\na.jpg,3 4\n", suffix=".csv"), label="int[2]")
    assert manifest[0].label == (3, 4)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("path,class\na,1\n", {}, r"no column 'label'; its header is 'path,class'"),
        ("path,label,label\na,1,2\n", {}, r"more than one column 'label'"),
        ("x,y\na,1\n", {"columns": {"path": "x", "label": "z"}}, r"no column 'z'"),
        ('path,label\na,1\nb,"2\n', {}, r"line 3: a quoted field .* never closed"),
    ],
)
def test_what_cannot_be_opened(write: WriteFile, content: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.open(write(content, suffix=".csv"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("b", "line 4: expected 2 fields, found 1"),
        ("b,2,3", "line 4: expected 2 fields, found 3"),
        (",2", "line 4: the path is empty"),
        ("b,x", "line 4: label 'x' is not an integer"),
        ("b,99999999999999999999", "line 4: label .* outside the range of int64"),
    ],
)
def test_rows_that_do_not_parse_are_named(write: WriteFile, line: str, message: str) -> None:
    manifest = Manifest.open(write(f'path,label\n"a\n",1\n{line}\n', suffix=".csv"))
    with pytest.raises(ManifestError, match=message):
        manifest.take([0, 1])
    assert manifest[0] == ("a\n", 1, 0, {})


def test_fields_longer_than_the_csv_module_allows(write: WriteFile) -> None:
    long = 'x,"\n' * 100_000
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([("a", 1, ""), (long, 2, ""), ("b", 3, long)])
    columns = ["path", "label", "note"]
    manifest = Manifest.open(write(out.getvalue(), suffix=".csv"), columns=columns, header=False)
    assert [(r.path, r.label, r.extra["note"]) for r in manifest] == [("a", 1, ""), (long, 2, ""), ("b", 3, long)]


@pytest.mark.parametrize("label", ["int", "str"])
@pytest.mark.parametrize(
    "content",
    [
        "filename,label\na.jpg,1\n",
        "Path,Label\na,1\n",
        "image_id,breed\n00ab,poodle\n",
        ",filename,label\n0,a.jpg,1\n",
        "species,photo,label\ncat,a.jpg,1\n",
        "x,y\na.jpg,1\nb.jpg,2\n",
        "x,y\na.jpg,cat\nb.jpg,dog\n",
        "x,y\na.jpg,cat\nb.png,dog\n",
        "image_file_name,class\n00ab,cat\n",
        "Image URL,class\n",
    ],
)
def test_a_header_without_the_name_of_the_path_column_is_an_error(write: WriteFile, content: str, label: str) -> None:
    path = write(content, suffix=".csv")
    with pytest.raises(ManifestError, match=r"looks like a header.*header=True, columns=.*header=False"):
        Manifest.open(path, label=label)
    assert len(Manifest.open(path, label=label, header=False)) == content.count("\n")


@pytest.mark.parametrize(
    "content",
    [
        "a.jpg,cat\nb.jpg,dog\n",
        "img1,cat\nimg2,dog\n",
        "a,image\nb,label\n",
        "file1,target\nfile2,background\n",
        "images/a,x\nimages/b,y\n",
        "image.jpg,class\nfile.jpg,class\n",
        "a,?\nb,2\n",
        "image,3\nb,2\n",
        "README,doc\nmain.py,code\nMakefile,code\n",
        "x,cat\n",
    ],
)
def test_samples_on_line_one_are_no_header(write: WriteFile, content: str) -> None:
    manifest = Manifest.open(write(content, suffix=".csv"), label="str")
    assert [f"{path},{label}\n" for path, label, *_ in manifest] == content.splitlines(keepends=True)


@pytest.mark.parametrize(("name", "content"), [("a.csv", "a.jpg,cat\n"), ("a.txt", "a.jpg cat\n"), ("a.jsonl", None)])
def test_names_of_classes_are_an_error_that_names_the_option(write: WriteFile, name: str, content: str | None) -> None:
    path = write(content or '{"path": "a.jpg", "label": "cat"}\n', name=name)
    with pytest.raises(ManifestError, match=r"line 1: label 'cat' is not .* pass label='str'"):
        Manifest.open(path)[0]
    assert Manifest.open(path, label="str")[0].label == "cat"


def test_a_mapping_needs_a_header(write: WriteFile) -> None:
    with pytest.raises(ConfigError, match="header=False rules out"):
        Manifest.open(write("a,1\n", suffix=".csv"), columns={"path": "a", "label": "b"}, header=False)


def test_header_and_no_header_have_indexes_of_their_own(write: WriteFile) -> None:
    path = write("path,label\na,1\n", suffix=".csv")
    assert len(Manifest.open(path)) == 1
    assert len(Manifest.open(path, header=False, label="str")) == 2
    assert len(Manifest.open(path, format="text", label=None)) == 2
    first = path.with_name(path.name + ".pstk").stat().st_ino
    assert len(Manifest.open(path)) == 1
    assert path.with_name(path.name + ".pstk").stat().st_ino == first
