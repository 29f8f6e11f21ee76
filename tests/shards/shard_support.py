"""What the tests of shards share: archives with chosen members, and what `tarfile` makes of them."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def make_tar(
    members: Iterable[tuple[str, bytes]], *, format: int = tarfile.PAX_FORMAT, mtime: float = 0, end: bool = True
) -> bytes:
    """An archive of regular files; names that end with a slash are folders."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.mtime = mtime  # type: ignore[assignment]
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        size = archive.offset
    return out.getvalue() if end else out.getvalue()[:size]


def samples(
    count: int, extensions: Sequence[str] = ("jpg", "cls"), *, seed: int = 0, size: int = 2000, prefix: str = "s"
) -> list[tuple[str, bytes]]:
    """Members of so many samples with data of random lengths."""
    rng = random.Random(seed)
    return [
        (f"{prefix}{i:05d}.{extension}", rng.randbytes(rng.randrange(size)))
        for i in range(count)
        for extension in extensions
    ]


def by_tarfile(data: bytes) -> list[tuple[str, bytes]]:
    """Regular files of an archive as the standard library reads them."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        return [(info.name, archive.extractfile(info).read()) for info in archive if info.isreg()]  # type: ignore[union-attr]


def write_shards(
    folder: Path, counts: Sequence[int], extensions: Sequence[str] = ("jpg", "cls"), *, mtime: float = 0
) -> list[str]:
    """Shards ``s-0000.tar`` ... with so many samples; the class of a sample is its number in the whole set."""
    paths, number = [], 0
    for k, count in enumerate(counts):
        members: list[tuple[str, bytes]] = []
        for i in range(number, number + count):
            for extension in extensions:
                text = str(i).encode() if extension == "cls" else f"{extension} of {i} ".encode() * (i % 60 + 1)
                members.append((f"d/k{i:06d}.{extension}", text))
        number += count
        path = folder / f"s-{k:04d}.tar"
        path.write_bytes(make_tar(members, mtime=mtime))
        paths.append(str(path))
    return paths


def reseal(block: bytearray) -> bytearray:
    """A header with a right checksum."""
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return block


def mutated(data: bytes, rng: random.Random, positions: Callable[[random.Random], int], *, seal: bool) -> bytes:
    """An archive with one to three bytes changed at chosen places, with right checksums in their blocks if asked."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = positions(rng)
        changed[at] = rng.choice((0, 32, 48, 55, 57, 128, 255, rng.randrange(256)))
        if seal:
            begin = at // 512 * 512
            changed[begin : begin + 512] = reseal(changed[begin : begin + 512])
    return bytes(changed)
