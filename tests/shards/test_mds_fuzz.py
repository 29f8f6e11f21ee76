"""Mutated shards and indices: an error of ours, or right data. Never a crash, a hang, or another sample.

Thousands of cases here; ``MUTATIONS`` may be raised for a long run (100,000 take about two minutes).
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mds_writer import write_mds

from penstock.errors import ConfigError, ShardError
from penstock.shards.mds import MDSFolder
from penstock.shards.mds.encodings import make_decoder

MUTATIONS = 3000
COLUMNS = {"a": "bytes", "b": "int", "c": "ndarray", "d": "str", "e": "list[pil]", "f": "ndarray:uint8:2"}


def samples(n: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        {
            "a": bytes([k]) * k,
            "b": k * 1000,
            "c": rng.integers(0, 9, (k + 1, 2)).astype(np.int16),
            "d": "x" * (9 - k),
            "e": [],
            "f": np.array([k, k + 1], np.uint8),
        }
        for k in range(n)
    ]


def text(sample: dict[str, Any]) -> str:
    return repr({name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()})


def outcome(read: Callable[[], Any]) -> tuple[Any, str]:
    """What was read, or the message of an error of ours."""
    try:
        return read(), ""
    except (ShardError, ConfigError) as error:
        return None, str(error)


def mutate(rng: random.Random, data: bytes, end: int) -> bytes:
    """Change some bytes before ``end``; or cut, or double a piece."""
    out = bytearray(data)
    kind, at = rng.randrange(6), rng.randrange(end)
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[at] = rng.randrange(256)
    elif kind == 2:
        struct.pack_into("<I", out, at, rng.choice([0, 1, 0xFFFFFFFF, 0x7FFFFFFF, rng.randrange(1 << 32), len(data)]))
    elif kind == 3:
        del out[at : at + rng.randrange(1, 9)]
    elif kind == 4:
        out[at:at] = out[at : at + rng.randrange(1, 9)]
    else:
        return bytes(out[:at])
    return bytes(out)


def test_mutated_shard_headers(tmp_path: Path) -> None:
    write_mds(tmp_path, COLUMNS, samples(8))
    expected = [text(sample) for sample in MDSFolder(tmp_path)]
    path = tmp_path / "shard.00000.mds"
    data = path.read_bytes()
    (header_end,) = struct.unpack_from("<I", data, 4)
    folder, rng, right = MDSFolder(tmp_path), random.Random(0), 0
    for _ in range(MUTATIONS):
        path.unlink()
        path.write_bytes(mutate(rng, data, header_end))
        folder._open._open.clear()
        found, error = outcome(lambda: [text(sample) for sample in folder])
        assert found == expected or "shard.00000.mds" in error
        right += not error
    assert right < MUTATIONS // 4, "most mutations must be noticed: only the header's text may change unnoticed"


def test_mutated_sizes_of_columns(tmp_path: Path) -> None:
    """Sizes within a sample: those that do not add up are errors; no others are possible by one changed number."""
    write_mds(tmp_path, COLUMNS, samples(8))
    expected = [text(sample) for sample in MDSFolder(tmp_path)]
    path = tmp_path / "shard.00000.mds"
    data = path.read_bytes()
    offsets = struct.unpack_from("<9I", data, 4)
    folder, rng = MDSFolder(tmp_path), random.Random(1)
    for _ in range(MUTATIONS // 3):
        number = rng.randrange(8)
        out = bytearray(data)
        at = offsets[number] + 4 * rng.randrange(4)
        struct.pack_into("<I", out, at, rng.choice([0, 1, 5, 0xFFFFFFFF, rng.randrange(300)]))
        path.unlink()
        path.write_bytes(out)
        folder._open._open.clear()
        found, error = outcome(lambda n=number: text(folder[n]))
        assert found == expected[number] or f"sample {number}" in error


def test_mutated_indices(tmp_path: Path) -> None:
    write_mds(tmp_path, COLUMNS, samples(8), per_shard=3, hashes=["sha1"])
    expected = [text(sample) for sample in MDSFolder(tmp_path)]
    whole_shards = [expected, expected[:3], expected[3:], expected[:6], expected[:3] + expected[6:]]
    path = tmp_path / "index.json"
    data = path.read_bytes()
    rng = random.Random(2)
    for _ in range(MUTATIONS):
        path.unlink()  # to cut a file and write it again takes some file systems ten times as long
        path.write_bytes(mutate(rng, data, len(data) - 4))
        found, error = outcome(lambda: [text(sample) for sample in MDSFolder(tmp_path)])
        assert found in whole_shards or str(tmp_path) in error


def values(rng: random.Random, data: Any) -> Any:
    """The same JSON with one value somewhere replaced by something odd."""
    odd = [None, -1, 0, 1 << 40, 1 << 70, 1.5, "", "x", [], {}, True, [None], "int", "ndarray:int8:99999999999"]
    if rng.random() < 0.15:
        return rng.choice(odd)
    if isinstance(data, dict) and data:
        key = rng.choice(list(data))
        return {**data, key: values(rng, data[key])}
    if isinstance(data, list) and data:
        at = rng.randrange(len(data))
        return [*data[:at], values(rng, data[at]), *data[at + 1 :]]
    return rng.choice(odd)


def test_odd_values_in_indices(tmp_path: Path) -> None:
    write_mds(tmp_path, COLUMNS, samples(8), per_shard=3, compression=[None, "zstd"])
    expected = {text(sample) for sample in MDSFolder(tmp_path)}
    path, rng = tmp_path / "index.json", random.Random(3)
    index = json.loads(path.read_text())
    for _ in range(MUTATIONS // 2):
        path.unlink()
        path.write_text(json.dumps(values(rng, index)))
        found, error = outcome(lambda: [text(sample) for sample in MDSFolder(tmp_path)])
        assert error or set(found) <= expected


@pytest.mark.parametrize(
    "encoding", ["ndarray", "ndarray:int32", "ndarray:int32:2,2", "list[pil]", "pil", "jpeg_array", "str_int", "json"]
)
def test_values_of_random_bytes(encoding: str) -> None:
    rng = random.Random(4)
    decode = make_decoder(encoding)
    for _ in range(MUTATIONS // 3):
        data = bytes(rng.choice([0, 1, 4, 5, 8, 255, rng.randrange(256)]) for _ in range(rng.randrange(40)))
        with suppress(ValueError, OSError):  # what the reader turns into a ShardError with the place
            decode(data)
