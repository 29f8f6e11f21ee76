"""Tables: `TableDataset` beside `datasets` with torch's DataLoader: numbers, text and images. And orders of Parquet.

Both read the folder that ``Dataset.save_to_disk`` wrote, or a Parquet file of the same text, which `datasets` converts
to Arrow first. They make the same batches in the same order (a hash of the labels says so), with the default collate
function; `datasets` in its formats. Each is measured in a process of its own, after
a pass that starts workers and fills the page cache, and all of them in turn. Processor time is that of the process and
its workers.

The second table is of one Parquet file, ours alone: what each order makes of row groups that are kept, or are not.

    python benchmarks/tables.py --lines 20000 --repeat 3
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from _common import arguments, folder, in_a_process, parse, spread, table

KINDS = {"numbers": 256, "text": 256, "text in Parquet": 256, "images": 64}
"""Batch size of each kind of rows."""

SECONDS = 1.0
"""Passes are repeated for so long: processor time of other processes is known in hundredths of a second."""

PEERS = ("penstock", "datasets, numpy", "datasets, torch", "datasets, python")


def write(where: Path, kind: str, rows: int) -> None:
    """A folder of `datasets`: 32 numbers of float32, 50 to 1,500 letters, or a JPEG of 224 x 224; and a label."""
    from PIL import Image

    import datasets

    datasets.disable_progress_bars()
    rng = np.random.default_rng(0)
    labels = {"label": rng.integers(0, 10, rows)}
    features: dict[str, Any] = {"label": datasets.Value("int64")}
    if kind == "numbers":
        values: Any = list(rng.random((rows, 32), np.float32))
        features["row"] = datasets.List(datasets.Value("float32"), length=32)
    elif kind != "images":
        values = ["words " * int(count) for count in rng.integers(10, 250, rows)]
        features["row"] = datasets.Value("string")
    else:
        values, features["row"] = [], datasets.Image()
        for small in rng.integers(0, 256, (64, 14, 14, 3), np.uint8):
            out = io.BytesIO()
            Image.fromarray(small).resize((224, 224), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
            values.append({"bytes": out.getvalue(), "path": None})
        values = [values[k % 64] for k in range(rows)]
    made = datasets.Dataset.from_dict({**labels, "row": values}, features=datasets.Features(features))
    if kind == "text in Parquet":
        (where / kind).mkdir()
        made.to_parquet(where / kind / "train.parquet", batch_size=1000)
    else:
        made.save_to_disk(str(where / kind))


def loader_of(path: Path, peer: str, workers: int) -> Any:
    """A loader of one pass in the order of seed 0."""
    import penstock

    warnings.filterwarnings("ignore", "This DataLoader will create")
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "batch_size": KINDS[path.name]}
    if peer == "penstock":
        return penstock.DataLoader(penstock.TableDataset(path, seed=0), **more)
    import torch.utils.data

    import datasets

    form = peer.partition(", ")[2]
    if path.name == "text in Parquet":
        file, cache = str(path / "train.parquet"), str(path.parent / "converted")
        theirs = datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=cache)
    else:
        theirs = datasets.load_from_disk(str(path))
    theirs = theirs.with_format(None if form == "python" else form)
    order = penstock.make_order("global", len(theirs), seed=0)[np.arange(len(theirs))].tolist()
    return torch.utils.data.DataLoader(theirs, sampler=order, **more)


def cpu_seconds() -> float:
    """Processor time of this process and its workers."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def measure(path: Path, peer: str, workers: int, connection: Any) -> None:
    """In a process of its own: rows a second, the processor's seconds for each, and hashes of the labels of a pass."""
    import torch

    torch.set_num_threads(1)
    loader = loader_of(path, peer, workers)
    for _ in loader:
        pass
    count, hashes = 0, set()
    before, start = cpu_seconds(), time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        getattr(loader, "set_epoch", lambda _: None)(0)
        seen = hashlib.sha256()
        for batch in loader:
            labels = batch["label"]
            seen.update(np.asarray(labels, np.int64).tobytes())
            count += len(labels)
            assert len(batch["row"]) == len(labels)
        hashes.add(seen.hexdigest())
    wall, cpu = time.perf_counter() - start, cpu_seconds() - before
    connection.send((count / wall, cpu / count, hashes))
    getattr(loader, "close", lambda: None)()


