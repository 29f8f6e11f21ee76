"""Decode MDS columns from bytes to values.

    ============================================  ==============================================================
    ``bytes``, ``str``, ``json``                  unchanged; UTF-8; UTF-8 JSON
    ``int``                                       8 bytes, a Python int
    ``uint8`` ... ``int64``, ``float16`` ...      1 to 8 bytes, a NumPy scalar
    ``str_int``, ``str_float``, ``str_decimal``   text, as a Python int, float or `decimal.Decimal`
    ``ndarray``, ``ndarray:T``, ``ndarray:T:D``   an array; a type T or shape D not in the name precedes the data
    ``pil``                                       raw pixels with their mode and size
    ``jpeg``, ``png``                             an encoded file
    ``jpeg_array``, ``list[jpeg|png|pil]``        several of them, preceded by their sizes
    ``pkl``                                       a pickle: runs code when read, refused unless allowed
    ============================================  ==============================================================

All integers are little-endian. Images become Pillow images; with ``images="rgb"``, uint8 arrays (height, width, 3),
decoded by `penstock.images` at about twice Pillow's speed; with ``images="bytes"`` they stay encoded.

Promise: a value that does not use its bytes exactly is a `ValueError` (`penstock.shards.mds.shard` adds the location),
never a truncated value. Arrays are writable copies.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import ConfigError, ShardError

__all__ = ["Decoder", "encoding_size", "make_decoder"]

Decoder = Callable[[bytes], Any]

_ARRAY_TYPES = {
    8: "uint8",
    16: "uint16",
    32: "uint32",
    64: "uint64",
    9: "int8",
    17: "int16",
    33: "int32",
    65: "int64",
    18: "float16",
    34: "float32",
    66: "float64",
}
_SCALARS = tuple(_ARRAY_TYPES.values())
_MODES = {"1": 1, "L": 1, "P": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "LAB": 3, "HSV": 3}
_WIDE_MODES = {"I": 4, "F": 4, "I;16": 2}


def encoding_size(encoding: str) -> int | None:
    """Return the bytes of a value if its encoding has a fixed size, else None; `ShardError` if it is unknown."""
    if encoding == "int":
        return 8
    if encoding in _SCALARS:
        return np.dtype(encoding).itemsize
    if encoding.partition(":")[0] == "ndarray":
        dtype, shape = _array_spec(encoding)
        return None if dtype is None or shape is None else dtype.itemsize * math.prod(shape)
    if encoding not in _PLAIN and encoding not in _IMAGES and encoding != "pkl":
        raise ShardError(f"unknown encoding {encoding!r}")
    return None


def make_decoder(encoding: str, *, images: str = "pil", allow_pickle: bool = False) -> Decoder:
    """Return the function that decodes the bytes of a value. See `MDSFolder` for ``images`` and ``allow_pickle``.

    Raises:
        ConfigError: pickle is not allowed, or Pillow images without Pillow installed.
        ShardError: an unknown encoding.
    """
    encoding_size(encoding)
    if encoding == "int":
        return _integer
    if encoding in _SCALARS:
        return partial(_scalar, np.dtype(encoding).newbyteorder("<"))
    if encoding.partition(":")[0] == "ndarray":
        return partial(_array, *_array_spec(encoding))
    if encoding == "pkl":
        if not allow_pickle:
            raise ConfigError("reading a pickle can run any code: if you trust these shards, pass allow_pickle=True")
        return pickle.loads
    if encoding in _PLAIN:
        return _PLAIN[encoding]
    decoders, begin = _IMAGES[encoding]
    if images == "pil":
        _pillow()  # fail now, not at the first sample
    return decoders[images] if begin is None else partial(_list, begin, decoders[images])


# Scalars, text and arrays.


def _integer(data: bytes) -> int:
    if len(data) != 8:
        raise ValueError(f"an integer of 8 bytes cannot be {len(data)} bytes long")
    return int.from_bytes(data, "little", signed=True)


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise ValueError(f"a value of {dtype.name} has {dtype.itemsize} bytes, not {len(data)}")
    return np.frombuffer(data, dtype)[0]


def _text(parse: Callable[[str], Any], data: bytes) -> Any:
    return parse(str(data, "utf-8"))


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError:
        raise ValueError(f"{text[:40]!r} is not a decimal number") from None


def _array_spec(encoding: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """Return type and shape, each None if the encoding's name does not fix it."""
    name, *rest = encoding.split(":")
    if name != "ndarray" or len(rest) > 2 or (rest and rest[0] not in _ARRAY_TYPES.values()):
        raise ShardError(f"unknown encoding {encoding!r}")
    dtype = np.dtype(rest[0]).newbyteorder("<") if rest else None
    if len(rest) < 2:
        return dtype, None
    sides = rest[1].split(",")
    if not all(side.isascii() and side.isdigit() and len(side) < 12 for side in sides):
        raise ShardError(f"unknown encoding {encoding!r}: its shape is not a list of positive integers")
    return dtype, tuple(map(int, sides))


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: bytes) -> Any:
    begin = 0
    if dtype is None:
        code = data[0] if data else -1
        if code not in _ARRAY_TYPES:
            raise ValueError(f"an array of unknown type {code}")
        dtype, begin = np.dtype(_ARRAY_TYPES[code]).newbyteorder("<"), 1
    if shape is None:
        if len(data) <= begin:
            raise ValueError("an array without a shape")
        ndim, width = divmod(data[begin], 4)
        side = 1 << width
        begin += 1
        if len(data) < begin + ndim * side:
            raise ValueError(f"an array whose shape has {ndim} sides ends within them")
        shape = tuple(int.from_bytes(data[at : at + side], "little") for at in range(begin, begin + ndim * side, side))
        begin += ndim * side
    if len(data) - begin != dtype.itemsize * math.prod(shape):
        raise ValueError(f"an array of {dtype.name} {shape} cannot be {len(data) - begin} bytes long")
    return np.frombuffer(data, dtype, offset=begin).astype(dtype.newbyteorder("=")).reshape(shape)


