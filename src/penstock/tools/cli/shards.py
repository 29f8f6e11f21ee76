"""``penstock shards``: index, show, check and write tar shards.

Results are printed to standard output, or as one JSON object with ``--json``; progress bars to standard error. Exit
code 1 means problems in the data, or a `PenstockError`, which `penstock.tools.cli.app.main` handles.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import ConfigError
from penstock.processes import map_in_processes
from penstock.tools.cli import quantities
from penstock.tools.cli.layout import App
from penstock.tools.cli.manifest_options import Json, bar, byte_size, console, duration, pairs, print_json, shown, speed
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.shards import ShardSet

__all__ = ["app"]

app = App()


def _size(text: str) -> int:
    size = quantities.size(text)
    if size < 1:
        raise typer.BadParameter(f"{text!r} is too small for a shard")
    return size


Urls = Annotated[
    list[str],
    typer.Argument(
        metavar="SHARD", help="Shards: files, a folder, 'train-{000..099}.tar' or a::b.", show_default=False
    ),
]

Workers = Annotated[int, typer.Option(min=1, help="Number of processes.")]
_SIZE_HELP = "Most bytes of a shard: 500MB, 1GB, 2GiB."
MaxBytes = Annotated[int, typer.Option("--maxsize", parser=_size, metavar="SIZE", show_default="1GB", help=_SIZE_HELP)]
MaxCount = Annotated[int | None, typer.Option("--maxcount", min=1, help="Most samples of a shard.", show_default=False)]


def _open(urls: list[str], *, bars: bool = True) -> ShardSet:
    from penstock.shards import ShardSet

    return ShardSet(_shards_of(urls), progress=None if bars else False)


def _shards_of(urls: list[str]) -> list[str | Path]:
    """Return the named shards, or the shards in a folder.

    Raises:
        ConfigError: a folder without shards. The message names the command to use instead.
    """
    if len(urls) != 1 or not os.path.isdir(urls[0]):
        return list(urls)
    from penstock.opening import kind_of, shards_in

    folder = urls[0]
    found = shards_in(folder)
    if not found:
        kind = kind_of(folder)
        command = "manifest info" if kind.startswith("a folder of") else "profile"
        raise ConfigError(f"{folder}: {kind}, without .tar files: try `penstock {command} {folder}`")
    return [Path(name) for name in found]


@app.command(epilog="Example:  penstock shards index 'train-{000..099}.tar' --workers 8")
def index(
    urls: Urls,
    *,
    workers: Workers = 1,
    force: Annotated[bool, typer.Option("--force", help="Build indexes again, even if they are up to date.")] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Also write NAME.tar.entries, for faster crops of JPEGs.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the indexes to this folder, as NAME.tar.pidx.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Build indexes of shards before the first training job.

    Shards in a store without an index are read once, several at a time. Each index is written beside its shard, or into
    --out. A stopped run continues when run again.
    """
    from penstock.shards.index import index_path
    from penstock.shards.shardset import build
    from penstock.shards.tar_shard import TarShard
    from penstock.storage.names import expand_versions
    from penstock.storage.urls import is_remote, path_of
    from penstock.tools.check_shards import count_samples
    from penstock.tools.shard_indexes import write_beside, write_indexes

    found = expand_versions(_shards_of(urls))
    names = [name for name, _ in found]
    for name in names if images else ():
        _local(name)  # fail now, not after an hour of work
    todo = []
    for path in filter(None, map(path_of, names)):
        where = index_path(path) if Path(path).exists() else None
        if where is not None and force:
            where.unlink(missing_ok=True)
        if where is None or force:
            todo.append(path)
    started = time.perf_counter()
    with bar("indexing", show=not as_json) as show:
        for done, _ in enumerate(map_in_processes(count_samples, todo, workers), 1):
            show(done, len(todo))
    seconds = time.perf_counter() - started
    local = [TarShard(name) for name in names if not is_remote(name)]
    stored = [TarShard(name, stat=stat) for name, stat in found if is_remote(name)]
    build(local if out is None else [*local, *stored], progress=False if as_json else None)
    written = 0 if out is not None else write_beside(stored, force=force, progress=False if as_json else None)
    shards = [*local, *stored]
    samples = sum(shard.facts.samples for shard in shards if shard.facts is not None)
    entries = _index_images(names, workers, force=force, bars=not as_json) if images else None
    if out is not None:
        write_indexes(shards, out)
    size = sum(Path(path).stat().st_size for path in todo)
    if as_json:
        built = {"indexed": len(todo), "bytes": size, "seconds": seconds, "out": out, "indexed_images": entries}
        built |= {"written_to_store": written}
        print_json({"shards": len(names), "samples": samples, **built})
        return
    rows = [("shards", f"{len(names):,}"), ("samples", f"{samples:,}")]
    if stored and out is None:
        rows.append(("indexes in the store", f"{written:,} written, {len(stored) - written:,} existed"))
    if todo:
        rows.append(("indexed", f"{len(todo):,}, {byte_size(size)} in {duration(seconds)}: {speed(size, seconds)}"))
    elif local or out is not None:
        rows.append(("indexed", "no files: all are up to date (--force builds again)"))
    if entries is not None:
        rows.append(("entries", f"written for {counted(entries, 'image')}"))
    if out is not None:
        rows.append(("written to", shown(str(out))))
    console().print(pairs(_title(names), rows))


