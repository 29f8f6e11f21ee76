"""The sidecar: where it goes, when it is made again, and that nothing in it is trusted."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from full_run import full_only
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.errors import ManifestChangedError, ManifestError
from penstock.manifest import Manifest
from penstock.manifest.lines import LineIndex
from penstock.manifest.scan import LineRules
from penstock.manifest.sidecar import BODY, SidecarHeader
from penstock.storage import File

WriteFile = Callable[..., Path]
one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
LINES = "".join(f"dir/img_{k}.jpg {k % 10}\n" for k in range(100))


def sidecar_of(path: Path) -> Path:
    return path.with_name(path.name + ".pstk")


def test_layout_of_the_file(write: WriteFile) -> None:
    path = write(b"\xef\xbb\xbfa 1\n\nbc 2\n")
    Manifest.open(path)
    data = sidecar_of(path).read_bytes()
    status = path.stat()
    magic, version, flags, rows, size, mtime, rules, digest, checksum = struct.unpack_from("<8sIIqqqQ16sQ", data)
    assert (magic, version, rows, size, mtime) == (b"PENSTOCK", 1, 2, status.st_size, status.st_mtime_ns)
    assert flags == 2  # skipped lines
    assert rules == LineRules().digest() == 0x1DC4DBFCE51D4598
    assert digest == xxhash.xxh3_128_digest(path.read_bytes())
    assert checksum == xxhash.xxh3_64_intdigest(data[:64])
    assert BODY % 64 == 0
    assert np.frombuffer(data, "<i8", offset=BODY).tolist() == [3, 8, 13]


def test_an_index_is_kept_and_used_again(write: WriteFile) -> None:
    path = write(LINES)
    Manifest.open(path)
    first = sidecar_of(path).stat()
    manifest = Manifest.open(path)
    assert sidecar_of(path).stat().st_ino == first.st_ino
    assert manifest[99].path == "dir/img_99.jpg"


def test_unusual_rules_have_a_name_of_their_own(write: WriteFile) -> None:
    path = write("#a 1\nb 2\n")
    assert len(Manifest.open(path)) == 2
    assert len(Manifest.open(path, comment="#")) == 1
    assert len(Manifest.open(path, blank="error")) == 2
    names = sorted(p.name for p in path.parent.iterdir())
    assert len(names) == 4
    assert names[-1] == path.name + ".pstk"


def test_the_index_can_go_elsewhere(write: WriteFile, tmp_path: Path) -> None:
    path = write(LINES)
    Manifest.open(path, cache_dir=tmp_path / "new" / "folder")
    assert not sidecar_of(path).exists()
    assert [p.suffix for p in (tmp_path / "new" / "folder").iterdir()] == [".pstk"]


@pytest.mark.parametrize("damage", ["empty", "short", "long", "header", "magic", "garbage", "folder"])
def test_a_damaged_index_is_made_again(write: WriteFile, damage: str) -> None:
    path = write(LINES)
    expected = list(Manifest.open(path))
    sidecar = sidecar_of(path)
    data = sidecar.read_bytes()
    sidecar.unlink()
    if damage == "folder":
        sidecar.mkdir()
    else:
        bad = {
            "empty": b"",
            "short": data[:-8],
            "long": data + bytes(8),
            "header": data[:20] + b"\x01" + data[21:],
            "magic": b"XENSTOCK" + data[8:],
            "garbage": bytes(range(256)) * 10,
        }
        sidecar.write_bytes(bad[damage])
    if damage == "folder":
        with pytest.raises(ManifestError, match=r"pstk"):
            Manifest.open(path)
        return
    assert list(Manifest.open(path)) == expected
    assert sidecar.read_bytes() == data


@given(st.integers(0, 100), st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 2500))
@example(0, 3)
@example(0, -1)
@example(0, 10_000)
@example(20, 0)
@example(0, 34)
@example(100, 10**18)
@one_file
def test_a_forged_offset_is_found_out(write: WriteFile, place: int, offset: int) -> None:
    """A header with a good checksum and a wrong offset: the index is made again."""
    path = write(LINES)
    expected = [f"dir/img_{k}.jpg {k % 10}".encode() for k in range(100)]
    LineIndex(File(str(path)), LineRules())
    sidecar = sidecar_of(path)
    data = bytearray(sidecar.read_bytes())
    data[BODY + 8 * place : BODY + 8 * place + 8] = struct.pack("<q", offset)
    sidecar.write_bytes(data)
    for times in (1, 3):  # a batch, and more rows than that
        sidecar.write_bytes(data)
        index = LineIndex(File(str(path)), LineRules())
        assert index.raw(np.tile(np.arange(100), times)).to_pylist() == expected * times
    for alone in (lambda index, row: index.one(row), lambda index, row: index.text(np.array([row]))[0]):
        for row in {max(place - 1, 0), min(place, 99)}:  # the rows that the offset bounds
            sidecar.write_bytes(data)
            index = LineIndex(File(str(path)), LineRules())
            assert alone(index, row).encode() == expected[row]


@pytest.mark.parametrize("content", [LINES, LINES.replace("img_5", "\n \n#\nimg_5"), LINES.replace("\n", "\r\n")])
@pytest.mark.parametrize("last", ["", "end 1"])
def test_a_forged_offset_at_another_row_is_found_out(write: WriteFile, content: str, last: str) -> None:
    """Its slice begins and ends where a line does, and has several rows in it."""
    rules = LineRules(comment="#")
    path = write(content + last)
    expected = LineIndex(File(str(path)), rules).text(np.arange(100))
    sidecar = sidecar_of(path)
    sound = sidecar.read_bytes()
    data = bytearray(sound)
    data[BODY + 8 * 70 : BODY + 8 * 71] = data[BODY + 8 * 60 : BODY + 8 * 61]
    for read in (
        lambda index: index.one(70),
        lambda index: index.text(np.array([70]))[0],
        lambda index: index.raw(np.array([70]))[0].as_py().decode(),
        lambda index: index.raw(np.full(300, 70))[299].as_py().decode(),
    ):
        sidecar.write_bytes(data)
        assert read(LineIndex(File(str(path)), rules)) == expected[70]
        assert sidecar.read_bytes() == sound


@pytest.mark.parametrize("read", [lambda index, rows: index.raw(rows).to_pylist(), LineIndex.text])
@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("place", [60, 62, 59, 90])
def test_a_forged_offset_within_a_batch_is_found_out(
    write: WriteFile, place: int, times: int, read: Callable[[LineIndex, np.ndarray], list[object]]
) -> None:
    """Row 61 begins where another does: a slice is empty or has several rows, and the line feeds may be as many."""
    path, rows = write(LINES), np.tile(np.arange(80, 40, -1), times)
    expected = read(LineIndex(File(str(path)), LineRules()), rows)
    sidecar = sidecar_of(path)
    sound = sidecar.read_bytes()
    data = bytearray(sound)
    data[BODY + 8 * 61 : BODY + 8 * 62] = data[BODY + 8 * place : BODY + 8 * (place + 1)]
    sidecar.write_bytes(data)
    assert read(LineIndex(File(str(path)), LineRules()), rows) == expected
    assert sidecar.read_bytes() == sound


def test_a_forged_number_of_rows_is_found_out(write: WriteFile) -> None:
    path = write(LINES)
    Manifest.open(path)
    sidecar = sidecar_of(path)
    data = sidecar.read_bytes()
    header = SidecarHeader.unpack(data[:BODY])
    assert header is not None
    forged = SidecarHeader(header.flags, 3, header.size, header.mtime_ns, header.rules, header.digest).pack()
    sidecar.write_bytes(forged + struct.pack("<4q", 0, 5, 10**15, header.size))
    manifest = Manifest.open(path)
    with pytest.raises(ManifestError, match=r"was damaged, .* and the index was rebuilt"):
        manifest.take([2])
    assert len(Manifest.open(path)) == 100


TRUNCATE = """
import os, sys
import numpy as np
from penstock.manifest import Manifest
path, read = sys.argv[1:]
manifest = Manifest.open(path)
os.truncate(path + ".pstk", 4096)  # what is beyond kills the process that touches it
row = 19_999
if read == "one":
    print(manifest[row].path)
