"""Clips of video and sound: speed, time by the place in the file, bytes read, memory, first batch.

    VideoDataset             this library; AudioDataset for sound
    PyAV                     opens the file for each clip, seeks to the key before it, decodes on
    PyAV, kept open          the same, files stay open
    torchcodec               VideoDecoder of each file for each clip, and with seek_mode="approximate", which trusts
                             what the container says of its frames; where it is installed
    soundfile                from the beginning: reads up to the clip; or seeks in an open file

Video is H.264 of 480 x 270, a key every 60 frames, made here; clips are 16 frames in a row at random starts, uint8
(16, 3, height, width), contiguous. One thread of one process.

    python benchmarks/clips.py --minutes 60 --repeat 5
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import soundfile
import torch

import penstock as ps
from _common import Samples, folder, interleave, parse, spread, table

HEIGHT, WIDTH, GOP, FRAMES, RATE = 270, 480, 60, 16, 30
FILES = 8

try:
    from torchcodec.decoders import VideoDecoder
except (ImportError, OSError, RuntimeError):
    VideoDecoder = None


def write_video(path: Path, frames: int) -> None:
    """Write a video with some texture that moves, as a camera would."""
    draw = np.random.default_rng(0)
    fine = cv2.GaussianBlur((draw.random((HEIGHT + 200, WIDTH + 200, 3)) * 40).astype(np.float32), (0, 0), 1.5)
    coarse = cv2.resize((draw.random((18, 30, 3)) * 200).astype(np.float32), (WIDTH + 200, HEIGHT + 200))
    texture = np.clip(fine * 2 + coarse, 0, 255).astype(np.uint8)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("libx264", rate=RATE, options={"crf": "23", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.codec_context.gop_size = GOP
        for number in range(frames):
            x, y = int(100 + 90 * np.sin(number / 25)), int(100 + 90 * np.cos(number / 31))
            pixels = texture[y : y + HEIGHT, x : x + WIDTH].copy()
            left = number * 3 % (WIDTH - 60)
            pixels[100:160, left : left + 60] = (number % 255, 80, 200)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))


def repeat_video(path: Path, source: Path, times: int) -> None:
    """Write the packets of a video again and again: a long one, without the time that encoding would take."""
    with av.open(str(source)) as opened, av.open(str(path), "w") as out:
        stream = opened.streams.video[0]
        copy = out.add_stream_from_template(stream)
        packets = [packet for packet in opened.demux(stream) if packet.size]
        length = int(stream.frames / stream.average_rate / stream.time_base)
        held = [(bytes(packet), packet.pts, packet.dts, packet.is_keyframe) for packet in packets]
        for turn in range(times):
            for data, pts, dts, key in held:
                packet = av.Packet(data)
                packet.pts, packet.dts = pts + turn * length, dts + turn * length
                packet.time_base, packet.stream, packet.is_keyframe = stream.time_base, copy, key
                out.mux(packet)


def write_sound(path: Path, seconds: int, codec: str) -> None:
    """Write a recording of tones and noise."""
    rate, draw = 44_100, np.random.default_rng(0)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream(codec, rate=rate, layout="stereo")
        stream.codec_context.open()
        resampler = av.AudioResampler(
            format=stream.codec_context.format, layout="stereo", rate=rate, frame_size=stream.codec_context.frame_size
        )
        for second in range(seconds):
            time_ = np.arange(rate) / rate + second
            values = 0.4 * np.sin(2 * np.pi * (300 + 5 * second) * time_) + draw.normal(0, 0.05, (2, rate))
            frame: Any = av.AudioFrame.from_ndarray(values.astype(np.float32), format="fltp", layout="stereo")
            frame.sample_rate, frame.pts, frame.time_base = rate, second * rate, Fraction(1, rate)
            for piece in resampler.resample(frame):
                out.mux(stream.encode(piece))
        for piece in resampler.resample(None):
            out.mux(stream.encode(piece))
        out.mux(stream.encode(None))


def _starts(lengths: list[int], count: int) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(one % len(lengths), draw.randrange(lengths[one % len(lengths)] - FRAMES)) for one in range(count)]


def _resized(clip: torch.Tensor, size: int | None) -> torch.Tensor:
    if size is None:
        return clip
    return torch.nn.functional.interpolate(clip, size=(size, size), mode="bilinear", antialias=True)


def by_pyav(container: Any, first: int, size: int | None) -> torch.Tensor:
    """Seek, decode on, and stack."""
    stream = container.streams.video[0]
    unit = float(stream.time_base) * float(stream.average_rate)
    container.seek(int(first / unit), stream=stream)
    frames = []
    for frame in container.decode(stream):
        if round(frame.pts * unit) >= first:
            pixels = frame.to_ndarray(format="rgb24")
            frames.append(pixels if size is None else cv2.resize(pixels, (size, size), interpolation=cv2.INTER_AREA))
            if len(frames) == FRAMES:
                break
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


def opened(path: str) -> Any:
    """Open a video with one decoder thread."""
    container = av.open(path)
    container.streams.video[0].thread_count = 1
    return container


def ways(paths: list[str], lengths: list[int], count: int, size: int | None) -> dict[str, Callable[[], None]]:
    """Return who makes so many clips."""
    places = _starts(lengths, count)
    kept = [opened(path) for path in paths]
    dataset = ps.VideoDataset(paths * -(-count // len(paths)), frames=FRAMES, size=size, seed=0)

    def pyav() -> None:
        for file, first in places:
            with opened(paths[file]) as container:
                by_pyav(container, first, size)

    def pyav_kept() -> None:
        for file, first in places:
            by_pyav(kept[file], first, size)

    def ours() -> None:
        for row in range(count):
            dataset[row]

    def torchcodec(mode: str) -> None:
        for file, first in places:
            decoder = VideoDecoder(paths[file], num_ffmpeg_threads=1, seek_mode=mode)
            _resized(decoder.get_frames_in_range(first, first + FRAMES).data, size).contiguous()

    found = {"PyAV": pyav, "PyAV, kept open": pyav_kept, "VideoDataset": ours}
    if VideoDecoder is not None:
        found["torchcodec"] = lambda: torchcodec("exact")
        found["torchcodec, approximate"] = lambda: torchcodec("approximate")
    return found


def _rows(measured: dict[str, Samples], count: int, bar: Callable[[str], str]) -> list[list[object]]:
    return [
        [
            name,
            *spread([count / wall for wall in one.wall]),
            spread([1e3 * cpu / count for cpu in one.cpu])[1],
            bar(name),
        ]
        for name, one in measured.items()
    ]


COLUMNS = ["", "clips/s: min", "median", "max", "CPU, ms a clip", "bar"]


def measure_speed(where: Path, count: int, repeat: int) -> None:
    """How many clips in a second."""
    lengths = [900 + 30 * number for number in range(FILES)]
    paths = [str(where / f"{number}.mp4") for number in range(FILES)]
    for path, length in zip(paths, lengths, strict=True):
        write_video(Path(path), length)
    for size in (None, 112):
        made = ways(paths, lengths, count, size)
        for way in made.values():
            way()
        measured = interleave(made, repeat)
        peers = [statistics.median(measured[name].wall) for name in ("PyAV", "torchcodec") if name in measured]
        ratio = min(peers) / measured["VideoDataset"].median

        def bar(name: str, ratio: float = ratio) -> str:
            reached = f"{ratio:.2f} x the better exact peer that opens: {'met' if ratio >= 1.5 else 'MISSED'} (1.5)"
            return reached if name == "VideoDataset" else ""

        title = "as they are" if size is None else f"resized to {size} x {size}"
        table(f"clips {title}", COLUMNS, _rows(measured, count, bar), peer="PyAV")


def measure_place(where: Path, minutes: int, count: int, repeat: int) -> None:
    """Whether a clip costs more at the end of a long file."""
    short, long = where / "minute.mp4", where / "long.mp4"
    write_video(short, 60 * RATE)
    repeat_video(long, short, minutes)
    begun = time.perf_counter()
    dataset = ps.VideoDataset([long], frames=FRAMES, stride=20)
    indexing = time.perf_counter() - begun
    draw, minute = random.Random(0), 60 * RATE // 20
    rows = {
        "first minute": [draw.randrange(minute) for _ in range(count)],
        "last minute": [len(dataset) - 1 - draw.randrange(minute) for _ in range(count)],
    }
    local = np.argsort(dataset.rows(np.arange(len(dataset))))

    def read(which: list[int]) -> Callable[[], None]:
        return lambda: [dataset[int(local[row])] for row in which] and None

    measured = interleave({name: read(which) for name, which in rows.items()}, repeat)
    ratio = measured["last minute"].median / measured["first minute"].median
    bar = f"{ratio:.2f} x: {'met' if ratio <= 1.2 else 'MISSED'} (1.2)"
    shown = _rows(measured, count, lambda name: bar if name == "last minute" else "")
    table(f"a file of {minutes} minutes, indexed in {indexing:.1f} s", COLUMNS, shown, peer="first minute")


def measure_memory(where: Path, clips: int) -> None:
    """Whether memory grows from clip to clip."""
    program = f"""
