"""``penstock lengths`` and `penstock.count_lengths`: the lengths of all samples, counted once, also after a kill."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from busy_support import HANG
from full_run import full_only
from packed_support import Documents
from text_support import END, TEXTS, expected, tokenizer, write_table
from typer.testing import CliRunner

from penstock import DocumentDataset, PackedDataset, Subset, TableDataset, TokenizedDataset, count_lengths
from penstock.datasets.lengths import CountedLengths
from penstock.errors import ConfigError, DataFileError, DataFileIOError, PartitionError
from penstock.tools.cli.app import app

LENGTHS = [5, 17, 1, 9, 3, 0, 40, 12, 7, 2, 31, 8]
WHOLE: dict[str, Any] = {"rank": 0, "world_size": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def command(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["lengths", *map(str, arguments), "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write(column: str = "input_ids", rows: int = 5) -> Path:
    tokens = [list(range(length)) for length in LENGTHS]
    table = pa.table({column: tokens, "n": LENGTHS, "text": ["é" * length for length in LENGTHS]})
    pq.write_table(table, "a.parquet", row_group_size=rows)
    return Path("a.parquet")


# The command.


@pytest.mark.parametrize("options", [(), ("--column", "n"), ("--column", "text")], ids=str)
def test_columns_of_tables(options: Any) -> None:
    report = command(write(), "--out", "lengths.npy", *options)
    found = np.load("lengths.npy")
    assert (found.dtype, found.tolist()) == (np.int64, LENGTHS)
    seconds = report.pop("seconds")
    assert seconds > 0
    assert report == {"out": "lengths.npy", "samples": 12, "tokens": sum(LENGTHS), "longest": 40, "kept": 0}
    assert sorted(path.name for path in Path().iterdir()) == ["a.parquet", "cache", "lengths.npy"]


def test_tokens_of_text() -> None:
    tokenizer().save("tokenizer.json")
    table = write_table(Path("text.parquet"), TEXTS)
    command(table, "--tokenizer", "tokenizer.json", "--append-eos", END, "--out", "lengths.npy")
    assert np.load("lengths.npy").tolist() == [len(ids) for ids in expected(TEXTS)]
    command(table, "--tokenizer", "tokenizer.json", "--out", "lengths.npy")
    assert np.load("lengths.npy").tolist() == [len(ids) for ids in expected(TEXTS, end=False)]


def test_files_of_tokens() -> None:
    np.array([1, 2, 0, 5, 0, 0, 7, 7, 7, 0], np.uint16).tofile("a.bin")
    command("a.bin", "--end-token", 0, "--dtype", "uint16", "--out", "lengths.npy")
    assert np.load("lengths.npy").tolist() == [3, 2, 1, 4]
    packs = PackedDataset(DocumentDataset("a.bin", end_token=0, dtype="uint16", **WHOLE), 4, lengths="lengths.npy")
    assert packs.packs == 3


def test_folders_of_tokens_say_where_documents_end() -> None:
    tokenizer().save("tokenizer.json")
    table = write_table(Path("text.parquet"), TEXTS)
    line = ["tokenize", table, "--tokenizer", "tokenizer.json", "--out", "tokens", "--workers", 1, "--json"]
    assert CliRunner().invoke(app, [*map(str, line)]).exit_code == 0
    command("tokens", "--out", "lengths.npy")
    assert np.load("lengths.npy").tolist() == [len(ids) for ids in expected(TEXTS, end=False)]


def test_the_report() -> None:
    result = CliRunner().invoke(app, ["lengths", str(write()), "--out", "lengths.npy"])
    text = re.sub(r"[ \t]+", " ", result.stdout)
    assert re.search(r" documents 12 in .*", text)
    assert re.search(r" length 135 in total, 11.2 on average, 40 at most", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--append-eos", "0"), "need --tokenizer"),
        (("--tokenizer", "t.json", "--end-token", "0"), "use one of them"),
        (("--end-token", "0", "--column", "n"), "--column is for tables"),
    ],
)
def test_lines_that_make_no_sense(options: Any, message: str) -> None:
    result = CliRunner().invoke(app, ["lengths", str(write()), "--out", "lengths.npy", *options])
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.output)


# The function.


def test_items_by_their_number_of_tokens() -> None:
    documents = Documents(LENGTHS)
    assert count_lengths(documents, "a.npy") == CountedLengths(12, sum(LENGTHS), 40, 0)
    items = [{"input_ids": list(range(length))} for length in LENGTHS]
    count_lengths(items, "b.npy")
    count_lengths(items, "c.npy", measure=lambda item: 2 * len(item["input_ids"]))
    assert np.load("a.npy").tolist() == np.load("b.npy").tolist() == LENGTHS
    assert np.load("c.npy").tolist() == [2 * length for length in LENGTHS]
    assert count_lengths([], "d.npy") == CountedLengths(0, 0, 0, 0)
    assert np.load("d.npy").shape == (0,)


def test_rows_of_a_table_that_is_shuffled_and_filtered() -> None:
    table = TableDataset(write(), seed=7, **WHOLE)
    kept = [length for length in LENGTHS if length > 5]
    some = Subset(table, np.array(LENGTHS) > 5)
    for name, dataset, wanted in (("all", table, LENGTHS), ("some", some, kept)):
        count_lengths(dataset, f"{name}.npy")
        count_lengths(dataset, f"{name}-column.npy", column="input_ids")
        assert np.load(f"{name}.npy").tolist() == np.load(f"{name}-column.npy").tolist() == wanted
        packs = PackedDataset(dataset, 16, lengths=f"{name}.npy", **WHOLE)
        assert sum(int((pack["document_ids"] >= 0).sum()) for pack in packs) == sum(wanted)


def test_lists_in_a_column_are_lengths_of_packs() -> None:
    packs = PackedDataset(TableDataset(write(), **WHOLE), 16, lengths="input_ids", **WHOLE)
    assert packs.lengths[:].tolist() == LENGTHS


class Cut:
    """Documents until the machine is gone."""

    fingerprint = "documents"

    def __init__(self, until: int) -> None:
        self.until = until
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, row: int) -> range:
        if row >= self.until:
            raise RuntimeError("the machine is gone")
        self.asked.append(row)
        return range(row % 97)


def cut(dataset: Cut, *, out: str = "lengths.npy", **options: Any) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        count_lengths(dataset, out, **options)


def test_it_goes_on_where_it_was() -> None:
    cut(Cut(2500))
    (part,) = Path().glob(".lengths.npy.*.part")
    with part.open("ab") as file:
        file.write(b"\1\2\3")  # a number that was being written
    rest = Cut(3000)
    assert count_lengths(rest, "lengths.npy").kept == 2048
    assert rest.asked == list(range(2048, 3000))
    assert np.load("lengths.npy").tolist() == [row % 97 for row in range(3000)]
    assert not list(Path().glob(".*"))


def test_what_another_measure_or_data_left_is_counted_anew() -> None:
    cut(Cut(2500))
    assert count_lengths(Cut(3000), "lengths.npy", measure=len).kept == 0
    cut(Cut(2500))
    other = Cut(3000)
    other.fingerprint = "other documents"
    assert count_lengths(other, "lengths.npy").kept == 0
    unknown = Cut(2500)
    unknown.fingerprint = None  # type: ignore[assignment]
    cut(unknown)
    unknown.until = 3000
    assert count_lengths(unknown, "lengths.npy").kept == 0
    assert not list(Path().glob(".*"))


def times(factor: int, fingerprint: str | None = None) -> Any:
    def measure(item: Any) -> int:
        return factor * len(item)

    if fingerprint is not None:
        measure.fingerprint = fingerprint  # type: ignore[attr-defined]
    return measure


def test_a_function_is_identified_by_its_fingerprint() -> None:
    for first, second, kept in (
        (times(1), times(7), 0),
        (times(1, "one"), times(7, "seven"), 0),
        (times(7, "seven"), times(7, "seven"), 2048),
        (len, len, 2048),
    ):
        cut(Cut(2500), measure=first)
        assert count_lengths(Cut(3000), "lengths.npy", measure=second).kept == kept
        assert np.load("lengths.npy").tolist() == [second(range(row % 97)) for row in range(3000)]


def load(text: str, until: int = 9999) -> Any:
    """Return a load function that fails at one of its calls."""
    calls = itertools.count()

    def loaded(sample: Any) -> Any:
        if next(calls) == until:
            raise RuntimeError("the machine is gone")
        return text

    return loaded


def test_a_file_that_is_written_again_is_counted_again() -> None:
    pq.write_table(pa.table({"text": ["a b c"] * 2000}), "b.parquet")
    for time, kept in ((0, 1024), (1, 0)):
        first, second = load("a", 1500), load("a")
        first.fingerprint = second.fingerprint = "a"
        cut(TableDataset("b.parquet", load=first, **WHOLE))
        status = os.stat("b.parquet")
        os.utime("b.parquet", ns=(status.st_atime_ns, status.st_mtime_ns + time * 10**9))
        assert count_lengths(TableDataset("b.parquet", load=second, **WHOLE), "lengths.npy").kept == kept


@pytest.mark.parametrize("wrap", [lambda table: table, lambda table: TokenizedDataset(table, tokenizer())])
def test_items_of_another_load_are_counted_again(wrap: Any) -> None:
    pq.write_table(pa.table({"text": ["a b c"] * 2000}), "b.parquet")
    cut(wrap(TableDataset("b.parquet", load=load("a", 1500), **WHOLE)))
    dataset = wrap(TableDataset("b.parquet", load=load("a b"), **WHOLE))
    assert count_lengths(dataset, "lengths.npy").kept == 0
    assert set(np.load("lengths.npy").tolist()) == {len(dataset[0])}


def test_text_that_is_tokenized_on_the_fly_is_packed() -> None:
    table = TableDataset(write_table(Path("text.parquet"), TEXTS), columns=["text"], seed=5, **WHOLE)
    tokens = TokenizedDataset(table, tokenizer(), append_eos=END)
    count_lengths(tokens, "a.npy")
    assert np.load("a.npy").tolist() == [len(ids) for ids in expected(TEXTS)]
    packs = PackedDataset(tokens, 64, lengths="a.npy", **WHOLE)
    assert packs.fill > 0.9
    had = [token for pack in packs for token in pack["input_ids"][pack["document_ids"] >= 0].tolist()]
    assert sorted(had) == sorted(token for ids in expected(TEXTS) for token in ids)


def test_other_tokenizers_count_anew() -> None:
    table = TableDataset(write_table(Path("text.parquet"), TEXTS), columns=["text"], **WHOLE)
    count_lengths(TokenizedDataset(table, tokenizer()), "a.npy")
    count_lengths(TokenizedDataset(table, tokenizer(), append_eos=END), "b.npy")
    assert (np.load("b.npy") - np.load("a.npy")).tolist() == [1] * len(TEXTS)


PROGRAM = """
import os, signal, sys
import penstock
class Killed:
    fingerprint = "documents"
    def __len__(self): return 3000
    def __getitem__(self, row):
        if row == 2500 and sys.argv[1] == "kill": os.kill(os.getpid(), signal.SIGKILL)
        return range(row % 97)
