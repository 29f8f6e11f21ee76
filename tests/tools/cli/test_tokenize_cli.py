"""``penstock tokenize`` and `penstock.tokenize`: the same bytes for any number of workers, and after any kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from interpreter_support import run
from text_support import END, TEXTS, digests, expected, letters, tokenizer, tokens_of, write_table
from torch.utils.data import ConcatDataset
from typer.testing import CliRunner

import penstock as ps
from penstock.errors import ConfigError, DataFileError, DataFileIOError, PenstockError
from penstock.storage import file_lock
from penstock.tokenizing import tokenize
from penstock.tools.cli.app import app

SUPPORT = str(Path(__file__).parents[2] / "support")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "text.parquet", TEXTS)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def documents(folder: Path) -> list[list[int]]:
    return [item.tolist() for item in ps.DocumentDataset(folder, shuffle="none")]


def command(*arguments: Any, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["tokenize", *map(str, arguments), "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_the_command(table: Path, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = [table, "--tokenizer", saved, "--out", out, "--append-eos", END, "--shard-tokens", 150, "--workers", 1]
    report = command(*line)
    wanted = expected(TEXTS)
    assert documents(out) == wanted
    assert tokens_of(out) == [token for ids in wanted for token in ids]
    assert report.pop("seconds") > 0
    names = [f"tokens-{k:05d}" for k in range(len(report["shards"]))]
    numbers = {"documents": 40, "tokens": sum(map(len, wanted)), "kept": 0, "dtype": "uint16"}
    assert report == {"folder": str(out), "shards": names, **numbers}
    assert len(names) > 2
    again = command(*line)
    assert (again["kept"], again["shards"]) == (40, names)
    by_id = tmp_path / "by id"
    command(*line[:4], by_id, "--append-eos", tokenizer().token_to_id(END), *line[7:])
    assert digests(by_id) == digests(out)


def test_megatrons_format(table: Path, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command(table, "--tokenizer", saved, "--out", out, "--format", "megatron", "--dtype", "int32", "--workers", 1)
    assert documents(out) == expected(TEXTS, end=False)
    pair = ps.DocumentDataset(out / "tokens-00000.idx", shuffle="none")
    assert [item.tolist() for item in pair] == expected(TEXTS, end=False)


def test_processes_write_the_same_bytes(table: Path, tmp_path: Path) -> None:
    source = ps.open(table)
    options: dict[str, Any] = {"append_eos": END, "shard_tokens": 300, "progress": False}
    for workers in (1, 2):
        tokenize(source, tmp_path / str(workers), tokenizer(), workers=workers, **options)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    assert documents(tmp_path / "2") == expected(TEXTS)


def test_rows_come_in_their_own_order_whatever_the_data_sets(table: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        shuffled = ps.open(table, seed=seed, rank=1, world_size=2)
        tokenize(shuffled, tmp_path / name, letters, dtype="uint16", workers=1, progress=False)
    assert documents(tmp_path / "a") == list(map(letters, TEXTS))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


@pytest.mark.parametrize("workers", [1, 2])
def test_only_rows_that_filters_and_exclusions_leave(table: Path, tmp_path: Path, workers: int) -> None:
    kept = [row for row in range(len(TEXTS)) if row % 3]
    wanted = [letters(TEXTS[row]) for row in kept if row not in (1, 8)]
    dataset = ps.Subset(ps.open(table, seed=1, exclude=[0, 1, 8]), kept)
    tokenize(dataset, tmp_path / "out", letters, dtype="uint16", workers=workers, progress=False)
    assert documents(tmp_path / "out") == wanted
    for other in (
        ps.Subset(ps.open(table, exclude=[1, 8]), kept[:-1]),
        ps.Subset(ps.open(table, exclude=[4, 8]), kept),
    ):
        with pytest.raises(ConfigError, match="source differ"):
            tokenize(other, tmp_path / "out", letters, dtype="uint16", workers=1, progress=False)


def test_another_filter_of_a_list_is_another_job(tmp_path: Path) -> None:
    texts = [str(number) for number in range(100)]
    small(tmp_path / "out", ps.Subset(texts, list(range(50))))
    with pytest.raises(ConfigError, match="source differ"):
        small(tmp_path / "out", ps.Subset(texts, [0, 99, *range(2, 50)]))


def test_a_dataset_without_stored_rows_is_refused(table: Path, tmp_path: Path) -> None:
    parts = [ps.open(table), ps.open(table)]
    for source in (ps.Mixture([(part, 1) for part in parts]), ConcatDataset(parts)):
        with pytest.raises(ConfigError, match="tokenize each source into its own folder"):
            tokenize(source, tmp_path / "out", letters, dtype="uint16", workers=1, progress=False)


def test_an_error_names_the_row_of_the_file(tmp_path: Path) -> None:
    table = ps.open(write_table(tmp_path / "text.parquet", [*TEXTS, "\u00ff"]))
    with pytest.raises(DataFileError, match=f"row {len(TEXTS)} has the token 255"):
        tokenize(ps.Subset(table, [len(TEXTS)]), tmp_path / "out", letters, dtype="int8", workers=1, progress=False)


def small(out: Path, texts: Any = TEXTS, **options: Any) -> Any:
    given = {"dtype": "uint16", "shard_tokens": 400, "workers": 1, "progress": False, "append_eos": 1, **options}
    return tokenize(texts, out, letters, **given)


KILLED = """
import os, signal, sys
sys.path.insert(0, {support!r})
from pathlib import Path
from text_support import TEXTS, letters
from penstock.tokenizing import tokenize
real, left = os.replace, {left}
def replace(*names):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*names)
os.replace = replace
tokenize(TEXTS, {out!r}, letters, dtype="uint16", shard_tokens={most}, workers=1, progress=False, append_eos=1)
"""


def killed_at(out: Path, left: int, most: int = 400) -> int:
    """Tokenize in a program that is killed when it is about to make one more file appear than this."""
    return run(["-c", KILLED.format(support=SUPPORT, left=left, out=str(out), most=most)], timeout=HANG).returncode


def test_a_kill_at_any_point_loses_nothing(tmp_path: Path) -> None:
    """Files appear by `os.replace` alone, so between two of them a kill leaves the same, whenever it comes."""
    small(tmp_path / "whole", shard_tokens=800)
    wanted = digests(tmp_path / "whole")
    left = 0
    while killed_at(tmp_path / str(left), left, most=800) == -signal.SIGKILL:
        assert small(tmp_path / str(left), shard_tokens=800).documents == len(TEXTS)
        assert digests(tmp_path / str(left)) == wanted, left
        left += 1
    assert left == 2 + 3 * len(list((tmp_path / "whole").glob("*.bin"))), "each file was reached"


def test_kill_upon_kill_ends_and_nothing_is_done_twice(tmp_path: Path) -> None:
    small(tmp_path / "whole")
    out, kills = tmp_path / "out", 0
    while killed_at(out, 4) == -signal.SIGKILL:
        kills += 1
    assert kills >= 2
    assert digests(out) == digests(tmp_path / "whole")


class Deadly(list[str]):
    """Texts, of which one kills the process with this number."""

    victim = 0

    def __getitem__(self, row: Any) -> Any:
        if row == 30 and self.victim:
            os.kill(self.victim, signal.SIGKILL)
        return super().__getitem__(row)


PROGRAM = """
import os, sys
sys.path[:0] = {folders!r}
from test_tokenize_cli import Deadly, small
from text_support import TEXTS
if __name__ == "__main__":
    texts = Deadly(TEXTS)
    texts.victim = os.getpid()
    small({out!r}, texts, workers=2)
