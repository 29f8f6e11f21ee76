"""`SoundDecoder`: decodes audio packets to float32 samples without a container."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.codec.context import CodecContext, Flags2
from av.packet import Packet

from penstock.clips.sound import SoundCoding
from penstock.errors import ClipError

__all__ = ["SoundDecoder", "as_floats", "is_known", "samples_of"]

_SCALES = {"u8": 128.0, "s16": 32768.0, "s32": 2147483648.0}


class SoundDecoder:
    """A decoder for audio packets.

    Args:
        context: PyAV's codec context, which has decoded nothing yet.
    """

    def __init__(self, context: Any) -> None:
        # Keep the encoder's priming samples: the reader counts and drops them.
        context.flags2 |= Flags2.skip_manual
        self._context = context

    @classmethod
    def of(cls, coding: SoundCoding) -> SoundDecoder:
        """Return a new decoder for packets with this coding.

        Each clip needs a new one: some decoders draw noise, which must not depend on earlier clips.

        Raises:
            ClipError: FFmpeg has no such decoder.
        """
        try:
            context: Any = CodecContext.create(coding.codec, "r")
        except (av.error.FFmpegError, ValueError) as error:
            raise ClipError(f"this FFmpeg cannot decode {coding.codec}: {error}") from error
        context.extradata = coding.extradata or None
        context.sample_rate, context.layout = coding.rate, coding.layout
        context.thread_count = 1  # threads do not survive a fork
        return cls(context)

    def frames(self, packets: Iterable[tuple[int, Packet[Any]]]) -> Iterator[tuple[int, Any]]:
        """Yield (packet number, frame). Damaged packets are skipped.

        Args:
            packets: (number, packet), in order.
        """
        context = self._context
        context.flush_buffers()
        for number, packet in packets:
            packet.pts = packet.dts = number
            try:
                for frame in context.decode(packet):
                    yield number if frame.pts is None else frame.pts, frame
            except av.error.InvalidDataError:
                continue
        for frame in context.decode(None):
            yield number if frame.pts is None else frame.pts, frame


def is_known(codec: str) -> bool:
    """Return whether `SoundCoding` contains all parameters that the codec's decoder needs."""
    return codec.startswith(("pcm_", "mp3", "mp2")) or codec in ("flac", "opus", "aac", "vorbis", "alac", "ac3", "eac3")


def as_floats(frame: Any) -> npt.NDArray[np.float32]:
    """Return the samples of a frame: float32 (channels, samples), from -1 to 1."""
    values = frame.to_ndarray()
    name = frame.format.name
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    scale = _SCALES.get(name.removesuffix("p"))
    if scale is None:
        return np.asarray(values, np.float32)
    if name.startswith("u8"):
        values = values.astype(np.float32) - scale
    return np.asarray(values, np.float32) / np.float32(scale)


def samples_of(codec: str, nbytes: int, channels: int) -> int:
    """Return the number of samples per channel in ``nbytes`` of PCM.

    >>> samples_of("pcm_s16le", 4096, 2)
    1024
    """
    # "pcm_s16le", "pcm_f32be", "pcm_u8"; the telephony codecs "pcm_alaw" and "pcm_mulaw" have 8 bits.
    digits = "".join(sign for sign in codec.partition("_")[2] if sign.isdigit())
    return nbytes // ((int(digits) // 8 if digits else 1) * max(1, channels))