def _local(name: str) -> str:
    """Return the path of a local shard, to index its images.

    Raises:
        ConfigError: the shard is in a store.
    """
    from penstock.storage.urls import path_of

    path = path_of(name)
    if path is None:
        raise ConfigError(f"{name} is in a store, but entries work for local shards only: leave --images out")
    return path


def _index_images(names: list[str], workers: int, *, force: bool, bars: bool) -> int:
    """Write missing indexes of entries (``.tar.entries``); return the number of indexed images."""
    from penstock.shards.entries import has_entries, write_entries

    paths = [path for path in map(_local, names) if force or not has_entries(path)]
    images = 0
    with bar("indexing images", show=bars) as show:
        for done, count in enumerate(map_in_processes(write_entries, paths, workers), 1):
            images += count
            show(done, len(paths))
    return images


@app.command(epilog="Example:  penstock shards info 'train-*.tar'")
def info(urls: Urls, *, as_json: Json = False) -> None:
    """Show the number of samples, their sizes and their parts."""
    import numpy as np

    shards = _open(urls, bars=not as_json)
    counts = np.array(shards.counts)
    parts: dict[str, tuple[int, int]] = {}
    for number in range(len(counts)):
        one = shards.index(number)
        which, sizes = np.frombuffer(one.extension, np.int32), np.frombuffer(one.size, np.int64)
        for k, name in enumerate(one.extensions):
            files, size = parts.get(name, (0, 0))
            mine = which == k
            parts[name] = files + int(mine.sum()), size + int(sizes[mine].sum())
    if as_json:
        report = {"shards": len(counts), "bytes": shards.nbytes, "samples": len(shards)}
        more = {"fewest": int(counts.min()), "most": int(counts.max()), "fingerprint": shards.fingerprint}
        files_of = {name: {"files": files, "bytes": size} for name, (files, size) in parts.items()}
        print_json({**report, **more, "parts": files_of})
        return
    each = f"{counts.min():,} to {counts.max():,} in a shard"
    rows = [
        ("shards", f"{len(counts):,}, {byte_size(shards.nbytes)}"),
        ("samples", f"{len(shards):,}; {each}"),
        ("fingerprint", shards.fingerprint),
    ]
    if len(shards):
        rows.append(("keys", f"{shown(shards.key(0))} to {shown(shards.key(len(shards) - 1))}"))
    for name, (files, size) in parts.items():
        note = "" if files == len(shards) else f" (not in every sample: {files:,})"
        rows.append((f".{shown(name)}", f"{byte_size(size)}, {byte_size(size / max(1, files))} each{note}"))
    console().print(pairs(_title(shards.urls), rows))


