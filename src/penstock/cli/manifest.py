"""``penstock manifest``: look at, index, check and prepare lists of samples.

Results go to standard output, progress bars to standard error. Exit code 1 means that problems were found in the data;
a `PenstockError` is left to `penstock.cli.app.main`, which prints it and exits with 1 as well.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.manifest_options import (
    Reading,
    bar,
    byte_size,
    console,
    duration,
    index_files,
    pairs,
    reading,
    shown,
    speed,
)

if TYPE_CHECKING:
    from penstock.manifest import CheckReport, Manifest

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

_SCANNED = 2_000_000  # rows up to which `info` reads all labels without being asked

File = Annotated[str, typer.Argument(help="A manifest: text, CSV, TSV, JSONL, Parquet or Arrow.", show_default=False)]
Files = Annotated[
    list[str],
    typer.Argument(help="Manifests, read as one in this order; quoted patterns work.", show_default=False),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Threads; by default 4 for each CPU, at most 32.", show_default=False)
]


@app.command(epilog="Example:  penstock manifest check train.txt --files --root /data/imagenet")
@reading
def check(
    files: Files,
    *,
    how: Reading,
    exist: Annotated[bool, typer.Option("--files", help="Also look whether every file is there.")] = False,
    duplicates: Annotated[bool, typer.Option(help="Look for paths that come twice (16 bytes of memory a row).")] = True,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Problems of each kind to show.")] = 5,
) -> None:
    """Read every row and list what is wrong: bad UTF-8, missing fields, bad labels, duplicates, missing files.

    The exit code is 1 when there are problems.
    """
    from penstock.manifest import check as check_manifest

    with bar("checking") as show:
        started = time.perf_counter()
        report = check_manifest(
            list(files), files=exist, duplicates=duplicates, examples=examples, progress=show, **how.arguments()
        )
    _print_report(report, time.perf_counter() - started, files=exist, duplicates=duplicates)
    if not report.ok:
        raise typer.Exit(1)


def _print_report(report: CheckReport, seconds: float, *, files: bool, duplicates: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    looked_for = ["fields", "labels", "UTF-8", *["duplicates"] * duplicates, *["missing files"] * files]
    if report.ok:
        out.print(
            f"{report.rows:,} rows checked in {duration(seconds)} ({', '.join(looked_for)}): no problems", style="green"
        )
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("problem", style="bold", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("first ones", overflow="fold")
    for problem in report.problems.values():
        examples = "\n".join(shown(example) for example in problem.examples)
        more = problem.count - len(problem.examples)
        if more > 0:
            examples += f"\nand {more:,} more" if examples else f"{more:,}"
        table.add_row(Text(problem.kind), f"{problem.count:,}", Text(examples))
    out.print(table)
    what = "problem" if report.count == 1 else "problems"
    out.print(f"{report.count:,} {what} in {report.rows:,} rows, checked in {duration(seconds)}", style="red")


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
            help="Read all labels for their range and classes; by default up to 2 million rows.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show rows, size, index, fingerprint, columns, and the range and classes of integer labels."""
    from penstock.errors import ManifestError

    manifest = how.open(list(files))
    indexes = index_files(manifest)
    rows = [
        ("rows", f"{len(manifest):,}"),
        ("size", f"{byte_size(manifest.nbytes)} in {_files(len(manifest.sources))}"),
        ("index", f"{byte_size(sum(path.stat().st_size for path in indexes))}: {_some(indexes)}"),
        ("fingerprint", manifest.fingerprint),
        ("columns", ", ".join(f"{field.name} ({field.type})" for field in manifest.schema)),
    ]
    if manifest.root is not None:
        rows.append(("root", shown(manifest.root)))
    if "label" in manifest.columns and str(manifest.schema.field("label").type) == "int64":
        if labels or (labels is None and len(manifest) <= _SCANNED):
            try:
                rows += _label_rows(manifest)
            except ManifestError as error:
                rows.append(("labels", f"{error}; `penstock manifest check` lists all such lines"))
        else:
            rows.append(("labels", "not read; pass --labels to see their range"))
    console().print(pairs(_some(list(manifest.sources)), rows))


def _label_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Range, number of classes and rows for each class, in one pass with memory for the classes only."""
    import numpy as np

    counts: dict[int, int] = {}
    step = 1 << 17
    with bar("reading labels") as show:
        for start in range(0, len(manifest), step):
            stop = min(start + step, len(manifest))
            values, times = np.unique(manifest.take(range(start, stop)).column("label").to_numpy(), return_counts=True)
            for value, count in zip(values.tolist(), times.tolist(), strict=True):
                counts[value] = counts.get(value, 0) + count
            show(stop, len(manifest))
    if not counts:
        return [("labels", "none")]
    low, high = min(counts), max(counts)
    fewest, most = min(counts.values()), max(counts.values())
    each = f"{fewest:,} rows each" if fewest == most else f"{fewest:,} to {most:,} rows each"
    rows = [("labels", f"{low} to {high}; {len(counts):,} classes of {each}")]
    gaps = high - low + 1 - len(counts)
    if gaps:
        rows.append(("unused", f"{gaps:,} numbers between the lowest and the highest label"))
    return rows


@app.command(epilog="Example:  penstock manifest head train.txt -n 3")
@reading
def head(
    files: Files,
    *,
    how: Reading,
    count: Annotated[int, typer.Option("-n", "--rows", min=1, help="How many rows.")] = 10,
) -> None:
    """Show the first rows as they are read."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    manifest = how.open(list(files))
    others = [name for name in manifest.columns if name not in ("path", "label")]
    labelled = ["label"] if "label" in manifest.columns else []
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
        out.print(f"{len(manifest) - count:,} more rows")


