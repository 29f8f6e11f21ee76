"""Data sets of the matrix of executors, in a module that worker processes can import."""

from __future__ import annotations

import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import penstock as ps

ARCHIVE = Path(__file__).parents[2] / "examples" / "data" / "cifar10-small.tar.xz"


class Pure(Dataset[Any]):
    """Index, a large draw (it travels in the ring) and a small one, of `penstock.generator` alone."""

    pure = True

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        generator = ps.generator()
        return {"index": index, "large": torch.from_numpy(generator.random(1500)), "small": float(generator.normal())}


class Impure(Pure):
    """And of the global generators, as other people's transforms do."""

    pure = False

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        drawn = [random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()]
        noise = torch.randn(1500) + torch.from_numpy(np.random.normal(size=1500))
        return {**item, "drawn": drawn, "noise": noise, "shuffled": random.sample(range(50), 5)}


class Images(Pure):
    """Real JPEG images, decoded, cropped, turned and made noisy at random."""

    releases_gil = True

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.files: list[bytes] = []
        with tarfile.open(ARCHIVE) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".jpg"):
                    self.files.append(archive.extractfile(member).read())  # type: ignore[union-attr]
                if len(self.files) == n:
                    break

    def __getitem__(self, index: int) -> Any:
        import simplejpeg

        generator = ps.generator()
        image = simplejpeg.decode_jpeg(self.files[index])
        top, left = generator.integers(0, 5, 2)
        image = image[top : top + 28, left : left + 28]
        if generator.random() < 0.5:
            image = image[:, ::-1]
        image = image.astype(np.float32) + generator.normal(0, 3, image.shape).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), index


DATA: dict[str, type[Pure]] = {"pure": Pure, "impure": Impure, "images": Images}


def bits(batch: Any) -> Any:
    """A batch as bytes, with types and shapes: equal if and only if equal bit for bit."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), tuple(batch.shape), batch.numpy().tobytes()
    if isinstance(batch, dict):
        return {name: bits(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [bits(value) for value in batch]
    return batch
