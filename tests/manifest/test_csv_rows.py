"""CSV and TSV against Python's csv module."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ManifestChangedError, ManifestError
from penstock.manifest import Manifest
from penstock.manifest.formats.csv import read_records
from penstock.storage import File

WriteFile = Callable[..., Path]
one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

cells = st.text(st.sampled_from('ab ,\t\n\r"é#'), max_size=6)
table = st.lists(st.tuples(cells.filter(bool), cells, cells), min_size=1, max_size=8)


def write_rows(out: io.StringIO, rows: list[tuple[str, str, str]], **options: str) -> None:
    """As the csv module does, which forgets that a carriage return needs quotes."""
    careful = any("\r" in cell for row in rows for cell in row)
    csv.writer(out, quoting=csv.QUOTE_ALL if careful else csv.QUOTE_MINIMAL, **options).writerows(rows)  # type: ignore


@given(table, st.sampled_from([",", "\t"]), st.sampled_from(["\n", "\r\n"]), st.booleans())
@example([("a", "\n\n", '"')], ",", "\r\n", False)
@one_file
def test_what_the_csv_module_writes_is_read_back(
    write: WriteFile, rows: list[tuple[str, str, str]], delimiter: str, end: str, header: bool
) -> None:
    out = io.StringIO()
    write_rows(out, [("path", "label", "note")] * header + rows, delimiter=delimiter, lineterminator=end)
    path = write(out.getvalue().removesuffix(end), suffix=".csv" if delimiter == "," else ".tsv")
    manifest = Manifest.open(path, columns=["path", "label", "note"], label="str", header=header)
    assert [(r.path, r.label, r.extra["note"]) for r in manifest] == rows
    assert [manifest[k].path for k in range(len(rows))] == [row[0] for row in rows]
    assert manifest.take(range(len(rows)))["note"].to_pylist() == [row[2] for row in rows]


messy = st.lists(st.sampled_from(['"', '"', ",", "\n", "a", "é", " ", "#"]), max_size=30).map("".join)


@given(messy)
@example('a 5" disk,1\nb,2\n')
@example('"a"b"c,\n"\nd')
@example('a\n"b')
@one_file
def test_records_of_any_text_are_those_of_the_csv_module(write: WriteFile, text: str) -> None:
    source = File(str(write(text, suffix=".csv")))
    # The csv module takes an unclosed quote to the end of the file; we call that an error.
    with_end = list(csv.reader(io.StringIO(text + '\nend,"', newline="")))
    unclosed = with_end[-1:] != [["end", ""]]
    if unclosed:
        with pytest.raises(ManifestError, match="never closed"):
            list(read_records(source, ","))
        return
    reader, expected, before = csv.reader(io.StringIO(text, newline="")), [], 0
    for row in reader:
        if row:
            expected.append((before + 1, row))
        before = reader.line_num
    assert list(read_records(source, ",")) == expected


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
    with pytest.raises(ManifestError, match=message):
        Manifest.open(write(f'path,label\n"a\n",1\n{line}\n', suffix=".csv"))


def test_fields_longer_than_the_csv_module_allows(write: WriteFile) -> None:
    long = 'x,"\n' * 100_000
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([("a", 1, ""), (long, 2, ""), ("b", 3, long)])
    columns = ["path", "label", "note"]
    path = write(out.getvalue(), suffix=".csv")
    with pytest.raises(ManifestError, match=r"line 2: field larger than field limit \(131072\)"):
        Manifest.open(path, columns=columns, header=False)
    before = csv.field_size_limit(1 << 20)
    try:
        manifest = Manifest.open(path, columns=columns, header=False)
    finally:
        csv.field_size_limit(before)
    assert [(r.path, r.label, r.extra["note"]) for r in manifest] == [("a", 1, ""), (long, 2, ""), ("b", 3, long)]


def test_lines_without_end_are_not_read_whole(write: WriteFile) -> None:
    with pytest.raises(ManifestError, match="line 2: longer than 16 MiB"):
        Manifest.open(write("path,label\n" + "a," * (9 << 20), suffix=".csv"))


def test_carriage_returns_are_those_of_the_csv_module(write: WriteFile) -> None:
    manifest = Manifest.open(write('path,label\r\n"a\rb",1\r\n', suffix=".csv"))
    assert [(r.path, r.label) for r in manifest] == [("a\rb", 1)]
    with pytest.raises(ManifestError, match="line 2: a carriage return in an unquoted field: 'a,1"):
        Manifest.open(write("path,label\na,1\rb,2\n", suffix=".csv"))


def test_paths_may_be_any_bytes(write: WriteFile) -> None:
    manifest = Manifest.open(write(b"path,label\ncaf\xe9.jpg,1\n", suffix=".csv"))
    assert manifest[0].path == manifest.records([0])[0].path == "caf\udce9.jpg"


def test_a_changed_file_is_noticed_and_converted_again(write: WriteFile, tmp_path: Path) -> None:
    path, cache = write("path,label\na,1\n", suffix=".csv"), tmp_path / "cache"
    manifest = Manifest.open(path, cache_dir=cache)
    (conversion,) = cache.iterdir()
    first = conversion.stat().st_ino
    assert Manifest.open(path, cache_dir=cache).fingerprint == manifest.fingerprint
    assert conversion.stat().st_ino == first
    path.write_text("path,label\na,1\nb,2\n")
    for read in (lambda: manifest[0], lambda: manifest.records([0]), lambda: manifest.take([0])):
        with pytest.raises(ManifestChangedError, match="it had 15 bytes and has 19"):
            read()
    grown = Manifest.open(path, cache_dir=cache)
    assert [record.path for record in grown] == ["a", "b"]
    assert not grown.is_prefix_of_current(manifest.fingerprint, 1)
    copy = write(path.read_bytes(), name="copy.csv")
    assert Manifest.open(copy, cache_dir=cache).fingerprint == grown.fingerprint


def test_blank_lines_can_be_errors(write: WriteFile) -> None:
    with pytest.raises(ManifestError, match="line 3: blank line; blank='skip' ignores"):
        Manifest.open(write("path,label\na,1\n\nb,2\n", suffix=".csv"), blank="error")


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
    ignored = ["_"] * (content.partition("\n")[0].count(",") - 1)
    columns = [*ignored, "path", "label"]  # the first field of a header may be empty
    assert len(Manifest.open(path, columns=columns, label="str", header=False)) == content.count("\n")


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


def test_header_and_no_header_have_conversions_of_their_own(write: WriteFile, tmp_path: Path) -> None:
    path, cache = write("path,label\na,1\n", suffix=".csv"), tmp_path / "cache"
    assert len(Manifest.open(path, label="str", cache_dir=cache)) == 1
    assert len(Manifest.open(path, header=False, label="str", cache_dir=cache)) == 2
    assert len(Manifest.open(path, format="text", label=None, cache_dir=cache)) == 2
    made = {entry.name: entry.stat().st_ino for entry in cache.iterdir()}
    assert sorted(Path(name).suffix for name in made) == [".arrow", ".arrow", ".pstk"]
    assert len(Manifest.open(path, label="str", cache_dir=cache)) == 1
    assert {entry.name: entry.stat().st_ino for entry in cache.iterdir()} == made
