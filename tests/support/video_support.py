"""Videos that tests make, and what a player that goes through all of one shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

HEIGHT, WIDTH = 48, 64


def picture(number: int, height: int = HEIGHT, width: int = WIDTH) -> npt.NDArray[np.uint8]:
    """Return a picture that differs from that of any other number, and moves a little from one to the next."""
    y, x = np.mgrid[:height, :width]
    shade = (x * 3 + number * 5) % 256, (y * 5 + number * 3) % 256, (x + y + number * 11) % 256
    pixels = np.stack(shade, axis=2).astype(np.uint8)
    square = number * 2 % (width - 16)
    pixels[8:24, square : square + 16] = (number * 37 % 256, number * 91 % 256, 255 - number % 256)
    return pixels


def write_video(
    path: Path | str,
    frames: int = 48,
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    gop: int = 12,
    rate: int = 24,
    size: tuple[int, int] = (HEIGHT, WIDTH),
    options: Mapping[str, str] | None = None,
    container: Mapping[str, str] | None = None,
    format: str | None = None,
    times: Callable[[int], int] | None = None,
    pictures: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    before: Callable[[Any], Any] | None = None,
    change: Callable[[Any], None] | None = None,
) -> Path:
    """Write a video of so many frames; return its path.

    Args:
        times: the time of a frame, in units of 1 / (10 * rate) seconds; by default they are evenly spaced.
        pictures: the pixels of a frame; by default `picture`.
        before: adds other streams to the container first.
        change: sets what else there is to the stream.
    """
    if codec == "libx265":
        options = {"x265-params": f"log-level=none:{(options or {}).get('x265-params', '')}".rstrip(":")}
    draw = pictures or (lambda number: picture(number, *size))
    with av.open(str(path), "w", format=format, options=dict(container or {})) as out:
        finish = before(out) if before is not None else None
        stream: Any = out.add_stream(codec, rate=rate, options=dict(options or {}))
        stream.height, stream.width = size
        stream.pix_fmt = pix_fmt
        stream.codec_context.gop_size = gop
        if times is not None:
            from fractions import Fraction

            stream.codec_context.time_base = Fraction(1, 10 * rate)
        if change is not None:
            change(stream)
        for number in range(frames):
            frame: Any = av.VideoFrame.from_ndarray(draw(number), format="rgb24")
            frame.pts = number if times is None else times(number)
            if times is not None:
                frame.time_base = stream.codec_context.time_base
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if finish is not None:
            finish()
    return Path(path)


def all_frames(path: Path | str) -> list[Any]:
    """Return the frames of a video that is decoded from its beginning to its end."""
    with av.open(str(path)) as opened:
        stream = opened.streams.best("video")
        stream.thread_count = 1
        return list(decoded(opened, stream))


def decoded(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the frames of a stream up to where it ends, or is torn."""
    try:
        yield from container.decode(stream)
    except av.error.InvalidDataError:
        yield from stream.codec_context.decode(None)


def turned(frame: Any) -> npt.NDArray[np.uint8]:
    """Return the pixels of a frame as it is looked at: (height, width, 3)."""
    pixels = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels, round(frame.rotation / 90) % 4)


def clip_of(frames: Iterable[Any], numbers: Iterable[int]) -> npt.NDArray[np.uint8]:
    """Return the pixels of some frames: (frames, 3, height, width)."""
    known = list(frames)
    chosen = [known[min(number, len(known) - 1)] for number in numbers]
    return np.stack([turned(frame).transpose(2, 0, 1) for frame in chosen])
