"""The charts of docs/. Each function draws one chart from the results that its parameters name.

A row that was not measured, or failed, has no bar.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from _picture import Bar, Panel, draw

__all__ = ["CHARTS", "Chart"]

Result = dict[str, Any]
Chart = Callable[..., str]


def speed(images: Result, tokens: Result) -> str:
    """Return images and tokens per second of Penstock and its peers, the first chart of README and site."""
    names = {
        "penstock, index": "Penstock, with an index of entries",
        "penstock": "Penstock",
        "decode alone": "decoding whole images, nothing else",
        "Grain, linear": "Grain, not antialiased",
        "Grain": "Grain",
        "torch + OpenCV": "torch, OpenCV",
        "DALI, CPU": "DALI on the CPU",
        "WebDataset": "WebDataset",
        "LitData": "LitData",
        "FFCV": "FFCV",
        "SPDL": "SPDL",
        "torch + Pillow": "torch, Pillow",
    }
    rows = _bars(images["tables"][0], "images/s", {(row,): name for row, name in names.items()})
    return draw(
        "Images and tokens per second, Penstock and other libraries",
        [
            Panel("Images per second", "JPEG files to augmented batches of 64 x 224 x 224, two workers", rows),
            _tokens(tokens, 64),
        ],
        _source(images, tokens),
    )


def images(images: Result) -> str:
    """Return a bar for every row of a table of images."""
    return _images(images, "JPEG files to augmented batches: images per second", "224 x 224; two workers")


def images_small(images_small: Result) -> str:
    """Return the same for images of 32 x 32 pixels."""
    return _images(images_small, "JPEGs of 32 x 32 pixels: images per second", "CIFAR-10; two workers")


def images_shards(images_shards: Result) -> str:
    """Return the same from tar shards."""
    return _images(images_shards, "JPEGs in tar shards: images per second", "augmented, 224 x 224; two workers")


def clips(clips: Result) -> str:
    """Return video clips per second, and the time per sound clip."""
    kept = {name: name for name in ("VideoDataset", "torchcodec", "torchcodec, approximate", "PyAV", "PyAV, kept open")}
    sound = ("AudioDataset", "soundfile, seeks", "soundfile, from the beginning")
    panels = [
        Panel(
            f"{title}: clips per second", "16 frames, one thread", _bars(_table(clips, start), "clips/s", _rows(kept))
        )
        for title, start in (
            ("Video, original size", "clips as they are"),
            ("Video, resized to 112 x 112", "clips resized"),
        )
    ]
    mp3 = _bars(_table(clips, "2 s out of 60 minutes of MP3"), "ms a clip", _rows({name: name for name in sound}), "ms")
    panels.append(Panel("2 s from an hour of MP3", "less is better", mp3, least=True))
    return draw("Clips of video and sound, Penstock and other libraries", panels, _source(clips))


def tar(shards: Result) -> str:
    """Return samples per second from tar shards, in order."""
    names = _rows(
        {"ShardSet, in order": "ShardSet, with an index", "StreamShards": "StreamShards", "webdataset": "WebDataset"}
    )
    decoded = _rows({"ShardDataset, processes": "ShardDataset", "webdataset": "WebDataset, Pillow"})
    panels = [
        Panel(f"{title}: samples per second", note, _bars(_table(shards, start), "samples/s", rows))
        for title, note, start, rows in (
            ("Tar, small samples", "CIFAR-10, bytes of each sample", "Raw iteration: CIFAR-10, webdataset", names),
            ("Tar, JPEGs", "ImageNet, bytes of each sample", "Raw iteration: ImageNet", names),
            ("Tar, decoded", "RGB 224 x 224, two workers", "RGB 224 x 224", decoded),
        )
    ]
    return draw("Tar shards, Penstock and WebDataset", panels, _source(shards))


def loader(loader_overhead: Result, loader_undeclared: Result) -> str:
    """Return batches per second of Penstock's and torch's loader: overhead, and datasets that declare nothing."""
    declared = {("tensors", "penstock"): "Penstock", ("tensors", "torch"): "torch"}
    dicts = {("dicts", "penstock"): "Penstock", ("dicts", "torch"): "torch"}
    panels = [
        Panel(f"{title}: batches per second", note, _bars(_table(result, start), "batches/s", rows))
        for title, note, result, start, rows in (
            ("64 x 150 KB", "tensors, two workers, pure dataset", loader_overhead, "64 x 150 KB", declared),
            ("64 x 1 KB", "tensors, two workers, pure dataset", loader_overhead, "64 x 1 KB", declared),
            (
                "64 dicts",
                "dataset that declares nothing, two workers",
                loader_undeclared,
                "Datasets that declare nothing, 2",
                dicts,
            ),
            (
                "64 dicts",
                "the same dataset without workers",
                loader_undeclared,
                "Datasets that declare nothing, inline",
                dicts,
            ),
        )
    ]
    return draw("Penstock's and torch's DataLoader", panels, _source(loader_overhead, loader_undeclared))


def manifest(manifest_memory: Result, samplers: Result, manifest_build: Result) -> str:
    """Return memory of a worker, time to a first index, and the rate of indexing a text file."""
    growth = _table(manifest_memory, "Growth of Pss_Anon")
    memory = {
        ("Manifest, 8 ranks x 4 workers", "worker"): "Manifest",
        ("list of 10,000,000 lines, 1 rank x 4 workers", "worker"): "list of lines",
    }
    first = {"DistributedSampler global": "Penstock, global shuffle", "torch DistributedSampler": "torch"}
    build = {
        "Manifest.open, index written and synced": "Manifest.open, index written",
        "open(...).readlines()": "readlines()",
        "wc -l": "wc -l, writes no index",
    }
    sampling = _table(samplers, "10,000,000 samples")
    panels = [
        Panel("Private memory of a worker", "10 M samples; less is better", _bars(growth, "min", memory, "MiB"), True),
        Panel(
            "DistributedSampler, first index",
            "10 M samples, 8 ranks; less is better",
            _bars(sampling, "first, ms", _rows(first), "ms"),
            True,
        ),
        Panel(
            "DistributedSampler, memory",
            "the same; less is better",
            _bars(sampling, "extra peak", _rows(first), "MiB"),
            True,
        ),
        Panel(
            "DistributedSampler: million indices per second",
            "one Python integer at a time",
            _bars(sampling, "M indices/s", _rows(first)),
        ),
        Panel(
            "Indexing a text file: GB/s", "10 M lines", _bars(_table(manifest_build, "Indexing"), "GB/s", _rows(build))
        ),
    ]
    return draw("Manifest and sampler with 10 M samples", panels, _source(manifest_memory, samplers, manifest_build))


def tokens(tokens: Result) -> str:
    """Return tokens per second by batch size."""
    return draw(
        "Tokens per second, Penstock and torch",
        [_tokens(tokens, size, panel=True) for size in (8, 64, 512)],
        _source(tokens),
    )


def packing(packing: Result, token_budget: Result) -> str:
    """Return how full packs are, and the padding of batches."""
    packs = {
        "PackedDataset, batches of 64": "PackedDataset",
        "cut": "cut (splits documents)",
        "windows of 4,096": "best fit in windows of 4,096",
        "next fit": "next fit",
        "longest of 8": "padded to the longest of 8",
        "padded": "one document per row",
    }
    budget = {
        "TokenBudgetBatchSampler, 256 classes": "TokenBudgetBatchSampler",
        "sorted list": "sorted list, same batches in each epoch",
        "sorted pools": "sorted pools",
        "bucket by length": "buckets by length",
        "random": "random",
    }
    web, samples = _table(packing, "web: sequences of 8,192"), _table(token_budget, "web: 1,000,000")
    panels = [
        Panel(
            "Real tokens",
            "web documents, sequences of 8,192 tokens",
            _bars(web, "real tokens, %", _rows(packs), "%"),
        ),
        Panel(
            "Padding in batches",
            "web documents, 65,536 tokens per batch; less is better",
            _bars(samples, "padding, %", _rows(budget), "%"),
            True,
        ),
        Panel(
            "Time to reach the middle of an epoch",
            "the same batches; less is better",
            _bars(samples, "middle, ms", _rows(budget), "ms"),
            True,
        ),
    ]
    return draw("Packed sequences, and batches within a token budget", panels, _source(packing, token_budget))


def tables(tables: Result, text: Result, tokenizing: Result) -> str:
    """Return rows per second of Penstock and Hugging Face datasets, and the rate of tokenizers."""
    formats = {"penstock": "Penstock", **{f"datasets, {kind}": f"datasets, {kind}" for kind in ("numpy", "torch")}}
    alone = {(name, "0"): shown for name, shown in formats.items()}
    lines = {("text.jsonl", name): shown for name, shown in (("penstock", "Penstock"), ("datasets", "datasets"))}
    parquet = {("text.parquet", row[1]): shown for row, shown in lines.items()}
    tools = {
        "penstock tokenize": "penstock tokenize",
        "tokenizers.encode_batch": "tokenizers, encode_batch",
        "tokenizers.encode_batch_fast": "tokenizers, encode_batch_fast",
        "datasets.map": "datasets.map",
    }
    documents = text["tables"][0]
    panels = [
        Panel("Arrow, numbers: rows per second", "shuffled, no workers", _bars(tables["tables"][0], "rows/s", alone)),
        Panel(
            "Arrow, text: rows per second",
            "shuffled, no workers",
            _bars(tables["tables"][1], "rows/s", {**alone, ("datasets, python", "0"): "datasets, python"}),
        ),
        Panel("JSON lines: rows per second", "in random order, no workers", _bars(documents, "rows/s: random", lines)),
        Panel("Parquet: rows per second", "in random order, no workers", _bars(documents, "rows/s: random", parquet)),
        Panel(
            "Tokenizing text: MB/s",
            "two workers, including start-up",
            _bars(tokenizing["tables"][0], "MB/s", _rows(tools)),
        ),
    ]
    return draw("Tables and text, Penstock and Hugging Face", panels, _source(tables, text, tokenizing))


def server(server: Result) -> str:
    """Return rows per second of the metadata server, and the latency of single rows."""
    rows, latency = server["tables"][0], _table(server, "Latency")
    panels = [
        Panel(f"{title}: rows per second", note, _bars(rows, "k rows/s", names, scale=1000))
        for title, note, names in (
            (
                "Shuffled pages",
                "one client, 1 M rows",
                {("pages, shuffled", "penstock"): "Penstock", ("pages, shuffled", "Flask"): "Flask and JSON"},
            ),
            (
                "Batches of 256",
                "one client",
                {
                    ("batches of 256", "penstock, 4 under way"): "Penstock, four concurrent requests",
                    ("batches of 256", "penstock"): "Penstock, one request at a time",
                    ("batches of 256", "Flask"): "Flask and JSON",
                },
            ),
            (
                "Single rows",
                "eight clients",
                {("8 clients, rows", "penstock"): "Penstock", ("8 clients, rows", "Flask"): "Flask and JSON"},
            ),
        )
    ]
    names = {("penstock",): "Penstock", ("Flask",): "Flask and JSON"}
    panels.append(
        Panel("Single rows, p99", "eight clients; less is better", _bars(latency, "p99: min", names, "ms"), least=True)
    )
    return draw("Metadata server, compared with Flask and JSON", panels, _source(server))


def stores(remote: Result) -> str:
    """Return bars of a cold epoch from the store with the highest latency; failures have no bar."""
    tables = [table for table in remote["tables"] if table["title"].endswith("before each answer")]
    table = [table for table in tables if any(column.startswith("cold samples") for column in table["columns"])][-1]
    rate, first = (_column(table, begin) for begin in ("cold samples", "first batch"))
    bars = [
        Bar(row[0], value, _kind(row[0]), f"{value:,.0f}; first batch {row[first]} s")
        for row in table["rows"]
        if (value := _number(row[rate])) is not None
    ]
    panel = Panel("First epoch from a store: samples per second", table["title"], bars)
    return draw(panel.title, [panel], _source(remote))


CHARTS: dict[str, Chart] = {
    "speed.svg": speed,
    "images-peers.svg": images,
    "charts/images-small.svg": images_small,
    "charts/images-shards.svg": images_shards,
    "charts/clips.svg": clips,
    "charts/tar.svg": tar,
    "charts/loader.svg": loader,
    "charts/manifest.svg": manifest,
    "charts/tokens.svg": tokens,
    "charts/packing.svg": packing,
    "charts/tables.svg": tables,
    "charts/server.svg": server,
    "guides/training-from-stores.svg": stores,
}
"""The path of each chart in docs/, and the function that draws it. Its parameters are the names of results."""


def _images(result: Result, title: str, note: str) -> str:
    """Return a bar for each row of the first table, with the name in that row."""
    table = result["tables"][0]
    rows = {(row[0],): row[0] for row in table["rows"]}
    note += "; dashed bar: decoding alone"
    return draw(title, [Panel(title, note, _bars(table, "images/s", rows))], _source(result))


def _tokens(result: Result, size: int, *, panel: bool = False) -> Panel:
    """Return tokens per second in batches of `size` sequences, with and without workers."""
    table = next(table for table in result["tables"] if table["title"].endswith(f"batches of {size}"))
    found = re.search(r"of (\d+) tokens", table["title"])
    assert found is not None
    names = {
        ("penstock, 0 workers",): "Penstock, no workers",
        ("penstock, 2 workers",): "Penstock, two workers",
        ("torch, 0 workers",): "torch, no workers",
        ("torch, 2 workers",): "torch, two workers",
    }
    rows = _bars(table, "sequences/s", names, "M", scale=int(found[1]) / 1e6)
    what = f"batches of {size} x {found[1]}"
    return Panel(
        f"Tokens per second, batches of {size}" if panel else "Tokens per second",
        f"{what}, from a memory-mapped file; M = million",
        rows,
    )


def _rows(names: dict[str, str]) -> dict[tuple[str, ...], str]:
    return {(row,): name for row, name in names.items()}


def _bars(
    table: Result, column: str, names: dict[tuple[str, ...], str], unit: str = "", scale: float = 1.0
) -> list[Bar]:
    """Return a bar for each of `names`, which maps the beginning of a row's first cells to the name to show."""
    where = _column(table, column)
    bars = []
    for begins, name in names.items():
        row = _row(table, begins)
        value = _number(row[where]) if row else None
        if value is not None:
            text = row[where] if scale == 1 and value < 100 else _figure(value * scale)
            bars.append(Bar(name, value * scale, _kind(*begins), f"{text} {unit}".rstrip()))
    return bars


