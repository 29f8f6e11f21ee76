"""Encode values to bytes by their extension, as WebDataset does.

Bytes are left unchanged, text becomes UTF-8; numbers, JSON, arrays, images and pickles are encoded by extension. If a
value cannot be encoded, the error (a ValueError) names the extension.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import ShardError
from penstock.wording import kind_text

__all__ = ["Encoder", "make_encoder", "numpy_dumps", "torch_dumps"]

Encoder = Callable[[dict[str, Any]], dict[str, Any]]


def numpy_dumps(data: Any) -> bytes:
    """Return an array as the bytes of an npy file."""
    out = io.BytesIO()
    np.save(out, np.asarray(data), allow_pickle=False)
    return out.getvalue()


def _arrays(value: Mapping[str, Any]) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, allow_pickle=False, **value)
    return out.getvalue()


def torch_dumps(data: Any) -> bytes:
    """Return the bytes of a pth file."""
    import torch

    out = io.BytesIO()
    torch.save(data, out)
    return out.getvalue()


def _msgpack(value: Any) -> bytes:
    import msgpack  # type: ignore[import-not-found,import-untyped,unused-ignore]

    packed: bytes = msgpack.packb(value)
    return packed


def _image(format: str, value: Any) -> bytes:
    """Return a PIL image, or an array of uint8 or of floats from 0 to 1, as an image file."""
    from PIL import Image

    image = value
    if not isinstance(value, Image.Image):
        array = np.asarray(value)
        if array.dtype.kind == "f":
            if array.size and not (array.min() > -0.001 and array.max() < 1.001):
                raise ValueError(f"float images must be from 0 to 1, this one is from {array.min()} to {array.max()}")
            array = (np.clip(array, 0, 1) * 255).astype(np.uint8)
        if array.dtype != np.uint8:
            raise ValueError(f"an image must be uint8 or float, not {array.dtype}")
        image = Image.fromarray(array)
    options: dict[str, Any] = {"quality": 100} if format == "JPEG" else {}
    if format == "JPEG" and image.mode not in ("L", "RGB", "CMYK"):
        image = image.convert("RGB")
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), lambda value: str(value).encode("ascii")),
    **dict.fromkeys(("txt", "text", "transcript", "html", "htm"), lambda value: str(value).encode("utf-8")),
    **dict.fromkeys(("json", "jsn"), lambda value: json.dumps(value).encode("utf-8")),
    **dict.fromkeys(("pyd", "pickle", "pkl"), pickle.dumps),
    **dict.fromkeys(("mp", "msgpack", "msg"), _msgpack),
    **dict.fromkeys(("jpg", "jpeg", "img", "image"), partial(_image, "JPEG")),
    **dict.fromkeys(("pbm", "pgm", "ppm"), partial(_image, "PPM")),
    **dict.fromkeys(("tif", "tiff"), partial(_image, "TIFF")),
    "png": partial(_image, "PNG"),
    "npy": numpy_dumps,
    "npz": _arrays,
    "pth": torch_dumps,
}


def _encode(name: str, value: Any, encoders: Mapping[str, Callable[[Any], bytes]]) -> bytes:
    """Return the bytes of a value.

    Raises:
        ShardError: no encoder for an extension, a value that it does not accept, or a missing package.
    """
    if name.lower().endswith(".gz"):
        return gzip.compress(_encode(name[:-3], value, encoders), mtime=0)
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return value.encode("utf-8")
    extension = name.rpartition(".")[2].lower()
    encoder = encoders.get(name, encoders.get(extension))
    if encoder is None:
        raise ShardError(f"no handler found for {extension}: give bytes, or encoder={{{extension!r}: function}}")
    try:
        return encoder(value)
    except ImportError as error:
        package = {"PIL": "pillow"}.get(error.name or "", error.name)
        raise ShardError(
            f"{name}: {kind_text(value)} cannot be written as {extension} without {package}: pip install "
            f"{package}, or give the bytes of the file"
        ) from error
    except ShardError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ShardError(f"{name}: {kind_text(value)} cannot be written as {extension}: {error}") from error


def make_encoder(spec: bool | Mapping[str, Callable[[Any], bytes]] | Encoder) -> Encoder:
    """Return the function for a writer's ``encoder=`` argument.

    True: the built-in encoders; False: none (bytes only); a mapping: the built-in ones, overridden by the mapping; a
    function: itself.
    """
    if spec is False:
        return dict
    if spec is not True and not isinstance(spec, Mapping):
        return spec
    encoders = _ENCODERS if spec is True else {**_ENCODERS, **spec}
    # Values whose name begins with an underscore are metadata.
    return lambda sample: {
        name: value if name.startswith("_") else _encode(name, value, encoders) for name, value in sample.items()
    }
