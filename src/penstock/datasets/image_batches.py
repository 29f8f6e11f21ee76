"""Load the small images of a batch together: one plan, and one call of the C extension that draws them.

For small images, calls of `LoadImage` for each take several times as long. The items are the same, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.datasets.loading import Item, LoadImage
from penstock.datasets.pixel_rows import PixelRecord
from penstock.images import native
from penstock.images.entries import ImageIndex
from penstock.images.sample_record import SampleRecord
from penstock.images.transforms.batch import Batch
from penstock.manifest import Record
from penstock.random import load_each, sample_scope
from penstock.stages import account, spent

__all__ = ["draw", "draws_of", "load_batch"]

_SMALL = 1 << 14
"""Size in bytes of files up to which images are drawn together, without entries. Of larger ones, decoding is nearly all
of the time, and entries save more of it."""
_AT_ONCE = 128
"""Images that are drawn together: a signal may have to wait for them."""
_READ_ONLY = os.O_RDONLY | getattr(os, "O_BINARY", 0)


def draws_of(load: LoadImage) -> int | None:
    """Return how many random numbers `load_batch` draws for an image at most; None if it cannot replace `load`."""
    chosen = native.is_available() and type(load) is LoadImage
    if not chosen or load.form is None or load.target is not None:
        return None
    return None if isinstance(load.index, ImageIndex) else load.transform.draws


def load_batch(
    load: LoadImage,
    records: Sequence[Record | SampleRecord | PixelRecord],
    keys: Sequence[int],
    into: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
) -> list[Item]:
    """Return the items of records, as calls of `load` in the scopes of their keys do. Small JPEGs are drawn together.

    Args:
        load: an object with `draws_of`.
        records: the records.
        keys: of the samples' generators.
        into: allocates memory for the images; by default, each has its own.
    """
    assert load.form is not None
    shape, dtype = load.form
    whole = None if into is None else into((len(records), *shape), dtype)
    items: list[Item] = []
    for begin in range(0, len(records), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        pixels = [record.pixels for record in records[some] if isinstance(record, PixelRecord)]
        sources = np.stack(pixels) if pixels else _read_small(records[some], keys[some])
        out = torch.empty((len(sources), *shape), dtype=dtype) if whole is None else whole[some]
        drawn = draw(load, sources, keys[some], out).tolist()
        images = (out.permute(0, 3, 1, 2) if load.transform.form.channels_last else out).unbind()
        for image, row, record, key, done in zip(images, out, records[some], keys[some], drawn, strict=True):
            if not done:
                items += load_each(partial(load, out=None if whole is None else row), [record], [key])
                continue
            image = image.clone() if whole is None else image
            items.append((image, record.label, record.row) if load.row else (image, record.label))
    return items


def draw(
    load: LoadImage, sources: list[bytes] | npt.NDArray[np.uint8], keys: Sequence[int], out: torch.Tensor
) -> npt.NDArray[np.bool_]:
    """Transform images together into the rows of `out`; return which of them could be.

    Args:
        load: an object with `draws_of`.
        sources: JPEG files, or pixels (images, height, width, channels).
        keys: of the samples' generators.
        out: the images, with the layout in memory and the dtype of `load.form`.
    """
    transform, clock = load.transform, account.clock
    assert transform.draws is not None
    start, channels = clock(), 3
    if isinstance(sources, np.ndarray):
        height, width = (np.full(len(sources), side) for side in sources.shape[1:3])
        channels = sources.shape[3]
    else:
        width, height = native.sizes_of(sources).T
    batch = Batch(width, height, native.uniform(np.array(keys, np.uint64), transform.draws), channels)
    transform.plan(batch)
    spent("augment", clock() - start)
    return batch.draw(sources, out, load.max_pixels)


def _read_small(records: Sequence[Record | SampleRecord | PixelRecord], keys: Sequence[int]) -> list[bytes]:
    """Return the files of images; none of those that are loaded alone: large, remote or unreadable ones."""
    files = []
    clock = account.clock
    start = clock()
    with sample_scope(0) as scope:
        for record, key in zip(records, keys, strict=True):
            scope.board[0] = key  # if the file system hangs, the message names the sample
            data: Any = b""
            if isinstance(record, SampleRecord):
                data = record.read()
            elif isinstance(record.path, str) and "://" not in record.path:
                with suppress(OSError, ValueError):  # the image is loaded again, alone, which raises them
                    # Before it is opened: closing a pipe, which has no size, would lose what is written to it.
                    size = os.stat(record.path).st_size
                    if 0 < size <= _SMALL:
                        descriptor = os.open(record.path, _READ_ONLY)
                        try:
                            data = os.read(descriptor, size + 1)
                        finally:
                            os.close(descriptor)
                    data = data if len(data) == size else b""
            small = isinstance(data, bytes | bytearray | memoryview) and len(data) <= _SMALL
            files.append(data if small else b"")
    spent("read", clock() - start)
    return files
