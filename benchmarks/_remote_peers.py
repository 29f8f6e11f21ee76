"""The peers of ``remote.py``: each in a process of its own, which reads the same samples from the same store.

Run by ``remote.py``: ``python _remote_peers.py NAME ADDRESS CACHE``. For each line that it reads, the process makes an
epoch: it prints a line of JSON with the first batch, and one at the end. After a line that says ``first`` it ends with
the first batch. All deliver the bytes of the same JPEGs in
lists of 64, shuffled as the library does, with two workers. A new peer is a function and a line in `PEERS`.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["PEERS", "main"]

BATCH, WORKERS = 64, 2
Epoch = Callable[[int], Iterable[list[bytes]]]
"""Makes the batches of the epoch with this number."""
S3_OPTIONS = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}


def main() -> None:
    name, address, cache = sys.argv[1:]
    try:
        epoch = PEERS[name](address, cache)
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        say(missing=f"not installed: {error}")
        return
    for number, line in enumerate(sys.stdin):
        samples = digest = 0
        longest, before = 0.0, time.perf_counter()
        for batch in epoch(number):
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
            if not samples:
                say(batch=len(batch))
                if line.strip() == "first":
                    return
            samples += len(batch)
            digest += sum(map(zlib.crc32, batch))
        say(samples=samples, digest=digest, longest=longest)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def shards(address: str, kind: str, extension: str) -> list[str]:
    """The addresses of the files of one format, which the benchmark names in the environment."""
    return [f"{address}/data/{kind}/{number:04d}.{extension}" for number in range(int(os.environ["REMOTE_SHARDS"]))]


def jpeg(sample: Any) -> bytes:
    return bytes(sample["jpg"])


def as_they_are(items: list[bytes]) -> list[bytes]:
    return items


def of_rows(items: list[dict[str, Any]]) -> list[bytes]:
    return [row["jpg"] for row in items]


def penstock_tar(kind: str) -> Callable[[str, str], Epoch]:
    """Tar shards, with indexes beside them or without."""

    def peer(address: str, cache: str) -> Epoch:
        from penstock.datasets.shards import ShardDataset

        return penstock_loader(ShardDataset(shards(address, kind, "tar"), cache_dir=cache, load=jpeg, progress=False))

    return peer


def penstock_mds(address: str, cache: str) -> Epoch:
    from penstock.datasets.mds import MDSDataset

    return penstock_loader(MDSDataset(f"{address}/data/mds", cache_dir=cache, load=jpeg))


def penstock_parquet(address: str, cache: str) -> Epoch:
    from penstock.datasets.tables import TableDataset
    from penstock.storage import Storage

    files = shards(address, "parquet", "parquet")
    return penstock_loader(TableDataset(files, storage=Storage(cache=cache), load=jpeg, shuffle="block"))


def penstock_lines(address: str, cache: str) -> Epoch:
    """JSON lines, which hold the images in base64."""
    from penstock.datasets.tables import TableDataset
    from penstock.storage import Storage

    files = shards(address, "lines", "jsonl")
    return penstock_loader(TableDataset(files, storage=Storage(cache=cache), load=jpeg_of_text))


def jpeg_of_text(row: dict[str, Any]) -> bytes:
    return base64.b64decode(row["jpg"])


def penstock_loader(dataset: Any) -> Epoch:
    from penstock import DataLoader

    loader = DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=as_they_are, seed=0)

    def epoch(number: int) -> Iterable[list[bytes]]:
        loader.set_epoch(number)
        return loader

    return epoch


def webdataset(*, cached: bool) -> Callable[[str, str], Epoch]:
    """Tar shards by curl, as webdataset reads addresses; with its cache of whole shards or without."""

    def peer(address: str, cache: str) -> Epoch:
        import webdataset as wds

        urls = shards(address, "tar", "tar")
        options = {"cache_dir": cache} if cached else {}
        dataset = wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False, **options).shuffle(1000)
        dataset = dataset.to_tuple("jpg").map(first).batched(BATCH, collation_fn=as_they_are)
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=WORKERS)
        return lambda number: loader

    return peer


def first(items: tuple[bytes, ...]) -> bytes:
    return items[0]


def mosaic(address: str, cache: str) -> Epoch:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    # A process that ended early leaves some, and the next one would wait for it.
    clean_stale_shared_memory()
    dataset = StreamingDataset(remote="s3://data/mds", local=cache, shuffle=True, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=of_rows)
    return lambda number: loader


def litdata(address: str, cache: str) -> Epoch:
    import litdata as ld
    from litdata.streaming import downloader

    # Its chunks are fetched by obstore, which refuses plain HTTP unless told; by LitData, nobody can tell it.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # type: ignore[typeddict-unknown-key]
    dataset = ld.StreamingDataset(
        "s3://data/litdata", cache_dir=cache, shuffle=True, storage_options=S3_OPTIONS | {"endpoint_url": address}
    )
    loader = ld.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=of_rows)
    return lambda number: loader


def hugging_face(kind: str, extension: str) -> Callable[[str, str], Epoch]:
    """`datasets` streaming from Parquet files or tar shards."""

    def peer(address: str, cache: str) -> Epoch:
        from torch.utils.data import DataLoader

        import datasets

        files = shards(address, kind, extension)
        builder = {"parquet": "parquet", "tar": "webdataset"}[extension]
        dataset = datasets.load_dataset(builder, data_files=files, split="train", streaming=True, cache_dir=cache)
        if extension == "tar":
            dataset = dataset.cast_column("jpg", datasets.Image(decode=False)).map(unwrapped)
        dataset = dataset.shuffle(seed=0, buffer_size=1000)
        loader = DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=of_rows)

        def epoch(number: int) -> Iterable[list[bytes]]:
            dataset.set_epoch(number)
            return loader

        return epoch

    return peer


def unwrapped(row: dict[str, Any]) -> dict[str, Any]:
    return {"jpg": row["jpg"]["bytes"]}


PEERS: dict[str, Callable[[str, str], Epoch]] = {
    "Penstock, tar with indexes": penstock_tar("indexed"),
    "Penstock, tar without indexes": penstock_tar("tar"),
    "Penstock, MDS": penstock_mds,
    "Penstock, Parquet": penstock_parquet,
    "Penstock, JSON lines": penstock_lines,
    "WebDataset": webdataset(cached=False),
    "WebDataset, cache": webdataset(cached=True),
    "MosaicML Streaming": mosaic,
    "LitData": litdata,
    "datasets, Parquet": hugging_face("parquet", "parquet"),
    "datasets, tar": hugging_face("tar", "tar"),
}
"""By name: a function of the store's address and an empty folder for the peer's cache."""


if __name__ == "__main__":
    main()
