"""Widths and heights of all images of a manifest, in a file beside it: ``train.txt.sizes.arrow``.

Aspect-ratio grouping needs the shape of every image before the first one is loaded. `measure` reads the headers once,
`write_sizes` stores the result, `Sizes.open` maps it again in a millisecond:

    manifest = Manifest.open("train.txt", root="/data/imagenet")
    widths, heights, errors = measure(manifest, workers=16)
    path = write_sizes(manifest, widths, heights)
    groups = Sizes.open(path, manifest).group_ids()        # 0: wider than high, 1: others

The file is Arrow IPC with two int32 columns, ``width`` and ``height``, one row per manifest row, 0 x 0 for an image
that could not be read. Its schema metadata contains the manifest's fingerprint, so the sizes of another manifest or of
an older version of it are refused (`StateError`).

Memory: `measure` uses 8 bytes per row; an open `Sizes` is a mapped file, shared by all processes of a machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, ImageError, ManifestError, StateError
from penstock.images.decode import image_size
from penstock.manifest import Manifest
from penstock.manifest.indices import as_numpy
from penstock.storage import io_error, write_atomically
from penstock.storage.files import MANIFEST
from penstock.threads import map_blocks

__all__ = ["MAX_ERRORS", "SizeError", "Sizes", "measure", "sizes_path", "write_sizes"]

MAX_ERRORS = 1000
"""The maximum number of images without a size that are listed."""
_BLOCK = 256  # rows per task: long enough to hide the executor, short enough for a smooth progress bar
_VERSION = "1"
_GROUP_CHUNK = 1 << 20


class SizeError(NamedTuple):
    """An image without a size: its row, its path and the reason."""

    row: int
    path: str
    message: str


def measure(
    manifest: Manifest, *, workers: int | None = None, progress: Callable[[int, int], object] | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], list[SizeError]]:
    """Read the headers of all image files; return widths, heights (int32, one per row of `manifest`) and errors.

    `workers` threads (default: 4 per CPU, at most 32) read the files; `progress` is called from time to time with the
    number of finished rows and of all rows. A file that cannot be read or has no size yields 0 x 0 and an error. Only
    the first `MAX_ERRORS` errors by row are returned: the total is ``numpy.count_nonzero(widths == 0)``. Lines of the
    manifest that do not parse raise `ManifestError`.
    """
    rows = len(manifest)
    widths, heights = np.zeros(rows, np.int32), np.zeros(rows, np.int32)

    def measure_block(part: range) -> list[SizeError]:
        failed = []
        for position, record in zip(part, manifest.records(part), strict=True):
            try:
                widths[position], heights[position] = image_size(record.path, storage=manifest.storage)
            except ImageError as error:
                failed.append(SizeError(record.row, record.path, str(error)))
        return failed

    errors: list[SizeError] = []
    for failed in map_blocks(measure_block, rows, block=_BLOCK, workers=workers, progress=progress):
        errors.extend(failed[: MAX_ERRORS - len(errors)])
    return widths, heights, errors


def sizes_path(manifest: Manifest) -> Path:
    """Return the default path of a manifest's sizes: beside its file. Raises `ConfigError` if it has several files."""
    if len(manifest.sources) != 1:
        raise ConfigError(
            f"a manifest of {len(manifest.sources)} files has no default path for its sizes: pass path= to write_sizes"
        )
    source = Path(manifest.sources[0])
    return source.with_name(source.name + ".sizes.arrow")


