"""Text: JSON lines, plain and compressed, and Parquet, through `TableDataset`, beside `datasets`.

All read the same made-up documents: words drawn by Zipf's law, a few hundred a document, with an id and a nested value.
Each is measured in processes of its own, in turn: the first opening (which indexes, or converts), the second one, then
rows a second in random order and in order, or what a stream calls so, through a loader without workers, and the private
memory of the process afterwards. What an opening leaves on the disk is said, too. Streams have no random order: their
shuffle buffer holds 1,000 rows.

    python benchmarks/text.py --megabytes 200 --repeat 3
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from _common import arguments, folder, in_a_process, parse, smaps_rollup, spread, table

FILES = ("text.jsonl", "text.jsonl.zst", "text.frames.jsonl.zst", "text.parquet")
PEERS = ("penstock", "datasets", "datasets, streaming")
BATCH = 64


def documents(size: int) -> Iterator[dict[str, Any]]:
    """Documents of so many bytes of text together."""
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, count))) for count in rng.integers(2, 12, 20_000)]
    number = written = 0
    while written < size:
        picked = np.minimum(rng.zipf(1.2, int(rng.integers(50, 500))), len(words)) - 1
        text = " ".join(words[k] for k in picked.tolist())
        yield {"id": number, "text": text, "meta": {"source": "made up", "words": len(picked)}}
        number, written = number + 1, written + len(text)


def write(where: Path, megabytes: int) -> int:
    """The four files; returns the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    rows = list(documents(megabytes << 20))
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    whole = b"".join(lines)
    (where / FILES[0]).write_bytes(whole)
    (where / FILES[1]).write_bytes(zstandard.compress(whole))
    frames = (whole[k : k + (1 << 20)] for k in range(0, len(whole), 1 << 20))
    (where / FILES[2]).write_bytes(b"".join(map(zstandard.compress, frames)))
    pq.write_table(pa.Table.from_pylist(rows), where / FILES[3], row_group_size=1000, compression="zstd")
    return len(rows)


def opened(path: Path, peer: str, order: str) -> Any:
    """A loader over a file: batches of lists of rows."""
    import penstock

    if peer == "penstock":
        dataset = penstock.TableDataset(path, seed=0, shuffle=order)
        return penstock.DataLoader(dataset, BATCH, collate_fn=list)
    import torch.utils.data

    import datasets

    datasets.disable_progress_bars()
    kind, streaming = ("parquet" if path.suffix == ".parquet" else "json"), "streaming" in peer
    theirs: Any = datasets.load_dataset(
        kind,
        data_files=str(path),
        split="train",
        streaming=streaming,
        cache_dir=str(path.parent / f"cache-{path.name}"),
    )
    if streaming:
        theirs = theirs.shuffle(seed=0, buffer_size=1000) if order != "none" else theirs
        return torch.utils.data.DataLoader(theirs, batch_size=BATCH, collate_fn=list)
    indices: Any = None
    if order != "none":
        made = penstock.make_order(order, len(theirs), seed=0)
        indices = made[np.arange(len(theirs))].tolist()
    return torch.utils.data.DataLoader(theirs, BATCH, sampler=indices, collate_fn=list)


def measure(path: Path, peer: str, order: str, seconds: float, connection: Any) -> None:
    """In a process of its own: seconds of the opening, rows a second, and MiB of private memory."""
    import torch

    import datasets
    import penstock

    _ = penstock.TableDataset, penstock.DataLoader, penstock.JsonFiles, penstock.TableFiles, datasets.load_dataset
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    start = time.perf_counter()
    loader = opened(path, peer, order)
    opening = time.perf_counter() - start
    count, start = 0, time.perf_counter()
    for batch in loader:
        assert isinstance(batch[0]["text"], str)
        count += len(batch)
        if time.perf_counter() - start > seconds:
            break
    rate = count / (time.perf_counter() - start)
    connection.send((opening, rate, smaps_rollup(os.getpid())["Private_Dirty"] / 2**20))


def held(*folders: Path) -> int:
    """MB of the files in folders."""
    return sum(file.stat().st_size for place in folders for file in place.rglob("*") if file.is_file()) // 10**6


def main() -> None:
    parser = arguments(__doc__, repeat=3)
    parser.add_argument("--megabytes", type=int, default=200, help="of text (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: %(default)s)")
    options = parse(parser, {"megabytes": 4, "repeat": 1, "seconds": 0.3}, versions=["datasets"])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is looked up
    multiprocessing.set_forkserver_preload(
        ["torch.utils.data", "penstock.datasets.tables", "penstock.loader", "datasets"]
    )
    with folder(options.dir) as where:
        os.environ["XDG_CACHE_HOME"] = str(where / "penstock-cache")
        rows = write(where, options.megabytes)
        lines = []
        for name in FILES:
            path = where / name
            for peer in PEERS:
                before = held(where)
                first = in_a_process(measure, path, peer, "none", 0.0)[0]
                left = held(where) - before
                found: dict[str, list[Any]] = {"global": [], "block": [], "none": []}
                for _ in range(options.repeat):
                    for order in random.sample([*found], len(found)):
                        if peer != "datasets, streaming" or order != "global":
                            found[order].append(in_a_process(measure, path, peer, order, options.seconds))
                results = [result for each in found.values() for result in each]
                second = statistics.median(result[0] for result in results)
                rates = [
                    spread([rate for _, rate, _ in found[order]], 3)[1] if found[order] else "-"
                    for order in ("global", "block", "none")
                ]
                memory = max(result[2] for result in results)
                lines.append((name, peer, f"{first:.2f}", f"{second:.2f}", left, *rates, f"{memory:.0f}"))
        header = ["file", "reader", "first opening s", "second s", "MB left on disk"]
        header += ["rows/s: random", "block or buffer", "in order", "private MiB, largest"]
        sizes = ", ".join(f"{name} {(where / name).stat().st_size // 10**6} MB" for name in FILES)
        table(f"{rows:,} documents; {sizes}; batches of {BATCH}, no workers", header, lines)


if __name__ == "__main__":
    main()
