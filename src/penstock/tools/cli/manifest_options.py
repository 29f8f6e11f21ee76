"""What the commands of ``penstock manifest`` share: the options that say how to read, tables, bars, numbers.

`reading` turns the eight options of `Manifest.open` into one argument:

    @app.command()
    @reading
    def info(file: File, *, how: Reading) -> None:
        manifest = how.open(file)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn
    from rich.table import Table

    from penstock.manifest import Manifest

__all__ = [
    "Json",
    "Reading",
    "Workers",
    "bar",
    "byte_size",
    "console",
    "duration",
    "given_options",
    "index_files",
    "pairs",
    "print_figures",
    "print_json",
    "reading",
    "shown",
    "speed",
    "spread",
]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Threads; by default 4 for each CPU, at most 32.", show_default=False)
]


class _Header(StrEnum):
    auto = "auto"
    yes = "yes"
    no = "no"


class _Blank(StrEnum):
    skip = "skip"
    error = "error"


_COLUMNS_HELP = (
    "Names in file order, with types: 'path, label:int, score:float'. "
    "Or NAME=SOURCE for formats with names: 'path=file, label=class'."
)


def _option(help_text: str, *, show_default: bool = True) -> Any:
    return typer.Option(help=help_text, show_default=show_default, rich_help_panel="How to read")


@dataclass(frozen=True)
class Reading:
    """How to read a manifest: the options of `Manifest.open` as the command line gives them."""

    root: Annotated[
        str | None, _option("Folder, or address, that relative paths are joined to.", show_default=False)
    ] = None
    format: Annotated[str, _option("auto (by extension), text, csv, tsv, jsonl, parquet or arrow.")] = "auto"
    label: Annotated[str, _option("int, float, str, a list such as int[3], or none.")] = "int"
    columns: Annotated[str | None, _option(_COLUMNS_HELP, show_default=False)] = None
    header: Annotated[_Header, _option("Whether a CSV file has a header.")] = _Header.auto
    blank: Annotated[_Blank, _option("What to do with blank lines.")] = _Blank.skip
    comment: Annotated[str | None, _option("Start of lines to leave out, such as '#'.", show_default=False)] = None
    cache_dir: Annotated[
        Path | None, _option("Folder for indexes, instead of beside the file.", show_default=False)
    ] = None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Manifest.open`. ConfigError for columns that mix both notations."""
        return {
            "root": self.root,
            "format": self.format,
            "label": None if self.label == "none" else self.label,
            "columns": _parse_columns(self.columns),
            "header": {"auto": "auto", "yes": True, "no": False}[self.header.value],
            "blank": self.blank.value,
            "comment": self.comment,
            "cache_dir": self.cache_dir,
        }

    def open(self, source: str | list[str], *, bars: bool = True) -> Manifest:
        """Return the manifest, indexed if it was not; a bar appears for large files. A folder is opened by the list of
        the images or arrays in it.

        Raises:
            ConfigError: a folder of samples of which there is no list. It says which command tells of them.
        """
        from penstock.manifest import Manifest

        names = [source] if isinstance(source, str) else source
        listed = self._listed(names[0]) if len(names) == 1 and os.path.isdir(names[0]) else {"source": source}
        return Manifest.open(**{**self.arguments(), **listed}, progress=None if bars else False)

    def _listed(self, folder: str) -> dict[str, Any]:
        from penstock.opening import folder_manifest, kind_of

        kind = kind_of(Path(folder))  # a path is taken as it is; a text may have braces
        listed = folder_manifest(folder) if kind.startswith("a folder of") else None
        if listed is None:
            command = "shards info" if kind == "shards" else "profile"
            raise ConfigError(f"{folder}: {kind}, of which there is no manifest: try `penstock {command} {folder}`")
        usual = Reading().arguments()
        given = [name for name, value in self.arguments().items() if value != usual[name]]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{folder}: the names in it say what there is to know of {kind}: leave {options} out")
        return listed


def _parse_columns(text: str | None) -> list[str] | dict[str, str] | None:
    if text is None:
        return None
    specs = [spec.strip() for spec in text.split(",")]
    named = [spec for spec in specs if "=" in spec]
    if not named:
        return specs
    if len(named) < len(specs):
        raise ConfigError(f"--columns {text!r}: either all columns have a NAME=SOURCE, or none")
    return dict([part.strip() for part in spec.split("=", 1)] for spec in specs)