def write_sizes(
    manifest: Manifest,
    widths: npt.NDArray[np.int32],
    heights: npt.NDArray[np.int32],
    *,
    path: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the sizes of `manifest` to `path` (default: `sizes_path`), atomically, and return that path.

    Raises `ConfigError` if the lengths differ from the manifest's, `ManifestIOError` if the file cannot be written.
    """
    if not len(widths) == len(heights) == len(manifest):
        raise ConfigError(f"{len(widths)} widths and {len(heights)} heights for {len(manifest)} rows")
    target = sizes_path(manifest) if path is None else Path(path)
    metadata = {"penstock.sizes": _VERSION, "penstock.fingerprint": manifest.fingerprint}
    schema = pa.schema([("width", pa.int32()), ("height", pa.int32())], metadata=metadata)
    batch = pa.record_batch([pa.array(np.asarray(column, np.int32)) for column in (widths, heights)], schema=schema)
    doing = "cannot write image sizes (choose another path with path=, or --output on the command line) to"
    with MANIFEST.naming(target, doing), write_atomically(target) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)
    return target


class Sizes:
    """The sizes of a manifest's images, memory-mapped.

    `widths` and `heights` are read-only int32 arrays over the mapped file, one value per manifest row; 0 x 0 is an
    image that could not be read. A pickle contains only the path and the expected fingerprint.
    """

    def __init__(self, path: Path, fingerprint: str | None, rows: int | None) -> None:
        """Use `Sizes.open`."""
        self.path = path
        try:
            with pa.memory_map(str(path)) as source:
                batch = pa.ipc.open_file(source).get_batch(0)
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            doing = "no image sizes (write them with: penstock manifest sizes FILE), cannot read"
            raise io_error(path, error, doing) from error
        except (ValueError, OSError) as error:
            raise ManifestError(f"{str(path)!r} is not a file of image sizes: {error}") from error
        metadata = {key.decode(): value.decode() for key, value in (batch.schema.metadata or {}).items()}
        if metadata.get("penstock.sizes") != _VERSION or batch.schema.names != ["width", "height"]:
            what = f"{str(path)!r} is not a file of image sizes (version {_VERSION})"
            raise ManifestError(f"{what}; write one: penstock manifest sizes FILE")
        self.fingerprint = metadata.get("penstock.fingerprint")
        """Fingerprint of the manifest."""
        if fingerprint is not None and (self.fingerprint != fingerprint or batch.num_rows != rows):
            raise StateError(
                f"{str(path)!r} belongs to another manifest or an older version of it: it has {batch.num_rows} rows "
                f"and the fingerprint {self.fingerprint}, the manifest {rows} rows and {fingerprint}; measure again "
                "with: penstock manifest sizes FILE"
            )
        self.widths: npt.NDArray[np.int32] = as_numpy(batch.column("width"))
        self.heights: npt.NDArray[np.int32] = as_numpy(batch.column("height"))

    @classmethod
    def open(cls, path: str | os.PathLike[str], manifest: Manifest | None = None) -> Sizes:
        """Open the sizes at `path`, which must belong to the current content of `manifest`, if there is one.

        Raises `ManifestIOError` (missing), `ManifestError` (another kind of file), `StateError` (another manifest).
        """
        return cls(Path(path), *((None, None) if manifest is None else (manifest.fingerprint, len(manifest))))

    def __len__(self) -> int:
        return len(self.widths)

    def __reduce__(self) -> tuple[type[Sizes], tuple[Path, str | None, int]]:
        return Sizes, (self.path, self.fingerprint, len(self))

    def group_ids(self, boundaries: Sequence[float] = (1.0,)) -> npt.NDArray[np.uint8] | npt.NDArray[np.int16]:
        """Return the aspect-ratio group of every row: the number of `boundaries` that are <= height / width.

        This is `bisect.bisect_right(sorted(boundaries), height / width)`, the rule of maskrcnn-benchmark. By default, 0
        is wider than high and 1 is square or higher. Images without a size count as square. The result is uint8, or
        int16 from 256 groups on. It is computed in blocks, so only the result takes memory.
        """
        bins = np.sort(np.asarray(boundaries, np.float64))
        if bins.ndim != 1 or len(bins) > 32766 or np.isnan(bins).any():
            raise ConfigError(f"boundaries must be at most 32,766 numbers, not {boundaries!r}")
        groups: npt.NDArray[Any] = np.empty(len(self), np.uint8 if len(bins) < 256 else np.int16)
        for start in range(0, len(self), _GROUP_CHUNK):
            part = slice(start, start + _GROUP_CHUNK)
            widths, heights = self.widths[part], self.heights[part]
            ratios = np.where(widths > 0, heights / np.maximum(widths, 1), 1.0)
            groups[part] = np.searchsorted(bins, ratios, side="right")
        return groups
