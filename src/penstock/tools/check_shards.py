"""Check shards completely (`verify`).

`verify` reads every byte: the structure of the archive, repeated keys, samples with missing parts, data after the end
mark, the index, the index of entries, and the checksum written by `pack`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import xxhash

from penstock.errors import ManifestError, PenstockError, StateError
from penstock.shards.archive import Archive
from penstock.shards.compressed import compression_of
from penstock.shards.grouping import Sample
from penstock.shards.index import SUFFIX, ShardIndex, index_path, load_or_build
from penstock.shards.runs import scan_runs
from penstock.shards.window import scan
from penstock.storage.files import PIECE, SHARD, File
from penstock.tools.pack import CHECKSUMS

__all__ = ["ShardReport", "count_samples", "verify"]

_SHOWN = 5


@dataclass
class ShardReport:
    """The result of checking one shard. ``problems`` is empty if it is sound."""

    path: str
    samples: int = 0
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def verify(path: str, *, decode: bool = False) -> ShardReport:
    """Read a whole shard and report its problems.

    Args:
        path: a local shard, compressed or not.
        decode: also decode every image, number and text.

    Problems of the shard are reported, not raised.
    """
    report = ShardReport(path)
    try:
        file = File(path, SHARD)
        report.nbytes = file.size
        if compression_of(file.read_exact(min(6, file.size), 0)) is None:
            _verify_archive(file, report)
        else:
            _verify_samples(path, report, None)
        if decode and report.ok:
            from penstock.shards.decode import Decode

            _verify_samples(path, report, Decode())
    except PenstockError as error:
        report.problems.append(str(error))
    return report


def _verify_archive(file: File, report: ShardReport) -> None:
    archive = Archive(file)
    keys: Counter[str] = Counter()
    parts: Counter[tuple[str, ...]] = Counter()
    digest, done = xxhash.xxh3_128(), 0
    for run in scan_runs(archive, file.path):
        keys.update(run.key_texts())
        names = [run.names[number] for number in run.extensions.tolist()]
        first = run.first.tolist()
        parts.update(tuple(names[a:b]) for a, b in itertools.pairwise(first))
        end = min(int(run.files.end[-1]), file.size)
        for piece in archive.pieces(done, end):
            digest.update(piece)
        done = end
    report.samples = keys.total()
    rest = -1
    for at, piece in zip(itertools.count(done, PIECE), file.pieces(done, file.size), strict=False):
        digest.update(piece)
        used = np.flatnonzero(np.frombuffer(piece, np.uint8))
        rest = at + int(used[-1]) if len(used) else rest
    # Folders and similar members may follow the last sample; another archive may not.
    if rest >= 0 and not _ends_behind(archive, file.path, rest):
        report.problems.append(f"there is data behind the end mark, up to byte {rest} (two archives in one file?)")
    file.check()
    twice = [key for key, count in keys.items() if count > 1]
    if twice:
        report.problems.append(f"{len(twice)} keys come twice, not one after the other: {', '.join(twice[:_SHOWN])}")
    _check_parts(parts, report)
    _check_index(file, digest.digest(), report)
    _check_entries(file, digest.digest(), report)


def _ends_behind(archive: Archive, path: str, last: int) -> bool:
    """Return whether a byte belongs to a member, and not to data after the end mark."""
    end = 0
    for members in scan(archive, path):
        end = int(members.end[-1])
    return last < end


def _check_parts(parts: Counter[tuple[str, ...]], report: ShardReport) -> None:
    if len({frozenset(names) for names in parts}) > 1:
        usual = frozenset(parts.most_common(1)[0][0])
        other = sum(count for names, count in parts.items() if frozenset(names) != usual)
        report.problems.append(f"{other} of {report.samples} samples have other parts than {', '.join(sorted(usual))}")


def _check_index(file: File, digest: bytes, report: ShardReport) -> None:
    beside = Path(file.path + SUFFIX)  # a wrong index is not used here, but might be uploaded
    for where in {index_path(file.path), beside if beside.exists() else None} - {None}:
        index = ShardIndex.load(cast(Path, where))
        fits = index is not None and index.header.digest == digest and index.is_sound()
        if index is None or not fits or len(index) != report.samples:
            report.problems.append(f"the index {where} is not that of this shard: remove it, and it is made again")
    listed = _listed(Path(file.path))
    if listed is not None and listed != digest.hex():
        report.problems.append(f"the content is not what was packed: xxh3_128 {digest.hex()}, not {listed}")


def _check_entries(file: File, digest: bytes, report: ShardReport) -> None:
    from penstock.images.entries import ImageIndex  # imported late: it loads the image decoders
    from penstock.shards.entries import ORIGIN, entries_path, first_image

    path, where = entries_path(file.path), index_path(file.path)
    if not path.exists():
        return
    index = None if where is None else ShardIndex.load(where)
    try:
        found = ImageIndex(path, digest.hex(), report.samples, ORIGIN)
        if index is None or index.header.digest != digest:  # images cannot be compared
            return
        for number in range(len(index)):
            data = first_image(index, file, number)
            if data is not None and not found.is_of(number, data):
                report.problems.append(
                    f"{path}: damaged entries, first those of sample {number}: make them again with: {ORIGIN.make}"
                )
                return
    except (ManifestError, StateError) as error:
        report.problems.append(str(error))


def _listed(path: Path) -> str | None:
    """Return the checksum of a shard in the list beside it."""
    try:
        lines = (path.parent / CHECKSUMS).read_text(errors="surrogateescape").splitlines()
    except (OSError, ValueError):
        return None
    return next((line[:32] for line in lines if line[34:] == path.name), None)


def _verify_samples(path: str, report: ShardReport, decode: Callable[[Sample], Sample] | None) -> None:
    """Check the samples one by one; count them if they were not counted."""
    from penstock.shards.stream import read_shard

    count = bad = 0
    for _, sample in read_shard(path):
        count += 1
        if decode is None:
            continue
        try:
            decode(sample)
        except PenstockError as error:
            bad += 1
            if bad <= _SHOWN:
                report.problems.append(str(error))
    if bad > _SHOWN:
        report.problems.append(f"{bad - _SHOWN} more samples cannot be decoded")
    report.samples = count


def count_samples(path: str) -> int:
    """Index a shard without an index; return its number of samples. Raises as `load_or_build`."""
    return len(load_or_build(path))
