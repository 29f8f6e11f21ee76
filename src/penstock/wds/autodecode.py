"""The decoders under the name of the module that programs import."""

from __future__ import annotations

from penstock.wds.decoders import (
    Continue,
    Decoder,
    DecodingError,
    basichandlers,
    decoders,
    gzfilter,
    handle_extension,
    torch_audio,
    torch_loads,
    torch_video,
    unpickle_loads,
)
from penstock.wds.images import IMAGE_EXTENSIONS, ImageHandler, imagehandler

__all__ = [
    "IMAGE_EXTENSIONS",
    "Continue",
    "Decoder",
    "DecodingError",
    "ImageHandler",
    "basichandlers",
    "decoders",
    "gzfilter",
    "handle_extension",
    "imagehandler",
    "torch_audio",
    "torch_loads",
    "torch_video",
    "unpickle_loads",
]