def spread(name: str, options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command the fields of a dataclass as options, in place of its argument ``name``.

    Typer builds a command line from a signature, so the wrapper has that of the command with one keyword-only
    parameter for each field.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        added = list(inspect.signature(options, eval_str=True).parameters.values())
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != name]
        parameters = own + [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in added]

        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            given = options(**{option.name: arguments.pop(option.name) for option in added})
            command(**arguments, **{name: given})

        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def given_options(context: typer.Context, *options: type[Any] | str, but: Container[str] = ()) -> list[str]:
    """Return the options that the command line has, also with the value that they have by default.

    Args:
        context: of the command.
        options: which ones are looked at: dataclasses of options, and names of parameters.
        but: names of parameters that are not.
    """
    spread_out = [[one] if isinstance(one, str) else [field.name for field in fields(one)] for one in options]
    names = {name for some in spread_out for name in some if name not in but}
    return [param.opts[0] for param in context.command.params if param.name in names and _is_given(context, param.name)]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


reading = spread("how", Reading)
"""Gives a command the options of `Reading` in place of its argument ``how``."""


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: no markup; and no line is folded where the output goes to a file."""
    from rich.console import Console

    result = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    return result if result.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=1 << 16)


@contextlib.contextmanager
def bar(title: str, *, unit: str = "", show: bool = True) -> Iterator[Callable[[int, int], object]]:
    """A progress bar on standard error; yields a function to call with what is done and what there is to do.

    It appears with the first call, so that the bar of an index that is built before has the line to itself. `unit` "B"
    counts bytes. There is none unless standard error is a terminal, nor without `show`.
    """
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count: ProgressColumn = DownloadColumn() if unit == "B" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    screen = console(stderr=True)
    progress = Progress(*columns, console=screen, transient=True, disable=not (show and screen.is_terminal))
    task = progress.add_task(title, total=None)

    def advance(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        progress.stop()


def pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    """A table of names and values."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def figures(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of numbers for `print_figures`; the first column has names."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", style=None if number else "bold", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_figures(table: Table) -> None:
    """Print a table of numbers, none of them cut: a number without its end is another number.

    Its columns are ``no_wrap``. Where the terminal is too narrow, heads are folded, then columns move together, then
    the first column is folded. Where that is not enough, it is the terminal that folds the lines.
    """
    from rich.console import Console
    from rich.measure import Measurement

    out = console()

    def needed() -> int:
        return Measurement.get(out, out.options.update(width=1 << 16), table).maximum

    if needed() > out.width:
        for column in table.columns:
            column.header = str(column.header).replace(" ", "\n")
    if needed() > out.width:
        table.padding = (0, 0)
    width = needed()
    if width > out.width:
        first = [str(cell) for cell in table.columns[0].cells]
        table.columns[0].no_wrap = False
        width -= max(map(len, first)) - max(len(word) for cell in first for word in cell.split())
    if width > out.width:
        out = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    out.print(table)


def print_json(report: Mapping[str, Any]) -> None:
    """One JSON object in one line; what JSON has no type for is written as text, and a number that is none as null."""
    print(json.dumps(_plain(report), default=str, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(text: str) -> str:
    """Text of a file, safe to print: bytes that are no UTF-8 and control characters are escaped."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def byte_size(count: float) -> str:
    """1536 -> "1.5 kB", as disks are sold: steps of 1000."""
    step = min(6, int(math.log10(count) / 3)) if count >= 1 else 0
    return f"{count:,.0f} B" if step == 0 else f"{count / 1000**step:,.3g} {'kMGTPE'[step - 1]}B"


def duration(seconds: float) -> str:
    """0.0123 -> "12 ms"."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:,.1f} s"


def speed(size: float, seconds: float) -> str:
    """Bytes for each second: "1.42 GB/s", and in smaller units below a tenth of that."""
    rate = size / seconds
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{byte_size(rate)}/s"


def index_files(manifest: Manifest) -> list[Path]:
    """The index, or conversion, of each source of a manifest."""
    from penstock.manifest.formats import LinePart
    from penstock.manifest.formats.mapped import ArrowPart
    from penstock.manifest.sidecar import places

    files = []
    for part in manifest.parts:
        if isinstance(part, LinePart):
            files.append(part.index.sidecar.path)
            continue
        assert isinstance(part, ArrowPart)
        mapped = part._sources[1].path
        if mapped != part.path:
            files.append(Path(mapped))
        else:
            files += [path for path in places(part.path, ".pstk", manifest._reopen["cache_dir"]) if path.exists()][:1]
    return files
