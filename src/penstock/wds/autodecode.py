"""Decoders that turn the bytes of fields into values, chosen by extension.

    dataset.decode("rgb8")                                        images as uint8 arrays, and the usual text formats
    dataset.decode(wds.handle_extension("seg.png", labels), "pil")
    dataset.decode("torchrgb", only=["jpg", "cls"], handler=wds.warn_and_continue)

A decoder is called as ``f(".ext", data)``; the first result other than None is used. Pickles and torch objects are
refused unless they are allowed, see `penstock.wds.utils`.

The last extension of a field decides whether it is an image. Image specifications:

    l8 rgb8 rgba8                uint8 array (height, width[, channels])
    l rgb rgba                   float32 array from 0 to 1
    torchl8 torchrgb8 torchrgba8 uint8 tensor, channels first; torchl8 is (height, width)
    torch torchl torchrgb torchrgba   float32 tensor from 0 to 1; torch is torchrgb
    pil pill pilrgb pilrgba      PIL image; pil is pilrgb
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from penstock.errors import ConfigError, NotAllowedError, PenstockError
from penstock.shards.decode import VALUES
from penstock.storage.urls import shown
from penstock.wds.utils import allowed, checked, refuse

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


def _msgpack(data: bytes) -> Any:
    import msgpack  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return msgpack.unpackb(data)


def _cbor(data: bytes) -> Any:
    import cbor  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return cbor.loads(data)


decoders: dict[str, Callable[[bytes], Any]] = {
    **VALUES,
    **dict.fromkeys(("mp", "msg"), _msgpack),
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


# ------------------------------------------------------------------ images

IMAGE_EXTENSIONS = [
    *("apng", "blp", "bmp", "bw", "cur", "dcx", "dds", "dib", "emf", "eps", "fit", "fits", "flc", "fli", "ftc", "ftu"),
    *("gbr", "gif", "icb", "icns", "ico", "iim", "im", "j2c", "j2k", "jfif", "jp2", "jpc", "jpe", "jpeg", "jpf", "jpg"),
    *("jpx", "msp", "pbm", "pcd", "pcx", "pgm", "png", "pnm", "ppm", "ps", "psd", "pxr", "ras", "rgb", "rgba", "sgi"),
    *("tga", "tif", "tiff", "vda", "vst", "webp", "wmf", "xbm", "xpm"),
]

_KINDS = {"": "array", "torch": "tensor", "pil": "pil"}


def _specs() -> dict[str, tuple[str, str, bool]]:
    """Return (container, mode, whether the values are floats) by name."""
    found = {}
    for prefix, kind in _KINDS.items():
        for mode in ("l", "rgb", "rgba"):
            found[prefix + mode] = (kind, mode.upper(), kind != "pil")
            if kind != "pil":
                found[prefix + mode + "8"] = (kind, mode.upper(), False)
    return {**found, "pil": found["pilrgb"], "torch": found["torchrgb"]}


_SPECS = _specs()


class ImageHandler:
    """A decoder of images.

    Args:
        imagespec: a name of the table above.
        extensions: extensions of image fields.

    Raises:
        ConfigError: (a ValueError) unknown name.
    """

    def __init__(self, imagespec: str, extensions: Collection[str] = IMAGE_EXTENSIONS) -> None:
        if imagespec.lower() not in _SPECS:
            raise ConfigError(f"Unknown imagespec: {imagespec}; use one of {', '.join(sorted(_SPECS))}")
        self.imagespec = imagespec.lower()
        self.extensions = frozenset(extensions)

    def __call__(self, key: str, data: bytes) -> Any:
        if key.rpartition(".")[2].lower() not in self.extensions:
            return None
        kind, mode, floats = _SPECS[self.imagespec]
        if kind == "pil":
            return _open(data, mode)
        array = _pixels(data, mode)
        if kind == "array":
            return array.astype(np.float32) / np.float32(255) if floats else array
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if tensor.ndim == 3:
            tensor = tensor.permute(2, 0, 1).contiguous()
        return tensor.to(torch.float32) / 255 if floats else tensor


def _pixels(data: bytes, mode: str) -> Any:
    if mode == "RGB" and data.startswith(b"\xff\xd8"):
        from penstock.images.decode import decode

        return decode(data)  # twice as fast as Pillow, with the same pixels
    return np.array(_open(data, mode))


def _open(data: bytes, mode: str) -> Any:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError("this image specification needs Pillow: pip install pillow") from error
    from penstock.images.limits import open_pillow

    with open_pillow(data) as image:
        return image.convert(mode) if image.mode != mode else image.copy()


def imagehandler(imagespec: str, extensions: Collection[str] = IMAGE_EXTENSIONS) -> ImageHandler:
    """Return an `ImageHandler`."""
    return ImageHandler(imagespec, extensions)


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
