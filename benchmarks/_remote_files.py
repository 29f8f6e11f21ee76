"""The files of ``remote.py``: the same images in each format that a peer reads.

Run by ``remote.py``: ``python _remote_files.py BUCKET SHARDS`` with the images in ``BUCKET/parquet``. A format whose
package is not installed is left out. This is a script, since LitData converts in processes that import the program's
main module: without such a file, or where it has no ``if __name__ == "__main__"``, they die, no error reaches
`optimize`, and it writes an index without chunks.
"""

from __future__ import annotations

import base64
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["write_parquet"]


def write_parquet(images: Sequence[bytes], folder: Path, shards: int) -> None:
    """Write so many files of about as many rows."""
    folder.mkdir(parents=True)
    for number, part in enumerate(split(images, shards)):
        table = pa.table({"jpg": pa.array(part, pa.binary())})
        pq.write_table(table, folder / f"{number:04d}.parquet", compression="none")


def split(images: Sequence[bytes], shards: int) -> Iterator[Sequence[bytes]]:
    """Yield so many parts of about the same length."""
    for number in range(shards):
        yield images[len(images) * number // shards : len(images) * (number + 1) // shards]


@functools.cache
def read(folder: Path) -> list[bytes]:
    """Read the images back."""
    return [image for path in sorted(folder.glob("*.parquet")) for image in pq.read_table(path)["jpg"].to_pylist()]


def sample(number: int, folder: Path) -> dict[str, Any]:
    """Return one sample, for LitData."""
    return {"jpg": read(folder)[number]}


def write_lines(bucket: Path, shards: int) -> None:
    """Write files of JSON lines, of which each holds an image in base64."""
    (bucket / "lines").mkdir()
    for number, rows in enumerate(split(read(bucket / "parquet"), shards)):
        lines = "".join(json.dumps({"jpg": base64.b64encode(image).decode()}) + "\n" for image in rows)
        (bucket / "lines" / f"{number:04d}.jsonl").write_text(lines)


def write_tar(bucket: Path, shards: int) -> None:
    """Write the same tar shards twice, without indexes and with."""
    from penstock.shards import ShardSet, TarWriter

    images = read(bucket / "parquet")
    for kind in ("tar", "indexed"):
        (bucket / kind).mkdir()
        for number in range(shards):
            with TarWriter(bucket / kind / f"{number:04d}.tar") as sink:
                for k in range(len(images) * number // shards, len(images) * (number + 1) // shards):
                    sink.write({"__key__": f"{k:08d}", "jpg": images[k]})
    for index in (bucket / "tar").glob("*.pidx"):
        index.unlink()
    ShardSet(sorted(map(str, (bucket / "indexed").glob("*.tar"))), progress=False)


def write_mds(bucket: Path, shards: int) -> None:
    """Write shards of about the same size."""
    from streaming import MDSWriter

    images = read(bucket / "parquet")
    limit = sum(map(len, images)) // shards + 8 * len(images) // shards
    with MDSWriter(out=str(bucket / "mds"), columns={"jpg": "bytes"}, size_limit=limit) as sink:
        for image in images:
            sink.write({"jpg": image})


def write_litdata(bucket: Path, shards: int) -> None:
    """Write chunks of about the same size.

    Raises:
        RuntimeError: LitData wrote none.
    """
    import litdata

    images = read(bucket / "parquet")
    litdata.optimize(
        functools.partial(sample, folder=bucket / "parquet"),
        list(range(len(images))),
        str(bucket / "litdata"),
        chunk_bytes=sum(map(len, images)) // shards,
        num_workers=1,
        reorder_files=False,
        verbose=False,
    )
    if not list((bucket / "litdata").glob("chunk-*.bin")):
        raise RuntimeError("LitData's optimize wrote no chunks: its processes cannot import this file")


def written(bucket: Path, shards: int) -> Iterator[str]:
    """Write all formats; yields what is left out, and why."""
    write_tar(bucket, shards)
    write_lines(bucket, shards)
    for name, write in (("MDS", write_mds), ("LitData", write_litdata)):
        try:
            write(bucket, shards)
        except ImportError as error:
            yield f"{name} is left out: {error}"


if __name__ == "__main__":
    for line in written(Path(sys.argv[1]), int(sys.argv[2])):
        print(line, file=sys.stderr)
