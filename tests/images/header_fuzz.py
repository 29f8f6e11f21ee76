"""Files with two sizes through each back end: `test_header_fuzz.py` runs this, in a process of its own.

    python tests/images/header_fuzz.py KIND SEED COUNT EVERY

Reads the headers of COUNT files and decodes each one of EVERY of them. Prints a JSON object: how many files have a size
(`sized`), how many no back end decoded (`refused`), how many each one did (`decoded`), how many contradictions were
`found` and the first of them (`contradictions`), and the most memory in MB and CPU time in seconds that one file took
one back end beyond what files before had taken (`megabytes`, `seconds`).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import cv2
import simplejpeg
from header_mutants import mutants

from penstock.errors import ImageError
from penstock.images.backends import BACKENDS, installed
from penstock.images.decode import decode
from penstock.images.headers import TruncatedHeader, size_from_header
from penstock.images.headers import kind as kind_of
from penstock.images.region import decode_region

MAX_PIXELS = 1 << 20
SHOWN = 10


def our_size(data: bytes) -> tuple[int, int] | None:
    try:
        return size_from_header(data)
    except TruncatedHeader:
        return None


def size_of_libjpeg(data: bytes) -> tuple[int, int] | None:
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
        return width, height
    except (ValueError, KeyError):
        return None


def shape_by(name: str, data: bytes, size: tuple[int, int] | None) -> tuple[int, ...] | None:
    """The shape that a back end gives; ``region`` is the box of the whole image, as transforms ask for it."""
    if name != "region":
        return decode(data, backend=name, max_pixels=MAX_PIXELS).shape
    if size is None or min(size) < 1:
        return None
    return decode_region(data, (0, 0, *size), target=size[::-1], max_pixels=MAX_PIXELS)[0].shape


def resident() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(kind: str, seed: int, count: int, every: int) -> dict[str, Any]:
    """Compare the sizes of `count` files, and decode each one of `every` by each back end."""
    make = mutants(kind, seed)
    decode(make_good(kind), backend="auto")
    names = [name for name in installed() if kind == "other" or BACKENDS[name].reads("jpeg")]
    names.append("region")
    found: dict[str, Any] = {"files": count, "sized": 0, "refused": 0, "decoded": dict.fromkeys(names, 0)}
    found |= {"contradictions": [], "megabytes": 0.0, "seconds": 0.0}
    for number in range(count):
        data = make()
        size = our_size(data)
        found["sized"] += size is not None
        if kind == "jpeg" and data[:2] == b"\xff\xd8":
            other = size_of_libjpeg(data)
            if other is not None and other != size:
                found["contradictions"].append(["header", size, other, data.hex()])
        if number % every:
            continue
        made = 0
        for name in names:
            if name in BACKENDS and not BACKENDS[name].reads(kind_of(data)):
                continue
            before, start = resident(), time.process_time()
            try:
                shape = shape_by(name, data, size)
            except ImageError:
                shape = None
            found["seconds"] = max(found["seconds"], time.process_time() - start)
            found["megabytes"] = max(found["megabytes"], resident() - before)
            if shape is not None:
                made += 1
                found["decoded"][name] += 1
                if shape[0] * shape[1] > MAX_PIXELS or (size is not None and size != (shape[1], shape[0])):
                    found["contradictions"].append([name, size, shape[:2], data.hex()])
        found["refused"] += made == 0
    found["found"] = len(found["contradictions"])
    found["contradictions"] = found["contradictions"][:SHOWN]
    return found


def make_good(kind: str) -> bytes:
    """A file that is decoded first, so that what libraries keep is not taken for what a file costs."""
    import numpy as np

    ok, data = cv2.imencode(".jpg" if kind == "jpeg" else ".png", np.zeros((1024, 1024, 3), np.uint8))
    assert ok
    return data.tobytes()


if __name__ == "__main__":
    os.environ["OPENCV_LOG_LEVEL"] = "SILENT"
    cv2.setNumThreads(0)
    json.dump(main(sys.argv[1], *map(int, sys.argv[2:])), sys.stdout)
