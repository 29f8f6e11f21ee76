"""Measures how fast each installed backend reads the user's files. Used by ``penstock bench readers``.

    files = sample(Path("/data/train"), count=200)
    result = compare(files, target=224, threads=(1, 8), rounds=3)
    result.speed["simplejpeg"]["decode", 8]          # images/s, the median of the rounds

There are four tasks. Each begins with bytes in memory, so no disk is measured:

==========  ==========================================================================================
``header``  width and height only
``decode``  the whole image
``target``  the whole image, resized to `target` pixels a side; shrunk while decoding if the library can
``crop``    the middle quarter of the area, resized to `target`; ``native`` decodes only that part
==========  ==========================================================================================

All backends take turns in every round, so that noise affects them alike. A file that any backend cannot process in any
task is counted and left out for all. If a library cannot shrink a file while decoding, or cannot decode a part of it
(such as CMYK), it decodes the whole image, as in training.
"""

from __future__ import annotations

import io
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import simplejpeg

from penstock.errors import ConfigError, ImageError
from penstock.images import exif
from penstock.images.backends import BACKENDS, choose, installed
from penstock.images.decode import MAX_PIXELS, decode
from penstock.images.files import EXTENSIONS, is_image
from penstock.images.headers import size_from_header
from penstock.images.limits import Limit, check_jpeg, open_pillow
from penstock.images.region import Box, decode_region

__all__ = ["TASKS", "Comparison", "Files", "compare", "sample", "synthetic_jpegs"]

TASKS = ("header", "decode", "target", "crop")
Task: TypeAlias = Callable[[bytes], object]

_MAX_BYTES = 1 << 30
_MAX_LISTED = 100_000
_LIMIT = Limit(MAX_PIXELS, None)


@dataclass(frozen=True)
class Files:
    """Encoded images of one format, in memory."""

    kind: str
    data: list[bytes]
    left_out: int = 0
    """Number of files of other formats."""
    unreadable: int = 0
    """Number of files that could not be read: dangling links, or no permission."""


