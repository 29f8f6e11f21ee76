"""``penstock manifest``: show, index, check and prepare lists of samples.

Results are printed to standard output, or as one JSON object with ``--json``; progress bars to standard error. Exit
code 1 means problems in the data, or a `PenstockError`, which `penstock.tools.cli.app.main` handles.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.tools.cli.layout import App
from penstock.tools.cli.manifest_options import (
    Json,
    Reading,
    Workers,
    bar,
    byte_size,
    console,
    duration,
    index_files,
    pairs,
    print_json,
    reading,
    shown,
    speed,
)
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.manifest import CheckReport, Manifest

__all__ = ["app"]

app = App()

_SCANNED = 2_000_000  # most rows for which `info` reads all labels by default

File = Annotated[
    str, typer.Argument(metavar="FILE", help="A manifest: text, CSV, TSV, JSONL, Parquet or Arrow.", show_default=False)
]
Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE",
        help="Manifests, read as one in this order, or quoted patterns; or a folder of images.",
        show_default=False,
    ),
]


@app.command(epilog="Example:  penstock manifest check train.txt --files --root /data/imagenet")
@reading
def check(
    files: Files,
    *,
    how: Reading,
    exist: Annotated[bool, typer.Option("--files", help="Also check that every file exists.")] = False,
    duplicates: Annotated[bool, typer.Option(help="Check for repeated paths (16 bytes of memory a row).")] = True,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Problems of each kind to list.")] = 5,
    as_json: Json = False,
) -> None:
    """Read every row and list its problems.

    Problems are invalid UTF-8, missing fields, invalid labels, repeated paths, and with --files missing files.

    The exit code is 1 if there are problems.
    """
    from penstock.manifest import check as check_manifest

    with bar("checking", show=not as_json) as show:
        started = time.perf_counter()
        report = check_manifest(
            files=exist, duplicates=duplicates, examples=examples, progress=show, **how.arguments_for(list(files))
        )
    seconds = time.perf_counter() - started
    if as_json:
        problems = [asdict(problem) for problem in report.problems.values()]
        print_json({"ok": report.ok, "rows": report.rows, "seconds": seconds, "problems": problems})
    else:
        _print_report(report, seconds, files=exist, duplicates=duplicates)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(report: CheckReport, seconds: float, *, files: bool, duplicates: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    looked_for = ["fields", "labels", "UTF-8", *["duplicates"] * duplicates, *["missing files"] * files]
    if not report.rows and report.ok:
        out.print("0 rows: the manifest is empty, so there is nothing to train on", style="yellow")
        return
    if report.ok:
        out.print(
            f"{counted(report.rows, 'row')} checked in {duration(seconds)} ({', '.join(looked_for)}): no problems",
            style="green",
        )
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("problem", style="bold", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("examples", overflow="fold")
    for problem in report.problems.values():
        examples = "\n".join(shown(example) for example in problem.examples)
        more = problem.count - len(problem.examples)
        if more > 0:
            examples += f"\nand {more:,} more" if examples else f"{more:,}"
        table.add_row(Text(problem.kind), f"{problem.count:,}", Text(examples))
    out.print(table)
    out.print(
        f"{counted(report.count, 'problem')} in {counted(report.rows, 'row')}, checked in {duration(seconds)}",
        style="red",
    )


@app.command(epilog="Example:  penstock manifest info train.txt")
@reading
def info(
    files: Files,
    *,
    how: Reading,
    labels: Annotated[
        bool | None,
        typer.Option(
            "--labels/--no-labels",
            help="Read all labels for their range and classes; by default only up to 2 million rows.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the number of rows, size, index, fingerprint, columns, and range and classes of integer labels."""
    from penstock.errors import ManifestError

    manifest = how.open(list(files), bars=not as_json)
    indexes = index_files(manifest)
    size = sum(path.stat().st_size for path in indexes)
    integers = "label" in manifest.columns and str(manifest.schema.field("label").type) == "int64"
    found: dict[str, Any] | None = None
    unread = "not read; pass --labels to see their range"
    if integers and (labels or (labels is None and len(manifest) <= _SCANNED)):
        try:
            found = _label_counts(manifest, bars=not as_json)
        except ManifestError as error:
            unread = f"{error}; `penstock manifest check` lists all such lines"
    if as_json:
        print_json(
            {
                "sources": manifest.sources,
                "rows": len(manifest),
                "bytes": manifest.nbytes,
                "indexes": indexes,
                "index_bytes": size,
                "fingerprint": manifest.fingerprint,
                "root": manifest.root,
                "columns": {field.name: str(field.type) for field in manifest.schema},
                "labels": found,
                "labels_unread": unread if integers and found is None else None,
            }
        )
        return
    rows = [
        ("rows", f"{len(manifest):,}"),
        ("size", f"{byte_size(manifest.nbytes)} in {counted(len(manifest.sources), 'file')}"),
        ("index", f"{byte_size(size)}: {_some(indexes)}"),
        ("fingerprint", manifest.fingerprint),
        ("columns", ", ".join(f"{field.name} ({field.type})" for field in manifest.schema)),
    ]
    if manifest.root is not None:
        rows.append(("root", shown(manifest.root)))
    if integers:
        rows += [("labels", unread)] if found is None else _label_rows(found)
    console().print(pairs(_some(list(manifest.sources)), rows))


