"""Kinds of recordings, each with what makes it hard to reach a sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
from sound_support import write_sound
from video_support import write_video

Make = Callable[[Path], Path]


def _sound(name: str, codec: str, **options: Any) -> Make:
    return lambda folder: write_sound(folder / name, codec=codec, **options)


def _cut(name: str, codec: str) -> Make:
    """A recording of which the last third is missing."""

    def make(folder: Path) -> Path:
        path = write_sound(folder / name, codec=codec)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
        return path

    return make


def _of_a_film(folder: Path) -> Path:
    """The sound of a video, whose packets lie between those of its pictures."""
    picture, sound = write_video(folder / "v.mp4", 96), write_sound(folder / "s.m4a", codec="aac", options=EXACT)
    with (
        av.open(str(picture)) as video,
        av.open(str(sound)) as audio,
        av.open(str(folder / "film.mp4"), "w") as out,
    ):
        streams = {
            source: out.add_stream_from_template(source) for source in (video.streams.video[0], audio.streams.audio[0])
        }
        packets = [packet for one in (video, audio) for packet in one.demux() if packet.dts is not None]
        for packet in sorted(packets, key=lambda packet: packet.dts * packet.time_base):
            packet.stream = streams[packet.stream]
            out.mux(packet)
    picture.unlink()
    sound.unlink()
    return folder / "film.mp4"


EXACT = {"aac_pns": "0", "aac_is": "0"}
"""Without noise that a decoder draws."""

SOUNDS: dict[str, Make] = {
    "wav": _sound("a.wav", "pcm_s16le"),
    "wav of 24 bits": _sound("a.wav", "pcm_s24le"),
    "wav of floats": _sound("a.wav", "pcm_f32le"),
    "wav of bytes": _sound("a.wav", "pcm_u8", channels=1),
    "wav of a telephone": _sound("a.wav", "pcm_mulaw", rate=8_000, channels=1),
    "wav of adpcm": _sound("a.wav", "adpcm_ima_wav"),
    "wav of six channels": _sound("a.wav", "pcm_s16le", channels=6),
    "aiff": _sound("a.aiff", "pcm_s16be"),
    "flac": _sound("a.flac", "flac"),
    "flac of 24 bits": _sound("a.flac", "flac", sample_format="s32"),
    "flac of one channel": _sound("a.flac", "flac", rate=16_000, channels=1),
    "flac in matroska": _sound("a.mka", "flac"),
    "flac in ogg": _sound("a.oga", "flac", format="ogg"),
    "mp3": _sound("a.mp3", "libmp3lame"),
    "mp3 of few bits": _sound("a.mp3", "libmp3lame", rate=24_000, channels=1, bit_rate=8_000),
    "mp3 of many bits": _sound("a.mp3", "libmp3lame", bit_rate=320_000),
    "mp3 of varying bits": _sound("a.mp3", "libmp3lame", options={"compression_level": "2", "q": "4"}),
    "mp3 with a title": _sound("a.mp3", "libmp3lame", metadata={"title": "t" * 3000}),
    "mp3 without a head": _sound("a.mp3", "libmp3lame", container={"write_xing": "0", "id3v2_version": "0"}),
    "mp3 in matroska": _sound("a.mka", "libmp3lame"),
    "aac": _sound("a.m4a", "aac", options=EXACT),
    "aac raw": _sound("a.aac", "aac", options=EXACT),
    "aac of a film": _of_a_film,
    "alac": _sound("a.m4a", "alac"),
    "truncated mp3": _cut("cut.mp3", "libmp3lame"),
    "truncated flac": _cut("cut.flac", "flac"),
    "truncated wav": _cut("cut.wav", "pcm_s16le"),
    "vorbis": _sound("a.ogg", "vorbis", options={"strict": "experimental"}),
    "vorbis in matroska": _sound("a.mka", "vorbis", options={"strict": "experimental"}),
    "windows media": _sound("a.wma", "wmav2", bit_rate=128_000),
}
"""What makes each kind whose samples are exactly those of a decode from the beginning."""

NEAR: dict[str, Make] = {
    "opus": _sound("a.opus", "libopus", rate=48_000),
    "opus of voices": _sound(
        "a.ogg", "libopus", rate=48_000, channels=1, bit_rate=12_000, options={"application": "voip"}
    ),
    "opus in webm": _sound("a.webm", "libopus", rate=48_000),
    "opus in mp4": _sound("a.mp4", "libopus", rate=48_000),
    "mp2, which is dithered": _sound("a.mp2", "mp2"),
    "ac3, which is dithered": _sound("a.ac3", "ac3", rate=48_000),
    "aac with noise": _sound("a.m4a", "aac", bit_rate=48_000),
}
"""Those that depend a little on where a decoder began: their decoders draw noise, or converge."""
