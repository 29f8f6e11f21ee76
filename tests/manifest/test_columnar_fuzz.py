"""Arrow and Parquet files, damaged anywhere: read, or refused by an error that names the file, and never a crash."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from full_run import full_only

import penstock as ps
from penstock.errors import ConfigError, DataFileError, ManifestError

CASES = 10_000 if os.environ.get("PENSTOCK_TEST_FULL") == "1" else 60


def write_file(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=20)


WRITERS: dict[str, Callable[[pa.Table, Path], object]] = {
    "file.arrow": write_file,
    "stream.arrow": write_stream,
    "packed.feather": lambda table, path: feather.write_feather(table, str(path), compression="lz4"),
    "file.parquet": lambda table, path: pq.write_table(table, path),
}


def rows() -> pa.Table:
    texts = ["x" * k for k in range(50)]
    lists = pa.array([["a", "bc"]] * 50)
    return pa.table({"path": [f"{k}.jpg" for k in range(50)], "label": list(range(50)), "name": texts, "more": lists})


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A copy with a few bytes changed; one in ten is cut as well."""
    changed = bytearray(data if rng.random() < 0.9 else data[: rng.randrange(len(data))])
    for _ in range(rng.choice([1, 1, 2, 4])):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return bytes(changed)


@full_only("as the others", but=["stream.arrow", "file.parquet"])
@pytest.mark.parametrize("name", WRITERS)
def test_manifests(tmp_path: Path, name: str) -> None:
    path, rng, refused = tmp_path / name, random.Random(name), 0
    WRITERS[name](rows(), path)
    data = path.read_bytes()
    columns = {column: column for column in rows().schema.names}
    for number in range(CASES):
        path.unlink()
        path.write_bytes(damaged(data, rng))
        try:
            manifest = ps.Manifest.open(path, columns=columns, cache_dir=tmp_path / str(number))
            manifest.records(range(len(manifest)))
            manifest.take(range(len(manifest)))
        except ManifestError as error:
            refused += name in str(error)
    assert refused > CASES // 8


@pytest.mark.parametrize("name", WRITERS)
def test_tables(tmp_path: Path, name: str) -> None:
    path, rng, refused = tmp_path / name, random.Random(name), 0
    WRITERS[name](rows(), path)
    data = path.read_bytes()
    for _ in range(CASES):
        path.unlink()
        path.write_bytes(damaged(data, rng))
        try:
            table = ps.TableFiles(path)
            table.records(range(len(table)))
        except (DataFileError, ConfigError) as error:  # the latter of two columns of one name
            refused += name in str(error)
    assert refused > CASES // 8