elif read == "take":
    print(manifest.take([row, 0]).column("path")[0])
elif read == "raw":
    print(manifest.raw([row])[0].as_py().decode().split()[0])
elif read == "prefix":
    print(manifest.is_prefix_of_current("0" * 32, row))
else:
    part, local = manifest.locate(row)
    print(part.index.line(local), part.index.offset(local))
"""


@full_only("a program for each", but=["raw-dir/img_99.jpg", "prefix-False"])
@pytest.mark.parametrize(
    ("read", "printed"),
    [
        ("one", "dir/img_99.jpg"),
        ("take", "dir/img_99.jpg"),
        ("raw", "dir/img_99.jpg"),
        ("prefix", "False"),
        ("line", f"20000 {200 * len(LINES) - len('dir/img_99.jpg 9') - 1}"),
    ],
)
def test_an_index_truncated_while_mapped_is_made_again(
    write: WriteFile, run_python: Callable[..., subprocess.CompletedProcess[str]], read: str, printed: str
) -> None:
    path = write(LINES * 200)
    Manifest.open(path)
    sound = sidecar_of(path).read_bytes()
    assert run_python(TRUNCATE, path, read).stdout.strip() == printed
    assert sidecar_of(path).read_bytes() == sound


def test_a_truncated_index_that_another_process_repaired_is_taken_as_it_is(
    write: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(LINES)
    manifest = Manifest.open(path)
    os.truncate(sidecar_of(path), BODY)
    Manifest.open(path)
    monkeypatch.setattr(LineIndex, "_build", None)
    assert manifest[99].path == "dir/img_99.jpg"


def test_an_index_for_other_rules_is_not_used(write: WriteFile) -> None:
    """Those of one name usually have the same rules, which nobody can rely on: names are not checked, contents are."""
    path = write("a 1\n#b 2\n")
    assert LineIndex(File(str(path)), LineRules()).rows == 2
    assert LineIndex(File(str(path)), LineRules(comment="#")).rows == 1
    assert LineIndex(File(str(path)), LineRules()).rows == 2


# ---------------------------------------------------------------------- sources that change


@pytest.mark.parametrize("change", ["truncate", "append", "rewrite", "touch", "empty"])
def test_a_change_is_noticed_before_the_next_read(write: WriteFile, change: str) -> None:
    path = write(LINES * 200)
    manifest = Manifest.open(path)
    manifest.records([5])
    if change == "truncate":
        os.truncate(path, 100)
    elif change == "append":
        with open(path, "a") as file:
            file.write("new 1\n")
    elif change == "rewrite":
        path.write_text(LINES[::-1] * 200)
    elif change == "touch":
        path.touch()
    else:
        path.write_bytes(b"")
    reads = [manifest.check_unchanged, lambda: manifest.records([19_999]), lambda: manifest.take([0])]
    reads += [lambda: manifest.raw([0]), lambda: manifest.gather([0])]
    reads.insert(0, lambda: manifest[19_999])
    time.sleep(0.002)  # a single row looks at the modification time once a millisecond
    for read in reads:
        with pytest.raises(ManifestChangedError, match=rf"{path.name} was changed while it was open"):
            read()


def test_a_change_behind_the_times_of_a_file_is_no_damage_of_its_index(write: WriteFile) -> None:
    path = write("a 1\nbbb 2\n")
    manifest, times = Manifest.open(path), path.stat()
    path.write_text("aaa 1\nb 2\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ManifestError, match="the index was rebuilt; open the manifest again"):
        manifest.records([1])


def test_a_single_row_notices_another_size_at_once(write: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(LINES * 200)
    manifest = Manifest.open(path)
    monkeypatch.setattr("penstock.manifest.lines.monotonic", lambda: 5.0)
    assert manifest[5].label == 5
    os.truncate(path, 100)
    with pytest.raises(ManifestChangedError, match="bytes and has 100"):
        manifest[19_999]


def write_as(write: WriteFile, name: str) -> Path:
    path = write(LINES, name)
    table = pa.table({"path": ["a", "b"], "label": [1, 2]})
    if name.endswith(".parquet"):
        pq.write_table(table, path)
    elif name.endswith(".arrow"):
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["meta.txt", "meta.arrow", "meta.parquet"])
def test_a_change_while_indexing_is_noticed(write: WriteFile, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What was read is perhaps neither the old nor the new content, and must not be kept as either."""
    path = write_as(write, name)
    monkeypatch.setattr("rich.progress.Progress.advance", lambda *arguments: os.utime(path, ns=(7, 7)))
    cache = path.parent / "cache"
    with pytest.raises(ManifestChangedError, match=rf"{path.name} was changed while .* modification time differs"):
        Manifest.open(path, progress=True, cache_dir=cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", ["meta.txt", "meta.parquet"])
@pytest.mark.parametrize(("age", "waits"), [(5_000_000, [0.015]), (3_600_000_000_000, [])])
def test_indexing_waits_until_a_later_write_has_another_time(
    write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, age: int, waits: list[float]
) -> None:
    path, cache = write_as(write, name), tmp_path / "cache"
    slept: list[float] = []
    monkeypatch.setattr("penstock.storage.files.time.time_ns", lambda: path.stat().st_mtime_ns + age)
    monkeypatch.setattr("penstock.storage.files.time.sleep", slept.append)
    Manifest.open(path, cache_dir=cache)
    assert slept == pytest.approx(waits)
    Manifest.open(path, cache_dir=cache)
    assert len(slept) == len(waits), "an index that is there is used at once"


def test_a_file_replaced_by_renaming_goes_on_as_it_was(write: WriteFile) -> None:
    path, new = write(LINES), write("other 5\n")
    manifest = Manifest.open(path)
    os.replace(new, path)
    manifest.check_unchanged()
    assert manifest.records([99])[0].path == "dir/img_99.jpg"
    assert list(Manifest.open(path)) == [("other", 5, 0, {})]


def test_a_rewritten_file_is_indexed_again_even_within_the_same_instant(tmp_path: Path) -> None:
    path = tmp_path / "meta.txt"
    for k in range(10):
        path.write_text(f"a{k} {k}\nb 1\n" if k % 2 else f"a{k} {k}b 1\n\n")
        assert Manifest.open(path, label="str")[0].path.startswith(f"a{k}")


pieces = st.sampled_from(["a 1", "b\t2", "\n", "\n", "\r\n", " ", "#c\n", "\n\n", "é 3\n"])
chunks = st.lists(st.lists(pieces, max_size=6).map("".join), min_size=1, max_size=4)


@given(chunks, st.sampled_from([None, "#"]), st.sampled_from([3, 4096]))
@one_file
def test_an_appended_file_has_the_index_of_a_new_one(
    write: WriteFile, parts: list[str], comment: str | None, buffer: int
) -> None:
    path = write(b"")
    rules = LineRules(comment=comment)
    for k in range(len(parts)):
        path.write_bytes("".join(parts[: k + 1]).encode())
        os.utime(path, ns=(k, k))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.storage.files.PIECE", buffer)
            LineIndex(File(str(path)), rules)
    grown = sidecar_of(path).read_bytes()
    sidecar_of(path).unlink()
    LineIndex(File(str(path)), rules)
    fresh = sidecar_of(path).read_bytes()
    assert grown[BODY:] == fresh[BODY:]
    appended, whole = SidecarHeader.unpack(grown[:BODY]), SidecarHeader.unpack(fresh[:BODY])
    assert appended is not None
    assert whole is not None
    assert appended.digest == whole.digest
    assert appended.flags & whole.flags == whole.flags, "it may take more care than it has to"


def test_appending_does_not_read_the_old_rows_again(write: WriteFile) -> None:
    """Seen by an offset that is wrong on purpose, between two lines: it is taken over."""
    path = write("a 1\nb 2\nc 3\n")
    Manifest.open(path)
    sidecar = sidecar_of(path)
    data = sidecar.read_bytes()
    sidecar.write_bytes(data[: BODY + 8] + struct.pack("<q", 5) + data[BODY + 16 :])
    with open(path, "a") as file:
        file.write("d 4\n")
    assert len(Manifest.open(path)) == 4
    assert np.frombuffer(sidecar.read_bytes(), "<i8", offset=BODY).tolist() == [0, 5, 8, 12, 16]
    assert [r.label for r in Manifest.open(path)] == [1, 2, 3, 4]  # and found out when it is read


def test_a_file_that_grew_but_was_also_changed_is_indexed_from_the_start(write: WriteFile) -> None:
    path = write("a 1\nb 2\n")
    Manifest.open(path)
    path.write_text("aaa 1\nb 2\nc 3\n")
    assert [r.path for r in Manifest.open(path)] == ["aaa", "b", "c"]


@pytest.mark.parametrize("progress", [True, None])
def test_a_progress_bar_for_those_who_ask(
    write: WriteFile, progress: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(LINES)
    Manifest.open(path, progress=progress)
    shown = capsys.readouterr()
    assert (f"indexing {path.name}" in shown.err) == (progress is True)
    assert not shown.out