_PLAIN: dict[str, Decoder] = {
    "bytes": bytes,
    "str": partial(_text, str),
    "json": partial(_text, json.loads),
    "str_int": partial(_text, int),
    "str_float": partial(_text, float),
    "str_decimal": partial(_text, _decimal),
}


# Images: one function for each kind (encoded or raw) and each requested form.


def _list(begin: int, decode: Decoder, data: bytes) -> list[Any]:
    """Return the values of a list, stored from ``begin`` on as count, sizes, values."""
    if len(data) < begin + 4:
        raise ValueError(f"a list of {len(data)} bytes has no count")
    count = int.from_bytes(data[begin : begin + 4], "little")
    at = begin + 4 + 4 * count
    if len(data) < at:
        raise ValueError(f"a list of {count} values ends within their sizes")
    sizes = np.frombuffer(data, "<u4", count, begin + 4).tolist()
    if at + sum(sizes) != len(data):
        raise ValueError(f"a list whose values take {sum(sizes)} bytes has {len(data) - at}")
    values = []
    for size in sizes:
        values.append(decode(data[at : at + size]))
        at += size
    return values


def _pixels(data: bytes) -> tuple[str, tuple[int, int], bytes]:
    """Return mode, size and pixels of a raw image."""
    if len(data) < 12:
        raise ValueError(f"a raw image of {len(data)} bytes has no header")
    width, height, length = struct.unpack_from("<3I", data)
    if length > 8 or len(data) < 12 + length:
        raise ValueError(f"a raw image whose mode has {length} letters")
    mode = str(data[12 : 12 + length], "ascii")
    each = _MODES.get(mode) or _WIDE_MODES.get(mode)
    if each is None:
        raise ValueError(f"a raw image of unknown mode {mode!r}")
    row = -(-width // 8) if mode == "1" else width * each
    if len(data) != 12 + length + row * height:
        raise ValueError(f"a raw image of {width} x {height} {mode} cannot have {len(data) - 12 - length} bytes")
    return mode, (width, height), data[12 + length :]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "Pillow images need Pillow: pip install pillow, or use images='rgb' (arrays) or images='bytes'"
        ) from None
    return Image


def _raw_pillow(data: bytes) -> Any:
    mode, size, pixels = _pixels(data)
    return _pillow().frombytes(mode, size, pixels)


def _raw_rgb(data: bytes) -> Any:
    mode, (width, height), pixels = _pixels(data)
    if mode in ("RGB", "L"):
        array = np.frombuffer(pixels, np.uint8).reshape(height, width, -1)
        return array.copy() if mode == "RGB" else np.repeat(array, 3, axis=2)
    if mode in _WIDE_MODES:
        raise ValueError(f"a raw image of mode {mode} has no uint8 colours: read it with images='pil'")
    return np.array(_pillow().frombytes(mode, (width, height), pixels).convert("RGB"))


def _file_pillow(data: bytes) -> Any:
    from penstock.images.limits import open_pillow

    _pillow()
    image = open_pillow(data)
    try:
        image.load()
    except SyntaxError as error:  # raised by Pillow for a broken PNG
        raise ValueError(str(error)) from error
    return image


def _file_rgb(data: bytes) -> Any:
    from penstock.images.decode import decode

    return decode(data)


_FILE: dict[str, Decoder] = {"pil": _file_pillow, "rgb": _file_rgb, "bytes": bytes}
_RAW: dict[str, Decoder] = {"pil": _raw_pillow, "rgb": _raw_rgb, "bytes": bytes}

_IMAGES: dict[str, tuple[dict[str, Decoder], int | None]] = {
    "pil": (_RAW, None),
    "jpeg": (_FILE, None),
    "png": (_FILE, None),
    "jpeg_array": (_FILE, 0),
    "jpegarray": (_FILE, 0),
    "list[jpeg]": (_FILE, 4),
    "list[png]": (_FILE, 4),
    "list[pil]": (_RAW, 4),
}
"""The decoders of each encoding, and the first byte of the list if it is one."""
