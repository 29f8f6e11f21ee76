"""MDS: what is written comes back, in every encoding and compression, and what MosaicML's own writer writes too."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from decimal import Decimal
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_run import full_only
from mds_writer import describe, fixed_size, picture, shard_bytes, write_mds
from PIL import Image

from penstock.errors import (
    ConfigError,
    ShardChangedError,
    ShardError,
    ShardIOError,
    StorageNotFoundError,
    TruncatedShardError,
)
from penstock.shards.mds import MDSFolder
from penstock.shards.mds.encodings import make_decoder
from penstock.shards.mds.local_files import HASHES
from penstock.storage import Storage

DATA = Path(__file__).parent / "data" / "mds"
COMPRESSIONS = ["raw", "br", "bz2", "gz", "snappy", "zstd"]
SIMPLE = {"image": "bytes", "label": "int", "name": "str"}


def simple(n: int) -> list[dict[str, Any]]:
    return [{"image": bytes([k % 256]) * (k % 7), "label": k - 3, "name": f"näme {k}"} for k in range(n)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, Image.Image):
        return isinstance(b, Image.Image) and a.mode == b.mode and a.size == b.size and a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


VALUES: dict[str, list[Any]] = {
    "bytes": [b"", b"\0\xff", b"x" * 300],
    "str": ["", "é\n", "x" * 300],
    "int": [0, -1, 2**63 - 1, -(2**63)],
    **{f"{kind}int{bits}": [0, 1, 100] for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": [0.0, -1.5, float("inf")] for bits in (16, 32, 64)},
    "ndarray": [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.ones((1, 1, 300), np.float64),
        np.zeros(70000, np.uint8),
    ],
    "ndarray:float16": [np.ones(3, np.float16), np.ones((2, 1, 2), np.float16)],
    "ndarray:uint32:2,3": [np.arange(6, dtype=np.uint32).reshape(2, 3)],
    "str_int": [10**40, -7, 0],
    "str_float": [float("inf"), float("-inf"), -0.0, 0.1, float("nan")],
    "str_decimal": [Decimal("1.500"), Decimal("-1E+30")],
    "pil": [*(picture(1, mode) for mode in ("RGB", "L", "LA", "RGBA", "CMYK", "I", "F")), picture(3, "1", (9, 3))],
    "json": [None, {"a": [1, "ü"]}, "x"],
}


@pytest.mark.parametrize("encoding", VALUES)
def test_every_encoding_comes_back(encoding: str, tmp_path: Path) -> None:
    values = VALUES[encoding]
    write_mds(tmp_path, {"ü": encoding, "other": "str"}, [{"ü": v, "other": str(i)} for i, v in enumerate(values)])
    folder = MDSFolder(tmp_path)
    for number, value in enumerate(values):
        found = folder[number]
        assert list(found) == ["other", "ü"]
        assert found["other"] == str(number)
        expected = np.dtype(encoding).type(value) if encoding in np.sctypeDict and encoding[-1].isdigit() else value
        assert same(found["ü"], expected)


@pytest.mark.parametrize("encoding", ["png", "jpeg", "list[png]", "list[jpeg]", "list[pil]", "jpeg_array"])
def test_encoded_images_come_back(encoding: str, tmp_path: Path) -> None:
    several = encoding not in ("png", "jpeg")
    pictures = [[picture(k + i) for i in range(k)] for k in range(3)] if several else [picture(k) for k in range(3)]
    write_mds(tmp_path, {"x": encoding}, [{"x": value} for value in pictures])
    folder, arrays = MDSFolder(tmp_path), MDSFolder(tmp_path, images="rgb")
    for number, value in enumerate(pictures):
        found, array = folder[number]["x"], arrays[number]["x"]
        if not several:
            found, array, value = [found], [array], [value]
        assert len(found) == len(array) == len(value)
        for one, other, original in zip(found, array, value, strict=True):
            assert other.dtype == np.uint8
            assert np.abs(np.array(one, dtype=int) - other).max() <= ("jpeg" in encoding)  # two JPEG decoders
            if "jpeg" in encoding:
                assert one.format == "JPEG"
            else:
                assert one.tobytes() == original.tobytes()


def test_arrays_may_be_written_to(tmp_path: Path) -> None:
    write_mds(tmp_path, {"x": "ndarray"}, [{"x": np.zeros(3, np.int32)}])
    folder = MDSFolder(tmp_path)
    folder[0]["x"][:] = 5
    assert folder[0]["x"].tolist() == [0, 0, 0]


def test_bytes_stay_bytes_when_asked(tmp_path: Path) -> None:
    write_mds(tmp_path, {"x": "jpeg", "y": "pil"}, [{"x": b"no jpeg", "y": b"no picture"}])
    assert MDSFolder(tmp_path, images="bytes")[0] == {"x": b"no jpeg", "y": b"no picture"}
    with pytest.raises(ShardError, match=r"shard\.00000\.mds, sample 0: column 'x' cannot be decoded"):
        MDSFolder(tmp_path)[0]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_what_mosaicml_wrote(name: str, tmp_path: Path) -> None:
    folder = MDSFolder(DATA / name, cache_dir=tmp_path, validate_hash="xxh64")
    reference = MDSFolder(DATA / "raw")
    assert len(folder) == 4
    for k in range(4):
        found = folder[k]
        assert all(same(value, found[column]) for column, value in reference[k].items() if column != "h_jpeg")
        assert found["a_bytes"] == b"\0" * k
        assert found["b_str"] == "é" * k
        assert found["c_int"] == -k
        assert found["d_u64"] == 2**64 - 1 - k
        assert found["d_i64"] == -(2**63) + k
        assert found["e_f16"] == 0.5 * k
        shape = [(6,), (2, 3), (1, 2, 3)][k % 3]
        assert same(found["f_nd"], np.arange(6, dtype=[np.uint8, np.float64, np.int32][k % 3]).reshape(shape))
        assert same(found["f_nd_t"], np.arange(300 * (k % 2) + 1, dtype=np.int16))
        assert same(found["f_nd_ts"], np.full((2, 3), k, np.float32))
        assert found["g_si"] == 10**30 + k
        assert same(found["g_sf"], [float("inf"), float("-inf"), -0.0, 0.1][k])
        assert same(found["g_sd"], Decimal("1.500") + k)
        assert [found["h_pil"].mode, found["h_jpeg"].format, found["h_png"].format] == [
            ["L", "1", "RGB"][k % 3],
            "JPEG",
            "PNG",
        ]
        assert [len(found[column]) for column in ("i_ja", "i_lj", "i_lp", "i_lpil")] == [k % 3, k % 3, k % 2 + 1, k % 3]
        assert found["j_json"] == {"k": k, "l": [1, None, "ü"]}


@pytest.mark.parametrize("keep", ["smallest", "both", "raw"])
def test_mixed_compressions(keep: str, tmp_path: Path) -> None:
    samples = simple(65)
    mixed = [None, "br:5", "bz2", "gz:9", "snappy", "zstd:7"]
    write_mds(tmp_path / "d", SIMPLE, samples, compression=mixed, keep=keep, hashes=["sha1", "xxh64"])
    folder = MDSFolder(tmp_path / "d", cache_dir=tmp_path / "cache", validate_hash="sha1")
    assert list(folder) == samples
    assert folder.shard_sizes == [10] * 6 + [5]
    assert len(list((tmp_path / "cache").rglob("*.mds"))) == (5 if keep == "smallest" else 0)
    assert (tmp_path / "cache").exists() == (keep == "smallest")
    assert folder.records([64, 3, 3, 17, -65]) == [samples[i] for i in (64, 3, 3, 17, 0)]
    again = MDSFolder(tmp_path / "d", cache_dir=tmp_path / "cache")
    assert again[12] == samples[12]


def test_unpacked_shards_follow_their_source(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_mds(tmp_path / "d", SIMPLE, simple(3), compression=["zstd"])
    assert list(MDSFolder(tmp_path / "d", cache_dir=cache)) == simple(3)
    changed = [{**sample, "label": 99} for sample in simple(3)]
    write_mds(tmp_path / "d", SIMPLE, changed, compression=["zstd"])
    assert list(MDSFolder(tmp_path / "d", cache_dir=cache)) == changed


def test_columns_are_chosen(tmp_path: Path) -> None:
    write_mds(tmp_path, SIMPLE, simple(3))
    folder = MDSFolder(tmp_path, columns=["label"])
    assert folder[2] == {"label": -1}
    assert folder.columns == {"label": "int"}
    with pytest.raises(ConfigError, match="no column 'lable': the columns are 'image', 'label', 'name'"):
        MDSFolder(tmp_path, columns=["lable"])
    with pytest.raises(ConfigError, match="list of names"):
        MDSFolder(tmp_path, columns="label")


def test_splits_and_merged_indices(tmp_path: Path) -> None:
    samples = simple(30)
    write_mds(tmp_path / "train" / "part0", SIMPLE, samples[:20], prefix="a/", hashes=["xxh64"])
    write_mds(tmp_path / "train" / "part1", SIMPLE, samples[20:], compression=["gz"], hashes=["xxh64"])
    entries = []
    for part in ("part0", "part1"):
        for entry in json.loads((tmp_path / "train" / part / "index.json").read_text())["shards"]:
            for kind in ("raw_data", "zip_data"):
                if entry[kind]:
                    entry[kind]["basename"] = f"{part}/{entry[kind]['basename']}"
            entries.append(entry)
    (tmp_path / "train" / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    assert list(MDSFolder(tmp_path, split="train")) == samples
    with pytest.raises(ShardIOError, match=r"there is one in train: name it with split="):
        MDSFolder(tmp_path)
    moved = shutil.copytree(tmp_path / "train", tmp_path / "elsewhere")
    assert MDSFolder(moved).fingerprint == MDSFolder(tmp_path, split="train").fingerprint


def test_shards_without_samples(tmp_path: Path) -> None:
    write_mds(tmp_path, SIMPLE, simple(4), per_shard=2)
    index = json.loads((tmp_path / "index.json").read_text())
    empty = shard_bytes(SIMPLE, [], None)
    (tmp_path / "empty.mds").write_bytes(empty)
    raw = {"basename": "empty.mds", "bytes": len(empty), "hashes": {}}
    index["shards"].insert(0, {**index["shards"][0], "samples": 0, "raw_data": raw})
    index["shards"].insert(2, {**index["shards"][0]})
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert list(MDSFolder(tmp_path)) == simple(4)
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": []}))
    assert len(MDSFolder(tmp_path)) == 0


def test_indices(tmp_path: Path) -> None:
    write_mds(tmp_path, SIMPLE, simple(12), per_shard=5)
    folder = MDSFolder(tmp_path)
    assert folder[-1] == folder[11] == simple(12)[11]
    for index in (12, -13):
        with pytest.raises(IndexError):
            folder[index]
        with pytest.raises(IndexError):
            folder.records([index])
    assert pickle.loads(pickle.dumps(folder))[7] == folder[7]


def test_pickle_needs_permission(tmp_path: Path) -> None:
    write_mds(tmp_path, {"x": "pkl", "y": "int"}, [{"x": {1, 2}, "y": 5}])
    with pytest.raises(ConfigError, match=r"column 'x' has encoding pkl: .*allow_pickle=True"):
        MDSFolder(tmp_path)
    assert MDSFolder(tmp_path, allow_pickle=True)[0]["x"] == {1, 2}
    assert MDSFolder(tmp_path, columns=["y"])[0] == {"y": 5}


def test_all_hashes_are_known() -> None:
    assert len(HASHES) == 17
    assert all(len(make().hexdigest()) >= 8 for make in HASHES.values())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_hashes_are_checked(compression: str | None, tmp_path: Path) -> None:
    write_mds(tmp_path, SIMPLE, simple(9), compression=[compression], hashes=["sha1"])
    path = tmp_path / ("shard.00000.mds" if compression is None else "shard.00000.mds.zstd")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardError, match=rf"{path.name} has sha1 .*, but .* in the index"):
        MDSFolder(tmp_path, validate_hash="sha1")[0]
    with pytest.raises(ConfigError, match=r"no md5 hash for .*, it has those by sha1"):
        MDSFolder(tmp_path, validate_hash="md5")[0]
    with pytest.raises(ConfigError, match="unknown hash 'md6'"):
        MDSFolder(tmp_path, validate_hash="md6")


def test_missing_and_cut_files(tmp_path: Path) -> None:
    for name, compression in (("plain", None), ("packed", "gz")):
        folder = write_mds(tmp_path / name, SIMPLE, simple(9), compression=[compression])
        path = next(folder.glob("shard*"))
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(TruncatedShardError, match=rf"{path.name} ends at byte {len(data) - 1}"):
            MDSFolder(folder)[0]
        path.write_bytes(data + b"\0")
        with pytest.raises(ShardError, match=path.name):
            MDSFolder(folder)[0]
        path.unlink()
        with pytest.raises(ShardIOError, match=r"missing"):
            MDSFolder(folder)[0]
    with pytest.raises(ShardIOError, match=r"cannot read .*index\.json"):
        MDSFolder(tmp_path / "nowhere")


@full_only("every place for each", but=["zstd", "gz"])
@pytest.mark.parametrize("algorithm", ["br", "bz2", "gz", "snappy", "zstd"])
def test_broken_compressed_files(algorithm: str, tmp_path: Path) -> None:
    samples = simple(200)
    write_mds(tmp_path, SIMPLE, samples, per_shard=200, compression=[algorithm])
    path = next(tmp_path.glob("shard*"))
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for k in range(60):
        broken = bytearray(data)
        at = int(rng.integers(len(data)))
        broken[at : at + 1 + k % 3] = rng.bytes(1 + k % 3)[: len(data) - at]
        path.write_bytes(broken)
        folder = MDSFolder(tmp_path, cache_dir=tmp_path / f"cache{k}")
        try:
            message, count = "", len(folder.records(range(200)))
        except ShardError as error:
            message, count = str(error), 0
        assert count == 200 or path.name in message or ".mds" in message


def test_a_shard_that_changes_is_noticed(tmp_path: Path) -> None:
    write_mds(tmp_path, SIMPLE, simple(9))
    folder = MDSFolder(tmp_path)
    folder[0]
    path = tmp_path / "shard.00000.mds"
    with path.open("r+b") as file:
        file.truncate(50)
    with pytest.raises(ShardChangedError, match=r"shard\.00000\.mds was changed while it was open"):
        folder[1]
    write_mds(tmp_path, SIMPLE, simple(8))
    with pytest.raises(ShardChangedError, match="no longer holds"):
        pickle.loads(pickle.dumps(folder))


BAD_INDICES: dict[str, Any] = {
    "not JSON": "{",
    "no 'shards'": {"version": 2},
    "version 1": {"version": 1, "shards": []},
    "is not a list": {"version": 2, "shards": {}},
    "is not an object": {"version": 2, "shards": [1]},
    "format 'json'": {"format": "json"},
    "has version 3": {"version": 3},
    "'samples' is -1": {"samples": -1},
    "'samples' is True": {"samples": True},
    "raw_data is not an object": {"raw_data": None},
    "basename '../x'": {"raw_data": {"basename": "../x", "bytes": 1, "hashes": {}}},
    "basename '%2e%2E/x'": {"raw_data": {"basename": "%2e%2E/x", "bytes": 1, "hashes": {}}},
    "basename '/etc/x'": {"raw_data": {"basename": "/etc/x", "bytes": 1, "hashes": {}}},
    "'bytes' is '7'": {"raw_data": {"basename": "x", "bytes": "7", "hashes": {}}},
    "'hashes' must": {"raw_data": {"basename": "x", "bytes": 7, "hashes": {"sha1": 1}}},
    "unknown compression 'lz4'": {"compression": "lz4"},
    "but no compression": {"zip_data": {"basename": "x", "bytes": 1, "hashes": {}}},
    "must be lists": {"column_names": None},
    "3 column_names, 1 column_encodings": {"column_encodings": ["int"]},
    "must be text": {"column_names": [1, 2, 3]},
    "two columns of the same name": {"column_names": ["a", "a", "b"]},
    "unknown encoding 'int7'": {"column_encodings": ["bytes", "int7", "str"]},
    "has 8 bytes, not 4": {"column_sizes": [None, 4, None]},
}


@pytest.mark.parametrize("message", BAD_INDICES)
def test_bad_indices_say_what_is_wrong(message: str, tmp_path: Path) -> None:
    write_mds(tmp_path, SIMPLE, simple(2))
    path, bad = tmp_path / "index.json", BAD_INDICES[message]
    if isinstance(bad, dict) and "shards" not in bad and bad != {"version": 2}:
        index = json.loads(path.read_text())
        index["shards"][0].update(bad)
        bad = index
    path.write_text(bad if isinstance(bad, str) else json.dumps(bad))
    with pytest.raises(ShardError, match=message.replace("(", r"\(")) as caught:
        MDSFolder(tmp_path)
    assert str(path) in str(caught.value)


def test_other_columns_in_the_shard_are_refused(tmp_path: Path) -> None:
    write_mds(tmp_path, {"a": "int", "b": "int64"}, [{"a": 1, "b": 2}])
    path = tmp_path / "index.json"
    index = json.loads(path.read_text())
    index["shards"][0].update(describe({"a": "int64", "b": "int"}))
    path.write_text(json.dumps(index))
    with pytest.raises(ShardError, match="other columns than the index"):
        MDSFolder(tmp_path)[0]


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    write_mds(tmp_path, SIMPLE, simple(2))
    with pytest.raises(ConfigError, match="unknown images='jpg'"):
        MDSFolder(tmp_path, images="jpg")
    with pytest.raises(ConfigError, match=r"storage= is for URLs"):
        MDSFolder(tmp_path, storage=Storage())
    with pytest.raises(ConfigError, match="not a local folder"):
        MDSFolder(tmp_path, cache_dir="s3://bucket/x")
    assert len(MDSFolder(tmp_path.as_uri())) == 2
    with pytest.raises(ShardError, match="unknown encoding"):
        make_decoder("ndarray:complex64")
    assert fixed_size("ndarray:int16:3,2") == 12


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *message: Any) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]


def test_over_http(tmp_path: Path) -> None:
    samples = simple(50)
    write_mds(tmp_path / "d" / "train", SIMPLE, samples, compression=[None, "zstd"], hashes=["xxh64"], keep="both")
    (tmp_path / "d" / "train" / "shard.00003.mds.zstd").unlink()  # its raw form is there
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=tmp_path / "d")) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            storage = Storage(cache=tmp_path / "objects", attempts=2)
            folder = MDSFolder(url, split="train", storage=storage, validate_hash="xxh64")
            assert folder[0] == samples[0]
            assert not any("00001" in path for path in server.asked)  # type: ignore[attr-defined]
            assert folder.records(range(50)) == samples
            assert not any("00001.mds" in path and "zstd" not in path for path in server.asked)  # type: ignore[attr-defined]
            assert list(pickle.loads(pickle.dumps(folder))) == samples
            (tmp_path / "d" / "train" / "shard.00004.mds").unlink()
            with pytest.raises(ShardIOError, match=r"http://.*shard\.00004\.mds is missing"):
                MDSFolder(url, split="train", storage=Storage(cache=tmp_path / "other", attempts=2))[-1]
            with pytest.raises(StorageNotFoundError, match=r"index\.json"):
                MDSFolder(url, storage=storage)
        finally:
            server.shutdown()
            thread.join()


def test_a_folder_by_its_address(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a b", SIMPLE, simple(9))
    address = f"file://{folder}".replace(" ", "%20")
    assert list(MDSFolder(address)) == list(MDSFolder(folder)) == simple(9)
