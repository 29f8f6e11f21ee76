"""Rows and fields of text, against references that read the whole file and split it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from full_run import full_only
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.errors import ManifestError
from penstock.manifest import Manifest
from penstock.manifest.lines import LineIndex, TooMuch
from penstock.manifest.scan import LineRules
from penstock.storage import File

WriteFile = Callable[..., Path]
one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

pieces = [b"a", b"b.jpg", b" ", b"\t", b"\r", b"\n", b"\n", b"\r\n", b"#", b"\xef\xbb\xbf", b"\xff", b"\xc3\xa9", b"7"]
adversarial = st.lists(st.sampled_from(pieces), max_size=40).map(b"".join)


def reference(data: bytes, comment: bytes | None = None) -> list[bytes]:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = [line for line in lines if line.strip(b" \t\r")]
    if comment is not None:
        rows = [line for line in rows if not line.lstrip(b" \t\r").startswith(comment)]
    return [line.removesuffix(b"\r") for line in rows]


@given(adversarial, st.sampled_from([None, "#", "##", "\ufeff"]), st.sampled_from([1, 2, 3, 7, 64, 1 << 16]), st.data())
@example(b"a\n\n", None, 2, None)
@example(b"a\r", None, 1, None)
@example(b"a\r\nb", None, 1, None)
@example(b"a\n#c\nb\nz", "#", 4, None)
@one_file
def test_rows_are_those_of_a_whole_file_split(
    write: WriteFile, data: bytes, comment: str | None, buffer: int, draw: st.DataObject | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.storage.files.PIECE", buffer)
        index = LineIndex(File(str(write(data))), LineRules(comment=comment))
    expected = reference(data, comment.encode() if comment else None)
    assert index.rows == len(expected)
    everything = np.arange(index.rows)
    assert index.raw(everything).to_pylist() == expected
    assert index.text(everything) == [os.fsdecode(row) for row in expected]
    assert [index.one(k) for k in range(index.rows)] == [os.fsdecode(row) for row in expected]
    if draw is not None and expected:
        some = np.array(draw.draw(st.lists(st.integers(0, len(expected) - 1), max_size=10)), dtype=np.int64)
        assert index.raw(some).to_pylist() == [expected[k] for k in some]
        assert index.text(some) == [os.fsdecode(expected[k]) for k in some]


usual = st.integers(0, 10**6).map(lambda k: b"class/%d.jpg %d" % (k, k % 7))
unusual = st.sampled_from(
    [b"x", b"x" * 509, b"x" * 510, b"x" * 511, b"x" * 4096, b"", b"#", b"x\r", b"\xff", b"\xef\xbb\xbf"]
)


@given(
    st.lists(usual, min_size=60, max_size=80), st.lists(st.tuples(st.integers(0, 80), unusual), max_size=3), st.data()
)
@example([b"a/%d.jpg 1" % k for k in range(99)], [], None)
@example([b"a/%d.jpg 1" % k for k in range(300)], [(20, b"x" * 510)], None)
@example([b"a/%d.jpg 1" % k for k in range(300)], [(20, b"x" * 511)], None)
@one_file
def test_batches_are_those_of_a_whole_file_split(
    write: WriteFile, content: list[bytes], others: list[tuple[int, bytes]], draw: st.DataObject | None
) -> None:
    for place, line in others:
        content.insert(place, line)
    data = b"\n".join(content) + (b"" if draw and draw.draw(st.booleans()) else b"\n")
    index, expected = LineIndex(File(str(write(data))), LineRules(comment="#")), reference(data, b"#")
    places = np.arange(9, 50) if draw is None else draw.draw(st.lists(st.integers(0, index.rows - 1), min_size=9))
    some = np.array(places, dtype=np.int64)
    assert index.raw(some).to_pylist() == [expected[k] for k in some]
    assert index.text(some) == [os.fsdecode(expected[k]) for k in some]
    with pytest.raises(TooMuch):
        index.raw(some, sum(len(expected[k]) for k in some) - 1)


def test_a_usual_batch_takes_the_short_way(write: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    index = LineIndex(File(str(write(b"".join(b"a/%d.jpg 1\n" % k for k in range(999))))), LineRules())
    monkeypatch.setattr(index, "_one", None)
    some = np.arange(700, 444, -1)
    assert index.raw(some).to_pylist() == [b"a/%d.jpg 1" % k for k in some]
    assert index.text(some) == [f"a/{k}.jpg 1" for k in some]


@given(adversarial)
@one_file
def test_line_numbers_count_every_line_of_the_file(write: WriteFile, data: bytes) -> None:
    index = LineIndex(File(str(write(data))), LineRules())
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [k + 1 for k, line in enumerate(lines) if line.strip(b" \t\r")]
    assert [index.line(row) for row in range(index.rows)] == expected


def split(line: str, fields: int) -> list[str] | None:
    """The path and the fields after it, by a regular expression."""
    pattern = r"[ \t]*(.*?[^ \t])" + r"[ \t]+([^ \t]+)" * fields + r"[ \t]*"
    match = re.fullmatch(pattern, line, re.DOTALL)
    return list(match.groups()) if match else None


words = st.sampled_from(
    ["a", "b c", "1", "-12", "+3", "0x1", "1_0", "１", "9223372036854775807", "9223372036854775808"]
)
numbers = st.sampled_from(["1.5", "-inf", "nan", "1e400", "1e", "٣", "", "-9223372036854775808"])
gaps = st.sampled_from([" ", "\t", "  ", " \t"])
lines = st.lists(
    st.tuples(gaps | st.just(""), words, gaps, words | numbers, gaps | st.just("")).map("".join), max_size=6
)


def parse_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text) or not -(2**63) <= int(text) < 2**63:
        raise ValueError
    return int(text)


def parse_float(text: str) -> float:
    if not text.isascii() or "_" in text:
        raise ValueError
    return float(text)


@given(lines, st.sampled_from(["int", "float", "str"]))
@example(["a.jpg 1", "b.jpg\t2", "c d.jpg \t 3"], "int")
@one_file
def test_labels_parse_as_they_should_or_name_the_line(write: WriteFile, content: list[str], label: str) -> None:
    path = write("".join(f"{line}\n" for line in content))
    manifest = Manifest.open(path, label=label)
    kept = [(number, line) for number, line in enumerate(content, 1) if line.strip(" \t")]
    parse: Callable[[str], object] = {"int": parse_int, "float": parse_float, "str": str}[label]
    good = []
    for row, (number, line) in enumerate(kept):
        fields = split(line, 1)
        try:
            if fields is None:
                raise ValueError
            expected = (fields[0], parse(fields[1]))
        except ValueError:
            with pytest.raises(ManifestError, match=rf"{path.name}, line {number}: "):
                manifest[row]
            with pytest.raises(ManifestError, match=rf"{path.name}, line {number}: "):
                manifest.records([row])
        else:
            good.append(row)
            assert repr(manifest[row][:3]) == repr((*expected, row))  # nan is not equal to itself
    assert repr(manifest.records(good)) == repr([manifest[row] for row in good])
    table = manifest.take(good)
    assert repr(table["label"].to_pylist()) == repr([manifest[row].label for row in good])
    assert table["path"].to_pylist() == [manifest[row].path for row in good]


def test_labels_of_the_original_system(write: WriteFile) -> None:
    """The lines that it read wrong: section 0.4 of what came before, acceptance 2."""
    path = write("b10.jpg 12\nb.jpg 100\nc.jpg  5\nd.jpg -1\ne f.jpg\t7\r\n\n/x/g.jpg 8\nlast.jpg 9")
    assert [(r.path, r.label) for r in Manifest.open(path, root="/r")] == [
        ("/r/b10.jpg", 12),
        ("/r/b.jpg", 100),
        ("/r/c.jpg", 5),
        ("/r/d.jpg", -1),
        ("/r/e f.jpg", 7),
        ("/x/g.jpg", 8),
        ("/r/last.jpg", 9),
    ]


def test_several_labels_and_other_columns(write: WriteFile) -> None:
    path = write("a b.jpg 1 2 3\nc.jpg\t4  5 6\n")
    manifest = Manifest.open(path, label="int[3]")
    assert [(r.path, r.label) for r in manifest] == [("a b.jpg", (1, 2, 3)), ("c.jpg", (4, 5, 6))]
    assert manifest.take([1])["label"].to_pylist() == [[4, 5, 6]]
    manifest = Manifest.open(path, columns=["path", "_", "label", "score:float"])
    assert manifest[1] == ("c.jpg", 5, 1, {"score": 6.0})
    assert manifest.columns == ["path", "label", "score"]
    assert Manifest.open(path, columns=["path", "x", "label:float[2]"])[0] == ("a b.jpg", (2.0, 3.0), 0, {"x": "1"})


def test_no_label_takes_the_whole_line(write: WriteFile) -> None:
    manifest = Manifest.open(write("a b c.jpg\nd 1\n"), label=None)
    assert [(r.path, r.label) for r in manifest] == [("a b c.jpg", None), ("d 1", None)]
    assert manifest.take([1]).to_pydict() == {"path": ["d 1"]}


def test_blank_lines_can_be_errors(write: WriteFile) -> None:
    path = write("a 1\nb 2\n \t\nc 3\n")
    assert len(Manifest.open(path)) == 3
    with pytest.raises(ManifestError, match=rf"{path.name}, line 3: blank line"):
        Manifest.open(path, blank="error")
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, path.name + ".pstk"]


def test_a_name_that_is_not_utf8_opens_the_file_it_names(write: WriteFile, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xe9t\xe9.jpg")).write_bytes(b"image")
    path = write(b"a.jpg 1\n\xe9t\xe9.jpg 2\n")
    manifest = Manifest.open(path, root=tmp_path)
    assert Path(manifest[1].path).read_bytes() == b"image"
    assert manifest.records([1])[0] == manifest[1]
    with pytest.raises(ManifestError, match=r"line 2: path is not UTF-8"):
        manifest.take([0, 1])


@full_only("much memory for each", but=["int"])
@pytest.mark.parametrize("label", ["int", "str"])
def test_lines_of_many_mebibytes(write: WriteFile, label: str) -> None:
    name = "x" * (9 << 20)
    path = write(f"{name}.jpg 1\nb 2\n{' ' * (3 << 20)}\n{name} c 3")
    manifest = Manifest.open(path, label=label)
    convert: type = int if label == "int" else str
    expected = [(f"{name}.jpg", convert(1)), ("b", convert(2)), (f"{name} c", convert(3))]
    assert [(r.path, r.label) for r in manifest] == expected
    assert [manifest[k][:2] for k in (2, 0)] == [expected[2], expected[0]]
    assert [len(row) for row in manifest.raw([0, 2]).to_pylist()] == [(9 << 20) + 6, (9 << 20) + 4]


def test_error_messages_are_short(write: WriteFile) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.open(write("x" * 100_000 + " y\n"))[0]
    assert "label 'y' is not an integer" in str(caught.value)
    assert len(str(caught.value)) < 1000