def _label_counts(manifest: Manifest, *, bars: bool) -> dict[str, Any]:
    """Return range, number of classes and rows per class, in one pass. Memory grows only with the number of classes."""
    import numpy as np

    counts: dict[int, int] = {}
    step = 1 << 17
    with bar("reading labels", show=bars) as show:
        for start in range(0, len(manifest), step):
            stop = min(start + step, len(manifest))
            values, times = np.unique(manifest.take(range(start, stop)).column("label").to_numpy(), return_counts=True)
            for value, count in zip(values.tolist(), times.tolist(), strict=True):
                counts[value] = counts.get(value, 0) + count
            show(stop, len(manifest))
    return {
        "classes": len(counts),
        "lowest": min(counts, default=None),
        "highest": max(counts, default=None),
        "fewest_rows": min(counts.values(), default=0),
        "most_rows": max(counts.values(), default=0),
    }


def _label_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    if not found["classes"]:
        return [("labels", "none")]
    low, high, fewest, most = (found[name] for name in ("lowest", "highest", "fewest_rows", "most_rows"))
    each = f"{counted(fewest, 'row')} each" if fewest == most else f"{fewest:,} to {most:,} rows each"
    rows = [("labels", f"{low} to {high}; {counted(found['classes'], 'class')} of {each}")]
    gaps = high - low + 1 - found["classes"]
    if gaps:
        rows.append(("unused", f"{counted(gaps, 'number')} between the lowest and the highest label"))
    return rows


