"""Pack single files into shards: in parallel, atomically, and resumable after a kill.

    report = pack("train.txt", "shards", root="/data/imagenet", workers=8, max_bytes=1 << 30, shuffle=True)

    shards/train-000000.tar ...    the samples: image, ``cls``, and ``json`` for further columns of the manifest
    shards/train-000000.tar.pidx   the index of each shard
    shards/train-000000.tar.entries   with index_images: the entry points of each image's coded data
    shards/checksums.txt           xxh3_128 of each shard
    shards/pack.json               source, options, and the first sample of each shard

The shard boundaries follow from the manifest, the file sizes and the options alone, before anything is written. So the
bytes are the same for any number of processes, and finished shards are kept after a kill.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import Timeout

from penstock.errors import ConfigError, ImageError, ShardError
from penstock.images import native
from penstock.images.sample_record import is_image
from penstock.manifest import Manifest, Record
from penstock.order import make_order
from penstock.processes import map_in_processes
from penstock.progress import progress_bar
from penstock.shards.archive import BLOCK
from penstock.shards.index import index_path, load_or_build, read_header
from penstock.shards.tar import rounded
from penstock.shards.writer import TarWriter
from penstock.sources.file_list import list_images
from penstock.storage import file_lock, write_atomically
from penstock.storage.files import SHARD

__all__ = ["CHECKSUMS", "PackReport", "pack", "write_checksums"]

CHECKSUMS, PLAN, LIST = "checksums.txt", "pack.json", "files.txt"
_VERSION = 1


@dataclass(frozen=True)
class PackReport:
    """The result: all shards in order, their samples and bytes, and the number of shards that existed already."""

    shards: list[str]
    samples: int
    nbytes: int
    kept: int
    marked: int = 0
    """Images that got restart markers. This and the next fields count only new shards."""
    unmarked: int = 0
    """Images without restart markers, despite ``restart_markers``."""
    indexed: int = 0
    """Images with entries, for ``index_images``."""


@dataclass(frozen=True)
class _Job:
    """Everything that a worker needs."""

    manifest: Manifest
    folder: str
    prefix: str
    shuffle: bool
    seed: int
    resize: int | None
    quality: int
    restart_markers: bool
    index_images: bool

    def name(self, number: int) -> str:
        return os.path.join(self.folder, f"{self.prefix}-{number:06d}.tar")

    def records(self, start: int, stop: int) -> list[Record]:
        order = make_order("global" if self.shuffle else "none", len(self.manifest), seed=self.seed, epoch=0)
        return self.manifest.records(order[np.arange(start, stop)])


def pack(
    source: Manifest | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    prefix: str = "train",
    workers: int = 1,
    max_bytes: int = 1_000_000_000,
    max_count: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    resize_max_side: int | None = None,
    quality: int = 90,
    restart_markers: bool = False,
    index_images: bool = False,
    progress: bool | None = None,
) -> PackReport:
    """Pack the files of a manifest, or the images of a folder with a subfolder for each class.

    Args:
        source: a manifest, a path to one, or a folder, whose classes are numbered in the order of their names.
        folder: the output folder, created if missing.
        root: the root of a manifest given by its path.
        prefix: the prefix of the shard names.
        workers: number of processes. More than one requires ``if __name__ == "__main__":`` in a program.
        max_bytes, max_count: limits of a shard in bytes and samples; a single sample always fits.
        shuffle, seed: write the samples in random order, the global order of this seed.
        resize_max_side: shrink images whose longer side exceeds it, and write them as JPEG with ``quality``; copy all
            others unchanged.
        restart_markers: insert restart markers into baseline JPEGs, so that decoding can begin near a crop. This is
            lossless: coefficients, other segments and pixels stay the same. Other files and damaged ones stay
            unchanged. Photographs grow by 0.8 %, which the limits do not include, and take 3 ms of a core each.
        index_images: write an index of entries beside each shard; same effect as markers, unchanged files: 3 % of the
            bytes of photographs, and 0.5 ms each. Existing shards get one, too.
        progress: show a bar: True, False, or None on a terminal.

    Raises:
        ConfigError: invalid arguments; ``restart_markers`` or ``index_images`` without the C extension, or both; a
            folder with shards of another packing, or in use by another process.
        ManifestError: a folder with an image whose name has a line break.
        ShardError: a damaged ``pack.json`` in the folder.
        ShardIOError: a file cannot be read or written; the message names it. Finished shards stay.
        ImageError: an image to resize cannot be decoded.
        WorkerError: a worker was killed.

    The key of a sample is its row in the manifest, nine digits.
    """
    if workers < 1 or max_bytes < 1 or (max_count is not None and max_count < 1):
        raise ConfigError("workers, max_bytes and max_count must be positive")
    if restart_markers and index_images:
        raise ConfigError("restart markers already serve as entries: pass restart_markers or index_images, not both")
    if restart_markers:
        native.require("restart markers need")
    if index_images:
        native.require("an index of entries needs")
    if os.path.basename(prefix) != prefix:
        raise ConfigError(f"prefix={prefix!r}: shard names begin with it, so it cannot contain a folder")
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SHARD.error(out, error, "cannot make") from error
    with _alone(out):
        manifest = _manifest(source, out, root)
        images = resize_max_side, quality, restart_markers, index_images
        job = _Job(manifest, os.path.abspath(out), prefix, shuffle, seed, *images)
        cuts = _plan(job, out, {"max_bytes": max_bytes, "max_count": max_count})
        return _pack(job, out, cuts, workers, progress)


def _pack(job: _Job, out: Path, cuts: list[int], workers: int, progress: bool | None) -> PackReport:
    from penstock.shards.entries import has_entries  # imported late: it loads the image decoders

    _remove_unfinished(out, job.prefix)
    with progress_bar("packing", len(job.manifest), progress, in_bytes=False) as advance:
        todo, kept = [], 0
        counts: Counter[str] = Counter()
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            name = job.name(number)
            packed = _is_packed(name, stop - start)
            kept += packed
            if packed and not (job.index_images and not has_entries(name)):
                advance(stop - start)
            else:
                todo.append(_Task(number, start, stop, packed))
        for done in map_in_processes(partial(_pack_shard, job), todo, workers):
            counts += done
            advance(done["samples"])
    names = [job.name(number) for number in range(len(cuts) - 1)]
    nbytes = write_checksums(out, names)
    images = counts["marked"], counts["unmarked"], counts["indexed"]
    return PackReport(names, len(job.manifest), nbytes, kept, *images)


def _alone(out: Path) -> contextlib.AbstractContextManager[object]:
    """Lock the folder, so that no other process of this machine packs into it."""
    try:
        return file_lock(out / PLAN).acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"another process packs into {out}: wait for its end, or pack into another folder") from None
    except OSError as error:
        raise SHARD.error(out, error, "cannot lock") from error


def _remove_unfinished(out: Path, prefix: str) -> None:
    """Remove partial shards of a killed packing."""
    unfinished = re.compile(rf"\.{re.escape(prefix)}-\d{{6,}}\.tar(\.pidx|\.entries)?\.[0-9a-f]{{8}}\.tmp")
    for name in os.listdir(out):
        if unfinished.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(out / name)


def _manifest(source: Any, out: Path, root: Any) -> Manifest:
    if isinstance(source, Manifest):
        return source
    if not os.path.isdir(source):
        return Manifest.open(source, root=root)
    where = out / LIST
    if not where.exists() and list_images(source, where) is None:  # else this resumes a packing
        raise ConfigError(f"{source} holds no images in subfolders, one for each class")
    return Manifest.open(where, root=os.path.abspath(source))


class _Task(NamedTuple):
    """A shard to pack, or a packed one to index: its number and its samples."""

    number: int
    start: int
    stop: int
    packed: bool


def _plan(job: _Job, out: Path, limits: dict[str, Any]) -> list[int]:
    """Return the first sample of each shard, and the number of samples; unchanged if the packing is resumed."""
    names = ("prefix", "shuffle", "seed", "resize", "quality", "restart_markers")  # the index is not part of a shard
    options = {name: getattr(job, name) for name in names}
    wanted = {**options, **limits, "version": _VERSION, "fingerprint": job.manifest.fingerprint}
    where = out / PLAN
    if where.exists():
        found, cuts = _read_plan(where)
        if found != wanted:
            differ = [name for name in wanted if found.get(name) != wanted[name]]
            raise ConfigError(
                f"{out} holds shards packed with other options ({', '.join(differ)} differ): pack into another "
                "folder, or remove them first"
            )
        return cuts
    cuts = list(_cuts(job, limits["max_bytes"], limits["max_count"]))
    with write_atomically(where) as file:
        file.write(json.dumps({**wanted, "cuts": cuts}, indent=1).encode())
    return cuts


def _read_plan(where: Path) -> tuple[dict[str, Any], list[int]]:
    """Return the options of a packing, and the first sample of each shard."""
    try:
        found = {"restart_markers": False, **json.loads(where.read_bytes())}  # older files lack this option
        cuts = [int(cut) for cut in found.pop("cuts")]
    except OSError as error:
        raise SHARD.error(where, error) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ShardError(
            f"{where} is damaged: remove it and pack with the same options, which keeps the finished shards"
        ) from error
    return found, cuts


def _cuts(job: _Job, max_bytes: int, max_count: int | None) -> Iterator[int]:
    yield 0
    n, begin, size, step = len(job.manifest), 0, 4 * BLOCK, 4096
    for start in range(0, n, step):
        for number, record in enumerate(job.records(start, min(start + step, n)), start):
            try:
                length = os.stat(record.path).st_size
            except OSError as error:
                raise SHARD.error(record.path, error) from error
            need = BLOCK + rounded(length) + sum(BLOCK + rounded(len(data)) for data in _fields(record).values())
            if number > begin and (size + need > max_bytes or number - begin == max_count):
                yield number
                begin, size = number, 4 * BLOCK
            size += need
    if n:
        yield n


def _fields(record: Record) -> dict[str, bytes]:
    """Return the other parts of a sample, besides its file."""
    fields = {}
    if record.label is not None:
        label = record.label if isinstance(record.label, int | float | str) else list(record.label)
        fields["cls"] = (label if isinstance(label, str) else json.dumps(label)).encode()
    if record.extra:
        fields["json"] = json.dumps(dict(record.extra), sort_keys=True).encode()
    return fields


def _is_packed(name: str, samples: int) -> bool:
    if not os.path.exists(name):
        return False
    where = index_path(name)
    header = None if where is None else read_header(where)
    return header is not None and header.samples == samples


def _pack_shard(job: _Job, task: _Task) -> Counter[str]:
    """Pack or index a shard; return the numbers of its samples, and of its images by what was done to them."""
    name, counts = job.name(task.number), Counter(samples=task.stop - task.start)
    if not task.packed:
        with TarWriter(name, mtime=0, encoder=False, user="", group="") as writer:
            for record in job.records(task.start, task.stop):
                extension, data = _file(record, job)
                if job.restart_markers and is_image(f".{extension}"):
                    from penstock.images.decode import MAX_PIXELS  # imported late: it loads the image decoders

                    marked = native.with_restart_markers(data, max_pixels=MAX_PIXELS)
                    counts["unmarked" if marked is None else "marked"] += 1
                    data = data if marked is None else marked
                writer.write({"__key__": f"{record.row:09d}", extension: data, **_fields(record)})
        load_or_build(name)
    if job.index_images:
        from penstock.shards.entries import write_entries

        counts["indexed"] += write_entries(name)
    return counts


def _file(record: Record, job: _Job) -> tuple[str, bytes]:
    """Return extension and bytes of a sample's file, shrunk if needed."""
    try:
        data = Path(record.path).read_bytes()
    except OSError as error:
        raise SHARD.error(record.path, error) from error
    extension = os.path.splitext(record.path)[1].lower().lstrip(".") or "bin"
    extension = {"jpeg": "jpg"}.get(extension, extension)
    if job.resize is None:
        return extension, data
    import cv2

    from penstock.images.decode import decode

    image = decode(data, path=record.path)
    height, width = image.shape[:2]
    scale = job.resize / max(height, width)
    if scale >= 1:
        return extension, data
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    ok, encoded = cv2.imencode(".jpg", small[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, job.quality])
    if not ok:
        raise ImageError(f"{record.path}: cannot be written as JPEG")
    return "jpg", encoded.tobytes()


def write_checksums(folder: Path, names: list[str]) -> int:
    """Write the checksums of shards that have an index; return their total bytes."""
    lines, nbytes = [], 0
    for name in names:
        header = load_or_build(name).header
        lines.append(f"{header.fingerprint}  {os.path.basename(name)}\n")
        nbytes += header.size
    with write_atomically(folder / CHECKSUMS) as file:
        file.write("".join(lines).encode("utf-8", "surrogateescape"))
    return nbytes