def beside_datasets(where: Path, options: Any) -> None:
    """The first table, for each kind of rows."""
    for kind in options.kinds:
        rows = options.lines if kind != "images" else max(64, options.lines // 20)
        write(where, kind, rows)
        peers = [peer for peer in PEERS if peer != "datasets, python" or kind.startswith("text")]
        names = [(peer, workers) for workers in (0, 2) for peer in peers]
        found: dict[Any, list[Any]] = {name: [] for name in names}
        for _ in range(options.repeat):
            for peer, workers in names:
                found[peer, workers].append(in_a_process(measure, where / kind, peer, workers))
        assert len(set().union(*(result[2] for results in found.values() for result in results))) == 1, "other batches"
        lines = []
        for (peer, workers), results in found.items():
            each = statistics.median(cpu for _, cpu, _ in results) * 1e6
            ours = statistics.median(cpu for _, cpu, _ in found["penstock", workers]) * 1e6
            rates = spread([rate for rate, _, _ in results], 4)
            lines.append((peer, workers, *rates, f"{each:.1f}", f"{each / ours:.1f}x"))
        header = ["loader", "workers", "rows/s: min", "median", "max", "CPU us each", "of penstock's"]
        table(f"{rows:,} rows of {kind}, shuffled, batches of {KINDS[kind]}", header, lines)


def orders_of_parquet(where: Path, options: Any) -> None:
    """The second table: text in row groups of 1,000 rows, all kept, or one tenth of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    import penstock

    rng, path, rows = np.random.default_rng(0), where / "text.parquet", options.lines
    letters = ["words " * int(count) for count in rng.integers(10, 250, rows)]
    pq.write_table(pa.table({"row": letters, "label": rng.integers(0, 10, rows)}), path, row_group_size=1000)
    whole = sum(penstock.TableFiles(path).take(np.arange(rows)).column(k).nbytes for k in range(2))
    torch.set_num_threads(1)
    lines = []
    for order, share in (("none", 0.1), ("block", 0.1), ("global", 2.0), ("global", 0.1)):
        cpu = []
        for _ in range(options.repeat):
            dataset = penstock.TableDataset(path, shuffle=order, cache_bytes=int(whole * share))
            loader, before = penstock.DataLoader(dataset, batch_size=256), time.process_time()
            count = 0
            for number, batch in enumerate(loader):
                count += len(batch["label"])
                if number == options.batches:
                    break
            cpu.append((time.process_time() - before) / count * 1e6)
        kept = "all" if share > 1 else f"{share:.0%}"
        lines.append((order, kept, *spread(cpu, 3), f"{dataset.table.decoded / count * 1000:.3g}"))
    header = ["order", "kept", "CPU us each: min", "median", "max", "row groups decoded per 1,000 rows"]
    title = f"{rows:,} rows of text in Parquet, {whole / 1e6:.0f} MB decoded, row groups of 1,000; batches of 256"
    table(title, header, lines)


def main() -> None:
    parser = arguments(__doc__, lines=20_000, repeat=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--batches", type=int, default=60, help="of Parquet, at most (default: %(default)s)")
    options = parse(parser, {"lines": 2000, "repeat": 1, "batches": 5}, versions=["datasets"])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is looked up
    multiprocessing.set_forkserver_preload(
        ["torch.utils.data", "penstock.datasets.tables", "penstock.loader", "datasets"]
    )
    with folder(options.dir) as where:
        beside_datasets(where, options)
        orders_of_parquet(where, options)


if __name__ == "__main__":
    main()
