"""Decoders that turn the bytes of fields into values, chosen by extension.

    dataset.decode("rgb8")                                        images as uint8 arrays, and the usual text formats
    dataset.decode(wds.handle_extension("seg.png", labels), "pil")
    dataset.decode("torchrgb", only=["jpg", "cls"], handler=wds.warn_and_continue)

A decoder is called as ``f(".ext", data)``; the first result other than None is used. Pickles and torch objects are
refused unless they are allowed, see `penstock.wds.trust`.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from penstock.errors import NotAllowedError, PenstockError
from penstock.shards.decode import load_array, load_arrays
from penstock.storage.urls import shown
from penstock.wds.curried import FilterFunction, _map, _matches
from penstock.wds.handlers import Handler, reraise_exception
from penstock.wds.images import IMAGE_EXTENSIONS, ImageHandler, imagehandler
from penstock.wds.iterators import memoryless
from penstock.wds.trust import allowed, checked, refuse

__all__ = [
    "IMAGE_EXTENSIONS",
    "Continue",
    "Decoder",
    "DecodingError",
    "ImageHandler",
    "basichandlers",
    "decode",
    "decoders",
    "gzfilter",
    "handle_extension",
    "imagehandler",
    "torch_audio",
    "torch_loads",
    "torch_video",
    "unpickle_loads",
    "xdecode",
]

Handlers = Callable[[str, bytes], Any]


class DecodingError(PenstockError, ValueError):
    """A field that cannot be decoded; ``__cause__`` holds the original error."""

    def __init__(self, url: Any = None, key: Any = None, k: Any = None, sample: Any = None) -> None:
        super().__init__(url, key, k)
        self.url, self.key, self.k, self.sample = url, key, k, sample

    def __str__(self) -> str:
        cause = "" if self.__cause__ is None else f": {type(self.__cause__).__name__}: {self.__cause__}"
        return f"{shown(str(self.url))}: sample {self.key!r}: {self.k} cannot be decoded{cause}"

    __repr__ = __str__


class Continue:
    """The result of a decoder that has only unpacked a field: its name without the handled extension, and the data."""

    def __init__(self, key: str, data: bytes) -> None:
        self.key, self.data = key, data


# ------------------------------------------------------------------ formats


def torch_loads(data: bytes, allow: Collection[str] = ()) -> Any:
    """Load a `torch.save` file: tensors and containers of them, or any object if ``"torch"`` is allowed."""
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allowed("torch", allow))
    except Exception as error:
        if "weights_only" in str(error) and not allowed("torch", allow):
            raise refuse("torch", "a pth field holds more than tensors") from error
        raise


def unpickle_loads(data: bytes, allow: Collection[str] = ()) -> Any:
    """Load a pickle, if ``"pickle"`` is allowed."""
    if not allowed("pickle", allow):
        raise refuse("pickle", "a pickled field")
    import pickle

    return pickle.loads(data)


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def _msgpack(data: bytes) -> Any:
    import msgpack  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return msgpack.unpackb(data)


def _cbor(data: bytes) -> Any:
    import cbor  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return cbor.loads(data)


decoders: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("mp", "msg"), _msgpack),
    "npy": load_array,
    "npz": load_arrays,
    "cbor": _cbor,
}
"""Decoders by the last extension of a field; programs may add their own."""


class basic:
    """The decoders of text, numbers, JSON and arrays, and of the formats that ``allow`` names."""

    def __init__(self, allow: Collection[str] = ()) -> None:
        self.allow = checked(allow)

    def __call__(self, key: str, data: bytes) -> Any:
        extension = key.rpartition(".")[2]
        decoder = decoders.get(extension)
        if decoder is not None:
            return decoder(data)
        if extension in ("pkl", "pickle", "pyd"):
            return unpickle_loads(data, self.allow)
        if extension == "pth":
            return torch_loads(data, self.allow)
        if extension in ("ten", "tb"):
            raise ValueError(
                f"tenbin is not decoded here: pass decode(wds.handle_extension({extension!r}, function)), or write npy"
            )
        return None


basichandlers = basic()


def gzfilter(key: str, data: bytes) -> Continue | None:
    """Decompress a ``.gz`` field; the next decoder sees its name without ``.gz``."""
    return Continue(key[:-3], gzip.decompress(data)) if key.endswith(".gz") else None


class handle_extension:
    """A decoder for extensions: ``handle_extension("jpg seg.png", f)`` calls ``f(data)`` for such fields."""

    def __init__(self, extensions: str, f: Callable[[bytes], Any]) -> None:
        self.extensions = [extension.lower().split(".") for extension in extensions.split()]
        self.f = f

    def __call__(self, key: str, data: bytes) -> Any:
        parts = key.lower().split(".")
        if any(parts[-len(extension) :] == extension for extension in self.extensions):
            return self.f(data)
        return None


def torch_video(key: str, data: bytes) -> Any:
    """Decode a video with torchvision, which must be installed: frames, audio and metadata."""
    if key.rpartition(".")[2].lower() not in ("mp4", "ogv", "mjpeg", "avi", "mov", "h264", "mpg", "webm", "wmv"):
        return None
    import tempfile

    from torchvision.io import read_video  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with tempfile.NamedTemporaryFile(suffix=key) as file:
        file.write(data)
        file.flush()
        return read_video(file.name, pts_unit="sec")


def torch_audio(key: str, data: bytes) -> Any:
    """Decode sound with torchaudio, which must be installed: samples and sample rate."""
    if key.rpartition(".")[2].lower() not in ("flac", "mp3", "sox", "wav", "m4a", "ogg", "wma"):
        return None
    import torchaudio  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return torchaudio.load(io.BytesIO(data))


# ------------------------------------------------------------------ samples


def _readable(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


class Decoder:
    """``decoder(sample) -> sample``: decodes the fields of a sample.

    Args:
        handlers: decoders, or image specifications (``"rgb8"``), tried in order.
        pre: decoders tried before them; by default, the one that decompresses ``.gz``.
        post: decoders tried after them; by default, text, numbers, JSON and arrays.
        only: decode only these fields.
        partial: leave values that are not bytes unchanged; by default they are an error.
        allow: formats to allow: ``"pickle"``, ``"torch"``.

    Raises:
        ValueError: an unknown image specification.
        DecodingError: (when called) a field cannot be decoded.
    """

    def __init__(
        self,
        handlers: Iterable[Any],
        pre: Iterable[Handlers] | None = None,
        post: Iterable[Handlers] | None = None,
        only: str | Collection[str] | None = None,
        partial: bool = False,
        allow: Collection[str] = (),
    ) -> None:
        self.only = None if only is None else set(only.split() if isinstance(only, str) else only)
        chain = [gzfilter] if pre is None else list(pre)
        chain += [ImageHandler(handler) if isinstance(handler, str) else handler for handler in handlers]
        chain += [basic(allow)] if post is None else list(post)
        self.handlers = chain
        self.partial = partial

    def decode1(self, key: str, data: bytes) -> Any:
        """Decode one field."""
        key = "." + key
        for handler in self.handlers:
            result = handler(key, data)
            if isinstance(result, Continue):
                key, data = result.key, result.data
            elif result is not None:
                return result
        return data

    def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Decode all fields."""
        result: dict[str, Any] = {}
        for name, value in sample.items():
            if name.startswith("__"):
                result[name] = _readable(value) if isinstance(value, bytes) else value
                continue
            left = self.only is not None and name not in self.only
            if left or (self.partial and value is not None and not isinstance(value, bytes)):
                result[name] = value
                continue
            try:
                if not isinstance(value, bytes):
                    raise TypeError(
                        f"a decoder takes bytes, got {type(value).__name__}; pass partial=True to keep such fields"
                    )
                result[name] = self.decode1(name, value)
            except NotAllowedError as error:
                where = f"{shown(str(sample.get('__url__')))}: sample {sample.get('__key__')!r}"
                raise NotAllowedError(f"{where}: {error}") from error
            except Exception as error:
                raise DecodingError(sample.get("__url__"), sample.get("__key__"), name, sample) from error
        return result

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(sample, dict), f"a decoder takes samples as dicts, got {type(sample).__name__}"
        return self.decode(sample)


