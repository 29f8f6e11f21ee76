"""100,000 damaged files through the C extension: each is decoded or refused, and no byte is written beside its place.

libjpeg itself is not instrumented by the AddressSanitizer (address_sanitizer.py), so the memory that it writes rows
into is fenced here: bytes before and behind must be as they were.
"""

from __future__ import annotations

import base64
import random
import re

import cv2
import numpy as np
import pytest
import simplejpeg
from jpeg_support import drawn, of_short_codes

from penstock.images import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

FILES = 100_000
PARTS = 10  # tests, so that processes share them and a crash names its seed
FENCE = 64
CAPACITY = 48 * 48 * 3
FRAMES = (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCB)  # of the kinds that one version of libjpeg-turbo or another reads
FRAME = re.compile(rb"\xff[\xc0-\xc3\xc9-\xcb]")
REFUSED = (ValueError, NotImplementedError, IndexError, OverflowError, MemoryError)

ARITHMETIC = base64.b64decode(
    "/9j/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBkeFxlZ2P/2wBD"
    "ARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/yQARCAAYACgD"
    "ASIAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AJyFnwv1V+ifbG3Ol2kMLOsvsfOUzXRhPNjLKyLrkaZ+iJUUoVzQ"
    "ILGo4yUKXW8jC5rUg7xokSlHgAzwXxmnNG2mjG268mfA/9k="
)


def seeds() -> list[bytes]:
    """Whole files of every kind: each subsampling, gray, CMYK, progressive, restart markers, arithmetic coding, codes
    that no encoder chooses."""
    image = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    image = cv2.resize(image, (40, 24))
    files = [simplejpeg.encode_jpeg(image, 70, colorsubsampling=kind) for kind in ("444", "422", "420", "440", "411")]
    gray = np.ascontiguousarray(image[..., :1])
    files.append(simplejpeg.encode_jpeg(gray, 70, colorspace="GRAY", colorsubsampling="Gray"))
    files.append(simplejpeg.encode_jpeg(np.dstack([image, gray]), 70, colorspace="CMYK"))
    for option in (cv2.IMWRITE_JPEG_PROGRESSIVE, cv2.IMWRITE_JPEG_RST_INTERVAL, cv2.IMWRITE_JPEG_OPTIMIZE):
        files.append(cv2.imencode(".jpg", image, [option, 1])[1].tobytes())
    return [*files, ARITHMETIC, *map(of_short_codes, range(4))]


def mutate(rng: random.Random, files: list[bytes]) -> bytes:
    """One to four changes: bits, bytes, markers, kinds and sizes of frames, cuts, repetitions, parts of other files."""
    data = bytearray(rng.choice(files))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if len(data) > 1 else 0
        way = rng.randrange(9)
        found = FRAME.search(data)
        frame = found.start() if found else 0
        if way == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1 and data:
            data[at] = rng.randrange(256)
        elif way == 2:
            data[at : at + 2] = bytes((0xFF, rng.choice((*FRAMES, 0xC4, 0xD0, 0xD9, 0xDA, 0xDB, 0xDD, 0xE1, 0xEE))))
        elif way == 3:
            data[frame + rng.randrange(4, 19) : frame + 19] = rng.randbytes(rng.choice((0, 1, 2)))
        elif way == 4:
            frame += rng.randrange(2, 19)
            if frame < len(data):
                data[frame] = rng.choice((0, 1, 2, 3, 4, 0x11, 0x21, 0x12, 0x22, 0x41, 0x44, 255))
        elif way == 5:
            del data[at : at + rng.randint(1, 60)]
        elif way == 6:
            data[at:at] = data[at : at + rng.randint(1, 60)]
        elif way == 7:
            data[frame : frame + 2] = bytes((0xFF, rng.choice(FRAMES)))
        else:
            other = rng.choice(files)
            data[at:] = other[min(at, len(other)) :]
    return bytes(data)


