"""What values become in a shard, by their extensions, and that the usual decoders read it."""

from __future__ import annotations

import gzip
import io
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.errors import ShardError
from penstock.shards.encode import make_encoder

ENCODE = make_encoder(True)
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)


def encoded(name: str, value: Any) -> bytes:
    found = ENCODE({"__key__": "a", name: value})
    assert found["__key__"] == "a"
    assert isinstance(found[name], bytes)
    return found[name]


def opened(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_numbers_text_and_objects() -> None:
    assert encoded("cls", 5) == encoded("index", np.int64(5)) == b"5"
    assert encoded("txt", "ä") == "ä".encode()
    assert encoded("html", 1.5) == b"1.5"
    assert encoded("left.json", {"a": [1, None]}) == b'{"a": [1, null]}'
    assert pickle.loads(encoded("pyd", {"a": (1, 2)})) == {"a": (1, 2)}
    assert encoded("bin", b"ab") == encoded("bin", bytearray(b"ab")) == encoded("bin", memoryview(b"ab")) == b"ab"
    assert gzip.decompress(encoded("json.gz", [1])) == b"[1]"
    assert encoded("json.gz", [1]) == encoded("json.gz", [1]), "without the time of day"


def test_arrays_and_tensors() -> None:
    assert np.array_equal(np.load(io.BytesIO(encoded("npy", PIXELS))), PIXELS)
    assert np.load(io.BytesIO(encoded("npy", [1.5, 2.5]))).tolist() == [1.5, 2.5]
    with np.load(io.BytesIO(encoded("npz", {"x": PIXELS, "y": np.arange(3)}))) as archive:
        assert np.array_equal(archive["x"], PIXELS)
        assert archive["y"].tolist() == [0, 1, 2]
    tensor = torch.arange(6).reshape(2, 3)
    assert torch.equal(torch.load(io.BytesIO(encoded("pth", tensor))), tensor)


def test_msgpack() -> None:
    msgpack = pytest.importorskip("msgpack")
    assert msgpack.unpackb(encoded("mp", {"a": [1, 2]})) == {"a": [1, 2]}


@pytest.mark.parametrize("name", ["png", "ppm", "tiff"])
@pytest.mark.parametrize("shape", [(6, 8, 3), (6, 8)])
def test_images_that_lose_nothing(name: str, shape: tuple[int, ...]) -> None:
    pixels = PIXELS.reshape(-1)[: np.prod(shape)].reshape(shape)
    assert np.array_equal(opened(encoded(name, pixels)), pixels)
    assert np.array_equal(opened(encoded(name, Image.fromarray(pixels))), pixels)
    assert np.array_equal(opened(encoded(name, pixels / 255)), pixels), "floats are from 0 to 1"


def test_jpegs() -> None:
    smooth = np.linspace(0, 255, 6 * 8 * 3).reshape(6, 8, 3).astype(np.uint8)
    found = opened(encoded("jpg", smooth))
    assert found.shape == smooth.shape
    assert np.abs(found.astype(int) - smooth).max() < 30
    assert opened(encoded("jpeg", Image.fromarray(PIXELS).convert("RGBA"))).shape == (6, 8, 3), "JPEG has no alpha"
    assert opened(encoded("jpg", Image.fromarray(PIXELS).convert("CMYK"))).shape == (6, 8, 4)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("png", np.full((2, 2), 1.5), "from 0 to 1"),
        ("png", np.zeros((2, 2), np.int32), "uint8 or float, not int32"),
        ("jpg", np.zeros((2, 2, 7), np.uint8), "an? ndarray cannot be written as jpg|ndarray"),
        ("json", {1j: 2}, "cannot be written as json"),
        ("npy", [object()], "cannot be written as npy"),
        ("xyz", 5, "no handler found for xyz: give bytes, or encoder="),
    ],
)
def test_what_cannot_be_written(name: str, value: Any, says: str) -> None:
    with pytest.raises(ShardError, match=says):
        encoded(name, value)


def test_other_encoders() -> None:
    assert make_encoder({"xyz": lambda value: b"!" * value})({"a.xyz": 3, "cls": 1}) == {"a.xyz": b"!!!", "cls": b"1"}
    assert make_encoder(False)({"x": b"a"}) == {"x": b"a"}
    own = make_encoder(lambda sample: {"x": b"own"})
    assert own({"x": 1}) == {"x": b"own"}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        ShardError, match=r"a\.png: a ndarray cannot be written as png without pillow: pip install pillow"
    ):
        ENCODE({"a.png": np.zeros((2, 2, 3), np.uint8)})