def decode(*args: Any, handler: Handler = reraise_exception, **kw: Any) -> FilterFunction:
    """Return a filter that decodes samples; options are those of `Decoder`."""
    return FilterFunction(_map, Decoder(args, **kw), handler=handler)


def _decode_bin(stream: Any) -> bytes:
    data: bytes = stream.read()
    return data


def _decode_text(stream: Any) -> str:
    return str(stream.read().decode("utf-8"))


def _decode_pickle(stream: Any) -> Any:
    return unpickle_loads(stream.read())


_XDEFAULTS = (("*.bin", _decode_bin), ("*.txt", _decode_text), ("*.pyd", _decode_pickle))


@memoryless
def _xdecode(
    source: Iterable[Any], *args: Any, must_decode: bool = True, defaults: Any = _XDEFAULTS, **kw: Any
) -> Iterator[Any]:
    """Decode fields with functions of a stream, chosen by patterns."""
    # The last match wins, so a program's decoders override the defaults. False leaves a field unchanged.
    known = [*defaults, *args, *((f"*.{name}", function) for name, function in kw.items())][::-1]
    for sample in source:
        result = dict(sample)
        for name, data in sample.items():
            base = name.rpartition("/")[2].lower()
            if base.startswith("__"):
                continue
            found = next((function for pattern, function in known if _matches(base, [pattern])), None)
            if found:
                result[name] = found(io.BytesIO(data) if isinstance(data, bytes) else data)
            elif found is None and must_decode:
                raise DecodingError(sample.get("__url__"), sample.get("__key__"), name, sample) from ValueError(
                    f"No decoder found for {name}."
                )
        yield result


def xdecode(*args: Any, **kw: Any) -> FilterFunction:
    """Return a filter: ``xdecode(("*.png", f), must_decode=False)``; each function gets the field as an open file."""
    return FilterFunction(_xdecode, *args, **kw)