@dataclass
class Comparison:
    """Images/s by backend, task and number of threads, with the numbers of measured and failed files."""

    files: int
    speed: dict[str, dict[tuple[str, int], float]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    """Number of files that a backend failed on in some task. They were left out for all backends."""

    def best(self, task: str, threads: int) -> str | None:
        """Return the fastest backend for a task; `None` if none supports it."""
        speeds = {name: found[task, threads] for name, found in self.speed.items() if (task, threads) in found}
        return max(speeds, key=speeds.__getitem__) if speeds else None


def sample(folder: Path, *, count: int) -> Files:
    """Read at most `count` image files (and 1 GB) under `folder`, evenly spread over its sorted paths.

    Return those of the most frequent format. Unreadable files are counted. At most 100,000 files are listed. Raises
    `ImageError` if the folder does not exist or contains no image.
    """
    if not folder.is_dir():
        raise ImageError(f"{str(folder)!r} is not a folder: pass a folder with image files")
    paths = sorted(_images(folder))
    kinds, total, unreadable = Counter[str](), 0, 0
    read: list[tuple[str, bytes]] = []
    for k in range(min(count, len(paths))):
        path = paths[k * len(paths) // min(count, len(paths))]
        try:
            data = path.read_bytes() if path.is_file() else None  # a pipe would block forever
        except OSError:
            data = None
        if data is None:
            unreadable += 1
            continue
        total += len(data)
        if total > _MAX_BYTES:
            break
        kinds[exif.kind(data)] += 1
        read.append((exif.kind(data), data))
    del kinds["other"]
    if not kinds:
        also = f", but {unreadable} that cannot be read" if unreadable else ""
        raise ImageError(f"{str(folder)!r} contains no image files ({', '.join(EXTENSIONS)}){also}")
    kind = kinds.most_common(1)[0][0]
    data_of_kind = [data for found, data in read if found == kind]
    return Files(kind, data_of_kind, len(read) - len(data_of_kind), unreadable)


def synthetic_jpegs(count: int = 64) -> Files:
    """Return synthetic JPEGs of 500 x 375 pixels with about the detail of a photograph."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(count):
        image = np.zeros((375, 500, 3), np.float32)
        for size, weight in ((5, 0.5), (30, 0.3), (190, 0.2)):
            layer = rng.integers(0, 256, (size * 3 // 4, size, 3)).astype(np.float32)
            image += weight * cv2.resize(layer, (500, 375), interpolation=cv2.INTER_CUBIC)
        pixels = image.clip(0, 255).astype(np.uint8)
        data.append(bytes(simplejpeg.encode_jpeg(pixels, quality=92, colorsubsampling="420")))
    return Files("jpeg", data)


def compare(
    files: Files,
    *,
    target: int = 224,
    threads: Sequence[int] = (1,),
    rounds: int = 3,
    backends: Sequence[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Measure `backends` (default: all that are installed and read this format) in all tasks.

    `target` is pixels a side, `threads` are the numbers of threads to measure with, and speeds are the median of
    `rounds`. `progress` is called with the number of finished runs and of all runs.

    Raises `ConfigError` for a backend that is not installed or does not read this format, `ImageError` if no file works
    with all of them in all tasks.
    """
    if min(threads, default=0) < 1 or rounds < 1 or target < 1:
        raise ConfigError(f"threads={threads}, rounds={rounds} and target={target} must be at least 1")
    names = [name for name in installed() if BACKENDS[name].reads(files.kind)] if backends is None else list(backends)
    for name in names:
        choose(name, files.kind)
    functions = {
        (name, task): function
        for task in TASKS
        for name in names
        if (function := _function(name, files.kind, task, target)) is not None
    }
    data, failed = _usable(files.data, names, functions)
    result = Comparison(len(data), {name: {} for name in names}, failed)
    plan = [
        (name, task, count, functions[name, task])
        for task in TASKS
        for count in dict.fromkeys(threads)
        for name in names
        if (name, task) in functions
    ]
    times: dict[tuple[str, str, int], list[float]] = {}
    with ThreadPoolExecutor(max(threads), thread_name_prefix="penstock-bench") as pool:
        for step in range(rounds * len(plan)):
            name, task, count, function = plan[step % len(plan)]
            start = time.perf_counter()
            list(pool.map(lambda part, run=function: _run(run, part), [data[k::count] for k in range(count)]))
            times.setdefault((name, task, count), []).append(time.perf_counter() - start)
            if progress is not None:
                progress(step + 1, rounds * len(plan))
    for (name, task, count), found in times.items():
        result.speed[name][task, count] = len(data) / statistics.median(found)
    return result


def _run(function: Task, part: Sequence[bytes]) -> None:
    for data in part:
        function(data)


def _images(folder: Path) -> Iterable[Path]:
    seen = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            seen += 1
            if seen > _MAX_LISTED:
                return
            if is_image(name):
                yield Path(parent, name)


def _usable(
    files: Sequence[bytes], names: Sequence[str], functions: Mapping[tuple[str, str], Task]
) -> tuple[list[bytes], dict[str, int]]:
    """Return the files that all backends can process, and the number of failures of each. Also serves as warm-up."""
    good, failed = [], dict.fromkeys(names, 0)
    for data in files:
        bad = {name for (name, task), function in functions.items() if not _works(function, data)}
        for name in bad:
            failed[name] += 1
        if not bad:
            good.append(data)
    if not good:
        raise ImageError(f"none of {len(files)} files can be read by all of {', '.join(names)}")
    return good, failed


def _works(function: Task, data: bytes) -> bool:
    try:
        return function(data) is not None  # None: a header without a size
    except Exception:  # libraries raise any type of error
        return False


def _function(name: str, kind: str, task: str, target: int) -> Task | None:
    """Return the function of a backend for a task, by its library's preferred method; `None` if not supported."""
    if task == "header":
        return _HEADERS.get(name) if kind == "jpeg" or name != "simplejpeg" else None
    if task == "decode":
        return lambda data: decode(data, backend=name)
    if task == "target":
        special = _TARGETS.get(name) if kind == "jpeg" else None
        if special is not None:
            return lambda data: special(data, target)
        return lambda data: _resize(decode(data, backend=name), target)
    if name == "native":
        return lambda data: _native_crop(data, target)
    return lambda data: _resize(_middle(decode(data, backend=name)), target)


def _resize(image: np.ndarray[Any, np.dtype[np.uint8]], target: int) -> object:
    shrinks = min(image.shape[:2]) > target
    return cv2.resize(image, (target, target), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def _middle(image: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    height, width = image.shape[:2]
    top, left = height // 4, width // 4
    return image[top : top + max(height // 2, 1), left : left + max(width // 2, 1)]


def _native_crop(data: bytes, target: int) -> object:
    size = size_from_header(data)
    if size is None:  # stray bytes in the header
        return _resize(_middle(decode(data, backend="native")), target)
    left, top = size[0] // 4, size[1] // 4
    return _native_box(data, (left, top, left + max(size[0] // 2, 1), top + max(size[1] // 2, 1)), target)


def _native_target(data: bytes, target: int) -> object:
    size = size_from_header(data)
    if size is None:
        return _resize(decode(data, backend="native"), target)
    return _native_box(data, (0, 0, *size), target)


def _native_box(data: bytes, box: Box, target: int) -> object:
    return _resize(decode_region(data, box, target=(target, target))[0], target)


def _simplejpeg_target(data: bytes, target: int) -> object:
    check_jpeg(data, _LIMIT)
    try:
        image = simplejpeg.decode_jpeg(data, "RGB", min_height=target, min_width=target)
    except ValueError:  # such as an unusual subsampling, which decode() handles
        image = decode(data, backend="simplejpeg")
    return _resize(image, target)


def _opencv_target(data: bytes, target: int) -> object:
    check_jpeg(data, _LIMIT)
    size = size_from_header(data) or (1, 1)
    flags = {1: cv2.IMREAD_COLOR, 2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4}
    factor = next((f for f in (8, 4, 2) if min(size) >= f * target), 1)
    flag = flags.get(factor, cv2.IMREAD_REDUCED_COLOR_8) | cv2.IMREAD_IGNORE_ORIENTATION
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    return _resize(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), target)


def _pillow_target(data: bytes, target: int) -> object:
    from PIL import Image

    with open_pillow(data, _LIMIT) as image:
        image.draft("RGB", (target, target))
        return np.asarray(image.convert("RGB").resize((target, target), Image.Resampling.BILINEAR))


def _pillow_header(data: bytes) -> object:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.size


_TARGETS: dict[str, Callable[[bytes, int], object]] = {
    "native": _native_target,
    "simplejpeg": _simplejpeg_target,
    "opencv": _opencv_target,
    "pillow": _pillow_target,
}
_HEADERS: dict[str, Task] = {
    "native": size_from_header,
    "simplejpeg": simplejpeg.decode_jpeg_header,
    "pillow": _pillow_header,
}
