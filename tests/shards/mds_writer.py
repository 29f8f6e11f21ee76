"""A writer of MDS data sets that shares nothing with our reader: made from the description of the format alone."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
import zstandard
from PIL import Image

FIXED = {
    "int": "<q",
    "uint8": "<B",
    "uint16": "<H",
    "uint32": "<I",
    "uint64": "<Q",
    "int8": "<b",
    "int16": "<h",
    "int32": "<i",
    "int64": "<q",
    "float16": "<e",
    "float32": "<f",
    "float64": "<d",
}
CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32, "int32": 33, "float32": 34}
CODES |= {"uint64": 64, "int64": 65, "float64": 66}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "br": lambda data: pa.Codec("brotli").compress(data, asbytes=True),
    "snappy": lambda data: pa.Codec("snappy").compress(data, asbytes=True),
    "bz2": bz2.compress,
    "gz": gzip.compress,
    "zstd": zstandard.ZstdCompressor(level=3).compress,
}
HASH = {"sha1": lambda data: hashlib.sha1(data).hexdigest(), "xxh64": lambda data: xxhash.xxh64(data).hexdigest()}


def encode(encoding: str, value: Any) -> bytes:
    if isinstance(value, bytes) and encoding not in ("pkl",):
        return value
    if encoding in FIXED:
        return struct.pack(FIXED[encoding], value)
    if encoding in ("str", "str_int", "str_float", "str_decimal"):
        return str(value).encode()
    if encoding == "json":
        return json.dumps(value).encode()
    if encoding == "pkl":
        return pickle.dumps(value)
    if encoding.startswith("ndarray"):
        return encode_array(encoding, value)
    if encoding == "pil":
        pixels = value.tobytes()
        return struct.pack("<III", *value.size, len(value.mode)) + value.mode.encode() + pixels
    if encoding in ("jpeg", "png"):
        file = io.BytesIO()
        value.save(file, encoding.upper())
        return file.getvalue()
    inner = "jpeg" if encoding.startswith("jpeg") else encoding[5:-1]
    items = [encode(inner, item) for item in value]
    head = b"" if encoding.startswith("jpeg") else b"\0\0\0\0"
    return head + struct.pack(f"<I{len(items)}I", len(items), *map(len, items)) + b"".join(items)


def encode_array(encoding: str, value: Any) -> bytes:
    parts = encoding.split(":")
    head = b"" if len(parts) > 1 else bytes([CODES[value.dtype.name]])
    if len(parts) < 3:
        width = max(0 if side < 256 else 1 if side < 65536 else 2 for side in value.shape)
        head += bytes([value.ndim << 2 | width])
        head += b"".join(side.to_bytes(1 << width, "little") for side in value.shape)
    return head + value.astype(value.dtype.newbyteorder("<")).tobytes()


def fixed_size(encoding: str) -> int | None:
    if encoding in FIXED:
        return struct.calcsize(FIXED[encoding])
    if encoding.count(":") == 2:
        _, dtype, shape = encoding.split(":")
        return int(np.dtype(dtype).itemsize * np.prod([int(side) for side in shape.split(",")]))
    return None


def shard_bytes(columns: dict[str, str], samples: Sequence[dict[str, Any]], compression: str | None) -> bytes:
    names = sorted(columns)
    header = json.dumps({**describe(columns), "compression": compression, "format": "mds", "hashes": [], "version": 2})
    bodies = []
    for sample in samples:
        values = [encode(columns[name], sample[name]) for name in names]
        sizes = [len(value) for name, value in zip(names, values, strict=True) if fixed_size(columns[name]) is None]
        bodies.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values))
    offsets = [4 + 4 * (len(samples) + 1) + len(header.encode())]
    for body in bodies:
        offsets.append(offsets[-1] + len(body))
    head = struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets)
    return head + header.encode() + b"".join(bodies)


def describe(columns: dict[str, str]) -> dict[str, Any]:
    names = sorted(columns)
    return {
        "column_encodings": [columns[name] for name in names],
        "column_names": names,
        "column_sizes": [fixed_size(columns[name]) for name in names],
    }


def write_mds(
    folder: Path,
    columns: dict[str, str],
    samples: Sequence[dict[str, Any]],
    *,
    per_shard: int = 10,
    compression: Sequence[str | None] = (None,),
    hashes: Sequence[str] = (),
    keep: str = "smallest",
    prefix: str = "",
) -> Path:
    """Write a data set; shard i has the i-th compression (they repeat). ``keep``: which files stay on disk, "both",
    "raw", or the compressed one where there is one."""
    (folder / prefix).mkdir(parents=True, exist_ok=True)
    shards = []
    for number, begin in enumerate(range(0, len(samples), per_shard)):
        chosen = compression[number % len(compression)]
        part = samples[begin : begin + per_shard]
        data = shard_bytes(columns, part, chosen)
        entry: dict[str, Any] = {
            **describe(columns),
            "compression": chosen,
            "format": "mds",
            "hashes": list(hashes),
            "samples": len(part),
            "version": 2,
            "size_limit": 1 << 26,
            "zip_data": None,
            "raw_data": file_entry(f"{prefix}shard.{number:05d}.mds", data, hashes),
        }
        if chosen is None or keep in ("both", "raw"):
            (folder / entry["raw_data"]["basename"]).write_bytes(data)
        if chosen is not None:
            algorithm = chosen.split(":")[0]
            packed = COMPRESS[algorithm](data)
            entry["zip_data"] = file_entry(f"{prefix}shard.{number:05d}.mds.{algorithm}", packed, hashes)
            if keep != "raw":
                (folder / entry["zip_data"]["basename"]).write_bytes(packed)
        shards.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def file_entry(basename: str, data: bytes, hashes: Sequence[str]) -> dict[str, Any]:
    return {"basename": basename, "bytes": len(data), "hashes": {name: HASH[name](data) for name in hashes}}


def picture(seed: int, mode: str = "RGB", size: tuple[int, int] = (5, 4)) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)
