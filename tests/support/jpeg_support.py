"""JPEG files whose every pixel is another one, and boxes of them."""

from __future__ import annotations

import cv2
import numpy as np
import simplejpeg

LIMIT = 1 << 28
FAR = (1 << 20, 1 << 20)  # a target that no box is twice as large as
SUBSAMPLINGS = ["444", "422", "420", "440", "411"]


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A picture with structure at every place and in every channel, so that no shift or mix-up goes unseen."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 3 + 2, width // 3 + 2, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)


def jpeg(image: np.ndarray, subsampling: str = "420", quality: int = 85) -> bytes:
    space = "GRAY" if image.shape[2] == 1 else "RGB"
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(image), quality=quality, colorspace=space, colorsubsampling=subsampling
    )


def by_opencv(image: np.ndarray, *options: int) -> bytes:
    ok, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
    assert ok
    return data.tobytes()


def outward(box: tuple[float, float, float, float]) -> tuple[slice, slice]:
    return slice(int(box[1]), int(np.ceil(box[3]))), slice(int(box[0]), int(np.ceil(box[2])))


def boxes(height: int, width: int, count: int, seed: int = 1) -> list[tuple[float, float, float, float]]:
    rng = np.random.default_rng(seed)
    found = [(0.0, 0.0, float(width), float(height)), (width - 0.5, height - 0.5, float(width), float(height))]
    for _ in range(count):
        left, top = rng.uniform(0, width - 0.01), rng.uniform(0, height - 0.01)
        found.append((left, top, rng.uniform(left + 0.005, width), rng.uniform(top + 0.005, height)))
    return found