@app.command(name="ls", epilog="Example:  penstock shards ls train-000.tar --long | head")
def list_samples(
    urls: Urls,
    *,
    long: Annotated[bool, typer.Option("--long", "-l", help="Also show size and offset of each part.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each sample, one per line.")
    ] = False,
) -> None:
    """List the samples, one per line, with key and parts."""
    shards = _open(urls, bars=not as_json)
    for number, count in enumerate(shards.counts):
        one = shards.index(number)
        for sample in range(count):
            files = range(one.first[sample], one.first[sample + 1])
            names = [one.extensions[one.extension[k]] for k in files]
            if as_json:
                parts = {
                    name: {"offset": int(one.offset[k]), "bytes": int(one.size[k])}
                    for name, k in zip(names, files, strict=True)
                }
                print_json({"shard": shards.urls[number], "key": one.key(sample), "parts": parts})
                continue
            if long:
                names = [f"{name} ({one.size[k]:,} at {one.offset[k]:,})" for name, k in zip(names, files, strict=True)]
            sys.stdout.write(shown(f"{one.key(sample)}  {' '.join(names)}") + "\n")


@app.command(epilog="Example:  penstock shards cat train-000.tar 0007.jpg > 7.jpg")
def cat(
    url: Annotated[str, typer.Argument(help="A shard, or a pattern of shards.", show_default=False)],
    name: Annotated[str, typer.Argument(help="Key and extension of a file, KEY.EXTENSION.", show_default=False)],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the place of the file as one JSON object instead.")
    ] = False,
) -> None:
    """Write one file of a sample to standard output."""
    from penstock.errors import ShardError
    from penstock.shards import split_name

    parts = split_name(name)
    if parts is None:
        raise typer.BadParameter(f"{name!r} has no extension: write KEY.EXTENSION")
    shards = _open([url], bars=not as_json)
    key, extension = parts
    for number, count in enumerate(shards.counts):
        shard = shards.shard(number)
        for sample in range(count):
            if shard.index.key(sample) == key:
                found = shard.sample(sample)
                if extension in found and as_json:
                    one = shard.index
                    files = range(one.first[sample], one.first[sample + 1])
                    k = next(k for k in files if one.extensions[one.extension[k]] == extension)
                    place = {"offset": int(one.offset[k]), "bytes": int(one.size[k])}
                    print_json({"shard": shards.urls[number], "key": key, "extension": extension, **place})
                    return
                if extension in found:
                    sys.stdout.buffer.write(found[extension])
                    return
    raise ShardError(f"no file {name!r} in {url}: `penstock shards ls` lists all files")


@app.command(epilog="Example:  penstock shards verify 'shards/*.tar' --decode --workers 8")
def verify(
    urls: Urls,
    *,
    decode: Annotated[bool, typer.Option("--decode", help="Also decode every image, number and text.")] = False,
    workers: Workers = 1,
    as_json: Json = False,
) -> None:
    """Read every byte and list problems: structure, duplicates, missing parts, index, checksum.

    The exit code is 1 if there are problems.
    """
    from penstock.shards import expand
    from penstock.shards.tar_shard import file_of
    from penstock.tools.check_shards import verify as verify_shard

    paths = [file_of(url) for url in expand(_shards_of(urls))]
    started = time.perf_counter()
    reports = []
    with bar("verifying", show=not as_json) as show:
        for report in map_in_processes(partial(verify_shard, decode=decode), paths, workers):
            reports.append(report)
            show(len(reports), len(paths))
    seconds = time.perf_counter() - started
    problems = [
        problem if report.path in problem else f"{report.path}: {problem}"
        for report in reports
        for problem in report.problems
    ]
    size, samples = sum(report.nbytes for report in reports), sum(report.samples for report in reports)
    bad = sum(not report.ok for report in reports)
    if as_json:
        numbers = {"shards": len(reports), "samples": samples, "bytes": size, "seconds": seconds}
        print_json({"ok": not bad, **numbers, "bad_shards": bad, "problems": problems})
        raise typer.Exit(int(bad > 0))
    out = console()
    for problem in problems:
        out.print(shown(problem), style="red")
    said = f"{counted(len(reports), 'shard')}, {counted(samples, 'sample')}, {byte_size(size)} in {duration(seconds)}"
    out.print(f"{said}: {f'{bad:,} with problems' if bad else 'no problems'}", style="red" if bad else "green")
    if bad:
        raise typer.Exit(1)


