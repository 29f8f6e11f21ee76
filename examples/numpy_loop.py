"""Plain NumPy: softmax regression on 5,000 small images, from batches that are NumPy arrays.

    python examples/numpy_loop.py
    python examples/numpy_loop.py --images FOLDER         # one folder of images for each class, in train and in test

No line of it uses torch: ``output="numpy"`` makes the loader's batches arrays, without a copy.
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

import penstock as ps

ARCHIVE = Path(__file__).parent / "data" / "cifar10-small.tar.xz"
CLASSES, FEATURES = 10, 3 * 32 * 32

Floats = npt.NDArray[np.float32]


def make_loader(
    folder: Path, **options: int | str
) -> ps.DataLoader[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Return a loader of images uint8 (N, 3, 32, 32) and labels int64 (N,)."""
    return ps.DataLoader(ps.open(folder, size=32), batch_size=100, output="numpy", **options)


def features(images: npt.NDArray[np.uint8]) -> Floats:
    """Return the pixels of each image as one row, float32 (N, 3072), from -1 to 1."""
    return images.reshape(len(images), -1) / np.float32(127.5) - np.float32(1)


def probabilities(weights: Floats, pixels: Floats) -> Floats:
    """Return the probability of each class, float32 (N, 10)."""
    scores = pixels @ weights[:-1] + weights[-1]
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def step(weights: Floats, pixels: Floats, labels: npt.NDArray[np.int64], rate: float) -> float:
    """Take a step down the gradient of the mean cross-entropy, in place, and return the loss before it."""
    chances = probabilities(weights, pixels)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels]).mean()
    chances[rows, labels] -= 1
    chances /= len(labels)
    weights[:-1] -= rate * (pixels.T @ chances)
    weights[-1] -= rate * chances.sum(axis=0)
    return float(loss)


def main() -> None:
    """Train, and say how many images of the other set it knows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=Path, default=Path("cifar10"), help="unpacked there the first time")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="worker processes (default: none)")
    args = parser.parse_args()
    if not args.images.exists():
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(args.images, filter="data")

    weights = np.zeros((FEATURES + 1, CLASSES), np.float32)
    loader = make_loader(args.images / "train", shuffle="global", seed=0, num_workers=args.workers)
    for epoch in range(args.epochs):
        losses = [step(weights, features(images), labels, rate=0.003) for images, labels in loader]
        print(f"epoch {epoch}: loss {np.mean(losses):.3f}")

    known = [
        (probabilities(weights, features(images)).argmax(axis=1) == labels).mean()
        for images, labels in make_loader(args.images / "test")
    ]
    print(f"accuracy {np.mean(known):.3f}, by chance {1 / CLASSES}")


if __name__ == "__main__":
    main()