print(penstock.count_lengths(Killed(), "lengths.npy").kept)
"""


@full_only("a process that is killed; inline the same is cut by an error")
def test_a_killed_process_loses_one_batch() -> None:
    def run(how: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-c", PROGRAM, how]
        return subprocess.run(line, capture_output=True, text=True, timeout=HANG, env=dict(os.environ))

    assert run("kill").returncode == -signal.SIGKILL
    assert run("go on").stdout == "2048\n"
    assert np.load("lengths.npy").tolist() == [row % 97 for row in range(3000)]


class Doubled(TableDataset):
    """It makes its items by itself."""

    def __getitem__(self, index: int) -> Any:
        return 2 * super().__getitem__(index)["input_ids"]


def bad() -> Iterator[tuple[Any, Any, str]]:
    yield lambda: count_lengths([[1]], "lengths.txt"), ConfigError, "an .npy file"
    yield lambda: count_lengths([[1]], "a.npy", measure=len, column="n"), ConfigError, "one of the two"
    yield lambda: count_lengths([[1], 3], "a.npy"), DataFileError, "sample 1, an int, has no length"
    yield lambda: count_lengths([{"ids": [1]}], "a.npy"), DataFileError, "under 'input_ids'"
    yield lambda: count_lengths(iter([]), "a.npy"), ConfigError, "with __len__ and __getitem__"
    yield lambda: count_lengths([[1]], "nowhere/a.npy"), DataFileIOError, "nowhere/a.npy"
    yield lambda: count_lengths(TableDataset(write(), **WHOLE), "a.npy", column="m"), ConfigError, "input_ids, n, text"
    share = {"rank": 0, "world_size": 2}
    yield lambda: count_lengths(TableDataset(write(), **share), "a.npy", column="n"), PartitionError, "one rank's"
    yield lambda: count_lengths(Doubled(write(), **WHOLE), "a.npy"), ConfigError, "shuffle='none'"


@pytest.mark.parametrize("number", range(9))
def test_what_makes_no_sense(number: int) -> None:
    call, error, message = list(bad())[number]
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert not Path("a.npy").exists()


def test_nulls_are_named() -> None:
    pq.write_table(pa.table({"n": [1, None, 3]}), "b.parquet")
    with pytest.raises(ConfigError, match="column 'n' is null in row 1"):
        count_lengths(TableDataset("b.parquet", **WHOLE), "a.npy", column="n")
