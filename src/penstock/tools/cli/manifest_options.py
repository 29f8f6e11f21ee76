"""Helpers shared by commands: the options for reading a manifest, tables, progress bars and numbers.

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
    "Or NAME=SOURCE, for formats with column names: 'path=file, label=class'."
)


def _option(help_text: str, *, show_default: bool = True) -> Any:
    return typer.Option(help=help_text, show_default=show_default, rich_help_panel="How to read")


@dataclass(frozen=True)
class Reading:
    """The options of `Manifest.open`, from the command line."""

    root: Annotated[str | None, _option("Folder or address of relative paths.", show_default=False)] = None
    format: Annotated[str, _option("auto (by extension), text, csv, tsv, jsonl, parquet or arrow.")] = "auto"
    label: Annotated[str, _option("int, float, str, a list such as int[3], or none.")] = "int"
    columns: Annotated[str | None, _option(_COLUMNS_HELP, show_default=False)] = None
    header: Annotated[_Header, _option("Whether a CSV file has a header.")] = _Header.auto
    blank: Annotated[_Blank, _option("Skip blank lines, or report an error.")] = _Blank.skip
    comment: Annotated[str | None, _option("Prefix of lines to skip, such as '#'.", show_default=False)] = None
    cache_dir: Annotated[Path | None, _option("Folder of indexes, instead of beside the file.", show_default=False)] = (
        None
    )

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `Manifest.open`.

        Raises:
            ConfigError: columns mix both notations, ``NAME`` and ``NAME=SOURCE``.
        """
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
        """Open a manifest, or the list of images or arrays in a folder. Indexing a large file shows a progress bar.

        Raises:
            ConfigError: a folder of other samples. The message names the command to use instead.
        """
        from penstock.manifest import Manifest

        return Manifest.open(**self.arguments_for(source), progress=None if bars else False)

    def arguments_for(self, source: str | list[str]) -> dict[str, Any]:
        """Return all arguments of `Manifest.open` for a manifest or a folder. Raises as `open`."""
        names = [source] if isinstance(source, str) else source
        listed = self._listed(names[0]) if len(names) == 1 and os.path.isdir(names[0]) else {"source": source}
        return {**self.arguments(), **listed}

    def _listed(self, folder: str) -> dict[str, Any]:
        from penstock.opening import folder_manifest, kind_of

        kind = kind_of(Path(folder))  # braces in a str would be a pattern
        listed = folder_manifest(folder) if kind.startswith("a folder of") else None
        if listed is None:
            command = "shards info" if kind == "shards" else "profile"
            raise ConfigError(f"{folder}: {kind}, which have no manifest: try `penstock {command} {folder}`")
        usual = Reading().arguments()
        given = [name for name, value in self.arguments().items() if value != usual[name]]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{folder}: {kind} is read by its file names: leave {options} out")
        return listed


def _parse_columns(text: str | None) -> list[str] | dict[str, str] | None:
    if text is None:
        return None
    specs = [spec.strip() for spec in text.split(",")]
    named = [spec for spec in specs if "=" in spec]
    if not named:
        return specs
    if len(named) < len(specs):
        raise ConfigError(f"--columns {text!r}: write NAME=SOURCE for all columns or for none")
    return dict([part.strip() for part in spec.split("=", 1)] for spec in specs)


def spread(name: str, options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's argument ``name`` by the fields of a dataclass as options.

    Typer builds options from the signature. So the wrapper has the command's signature with a keyword-only parameter
    for each field.
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
    """Return the options on the command line, including options with their default value.

    Args:
        context: the context of the command.
        options: the options to check: dataclasses of options, and names of parameters.
        but: names of parameters to ignore.
    """
    spread_out = [[one] if isinstance(one, str) else [field.name for field in fields(one)] for one in options]
    names = {name for some in spread_out for name in some if name not in but}
    return [param.opts[0] for param in context.command.params if param.name in names and _is_given(context, param.name)]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


reading = spread("how", Reading)
"""Decorator that replaces a command's argument ``how`` by the options of `Reading`."""


def console(*, stderr: bool = False) -> Console:
    """Return a console without markup. Lines written to a file or a pipe are not wrapped."""
    from rich.console import Console

    result = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    return result if result.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=1 << 16)


@contextlib.contextmanager
def bar(title: str, *, unit: str = "", show: bool = True) -> Iterator[Callable[[int, int], object]]:
    """Show a progress bar on standard error; yield a function to call with the finished and the total amount.

    The bar appears at the first call, so that it does not disturb the bar shown while an index is built.
    ``unit="B"`` counts bytes. Without a terminal, or with ``show=False``, there is no bar.
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
    """Return a table of names and values."""
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
    """Return a table of numbers for `print_figures`, with names in the first column."""
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
    """Print a table of numbers, never truncated.

    Its columns are ``no_wrap``. On a narrow terminal, first the headings are wrapped, then padding is removed, then the
    first column is wrapped. If that is not enough, the terminal wraps the lines.
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
    """Print a JSON object on one line. Unknown types become text; NaN and infinity become null."""
    print(json.dumps(_plain(report), default=str, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(text: str) -> str:
    """Escape invalid UTF-8 and control characters, so that text from a file is safe to print."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def byte_size(count: float) -> str:
    """Return a size as text in steps of 1000: 1500 -> "1.5 kB"."""
    step = min(6, int(math.log10(count) / 3)) if count >= 1 else 0
    return f"{count:,.0f} B" if step == 0 else f"{count / 1000**step:,.3g} {'kMGTPE'[step - 1]}B"


def duration(seconds: float) -> str:
    """Return a time as text: 0.0123 -> "12.3 ms"."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:,.1f} s"


def speed(size: float, seconds: float) -> str:
    """Return bytes per second as text: "1.42 GB/s", and smaller units below 0.1 GB/s."""
    rate = size / seconds
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{byte_size(rate)}/s"


def index_files(manifest: Manifest) -> list[Path]:
    """Return the index, or the converted file, of each source file of a manifest."""
    from penstock.manifest.formats.arrow import ArrowPart
    from penstock.manifest.formats.base import LinePart
    from penstock.manifest.sidecar import places

    files = []
    for part in manifest.parts:
        if isinstance(part, LinePart):
            files.append(part.index.sidecar.path)
            continue
        assert isinstance(part, ArrowPart)
        mapped = part._sources[-1].path
        if mapped != part.path:
            files.append(Path(mapped))
        else:
            files += [path for path in places(part.path, ".pstk", manifest._reopen["cache_dir"]) if path.exists()][:1]
    return files
