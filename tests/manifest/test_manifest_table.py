"""`Manifest` as a sequence: indices, views, several sources, fingerprints, processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from busy_support import HANG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreter_support import METHODS

from penstock.errors import ConfigError, ManifestChangedError, ManifestError
from penstock.manifest import Manifest, Record

WriteFile = Callable[..., Path]
one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def lines(count: int, first: int = 0) -> str:
    return "".join(f"d/{k}.jpg {k % 7}\n" for k in range(first, first + count))


def raw_texts(manifest: Manifest, rows: list[int]) -> list[str]:
    return [text.decode() for text in manifest.raw(rows).to_pylist()]


def record(k: int, row: int | None = None) -> Record:
    return Record(f"d/{k}.jpg", k % 7, k if row is None else row, {})


@pytest.fixture
def joined(write: WriteFile) -> Manifest:
    """The 30 records of `record`, from five files of which two are empty and one is JSON lines."""
    json_lines = "".join(f'{{"path": "{record(k).path}", "label": {record(k).label}}}\n' for k in range(10, 15))
    sources = [write(""), write(lines(10)), write(json_lines, suffix=".jsonl"), write(""), write(lines(15, 15))]
    return Manifest.open(sources)


indices = st.integers(-31, 31)
bounds = st.none() | st.integers(-40, 40)


@given(st.lists(st.slices(40), max_size=3), st.lists(indices, max_size=12))
@one_file
def test_views_are_slices_of_the_list(joined: Manifest, slices: list[slice], some: list[int]) -> None:
    view, expected = joined, [record(k) for k in range(30)]
    for one in slices:
        view, expected = view[one], expected[one]
    assert len(view) == view.rows == len(expected)
    assert list(view) == expected
    valid = [k for k in some if -len(expected) <= k < len(expected)]
    assert [view[k] for k in valid] == view.records(valid) == [expected[k] for k in valid]
    assert view.take(valid).to_pylist() == [{"path": expected[k].path, "label": expected[k].label} for k in valid]
    assert view.column("label").to_pylist() == [r.label for r in expected]
    parsed = [
        text if text[0] != "{" else "{path} {label}".format(**json.loads(text)) for text in raw_texts(view, valid)
    ]
    assert parsed == [f"{expected[k].path} {expected[k].label}" for k in valid]
    assert view.parse(view.gather(valid), valid) == [expected[k] for k in valid]
    for k in set(some) - set(valid):
        with pytest.raises(IndexError, match=f"row {k} is out of range for a manifest of {len(expected)} rows"):
            view[k]
        with pytest.raises(IndexError, match=f"row {k} is out of range"):
            view.records([k])


def test_all_kinds_of_indices(joined: Manifest) -> None:
    expected = [record(3), record(29)]
    for some in ([3, 29], (3, -1), range(3, 30, 26), np.array([3, 29], np.uint8), np.array([3, -1], np.int32)):
        assert joined.records(some) == expected  # type: ignore[arg-type]
    assert joined[np.int64(3)] == record(3)
    assert joined.records([]) == joined.records(np.array([], np.int64)) == []
    for bad in ([0.5], np.array([True]), np.array([[1]])):
        with pytest.raises(TypeError, match="indices must be a sequence of integers"):
            joined.records(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        joined["3"]  # type: ignore[call-overload]


def test_a_gathered_batch_can_be_parsed_in_parts(joined: Manifest) -> None:
    rows = np.array([29, 3, 12, 3])
    batch = joined.gather(rows)
    assert batch.schema.names == ["line"]
    some = np.array([3, 0, 2])
    assert joined.parse(batch.take(pa.array(some)), rows[some]) == [record(3), record(29), record(12)]
    assert joined.parse(batch.slice(1, 2), rows[1:3]) == [record(3), record(12)]
    with pytest.raises(ConfigError, match="4 rows cannot be parsed as 2"):
        joined.parse(batch, [1, 2])


def test_patterns_are_sorted_and_literal_names_go_first(write: WriteFile, tmp_path: Path) -> None:
    write("b 2\n", "part-1.txt"), write("a 1\n", "part-0.txt"), write("c 3\n", "part-[0-9].txt")
    assert [r.path for r in Manifest.open(tmp_path / "part-?.txt")] == ["a", "b"]
    assert [r.path for r in Manifest.open(tmp_path / "part-[0-9].txt")] == ["c"]
    assert [r.path for r in Manifest.open([tmp_path / "part-1.txt", tmp_path / "part-?.txt"])] == ["b", "a", "b"]


def test_what_it_says_of_itself(joined: Manifest, write: WriteFile) -> None:
    assert [path.suffix for path in joined.sources] == [".txt", ".txt", ".jsonl", ".txt", ".txt"]
    assert joined.nbytes == sum(path.stat().st_size for path in joined.sources)
    assert joined.columns == ["path", "label"]
    assert joined.schema == pa.schema({"path": pa.string(), "label": pa.int64()})
    assert repr(joined).startswith("<Manifest of 30 rows: path, label; /")
    with pytest.raises(ManifestError, match="no column 'x'; there are path, label"):
        joined.column("x")


def test_sources_must_have_the_same_columns(write: WriteFile, tmp_path: Path) -> None:
    pq.write_table(pa.table({"path": ["a"], "label": [1], "w": [0.5]}), tmp_path / "t.parquet")
    text = write("b 2 0.5\n")
    with pytest.raises(ManifestError, match=r"has other columns than .*w: string, not .*w: double"):
        Manifest.open([tmp_path / "t.parquet", text], columns=["path", "label", "w"])
    manifest = Manifest.open([tmp_path / "t.parquet", text], columns=["path", "label", "w:float"])
    assert list(manifest) == [("a", 1, 0, {"w": 0.5}), ("b", 2, 1, {"w": 0.5})]
    with pytest.raises(ManifestError, match="cannot be gathered together"):
        manifest.gather([0, 1])


# ---------------------------------------------------------------------- fingerprints


def test_a_fingerprint_is_of_content_rows_and_options(write: WriteFile) -> None:
    path = write(lines(20))
    manifest = Manifest.open(path, root="/a")
    same = Manifest.open(write(lines(20), age=0.0), root="/b", progress=False)
    assert manifest.fingerprint == same.fingerprint == Manifest.open([path]).fingerprint
    others = [
        Manifest.open(write(lines(20)[:-1])),
        Manifest.open(path, label="float"),
        Manifest.open(path, comment="#"),
        Manifest.open(path, columns=["path", "label:str"]),
        Manifest.open([path, path]),
        Manifest.open([write(lines(10)), write(lines(10, 10))]),
        Manifest.open([write(lines(10, 10)), write(lines(10))]),
        manifest[1:],
        manifest[::2],
        manifest[::-1],
    ]
    prints = {manifest.fingerprint, *(other.fingerprint for other in others)}
    assert len(prints) == len(others) + 1
    assert manifest[:].fingerprint == manifest.fingerprint
    assert manifest[2:][3:].fingerprint == manifest[5:].fingerprint


@given(st.lists(st.sampled_from(["a 1", "b 2\n", "\n", "\r\n", "#c\n", "c 3\r\n"]), min_size=1, max_size=8), st.data())
@one_file
def test_a_prefix_is_known_by_its_fingerprint(write: WriteFile, parts: list[str], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(parts)))
    before = Manifest.open(write("".join(parts[:cut])), comment="#", label="str")
    now = Manifest.open(write("".join(parts)), comment="#", label="str")
    whole_lines = (
        cut == 0 or parts[cut - 1].endswith("\n") or cut == len(parts) or parts[cut].strip(" ") in ("\n", "\r\n")
    )
    if whole_lines:
        assert now.is_prefix_of_current(before.fingerprint, len(before))
    assert not now.is_prefix_of_current("0" * 32, len(before))
    assert now.prefix_fingerprint(len(now)) == now.fingerprint


def test_prefixes_over_several_sources(write: WriteFile) -> None:
    first, second = write(lines(10)), write(lines(10, 10))
    both = Manifest.open([first, second])
    assert both.prefix_fingerprint(10) == Manifest.open(first).fingerprint
    assert both.prefix_fingerprint(15) == Manifest.open([first, write(lines(5, 10))]).fingerprint
    assert both.is_prefix_of_current(Manifest.open(first).fingerprint, 10)
    assert not both.is_prefix_of_current(Manifest.open(second).fingerprint, 10)
    with pytest.raises(ManifestError, match="a view has no prefix"):
        both[1:].prefix_fingerprint(1)
    with pytest.raises(ManifestError, match="rows must be from 0 to 20"):
        both.prefix_fingerprint(21)
    assert not both.is_prefix_of_current("0" * 32, 21)


# ---------------------------------------------------------------------- processes and threads


def read_all(manifest: Manifest, connection: object) -> None:
    connection.send((list(manifest), manifest.fingerprint))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", METHODS)
def test_it_travels_to_other_processes(joined: Manifest, method: str) -> None:
    context = multiprocessing.get_context(method)
    view = joined[3:25:2]
    here, there = context.Pipe()
    process = context.Process(target=read_all, args=(view, there))
    process.start()
    assert here.poll(HANG)
    assert here.recv() == (list(view), view.fingerprint)
    process.join()


def test_only_paths_and_options_are_pickled(write: WriteFile) -> None:
    manifest = Manifest.open(write(lines(5000)), root="/r")
    data = pickle.dumps(manifest)
    assert len(data) < 1000
    assert pickle.loads(data)[4999] == manifest[4999]
    assert pickle.loads(pickle.dumps(manifest[7]))._asdict() == manifest[7]._asdict()


def test_a_pickled_manifest_refuses_another_file(write: WriteFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(lines(10))
    monkeypatch.chdir(path.parent)
    data = pickle.dumps(Manifest.open(path.name))
    monkeypatch.chdir("/")
    assert len(pickle.loads(data)) == 10
    path.write_text(lines(11))
    with pytest.raises(ManifestChangedError, match="not the file that the manifest was opened with"):
        pickle.loads(data)


def test_threads_read_together(joined: Manifest) -> None:
    wrong: list[object] = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(100):
            some = random.integers(0, 30, 16)
            if joined.records(some) != [record(k) for k in some.tolist()]:
                wrong.append(some)

    threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_closing_leaves_no_descriptor(write: WriteFile) -> None:
    before = len(os.listdir("/proc/self/fd"))
    manifest = Manifest.open([write(lines(3)) for _ in range(10)])
    del manifest
    assert len(os.listdir("/proc/self/fd")) == before


def test_neither_torch_nor_what_is_rarely_needed_is_imported(run_python: Callable[..., object]) -> None:
    run_python("import sys, penstock.manifest; assert not {'torch', 'rich', 'typer', 'pandas'} & set(sys.modules)")


def test_records_are_read_without_pandas(tmp_path: Path) -> None:
    """pyarrow imports it for the sake of arrays that may be pandas': 50 MiB in every worker."""
    pytest.importorskip("pandas")
    (tmp_path / "train.txt").write_text("".join(f"{k}.jpg {k}\n" for k in range(100)))
    program = (
        "import sys; from penstock.manifest import Manifest\n"
        "manifest = Manifest.open(sys.argv[1]); manifest.raw(range(50)); manifest.records(range(99, 9, -1))\n"
        "manifest[10:].parse(manifest[10:].gather(range(60)), range(60))\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('pandas', 'torch')])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "train.txt")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"