@app.command(epilog="Example:  penstock manifest head train.txt -n 3")
@reading
def head(
    files: Files,
    *,
    how: Reading,
    count: Annotated[int, typer.Option("-n", "--rows", min=1, help="Number of rows.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the first rows as training reads them."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    manifest = how.open(list(files), bars=not as_json)
    others = [name for name in manifest.columns if name not in ("path", "label")]
    labelled = ["label"] if "label" in manifest.columns else []
    if as_json:
        first = [{"path": one.path, **dict.fromkeys(labelled, one.label), **one.extra} for one in manifest[:count]]
        print_json({"rows": len(manifest), "first": first})
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("row", justify="right", style="dim", no_wrap=True)
    for name in ["path", *labelled, *others]:
        table.add_column(Text(shown(name)), overflow="fold")
    for record in manifest[:count]:
        values = [record.path, *[record.label] * len(labelled), *record.extra.values()]
        table.add_row(f"{record.row:,}", *(Text(shown(str(value))) for value in values))
    out = console()
    out.print(table)
    if len(manifest) > count:
        out.print(counted(len(manifest) - count, "more row"))


@app.command(epilog="Example:  penstock manifest build 'lists/*.txt'")
@reading
def build(
    files: Files,
    *,
    how: Reading,
    force: Annotated[bool, typer.Option("--force", help="Build indexes again, even if they are up to date.")] = False,
    as_json: Json = False,
) -> None:
    """Build indexes of manifests before the first training job. Parquet is converted to Arrow."""
    if force:
        for path in index_files(how.open(list(files), bars=not as_json)):
            path.unlink(missing_ok=True)
    began = time.time_ns() - 20_000_000  # the file system's clock may lag by some ms
    started = time.perf_counter()
    manifest = how.open(list(files), bars=not as_json)
    seconds = time.perf_counter() - started
    built = [
        source
        for source, index in zip(manifest.sources, index_files(manifest), strict=True)
        if index.stat().st_mtime_ns >= began
    ]
    if as_json:
        said = {"sources": manifest.sources, "rows": len(manifest), "indexes": index_files(manifest)}
        print_json({**said, "built": built, "seconds": seconds})
        return
    rows = [("rows", f"{len(manifest):,}"), ("index", _some(index_files(manifest)))]
    if built:
        size = sum(path.stat().st_size for path in built)
        rows.append(("built", f"{byte_size(size)} in {duration(seconds)}: {speed(size, seconds)}"))
    else:
        rows.append(("built", "nothing: all are up to date (--force builds again)"))
    console().print(pairs(_some(list(manifest.sources)), rows))


@app.command(epilog="Example:  penstock manifest sizes train.txt --root /data/imagenet --workers 16")
@reading
def sizes(
    file: File,
    *,
    how: Reading,
    workers: Workers = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write, instead of FILE.sizes.arrow.", show_default=False)
    ] = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Number of unreadable images to list.")] = 10,
    as_json: Json = False,
) -> None:
    """Write widths and heights of all images beside the manifest, for aspect-ratio grouping.

    Only file headers are read. An unreadable image gets 0 x 0, and the exit code is 1.
    If no image can be read, nothing is written.
    """
    from penstock.errors import ImageError, ManifestIOError
    from penstock.images.sizes import measure, sizes_path, write_sizes
    from penstock.storage import is_writable
    from penstock.tools.cli.manifest_sizes import print_sizes, size_figures

    manifest = how.open(file, bars=not as_json)
    output = output or sizes_path(manifest)
    if not is_writable(output.parent):  # fail now, not after an hour of measuring
        raise ManifestIOError(f"cannot write to the folder of {output}: choose another path with --output")
    with bar("measuring", show=not as_json) as show:
        started = time.perf_counter()
        widths, heights, errors = measure(manifest, workers=workers, progress=show)
    seconds = time.perf_counter() - started
    if errors and not widths.any():
        raise ImageError(
            f"none of {len(widths):,} images can be read, so nothing is written; the first one: {errors[0].message}"
        )
    write_sizes(manifest, widths, heights, path=output)
    broken = int((widths == 0).sum())
    if as_json:
        report = {"images": len(manifest), "seconds": seconds, "output": output, "broken": broken}
        report |= size_figures(widths, heights)
        print_json({**report, "errors": [{"row": one.row, "error": one.message} for one in errors[:examples]]})
    else:
        print_sizes(file, output, seconds, widths, heights, errors[:examples])
    if broken:
        raise typer.Exit(1)


@app.command(epilog="Example:  penstock manifest warm train.txt --files --root /data/imagenet")
@reading
def warm(
    files: Files,
    *,
    how: Reading,
    images: Annotated[bool, typer.Option("--files", help="Also read the files of all rows.")] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Read manifests and their indexes into the page cache, with --files also the files of all rows."""
    from penstock.tools.cli.manifest_warm import read_files, read_samples

    manifest = how.open(list(files), bars=not as_json)
    with bar("reading", unit="B", show=not as_json) as show:
        started = time.perf_counter()
        size = read_files([*manifest.sources, *index_files(manifest)], show)
    seconds = time.perf_counter() - started
    report: dict[str, Any] = {"manifest": {"bytes": size, "seconds": seconds}, "files": None}
    rows = [("manifest", f"{byte_size(size)} in {duration(seconds)}: {speed(size, seconds)}")]
    missing: list[str] = []
    failed = 0
    if images:
        with bar("reading files", show=not as_json) as show:
            started = time.perf_counter()
            size, failed, missing = read_samples(manifest, workers, show)
        seconds = time.perf_counter() - started
        rate = f"{len(manifest) / seconds:,.0f} files/s, {speed(size, seconds)}"
        rows.append(("files", f"{len(manifest) - failed:,}, {byte_size(size)} in {duration(seconds)}: {rate}"))
        read = {"read": len(manifest) - failed, "bytes": size, "seconds": seconds}
        report["files"] = {**read, "failed": failed, "errors": missing}
    if as_json:
        print_json(report)
    else:
        out = console()
        out.print(pairs(_some(list(manifest.sources)), rows))
        for message in missing:
            out.print(shown(message))
        if failed:
            out.print(f"{failed:,} of {len(manifest):,} files cannot be read", style="red")
    if failed:
        raise typer.Exit(1)


def _some(paths: list[Path]) -> str:
    """Return the first paths of a list as text, followed by the number of the others."""
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(shown(str(path)) for path in paths[:3]) + more
