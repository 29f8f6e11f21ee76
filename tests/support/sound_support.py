"""Recordings that tests make, and what one hears who plays all of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from video_support import decoded

from penstock.clips.sound_decoder import as_floats


def wave(samples: int, rate: int, channels: int = 2, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return sound that is nowhere the same: rising tones and some noise, float32 (channels, samples)."""
    time = np.arange(samples) / rate
    noise = np.random.default_rng(seed).normal(0, 0.05, (channels, samples))
    tones = [np.sin(2 * np.pi * (200 + 60 * seed + 50 * (one + 1) * time) * time) for one in range(channels)]
    return (0.4 * np.stack(tones) + noise).clip(-1, 1).astype(np.float32)


def write_sound(
    path: Path | str,
    seconds: float = 4.0,
    *,
    codec: str = "pcm_s16le",
    rate: int = 44_100,
    channels: int = 2,
    seed: int = 0,
    format: str | None = None,
    sample_format: str | None = None,
    options: Mapping[str, str] | None = None,
    container: Mapping[str, str] | None = None,
    bit_rate: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a recording of so many seconds; return its path."""
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[channels]
    with av.open(str(path), "w", format=format, options=dict(container or {})) as out:
        out.metadata.update(metadata or {})
        stream: Any = out.add_stream(codec, rate=rate, layout=layout, options=dict(options or {}))
        if sample_format is not None:
            stream.codec_context.format = sample_format
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        frame: Any = av.AudioFrame.from_ndarray(
            wave(round(seconds * rate), rate, channels, seed), format="fltp", layout=layout
        )
        frame.sample_rate, frame.pts = rate, 0
        stream.codec_context.open()
        resampler = av.AudioResampler(
            format=stream.codec_context.format,
            layout=layout,
            rate=rate,
            frame_size=stream.codec_context.frame_size or 1024,
        )
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode(None))
    return Path(path)


def all_samples(path: Path | str) -> npt.NDArray[np.float32]:
    """Return the samples of a recording that is decoded from its beginning to its end."""
    with av.open(str(path)) as opened:
        frames = decoded(opened, opened.streams.best("audio"))
        return np.concatenate([as_floats(frame) for frame in frames], axis=1)
