"""Files of video or sound that are changed at random, through an index and a worker process: `test_clip_fuzz.py` runs
this, in a process of its own.

    python tests/tools/clips/clip_fuzz.py KIND SEED COUNT

Prints a JSON object: how many files were `refused` when they were indexed, and how many took their process along
(`ended`); how many `clips` came, and how many were `skipped` by the loader, of which error types (`errors`); the most
memory in MB of a process that indexes or decodes (`megabytes`), and the longest time between two batches (`seconds`).
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from sound_support import write_sound
from video_support import write_video

import penstock as ps
from penstock.clips import decoder

NUMBERS = (0, 1, 2, 255, 1000, 65_535, 1 << 16, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
AT_A_TIME = 500  # files that lie on the disk at once


def videos(folder: Path) -> list[bytes]:
    """Whole files of many kinds."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("a.mp4", {"options": {"bf": "2"}}),
        ("b.mp4", {"container": {"movflags": "frag_keyframe+empty_moov"}}),
        ("c.mkv", {}),
        ("d.ts", {}),
        ("e.avi", {"codec": "mpeg4", "options": {"bf": "2"}}),
        ("f.mp4", {"codec": "libx265"}),
        ("g.webm", {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}}),
        ("i.mpg", {"codec": "mpeg2video", "rate": 25}),
        ("j.avi", {"codec": "mjpeg", "pix_fmt": "yuvj420p"}),
        ("k.h264", {"options": {"bf": "2"}}),
        ("l.flv", {"codec": "flv"}),
        ("m.mov", {"codec": "png", "pix_fmt": "rgb24"}),
        ("n.mkv", {"codec": "ffv1"}),
    ]
    return [write_video(folder / name, 12, gop=6, **options).read_bytes() for name, options in kinds]


def sounds(folder: Path) -> list[bytes]:
    """Whole files of many kinds."""
    kinds = [
        ("a.wav", "pcm_s16le"),
        ("b.flac", "flac"),
        ("c.mp3", "libmp3lame"),
        ("d.opus", "libopus"),
        ("e.m4a", "aac"),
        ("f.ac3", "ac3"),
        ("g.aac", "aac"),
        ("h.mka", "flac"),
        ("i.m4a", "alac"),
        ("j.wav", "adpcm_ima_wav"),
        ("k.mp2", "mp2"),
    ]
    return [write_sound(folder / name, 0.6, codec=codec, rate=48_000).read_bytes() for name, codec in kinds]


def mutate(rng: random.Random, files: list[bytes]) -> bytes:
    """One to four changes: bits, bytes, numbers, cuts, repetitions, parts of other files. Most are near an end, where
    containers say what there is."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.randint(1, 4)):
        near = min(len(data), rng.choice((200, 1500, len(data)))) or 1
        at = rng.randrange(near) if rng.random() < 0.5 else len(data) - 1 - rng.randrange(near)
        at, way = max(0, at), rng.randrange(8)
        if way == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1 and data:
            data[at] = rng.randrange(256)
        elif way in (2, 3):
            data[at : at + 4] = rng.choice(NUMBERS).to_bytes(4, rng.choice(("big", "little")))
        elif way == 4:
            del data[at : at + rng.randint(1, 200)]
        elif way == 5:
            data[at:at] = data[at : at + rng.randint(1, 200)]
        elif way == 6:
            del data[max(at, 1) :]
        else:
            other = rng.choice(files)
            data[at:] = other[min(at, len(other)) :]
    return bytes(data)


def main(kind: str, seed: int, count: int) -> dict[str, Any]:
    """Index `count` files, and make a batch of each in a worker."""
    rng = random.Random(seed)
    found: dict[str, Any] = {"files": count, "refused": 0, "clips": 0, "skipped": 0, "ended": 0, "seconds": 0.0}
    errors: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        whole = (videos if kind == "video" else sounds)(Path(folder))
        for begin in range(0, count, AT_A_TIME):
            paths = [f"{folder}/{number}.bin" for number in range(min(AT_A_TIME, count - begin))]
            for path in paths:
                Path(path).write_bytes(mutate(rng, whole))
            through(kind, paths, f"{folder}/{begin}.index", found, errors)
    assert not decoder._open.decoders, "this process has decoded"
    found["errors"] = errors
    found["megabytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return found


def through(kind: str, paths: list[str], index: str, found: dict[str, Any], errors: Counter[str]) -> None:
    """Make clips of files, and note in `found` and `errors` what came of it."""
    options: dict[str, Any] = {"index": index, "labels": range(len(paths)), "progress": False}
    dataset: Any = (
        ps.VideoDataset(paths, frames=4, size=32, **options)
        if kind == "video"
        else ps.AudioDataset(paths, seconds=0.1, channels=1, sample_rate=48_000, **options)
    )
    said = dataset.files.index.column("error")
    found["refused"] += sum(bool(one) for one in said)
    found["ended"] += sum("has ended" in one for one in said)
    loader: Any = ps.DataLoader(
        dataset, 10, executor="process", num_workers=1, on_worker_death="restart", on_error="skip"
    )
    labels, last = [], time.monotonic()
    for _, label in loader:
        labels += label.tolist()
        found["seconds"] = max(found["seconds"], time.monotonic() - last)
        last = time.monotonic()
    failures = loader.stats()["errors"]
    errors.update(failures["types"])
    found["clips"] += len(labels)
    found["skipped"] += failures["skipped"]
    loader.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(main(sys.argv[1], *map(int, sys.argv[2:])), sys.stdout)