@app.command(epilog="Example:  penstock manifest build 'lists/*.txt'")
@reading
def build(
    files: Files,
    *,
    how: Reading,
    force: Annotated[bool, typer.Option("--force", help="Build again what is up to date.")] = False,
) -> None:
    """Index manifests, so that the first training job need not. Parquet is converted."""
    if force:
        for path in index_files(how.open(list(files))):
            path.unlink(missing_ok=True)
    began = time.time_ns() - 20_000_000  # the clock of modification times may be a few ms behind this one
    started = time.perf_counter()
    manifest = how.open(list(files))
    seconds = time.perf_counter() - started
    built = [
        source
        for source, index in zip(manifest.sources, index_files(manifest), strict=True)
        if index.stat().st_mtime_ns >= began
    ]
    rows = [("rows", f"{len(manifest):,}"), ("index", _some(index_files(manifest)))]
    if built:
        size = sum(path.stat().st_size for path in built)
        rows.append(("built", f"{byte_size(size)} in {duration(seconds)}: {speed(size, seconds)}"))
    else:
        rows.append(("built", "nothing, all up to date (--force builds again)"))
    console().print(pairs(_some(list(manifest.sources)), rows))


@app.command(epilog="Example:  penstock manifest sizes train.txt --root /data/imagenet --workers 16")
@reading
def sizes(
    file: File,
    *,
    how: Reading,
    workers: Workers = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write, instead of FILE.sizes.arrow.", show_default=False)
    ] = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Broken images to show.")] = 10,
) -> None:
    """Write widths and heights of all images beside the manifest, for aspect-ratio grouping.

    Only the headers of the files are read. An image that cannot be read gets 0 x 0; then the exit code is 1.
    """
    import numpy as np

    from penstock.errors import ManifestIOError
    from penstock.images.sizes import measure, sizes_path, write_sizes
    from penstock.storage import is_writable

    manifest = how.open(file)
    output = output or sizes_path(manifest)
    if not is_writable(output.parent):  # said now, not after an hour of measuring
        raise ManifestIOError(f"cannot write to the folder of {output}; choose another place with --output")
    with bar("measuring") as show:
        started = time.perf_counter()
        widths, heights, errors = measure(manifest, workers=workers, progress=show)
    seconds = time.perf_counter() - started
    write_sizes(manifest, widths, heights, path=output)
    good = widths > 0
    rows = [
        ("images", f"{len(manifest):,} in {duration(seconds)}: {len(manifest) / seconds:,.0f} images/s"),
        ("written", f"{shown(str(output))} ({byte_size(output.stat().st_size)})"),
    ]
    if good.any():
        w, h = widths[good], heights[good]
        rows += [
            ("width", f"{w.min():,} to {w.max():,}, median {np.median(w):,.0f}"),
            ("height", f"{h.min():,} to {h.max():,}, median {np.median(h):,.0f}"),
            ("wider than high", f"{np.count_nonzero(w > h) / len(w):.1%}"),
        ]
    out = console()
    out.print(pairs(shown(file), rows))
    broken = len(manifest) - int(np.count_nonzero(good))
    if broken:
        for error in errors[:examples]:
            out.print(f"row {error.row}: {shown(error.message)}")
        out.print(f"{broken:,} of {len(manifest):,} images have no size (written as 0 x 0)", style="red")
        raise typer.Exit(1)


@app.command(epilog="Example:  penstock manifest warm train.txt --files --root /data/imagenet")
@reading
def warm(
    files: Files,
    *,
    how: Reading,
    images: Annotated[bool, typer.Option("--files", help="Also read the files that the rows name.")] = False,
    workers: Workers = None,
) -> None:
    """Read manifests and their indexes ahead into the page cache, with --files what they name as well."""
    from penstock.cli.manifest_warm import read_files, read_samples

    manifest = how.open(list(files))
    with bar("reading", unit="B") as show:
        started = time.perf_counter()
        size = read_files([*manifest.sources, *index_files(manifest)], show)
    seconds = time.perf_counter() - started
    rows = [("manifest", f"{byte_size(size)} in {duration(seconds)}: {speed(size, seconds)}")]
    missing: list[str] = []
    failed = 0
    if images:
        with bar("reading files") as show:
            started = time.perf_counter()
            size, failed, missing = read_samples(manifest, workers, show)
        seconds = time.perf_counter() - started
        rate = f"{len(manifest) / seconds:,.0f} files/s, {speed(size, seconds)}"
        rows.append(("files", f"{len(manifest) - failed:,}, {byte_size(size)} in {duration(seconds)}: {rate}"))
    out = console()
    out.print(pairs(_some(list(manifest.sources)), rows))
    if failed:
        for message in missing:
            out.print(shown(message))
        out.print(f"{failed:,} of {len(manifest):,} files could not be read", style="red")
        raise typer.Exit(1)


def _some(paths: list[Path]) -> str:
    """The first paths of a list, and how many more."""
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(shown(str(path)) for path in paths[:3]) + more


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"
