"""Shards that somebody truncates, rewrites, replaces or removes between two samples of a stream.

The readers run in a process of their own, where a signal (SIGBUS: -7) would be seen.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import run
from pairwise import each_value

PROGRAM = """
import gzip, io, os, sys, tarfile, warnings
from pathlib import Path

import zstandard

import penstock as ps
from penstock import wds
from penstock.errors import ShardChangedError
from penstock.wds.tariterators import group_by_keys, tar_file_expander, url_opener

FOLDER = Path(sys.argv[1])
PAST = 1_000_000_000


def archive(word, count, size):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for i in range(count):
            for extension, data in (("txt", word * (size // 3 + i % 7)), ("cls", str(i).encode())):
                info = tarfile.TarInfo(f"{i:05d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


LAYOUTS = {"near": (1200, 900), "far": (60, 90_000), "mixed": (150, 30_000)}


class Archives(dict):
    def __init__(self, word):
        self.word = word

    def __missing__(self, name):
        self[name] = archive(self.word, *LAYOUTS[name])
        return self[name]


OLD, NEW = Archives(b"old"), Archives(b"new")


def members(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(info.offset, info.offset_data, info.size) for info in tar]


def cuts(data):
    found = members(data)
    middle, last = found[len(found) // 2], found[-1]
    end = last[1] + (last[2] + 511) // 512 * 512
    return {
        "nothing left": 0,
        "in what was read": found[4][1] + 100,
        "in a header": middle[0] + 200,
        "in data": middle[1] + middle[2] // 2,
        "between two members": middle[0],
        "before the end mark": end,
        "in the end mark": end + 512,
    }


def changes(name, pack):
    old, new = pack(OLD[name]), pack(NEW[name])
    for what, at in cuts(OLD[name]).items():
        at = at if pack is bytes else at * len(old) // len(OLD[name])
        yield what, lambda path, at=at: os.truncate(path, at), True
    yield "rewritten", lambda path: overwrite(path, new), True
    yield "no archive any more", lambda path: overwrite(path, b"garbage " * (len(old) // 8)), True
    yield "rewritten, longer", lambda path: overwrite(path, new + bytes(10240)), True
    yield "replaced", lambda path: replace(path, new), False
    yield "removed", lambda path: path.unlink(), False


def overwrite(path, data):
    with open(path, "r+b") as file:
        file.write(data)


def replace(path, data):
    other = path.with_suffix(".new")
    other.write_bytes(data)
    other.rename(path)


def parts(path):
    stages = wds.SimpleShardList([path]), url_opener, tar_file_expander, group_by_keys
    return wds.DataPipeline(*stages)


READERS = {
    "StreamShards": lambda path: ps.StreamShards(path),
    "a buffer": lambda path: ps.StreamShards(path, buffer_bytes=50_000),
    "WebDataset": lambda path: wds.WebDataset(path, shardshuffle=False),
    "names changed": lambda path: wds.WebDataset(path, shardshuffle=False, rename_files=str.lower),
    "parts": lambda path: parts(path),
}
PACKS = {"bytes": bytes, "gzip": lambda data: gzip.compress(data, 0), "zstd": lambda data: zstandard.compress(data, -9)}


def read(reader, path, change, had):
    samples, items = [], iter(reader(str(path)))
    for _ in range(had):
        samples.append(next(items))
    change(path)
    try:
        samples += items
    except Exception as error:
        return samples, error
    return samples, None


def changed(error):
    return isinstance(error, ShardChangedError) or isinstance(error.__cause__, ShardChangedError)


def try_all(readers, pack, had, *layouts):
    path = FOLDER / "shard.tar"
    for name in layouts:
        whole = PACKS[pack](OLD[name])
        for what, change, fails in changes(name, PACKS[pack]):
            for reader in readers:
                path.unlink(missing_ok=True)
                path.write_bytes(whole)
                os.utime(path, (PAST, PAST))
                samples, error = read(READERS[reader], path, change, had)
                case = f"{name}, {what}, {reader}, {pack}: {len(samples)} samples, {error!r}"
                assert all(set(sample["txt"]) <= set(b"old") for sample in samples), case
                assert len({sample["cls"] for sample in samples}) == len(samples) >= had, case
                if fails and had < LAYOUTS[name][0] // 2:
                    assert error is not None and changed(error) and str(path) in str(error), case
                elif not fails:
                    assert error is None and len(samples) == LAYOUTS[name][0], case


warnings.simplefilter("error")
exec(sys.argv[2])
print("done")
"""


def program(tmp_path: Path, text: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run(["-c", PROGRAM, str(tmp_path), text], env=environment, timeout=HANG)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


READERS = ["StreamShards", "a buffer", "WebDataset", "names changed", "parts"]
LAYOUTS = ["near", "far", "mixed"]


@full_only("as the others", but=["parts-far", "WebDataset-mixed"])
@pytest.mark.parametrize(("reader", "layout"), each_value(READERS, LAYOUTS))
def test_a_stream_is_an_error_and_never_a_signal_or_other_rows(tmp_path: Path, reader: str, layout: str) -> None:
    program(tmp_path, f"""try_all(["{reader}"], "bytes", 3, "{layout}")""")


@full_only("as the others", but=["gzip-near"])
@pytest.mark.parametrize(("pack", "layout"), each_value(["gzip", "zstd"], LAYOUTS))
def test_compressed_streams(tmp_path: Path, pack: str, layout: str) -> None:
    program(tmp_path, f"""try_all(["StreamShards", "WebDataset"], "{pack}", 2, "{layout}")""")


def test_a_handler_goes_on_with_the_next_shard(tmp_path: Path) -> None:
    text = """
first, second = FOLDER / "a.tar", FOLDER / "b.tar"
for make in (
    lambda: wds.WebDataset([str(first), str(second)], shardshuffle=False, handler=wds.ignore_and_continue),
    lambda: ps.StreamShards([first, second], shuffle="none", handler=lambda error: True),
):
    for path in (first, second):
        path.write_bytes(OLD["far"])
        os.utime(path, (PAST, PAST))
    items = iter(make())
    samples = [next(items)]
    os.truncate(first, 100_000)
    samples += items
    urls = [sample["__url__"] for sample in samples]
    assert urls.count(str(second)) == 60 and 1 <= urls.count(str(first)) < 60, urls
"""
    program(tmp_path, text)


def test_worker_processes_raise_it(tmp_path: Path) -> None:
    text = """
for stream in (ps.StreamShards, wds.WebDataset):
    paths = [FOLDER / f"{k}.tar" for k in range(2)]
    for path in paths:
        path.write_bytes(OLD["mixed"])
        os.utime(path, (PAST, PAST))
    source = stream([str(path) for path in paths])
    with ps.DataLoader(source, batch_size=4, num_workers=2, executor="process", collate_fn=list) as loader:
        batches = iter(loader)
        samples = next(batches) + next(batches)  # one of each worker: both have opened their shards
        for path in paths:
            os.truncate(path, 50_000)
        try:
            for batch in batches:
                samples += batch
        except Exception as error:
            assert "was changed while it was open" in str(error), error
        else:
            raise AssertionError("no error")
        assert all(set(sample["txt"]) <= set(b"old") for sample in samples)
"""
    program(tmp_path, text)


def test_a_shard_that_shrinks_while_it_is_indexed(tmp_path: Path) -> None:
    text = """
from penstock.shards.index import load_or_build

path, steps = FOLDER / "a.tar", []

def cut(count):
    steps.append(count)
    os.truncate(path, 2_000_000)

path.write_bytes(OLD["near"])
os.utime(path, (PAST, PAST))
try:
    load_or_build(str(path), progress=cut)
except ShardChangedError as error:
    assert f"it had {len(OLD['near'])} bytes and has 2000000" in str(error), error
assert steps and not list(FOLDER.glob("*.pidx"))
"""
    program(tmp_path, text)
