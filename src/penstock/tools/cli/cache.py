"""``penstock cache``: show, clear and verify copies of remote objects and files derived from local data.

Results are printed to standard output, or as one JSON object with ``--json``. `verify` exits with 1 if a copy is
damaged.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.tools.cli.layout import App
from penstock.tools.cli.manifest_options import Json, byte_size, console, pairs, print_json, shown
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.storage.cache import Cache
    from penstock.storage.derived import DerivedFile
    from penstock.storage.download import Entry

__all__ = ["app"]

app = App()

_SHOWN = 10  # largest number of copies in the table

Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="A folder with a cache of copies, instead of the user's cache.", show_default=False),
]


def _cache(folder: Path | None) -> Cache:
    from penstock.errors import StorageError
    from penstock.storage.cache import Cache

    if folder is not None and not (folder / "objects").is_dir():  # a typo must not create a cache
        raise StorageError(f"{folder} is not a cache of Penstock: it has no folder 'objects'")
    return Cache(folder)


def _describe(entry: Entry) -> dict[str, Any]:
    return {
        "url": entry.url,
        "bytes": entry.size,
        "used": entry.used,
        "complete": entry.complete,
        "folder": str(entry.folder),
    }


def _describe_jobs(cache: Cache, complete: list[Entry]) -> list[dict[str, Any]]:
    """Return the cache needs of each running job."""
    import numpy as np

    there = np.array([entry.name for entry in complete], np.uint64)
    return [
        {
            "pid": job.pid,
            "objects": len(job.name),
            "copies": int(job.copied.sum()),
            "here": int(np.isin(job.name[job.copied != 0], there).sum()),
            "position": job.position,
            "seconds_per_position": job.pace,
        }
        for job in cache.planned_uses().jobs
    ]


def _job_in_words(job: dict[str, Any]) -> str:
    ranges = job["objects"] - job["copies"]
    others = f", and ranges of {ranges:,} others" if ranges else ""
    needed = f"needs {job['copies']:,} copies ({job['here']:,} cached){others}"
    return f"process {job['pid']} at {job['position']:,} {needed}"


def _kept(folder: Path | None) -> dict[str, list[DerivedFile]]:
    """Return the files derived from local data, by kind. A cache given with --folder has none."""
    from penstock.storage.derived import KINDS, derived_files

    found: dict[str, list[DerivedFile]] = {kind: [] for kind in KINDS}
    if folder is None:
        for file in derived_files():
            found[file.kind].append(file)
    return found


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now" if seconds < 60 else "a minute ago"


@app.command(epilog="Example:  penstock cache info --json")
def info(
    *,
    folder: Folder = None,
    as_json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="List all copies, not only the largest.")] = False,
) -> None:
    """Show the cache: its folder, contents and limit, and the needs of running jobs.

    It holds copies of remote objects, and files derived from local data, such as the line offsets of a file.
    """
    from penstock.storage.derived import KINDS, limit_given

    cache, kept = _cache(folder), _kept(folder)
    made = sum(file.size for files in kept.values() for file in files)
    entries = sorted(cache.entries(), key=lambda entry: -entry.size)
    complete = [entry for entry in entries if entry.complete]
    held, limit, jobs = sum(entry.size for entry in complete), cache.limit(), _describe_jobs(cache, complete)
    if as_json:
        print_json(
            {
                "folder": str(cache.folder),
                "objects": len(complete),
                "bytes": held,
                "max_bytes": limit,
                "partial": len(entries) - len(complete),
                "jobs": jobs,
                "entries": [_describe(entry) for entry in entries],
                "made": {
                    kind: {"count": len(files), "bytes": sum(file.size for file in files)}
                    for kind, files in kept.items()
                    if files
                },
                "made_bytes": made,
                "made_max_bytes": limit_given(made),
            }
        )
        return
    rows = [
        ("objects", f"{len(complete):,}, {byte_size(held)}"),
        ("limit", f"{byte_size(limit)}{'' if cache.max_bytes else ' (half of the free disk space)'}"),
    ]
    if len(entries) > len(complete):
        rows.append(("unfinished", f"{counted(len(entries) - len(complete), 'download')}, running or resumable"))
    rows += [("running job", _job_in_words(job)) for job in jobs]
    now = time.time()
    for entry in entries if every else entries[:_SHOWN]:
        state = "" if entry.complete else ", unfinished"
        rows.append((byte_size(entry.size), f"{shown(entry.url)} (used {_age(now - entry.used)}{state})"))
    out = console()
    out.print(pairs(shown(str(cache.folder)), rows))
    if not every and len(entries) > _SHOWN:
        out.print(f"{len(entries) - _SHOWN:,} more (--all)")
    if made:
        rows = [("limit", f"{byte_size(limit_given(made))} (half of the free disk space)")]
        for kind, files in kept.items():
            if files:
                size, used = sum(file.size for file in files), max(file.used for file in files)
                rows.append((byte_size(size), f"{kind}, {len(files):,}: {KINDS[kind]} (used {_age(now - used)})"))
        out.print(pairs("derived from local data", rows))


@app.command(epilog="Example:  penstock cache clear --unused-days 30")
def clear(
    *,
    folder: Folder = None,
    unused_days: Annotated[
        float, typer.Option(min=0, help="Only files that were unused for so many days.", show_default=False)
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Remove copies and files derived from local data. They are created again when needed.

    A process that has a copy open can still read it, and running downloads continue. Derived files stay while a process
    of this machine has them mapped.
    """
    from penstock.storage import derived

    cache, unused = _cache(folder), unused_days * 86400
    count, size = cache.clear(unused_for=unused)
    made, made_size, stay = derived.clear(unused_for=unused) if folder is None else (0, 0, 0)
    if as_json:
        about = {"folder": str(cache.folder), "removed": count, "bytes": size}
        print_json({**about, "made_removed": made, "made_bytes": made_size, "made_in_use": stay})
        return
    out = console()
    out.print(f"removed {counted(count, 'copy')}, {byte_size(size)}, from {shown(str(cache.folder))}")
    if folder is None:
        left = f"; kept {counted(stay, 'file')} in use" if stay else ""
        out.print(f"removed {counted(made, 'file')}, {byte_size(made_size)}, derived from local data{left}")


@app.command(epilog="Example:  penstock cache verify --remove")
def verify(
    *,
    folder: Folder = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged copies.")] = False,
    as_json: Json = False,
) -> None:
    """Read all copies, and compare them with the checksums of their downloads.

    The exit code is 1 if a copy is damaged.
    """
    cache = _cache(folder)
    count, bad = cache.verify(remove=remove, progress=False if as_json else None)
    if as_json:
        damaged = [{**_describe(entry), "reason": reason} for entry, reason in bad]
        print_json({"folder": str(cache.folder), "objects": count, "removed": remove, "damaged": damaged})
    else:
        out = console()
        for entry, reason in bad:
            out.print(f"{shown(entry.url)}: {reason} ({shown(str(entry.folder))})", style="red")
        what = (
            f", {len(bad):,} damaged{' and removed' if remove else ' (--remove removes them)'}"
            if bad
            else ", none damaged"
        )
        out.print(f"{counted(count, 'copy')} read{what}")
    if bad:
        raise typer.Exit(1)
