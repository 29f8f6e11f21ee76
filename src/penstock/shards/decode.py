"""Decode the bytes of a sample by their extension: images, numbers, text, JSON, arrays.

    decode = Decode()
    decode({"__key__": "a", "__url__": "x.tar", "jpg": b"...", "cls": b"7"})     # jpg: uint8 tensor (3, h, w), cls: 7

Images are uint8, RGB, (3, height, width) with channels_last strides, not normalised, as everywhere in Penstock.
Pickles are never loaded: that would run code from the data.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError, ImageError, ShardError
from penstock.shards.grouping import KEY, URL, Sample
from penstock.stages import stage
from penstock.storage.mapped import error_text
from penstock.storage.urls import shown

__all__ = ["VALUES", "Decode", "chained", "field_name", "load_array", "load_arrays"]

Decoder = Callable[[bytes], Any]


def load_array(data: bytes) -> Any:
    """Return the array of an ``.npy`` file; ValueError for other data.

    NumPy parses the header as Python, so a damaged one may raise anything: SyntaxError, TokenError, MemoryError.
    """
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:
        raise ValueError(f"not an .npy file, or damaged: {error_text(error)}") from error


def load_arrays(data: bytes) -> dict[str, Any]:
    """Return the arrays of an ``.npz`` file by name; ValueError for other data."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return dict(archive)
    except Exception as error:  # errors of zip, of zlib, and of `load_array`
        raise ValueError(f"not an .npz file, or damaged: {error_text(error)}") from error


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _image(data: bytes) -> torch.Tensor:
    from penstock.images.decode import decode  # imported late: it loads the image decoders

    with stage("decode"):
        return torch.from_numpy(decode(data)).permute(2, 0, 1)


VALUES: dict[str, Decoder] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), _json),
    "npy": load_array,
    "npz": load_arrays,
}
"""Decoders of numbers, text and arrays by extension, as in WebDataset."""

_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "bmp", "webp", "tif", "tiff"), _image),
    **dict.fromkeys(("class", "count"), int),
    **dict.fromkeys(("html", "htm"), bytes.decode),
    **VALUES,
}


class Decode:
    """A callable ``decode(sample) -> sample`` that replaces bytes by values; picklable.

    Args:
        decoders: functions of bytes, by extension, which take precedence over the built-in ones. A full extension
            (``seg.png``) takes precedence over its last part (``png``). None leaves an extension as bytes.

    Unknown extensions stay bytes.

    Raises:
        ImageError, ShardError: (when called) data that cannot be decoded; the message names shard, key and extension.
    """

    pure = True

    def __init__(self, decoders: Mapping[str, Decoder | None] | None = None) -> None:
        importlib.import_module("penstock.images.decode")  # before workers are forked
        self._own = dict(decoders or {})
        self.pure = all(getattr(decoder, "pure", False) for decoder in self._own.values() if decoder is not None)

    def __call__(self, sample: Sample) -> Sample:
        """Return a new, decoded sample."""
        result: Sample = {}
        for name, data in sample.items():
            decoder = self._decoder(name) if isinstance(data, bytes) else None
            if decoder is None:
                result[name] = data
                continue
            try:
                result[name] = decoder(data)
            except ImageError as error:
                raise ImageError(f"{field_name(sample, name)}: {error}") from error
            except (ValueError, EOFError) as error:
                raise ShardError(f"{field_name(sample, name)}: cannot be decoded: {error}") from error
        return result

    def _decoder(self, name: str) -> Decoder | None:
        if name.startswith("__"):
            return None
        last = name.rpartition(".")[2]
        for known in (self._own, _DECODERS):
            for part in (name, last):
                if part in known:
                    return known[part]
        return None


def field_name(sample: Sample, name: str) -> str:
    """Return the name of a field for messages."""
    return f"{shown(str(sample.get(URL)))}: sample {sample.get(KEY)!r}: {name}"


class _Chain:
    """Applies ``decode``, then ``load``; picklable."""

    def __init__(self, decode: Callable[[Sample], Sample], load: Callable[[Sample], Any]) -> None:
        self.decode, self.load = decode, load
        self.pure = bool(getattr(decode, "pure", False) and getattr(load, "pure", False))

    def __call__(self, sample: Sample) -> Any:
        return self.load(self.decode(sample))


def chained(decode: Any, load: Callable[[Sample], Any] | None) -> Callable[[Sample], Any] | None:
    """Return one function for the arguments ``decode=`` and ``load=`` of a dataset; None if it does nothing.

    Raises:
        ConfigError: an invalid ``decode``.
    """
    if decode is None or decode is False:
        return load
    if not callable(decode) and decode is not True and not isinstance(decode, Mapping):
        raise ConfigError(f"decode= takes True, decoders by extension, or a function of a sample, got {decode!r}")
    decoder = decode if callable(decode) else Decode(None if decode is True else decode)
    return decoder if load is None else _Chain(decoder, load)
