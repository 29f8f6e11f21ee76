"""``penstock cache``: what is kept of remote objects, how much of it, and whether it is sound.

Results go to standard output, with ``--json`` as one JSON object. Exit code 1 of `verify` means damaged copies.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.layout import App
from penstock.cli.manifest_options import Json, byte_size, console, pairs, print_json, shown
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.storage.copies import Entry
    from penstock.storage.store import Cache

__all__ = ["app"]

app = App()

_SHOWN = 10  # copies that a table lists

Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="The cache, instead of the one in the user's cache folder.", show_default=False),
]


def _cache(folder: Path | None) -> Cache:
    from penstock.errors import StorageError
    from penstock.storage.store import Cache

    if folder is not None and not (folder / "objects").is_dir():  # a slip of the pen should not become a cache
        raise StorageError(f"{folder} is not a cache of Penstock: it holds no folder 'objects'")
    return Cache(folder)


def _describe(entry: Entry) -> dict[str, Any]:
    return {
        "url": entry.url,
        "bytes": entry.size,
        "used": entry.used,
        "complete": entry.complete,
        "folder": str(entry.folder),
    }


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
    """Show where the cache is, what it holds, and how much it may hold."""
    cache = _cache(folder)
    entries = sorted(cache.entries(), key=lambda entry: -entry.size)
    complete = [entry for entry in entries if entry.complete]
    held, limit = sum(entry.size for entry in complete), cache.limit()
    if as_json:
        print_json(
            {
                "folder": str(cache.folder),
                "objects": len(complete),
                "bytes": held,
                "max_bytes": limit,
                "partial": len(entries) - len(complete),
                "entries": [_describe(entry) for entry in entries],
            }
        )
        return
    rows = [
        ("objects", f"{len(complete):,}, {byte_size(held)}"),
        ("limit", f"{byte_size(limit)}{'' if cache.max_bytes else ' (half of what the disk has free)'}"),
    ]
    if len(entries) > len(complete):
        rows.append(("unfinished", f"{counted(len(entries) - len(complete), 'download')}, under way or to be resumed"))
    now = time.time()
    for entry in entries if every else entries[:_SHOWN]:
        state = "" if entry.complete else ", unfinished"
        rows.append((byte_size(entry.size), f"{shown(entry.url)} (used {_age(now - entry.used)}{state})"))
    out = console()
    out.print(pairs(shown(str(cache.folder)), rows))
    if not every and len(entries) > _SHOWN:
        out.print(f"{len(entries) - _SHOWN:,} more (--all)")


@app.command(epilog="Example:  penstock cache clear --unused-days 30")
def clear(
    *,
    folder: Folder = None,
    unused_days: Annotated[
        float, typer.Option(min=0, help="Only what was not used for so many days.", show_default=False)
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Remove copies. Whoever has one open keeps it, and downloads under way go on."""
    cache = _cache(folder)
    count, size = cache.clear(unused_for=unused_days * 86400)
    if as_json:
        print_json({"folder": str(cache.folder), "removed": count, "bytes": size})
    else:
        console().print(f"removed {counted(count, 'copy')}, {byte_size(size)}, from {shown(str(cache.folder))}")


@app.command(epilog="Example:  penstock cache verify --remove")
def verify(
    *,
    folder: Folder = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged copies.")] = False,
    as_json: Json = False,
) -> None:
    """Read all copies and compare them with the checksums of their download.

    The exit code is 1 when one is damaged.
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
            else ", all sound"
        )
        out.print(f"{counted(count, 'copy')} read{what}")
    if bad:
        raise typer.Exit(1)