def _row(table: Result, begins: tuple[str, ...]) -> Sequence[str]:
    """Return the row whose first cells equal `begins`, else one whose cells start with them, else an empty one."""
    rows = [row for row in table["rows"] if all(map(str.startswith, row, begins))]
    exact = [row for row in rows if tuple(row[: len(begins)]) == begins]
    return next(iter([*exact, *rows]), [])


def _table(result: Result, begins: str) -> Result:
    """Return the table whose title begins with `begins`, or an empty one."""
    empty: Result = {"title": begins, "columns": [], "rows": []}
    return next((table for table in result["tables"] if table["title"].startswith(begins)), empty)


def _column(table: Result, begins: str) -> int:
    """Return the index of a column; if it is the minimum, the index of the median, which follows it."""
    columns = table["columns"]
    found = next((number for number, column in enumerate(columns) if column.startswith(begins)), 0)
    return found + 1 if columns and columns[found].endswith(("min", "least")) else found


def _kind(*names: str) -> Any:
    """Return the kind of bar for a row with these first cells: Penstock, a peer, or decoding alone."""
    ours = ("penstock", "manifest", "shard", "streamshards", "packed", "tokenbudget", "videodataset", "audiodataset")
    if "decode alone" in names:
        return "plain"
    return "ours" if any(name.lower().startswith((*ours, "distributedsampler")) for name in names) else "peer"


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _figure(value: float) -> str:
    """Return a figure with three significant digits, or more if it is 1,000 or larger."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _source(*results: Result) -> str:
    """Return the machines and the dates of the results."""
    dates: dict[str, set[str]] = {}
    for result in results:
        machine = result["machine"]
        dates.setdefault(f"{machine['processor']}, {machine['cores']} cores", set()).add(result["date"][:10])
    return "; ".join([*(f"{where}, {' and '.join(sorted(days))}" for where, days in dates.items()), "medians"])