def entries_for(rng: random.Random, data: bytes, files: list[bytes]) -> bytes | None:
    """Entries of the file, of another one, some that are damaged, or none."""
    found = native.entries_of(rng.choice((data, rng.choice(files))), step=rng.choice((1, 2, 99)))
    if found is None or rng.random() < 0.3:
        return None
    if rng.random() < 0.5:
        damaged = bytearray(found)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        found = bytes(damaged[: rng.choice((len(damaged), len(damaged), rng.randrange(len(damaged))))])
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_mutated_files(part: int) -> None:
    rng, files = random.Random(part), seeds()
    memory = np.zeros(CAPACITY + 2 * FENCE, np.uint8)
    fences = np.concatenate([memory[:FENCE], memory[-FENCE:]])
    decoded = refused = 0
    for _ in range(FILES // PARTS):
        data = mutate(rng, files)
        left, top = rng.uniform(0, 30), rng.uniform(0, 20)
        box = (left, top, rng.uniform(left + 0.1, 42), rng.uniform(top + 0.1, 25))
        if rng.random() < 0.2:
            box = (0.0, 0.0, 40.0, 24.0)
        channels, scale = rng.choice((1, 3)), rng.choice((0, 0, 1, 1, 2, 4, 8))
        if scale and rng.random() < 0.8:  # decoded only
            height = -int(-box[3] // scale) - int(box[1] // scale)
            width = -int(-box[2] // scale) - int(box[0] // scale)
        else:
            height, width = rng.choice(((1, 1), (4, 4), (10, 10), (48, 48)))
        out = memory[FENCE : FENCE + height * width * channels].reshape(height, width, channels)
        flipped = rng.random() < 0.5, rng.random() < 0.5
        how = rng.random() < 0.5, rng.random() < 0.5, flipped, None, False
        size = rng.choice(((0, 0), (0, 0), (0, 0), (40, 24), (24, 40)))
        simd, own, partial = rng.random() < 0.8, rng.random() < 0.8, rng.random() < 0.3
        entries = entries_for(rng, data, files)
        try:
            native._jpeg.draw(data, out, box, *how, simd, 1 << 20, size, entries, scale, own, partial)
            decoded += 1
        except REFUSED:
            refused += 1
        assert not memory[FENCE + out.size :].any()
        memory[FENCE:-FENCE] = 0
    assert np.array_equal(np.concatenate([memory[:FENCE], memory[-FENCE:]]), fences)
    assert min(decoded, refused) > 1000, (decoded, refused)  # the mutations reach both


EDGES = (0.0, -0.0, 1e-320, -1e-9, 0.5, 1, 23.999999999, 24, 40, 40.1, 65535.9, 65536, 2**31, 2**53, 1e19, 1e308)
EDGES = (*EDGES, *(-edge for edge in EDGES), float("inf"), -float("inf"), float("nan"))
NUMBERS = (0, 1, -1, 40, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63))


def test_any_arguments() -> None:
    """Numbers that no caller gives: none of them is cast to what it does not fit in, and none gets past a limit."""
    rng, files = random.Random(11), seeds()
    decoded = 0
    for _ in range(20_000):
        box = tuple(rng.choice((rng.choice(EDGES), edge)) for edge in (0, 0, 40, 24))
        size = tuple(rng.choice(NUMBERS) if rng.random() < 0.3 else 0 for _ in range(2))
        limit = rng.choice((0, 1, 959, 960, 2**32, 2**63, 2**64 - 1))
        scale = rng.choice((0, 0, 0, 1, 2, 3, 4, 8, 16, -1, 2**31))
        out = np.zeros((rng.randint(0, 50), rng.randint(0, 50), rng.choice((1, 3, 0, 4))), np.uint8)
        how = rng.random() < 0.5, rng.random() < 0.5, (False, True), None, rng.random() < 0.2
        partial = rng.random() < 0.5
        try:
            native._jpeg.draw(rng.choice(files), out, box, *how, True, limit, size, None, scale, True, partial)
        except REFUSED:
            continue
        decoded += 1
        assert limit >= 960
    assert decoded > 200, decoded


def test_a_damaged_file_that_passes_has_the_same_pixels_in_a_box() -> None:
    """Damage that no decoder notices changes the picture, but not what a box of it is, with entries or without."""
    rng, files, same, entered = random.Random(7), seeds(), 0, 0
    for _ in range(20_000):
        data = mutate(rng, files)
        try:
            whole = drawn(data, max_pixels=1 << 16)
        except REFUSED:
            continue
        assert np.array_equal(whole, drawn(data, max_pixels=1 << 16, partial=True)), data  # by libjpeg
        height, width = whole.shape[:2]
        left, top = rng.uniform(0, width - 0.5), rng.uniform(0, height - 0.5)
        right, bottom = rng.uniform(left + 0.1, width), rng.uniform(top + 0.1, height)
        part = whole[int(top) : int(np.ceil(bottom)), int(left) : int(np.ceil(right))]
        for entries in (None, native.entries_of(data, step=1)):
            box = (left, top, right, bottom)
            assert np.array_equal(drawn(data, box, max_pixels=1 << 16, entries=entries), part), data
        same += 1
        entered += entries is not None
    assert same > 2000
    assert entered > 800  # files of odd form have none


def pixels(data: bytes) -> np.ndarray:
    """Those of a file; none where its colours are not turned into RGB."""
    try:
        return drawn(data, max_pixels=1 << 20)
    except NotImplementedError:
        return np.empty(0, np.uint8)


def test_mutated_files_are_marked_or_left() -> None:
    """Restart markers are put into whatever can be read to its end."""
    rng, files = random.Random(13), seeds()
    made = left = 0
    for _ in range(24_000):
        data = mutate(rng, files)
        result = native._jpeg.transcode(data, rng.choice((-1, 0, 1, 2, 5, 65535)), 1 << 20)
        if result is None:
            left += 1
        else:
            made += 1
            assert np.array_equal(pixels(result), pixels(data)), data
    assert min(made, left) > 3000, (made, left)
    assert native.with_restart_markers(ARITHMETIC, max_pixels=1 << 20) is None