"""


def test_a_job_with_workers_is_killed_and_goes_on(tmp_path: Path) -> None:
    """Row 30 is beyond the spans that are written when it kills the job, which has three tasks for each worker."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folders=[SUPPORT, str(Path(__file__).parent)], out=str(tmp_path / "out")))
    process = subprocess.Popen([sys.executable, program], start_new_session=True)
    assert process.wait(HANG) == -signal.SIGKILL
    deadline = time.monotonic() + HANG
    while True:  # its workers hear of it
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline, "workers outlive the job"
        time.sleep(0.01)
    small(tmp_path / "out")
    small(tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_shards_that_are_missing_are_made_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = small(out)
    wanted = digests(out)
    assert len(report.shards) >= 4
    (out / "tokens-00002.idx.npy").unlink()
    (out / ".tokens-00001.bin.0123abcd.tmp").write_bytes(b"left by a kill")
    (out / "notes.txt").write_text("of somebody else")
    again = small(out)
    assert 0 < again.kept < len(TEXTS)
    (out / "notes.txt").unlink()
    assert digests(out) == wanted


@pytest.mark.parametrize("format", ["penstock", "megatron"])
@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_shards_that_are_truncated_are_made_again(format: str, ending: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    small(out, format=format)
    wanted = digests(out)
    path = next(out.glob(f"tokens-00002.{ending}*"))
    os.truncate(path, path.stat().st_size - 8)
    assert 0 < small(out, format=format).kept < len(TEXTS)
    assert digests(out) == wanted


def test_a_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    small(out)
    for options, match in (
        ({"append_eos": 2}, "end_token differ"),
        ({"shard_tokens": 401}, "shard_tokens differ"),
        ({"dtype": "uint32"}, "dtype differ"),
        ({"format": "megatron"}, "format differ"),
        ({"texts": [*TEXTS[:-1], "other"]}, "source differ"),
        ({"texts": [*TEXTS, "more"]}, "rows, source differ"),
    ):
        with pytest.raises(ConfigError, match=match):
            small(out, **options)
    (out / "tokens.json").unlink()
    with pytest.raises(ConfigError, match="other files named"):
        small(out)
    for options in ({}, {"sequence_length": 8}):
        with pytest.raises(DataFileError, match=r"tokens-00000.idx.npy is an index of documents\), and no tokens.json"):
            ps.open(out, **options)
    with file_lock(tmp_path / "taken" / "tokens.json"), pytest.raises(ConfigError, match="another process"):
        small(tmp_path / "taken")


def test_errors(table: Path, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = ps.open(table)
    wrong: list[tuple[dict[str, Any], type[PenstockError], str]] = [
        ({"format": "npy"}, ConfigError, "'penstock', 'megatron'"),
        ({"executor": "thread"}, ConfigError, "'process', 'ray'"),
        ({"workers": 0}, ConfigError, "must be positive"),
        ({"column": "body"}, ConfigError, "columns are text, number"),
        ({"dtype": "float32"}, ConfigError, "is not an integer type"),
        ({"dtype": "uint32", "format": "megatron"}, ConfigError, "is not an integer type"),
        ({"dtype": "uint8"}, DataFileError, r"text\.parquet, row 0 has the token 2.., which uint8 cannot hold"),
        ({"address": "host:1", "workers": 1}, ConfigError, "use it with executor='ray'"),
        ({"column": "number"}, DataFileError, r"text\.parquet, row 0 has int64 in the column 'number'"),
    ]
    for options, kind, match in wrong:
        with pytest.raises(kind, match=match):
            tokenize(source, out, saved, **{"workers": 1, "progress": False, **options})
    # None of these has finished a shard, so none is in the way of the next.
    with pytest.raises(ConfigError, match="cannot be identified"):
        tokenize(TEXTS, out, lambda text: [1], dtype="uint16")
    with pytest.raises(ConfigError, match="dtype='auto' needs"):
        tokenize(TEXTS, out, letters)
    with pytest.raises(ConfigError, match="its own load="):
        tokenize(ps.open(table, load=str), out, saved)
    with pytest.raises(ConfigError, match="needs a map-style dataset"):
        tokenize(3, out, saved)
    made = type(tokenizer()).from_file(str(saved))
    made.model.dropout = 0.1
    with pytest.raises(ConfigError, match="is random"):
        tokenize(source, out, made)
    (tmp_path / "file").touch()
    with pytest.raises(DataFileIOError, match="cannot write"):
        tokenize(source, tmp_path / "file" / "out", saved, workers=1)


def test_an_error_in_a_worker_is_ours(tmp_path: Path) -> None:
    texts: Any = [*TEXTS, 3]
    with pytest.raises(ConfigError, match="sample 40 is int"):
        small(tmp_path / "out", texts, workers=2)
    assert not list((tmp_path / "out").glob(".*.tmp"))


def test_types_of_tokens(tmp_path: Path, saved: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_file(str(saved))
    made.add_tokens([AddedToken(f"<{k}>") for k in range(65_536 - made.get_vocab_size())])
    options: dict[str, Any] = {"workers": 1, "progress": False}
    assert tokenize(TEXTS, tmp_path / "a", made, **options).dtype == "uint16"
    assert tokenize(TEXTS, tmp_path / "b", made, format="megatron", **options).dtype == "int32"
    made.add_tokens(["<one more>"])
    assert tokenize(["<one more>"], tmp_path / "c", made, **options).dtype == "uint32"
    assert documents(tmp_path / "c") == [[65_536]]


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    import xxhash

    for format, ending in (("penstock", ".idx.npy"), ("megatron", ".idx")):
        out = tmp_path / format
        small(out, format=format)
        for shard in json.loads((out / "tokens.json").read_text())["shards"]:
            files = [out / f"{shard['name']}{end}" for end in (".bin", ending)]
            assert [xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in files] == shard["checksum"]


def test_no_rows_are_no_documents(tmp_path: Path) -> None:
    assert small(tmp_path / "out", []).documents == 0
    assert small(tmp_path / "out", []).shards == []
    with pytest.raises(DataFileError, match="holds no documents"):
        ps.DocumentDataset(tmp_path / "out")
