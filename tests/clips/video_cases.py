"""Kinds of video, each with what makes it hard to reach a frame."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from video_support import picture, write_video

Make = Callable[[Path], Path]


def _video(name: str, **options: Any) -> Make:
    return lambda folder: write_video(folder / name, **options)


def _uneven(number: int) -> int:
    """A time at which a frame of varying rate is shown."""
    return 10 * number + random.Random(number).randrange(9)


def _with_others(out: Any) -> Any:
    """Add sound before the video, and a small second video."""
    sound = out.add_stream("aac", rate=8000, layout="mono")
    small = out.add_stream("mpeg4", rate=24)
    small.width = small.height = 16
    small.pix_fmt = "yuv420p"

    def finish() -> None:
        wave = np.sin(np.arange(16_384) / 9).astype(np.float32)
        for begin in range(0, len(wave), 1024):
            frame = av.AudioFrame.from_ndarray(wave[None, begin : begin + 1024].copy(), format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 8000, begin, Fraction(1, 8000)
            out.mux(sound.encode(frame))
        out.mux(sound.encode(None))
        for number in range(48):
            frame = av.VideoFrame.from_ndarray(np.full((16, 16, 3), number, np.uint8), format="rgb24")
            frame.pts = number
            out.mux(small.encode(frame))
        out.mux(small.encode(None))

    return finish


def _turned(degrees: int) -> Callable[[Any], None]:
    return lambda stream: stream.set_display_rotation(degrees)


def _tagged(tag: str) -> Callable[[Any], None]:
    def change(stream: Any) -> None:
        stream.codec_context.codec_tag = tag

    return change


def _full_range(stream: Any) -> None:
    stream.codec_context.color_range = 2
    stream.codec_context.colorspace = 1


def _cut(name: str, **options: Any) -> Make:
    """A video of which the last third is missing."""

    def make(folder: Path) -> Path:
        path = write_video(folder / name, **options)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
        return path

    return make


def _edited(folder: Path) -> Path:
    """A video whose edit list begins in the middle of a group: frames before it are decoded and not shown."""
    whole = write_video(folder / "whole.mp4", codec="libx264", options={"bf": "2"})
    path = folder / "edited.mp4"
    with av.open(str(whole)) as source, av.open(str(path), "w") as out:
        stream = source.streams.video[0]
        copy = out.add_stream_from_template(stream)
        shift = int(Fraction(5, 24) / stream.time_base)
        for packet in source.demux(stream):
            if packet.dts is None:
                continue
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            packet.stream = copy
            out.mux(packet)
    whole.unlink()
    return path


def _headless(folder: Path) -> Path:
    """A transport stream that begins in the middle of a group."""
    path = write_video(folder / "headless.ts", gop=12)
    data = path.read_bytes()
    path.write_bytes(data[188 * (len(data) // 188 // 10) :])
    return path


def _joined(folder: Path) -> Path:
    """Two transport streams behind each other, the second of which begins at the same time."""
    parts = [
        write_video(folder / f"{number}.ts", 30, pictures=lambda frame, number=number: picture(100 * number + frame))
        for number in range(2)
    ]
    path = folder / "joined.ts"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    for part in parts:
        part.unlink()
    return path


B_FRAMES = {"bf": "3", "b_strategy": "0"}

VIDEOS: dict[str, Make] = {
    "h264": _video("a.mp4"),
    "h264 without B-frames": _video("a.mp4", options={"bf": "0"}),
    "h264 in open groups": _video("a.mp4", options={**B_FRAMES, "x264-params": "open-gop=1:keyint=12:scenecut=0"}),
    "h264 of one group": _video("a.mp4", gop=1000),
    "h264 of keys alone": _video("a.mp4", gop=1),
    "h264 with pyramids": _video("a.mkv", options={"bf": "4", "x264-params": "b-pyramid=normal:ref=4"}),
    "h264 in fragments": _video("a.mp4", container={"movflags": "frag_keyframe+empty_moov"}),
    "h264 raw": _video("a.h264", options={"bf": "2"}),
    "h264 interlaced": _video("a.mp4", options={"x264-params": "interlaced=1"}),
    "h264 refreshed bit by bit": _video("a.mp4", options={"x264-params": "intra-refresh=1:keyint=12"}),
    "h265": _video("a.mp4", codec="libx265"),
    "h265 in open groups": _video("a.mkv", codec="libx265", options={"x265-params": "open-gop=1:keyint=12:bframes=4"}),
    "h265 in a transport stream": _video("a.ts", codec="libx265"),
    "vp9": _video("a.webm", codec="libvpx-vp9", options={"deadline": "realtime", "cpu-used": "8"}),
    "vp9 with hidden frames": _video(
        "a.webm", codec="libvpx-vp9", options={"auto-alt-ref": "1", "lag-in-frames": "16"}
    ),
    "vp8": _video("a.webm", codec="libvpx", options={"deadline": "realtime"}),
    "av1": _video("a.mp4", codec="libsvtav1", options={"preset": "12", "svtav1-params": "tune=0"}),
    "av1 in matroska": _video("a.mkv", codec="libsvtav1", options={"preset": "12"}),
    "mpeg4": _video("a.mp4", codec="mpeg4"),
    "mpeg4 in avi, without times": _video("a.avi", codec="mpeg4", options={"bf": "2"}),
    "mpeg2": _video("a.mpg", codec="mpeg2video", rate=25, options={"bf": "2"}),
    "mpeg2 in mov": _video("a.mov", codec="mpeg2video", rate=25, options={"bf": "2"}),
    "mpeg4 in avi, in a tag of its own": _video("a.avi", codec="mpeg4", change=_tagged("XVID")),
    "png": _video("a.mov", codec="png", pix_fmt="rgb24"),
    "raw pixels": _video("a.avi", codec="rawvideo"),
    "ffv1": _video("a.mkv", codec="ffv1"),
    "h264 in avi, with guessed times": _video("a.avi", options=B_FRAMES),
    "transport streams, joined, with two times": _joined,
    "transport stream in open groups": _video(
        "a.ts", options={**B_FRAMES, "x264-params": "open-gop=1:keyint=12:scenecut=0"}
    ),
    "motion jpeg": _video("a.avi", codec="mjpeg", pix_fmt="yuvj420p"),
    "flash": _video("a.flv", codec="flv"),
    "transport stream": _video("a.ts", options={"bf": "2"}),
    "transport stream without a head": _headless,
    "varying rate": _video("a.mp4", times=_uneven),
    "varying rate in matroska": _video("a.mkv", times=_uneven, options=B_FRAMES),
    "begins late": _video("a.mp4", times=lambda number: 300 + 10 * number),
    "edit list": _edited,
    "turned by 90": _video("a.mp4", change=_turned(90)),
    "turned by 180": _video("a.mov", change=_turned(180)),
    "turned by 270": _video("a.mp4", change=_turned(-90)),
    "full range": _video("a.mp4", change=_full_range),
    "ten bits": _video("a.mp4", pix_fmt="yuv420p10le"),
    "all colours": _video("a.mp4", pix_fmt="yuv444p"),
    "odd size": _video("a.mp4", size=(50, 70)),
    "several streams": _video("a.mp4", before=_with_others),
    "several streams in matroska": _video("a.mkv", before=_with_others),
    "truncated": _cut("cut.mkv"),
    "truncated within a packet": _cut("cut.mp4", container={"movflags": "faststart"}),
    "one frame": _video("a.mp4", frames=1),
}
"""What makes each kind."""


@functools.cache
def is_made_here(kind: str) -> bool:
    """Whether this FFmpeg has the encoder of a kind."""
    names = {"h265": "libx265", "vp9": "libvpx-vp9", "vp8": "libvpx", "av1": "libsvtav1"}
    codec = names.get(kind.split(" ")[0])
    return codec is None or codec in av.codecs_available