@app.command(epilog="Example:  penstock shards pack train.txt shards --root /data/imagenet --workers 8 --shuffle")
def pack(
    source: Annotated[
        str, typer.Argument(help="A manifest, or a folder with a subfolder for each class.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Output folder of the shards.", show_default=False)],
    *,
    root: Annotated[Path | None, typer.Option(help="Folder of relative paths.", show_default=False)] = None,
    prefix: Annotated[str, typer.Option(help="First part of the shards' names.")] = "train",
    workers: Workers = 1,
    maxsize: MaxBytes = 1_000_000_000,
    maxcount: MaxCount = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Write the samples in a random order.")] = False,
    seed: Annotated[int, typer.Option(callback=quantities.check_seed, help="Seed of the random order.")] = 0,
    resize_max_side: Annotated[
        int | None,
        typer.Option(min=1, help="Shrink images with a longer side than this, in pixels.", show_default=False),
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="JPEG quality of shrunk images.")] = 90,
    restart_markers: Annotated[
        bool, typer.Option("--restart-markers", help="Add restart markers to JPEGs, for faster crops.")
    ] = False,
    index_images: Annotated[
        bool,
        typer.Option("--index-images", help="Write an index beside each shard, for faster crops of unchanged images."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write single files into shards, with indexes and checksums. A killed run continues when run again.

    Pixels stay the same with --restart-markers (0.8 % more bytes for photographs) and --index-images (3 %).
    """
    from penstock.tools.pack import pack as pack_files

    started = time.perf_counter()
    report = pack_files(
        source,
        out,
        root=root,
        prefix=prefix,
        workers=workers,
        max_bytes=maxsize,
        max_count=maxcount,
        shuffle=shuffle,
        seed=seed,
        resize_max_side=resize_max_side,
        quality=quality,
        restart_markers=restart_markers,
        index_images=index_images,
        progress=False if as_json else None,
    )
    seconds = time.perf_counter() - started
    if as_json:
        numbers = {"samples": report.samples, "bytes": report.nbytes, "kept": report.kept, "seconds": seconds}
        images = {"marked": report.marked, "unmarked": report.unmarked, "indexed": report.indexed}
        print_json({"folder": out, "shards": report.shards, **numbers, **images})
        return
    kept = f", {report.kept:,} of them from an earlier run" if report.kept else ""
    rows = [
        ("shards", f"{len(report.shards):,}, {byte_size(report.nbytes)}{kept}"),
        ("samples", f"{report.samples:,} in {duration(seconds)}"),
    ]
    if restart_markers:
        left = f"; {report.unmarked:,} unchanged: not baseline, damaged, or not JPEG" if report.unmarked else ""
        rows.append(("re-marked", f"{counted(report.marked, 'image')}{left}"))
    if index_images:
        rows.append(("entries", f"written for {counted(report.indexed, 'image')}"))
    console().print(pairs(shown(str(out)), rows))


def _title(urls: list[str]) -> str:
    return shown(urls[0]) + (f" and {len(urls) - 1:,} more" if len(urls) > 1 else "")