import os, penstock as ps, torch
torch.set_num_threads(1)
paths = [f"{where}/{{number}}.mp4" for number in range({FILES})]
dataset = ps.VideoDataset(paths, frames=4, size=32, seed=0)
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024
for done in range({clips}):
    if done in ({clips} // 10, {clips} // 2):
        print(private())
    if done % {FILES} == 0:
        dataset.set_epoch(done)
    dataset[done % {FILES}]
print(private())
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    early, middle, late = (float(value) for value in said)
    bar = "flat: " + ("met" if late <= 1.05 * early + 2 else "MISSED")
    rows = [["VideoDataset", f"{early:.1f}", f"{middle:.1f}", f"{late:.1f}", bar]]
    table(f"private memory, MiB, over {clips:,} clips", ["", "after a tenth", "half", "all", "bar"], rows)


def measure_first(where: Path, files: int, repeat: int) -> None:
    """How long it takes to the first batch of many files with an index."""
    source = where / "few.mp4"
    write_video(source, 90)
    (where / "many").mkdir()
    for number in range(files):
        os.link(source, where / "many" / f"{number:04d}.mp4")
    index = where / "many.clips"
    ps.VideoDataset(where / "many", index=index)

    def first() -> None:
        dataset = ps.VideoDataset(where / "many", frames=FRAMES, size=112, index=index)
        next(iter(ps.DataLoader(dataset, batch_size=16)))

    measured = interleave({"VideoDataset": first}, repeat)["VideoDataset"]
    low, middle, high = spread(measured.wall)
    bar = "<= 1 s: " + ("met" if max(measured.wall) <= 1 else "MISSED")
    columns = ["", "seconds: min", "median", "max", "bar"]
    table(f"first batch of 16 clips of {files:,} files", columns, [["VideoDataset", low, middle, high, bar]])


def measure_sound(where: Path, minutes: int, count: int, repeat: int) -> None:
    """How long 2 seconds take out of a long recording."""
    for name, codec in (("flac", "flac"), ("mp3", "libmp3lame")):
        path = where / f"long.{name}"
        write_sound(path, 60 * minutes, codec)
        dataset = ps.AudioDataset([path] * count, seconds=2.0, seed=0)
        starts = [round(dataset[row][1]["seconds"] * 44_100) for row in range(count)]
        few = starts[: max(1, count // 20)]

        def ours(dataset: Any = dataset) -> None:
            for row in range(count):
                dataset[row]

        def beginning(path: Path = path, few: list[int] = few) -> None:
            for start in few:
                with soundfile.SoundFile(path) as file:
                    left = start
                    while left > 0:
                        left -= len(file.read(min(left, 1 << 20), dtype="float32"))
                    file.read(88_200, dtype="float32")

        def seeking(path: Path = path, starts: list[int] = starts) -> None:
            for start in starts:
                with soundfile.SoundFile(path) as file:
                    file.seek(start)
                    file.read(88_200, dtype="float32")

        for row, start in enumerate(starts[:5]):
            if name == "flac":
                expected, _ = soundfile.read(path, start=start, frames=88_200, dtype="float32")
                assert np.array_equal(dataset[row][0].numpy(), expected.T)
        measured = interleave(
            {"soundfile, from the beginning": beginning, "soundfile, seeks": seeking, "AudioDataset": ours}, repeat
        )
        each = {one: len(few) if "beginning" in one else count for one in measured}
        ms = {one: [1e3 * wall / each[one] for wall in samples.wall] for one, samples in measured.items()}
        ratio = statistics.median(ms["soundfile, from the beginning"]) / statistics.median(ms["AudioDataset"])
        rows = [
            [
                one,
                *spread(values),
                spread([1e3 * cpu / each[one] for cpu in measured[one].cpu])[1],
                f"{ratio:.0f} x: {'met' if ratio >= 20 else 'MISSED'} (20)" if one == "AudioDataset" else "",
            ]
            for one, values in ms.items()
        ]
        columns = ["", "ms a clip: min", "median", "max", "CPU, ms", "bar"]
        table(f"2 s out of {minutes} minutes of {name.upper()}", columns, rows, peer="soundfile, from the beginning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=80, help="of each measurement (default: %(default)s)")
    parser.add_argument("--minutes", type=int, default=60, help="of the long files (default: %(default)s)")
    parser.add_argument(
        "--many", type=int, default=10_000, help="clips over which memory is flat (default: %(default)s)"
    )
    parser.add_argument("--files", type=int, default=1_000, help="of which a first batch is (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    quick = {"clips": 8, "minutes": 2, "many": 200, "files": 20, "repeat": 1}
    options = parse(parser, quick, versions=["av", "torchcodec", "soundfile", "soxr"])
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    with folder(options.dir) as where:
        os.environ["XDG_CACHE_HOME"] = str(where / "cache")
        measure_speed(where, options.clips, options.repeat)
        measure_place(where, options.minutes, options.clips, options.repeat)
        measure_first(where, options.files, options.repeat)
        measure_memory(where, options.many)
        measure_sound(where, options.minutes, options.clips, options.repeat)


if __name__ == "__main__":
    main()
