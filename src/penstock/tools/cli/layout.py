"""Groups of commands, and their ``--help`` as plain text under headings.

Typer renders help with rich, whose import takes longer than the rest of ``--help``, and to list the commands of a group
it imports all of them. `App` is `typer.Typer` with plain help. `Catalog` is a group that imports the module of a
command only to run it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.tools.cli.interrupt import AtOnce

__all__ = ["App", "Catalog", "Entry"]


def _options(params: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Write arguments, then options, then options with their own heading (``rich_help_panel``)."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in params:
        record = param.get_help_record(ctx)
        if record is not None and param.param_type_name == "argument":
            sections["Arguments"].append((_usage(param), record[1]))
        elif record is not None:
            sections.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
    for title, rows in sections.items():
        _section(formatter, title, rows)


def _usage(argument: Any) -> str:
    """Return FILE, [FILE], FILE... or [FILE]...; versions of typer differ in this."""
    name = (argument.metavar or argument.name).upper()
    return f"{name if argument.required else f'[{name}]'}{'...' if argument.nargs == -1 else ''}"


def _section(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(typer.style(title, bold=True)):
            formatter.write_dl(rows)


def _epilog(text: str | None, formatter: Any) -> None:
    """Write examples, one per line and unwrapped, so that they can be copied."""
    if text:
        formatter.write_paragraph()
        for line in text.splitlines():
            formatter.write(f"{line}\n")


class _Command(TyperCommand):
    """A command with plain help."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = (param for param in self.get_params(ctx) if param.param_type_name == "argument")
        return ["[OPTIONS]", *map(_usage, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _epilog(self.epilog, formatter)


class _Group(TyperGroup):
    """A group of commands with plain help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _options(self.get_params(ctx), ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        entries = list(self.entries(ctx))
        width = max(len(name) for name, *_ in entries)
        for panel, rows in groupby(entries, key=lambda entry: entry[1]):
            _section(formatter, panel, [(name.ljust(width), text) for name, _, text in rows])

    def entries(self, ctx: Any) -> Iterator[tuple[str, str, str]]:
        """Yield name, heading and one line of help for each command."""
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            yield name, getattr(command, "rich_help_panel", None) or "Commands", command.get_short_help_str(100)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _epilog(self.epilog, formatter)


class App(typer.Typer):
    """`typer.Typer` with plain help, and without typer's tracebacks."""

    def __init__(self, **settings: Any) -> None:
        plain: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}
        # Without a default for --help, typer would import pydantic, which takes 100 ms.
        context = {"help_option_names": ["-h", "--help"], "default_map": {"help": False}}
        super().__init__(**{"cls": _Group, "no_args_is_help": True, "context_settings": context, **plain, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Return typer's decorator for a command with plain help."""
        return super().command(name, cls=_Command, **settings)


@dataclass(frozen=True)
class Entry:
    """A command that is not imported yet.

    Attributes:
        module: a module with an `App` named ``app``, or a function named ``command``.
        panel: the heading above it in the list of commands.
        help: one line of help.
        example: used for a function; an `App` defines its own.
    """

    module: str
    panel: str
    help: str
    example: str | None = None

    def load(self, name: str) -> Any:
        """Import and return the command."""
        with AtOnce():
            module = importlib.import_module(self.module)
        app = getattr(module, "app", None)
        if app is None:
            app = App()
            app.command(epilog=self.example and f"Example:  {self.example}")(module.command)
        command = typer.main.get_command(app)
        command.name = name
        command.help = command.help or self.help
        return command


class _Commands(MutableMapping[str, Any]):
    """A mapping from name to command. A command is imported at its first use."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self.entries = entries
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self.entries[name].load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Catalog(_Group):
    """A group of commands, each imported only when it runs. Subclasses list the entries."""

    catalog: dict[str, Entry] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(self.catalog)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in catalog order, without importing them."""
        return list(self.commands)

    def entries(self, ctx: Any) -> Iterator[tuple[str, str, str]]:
        for name, entry in self.catalog.items():
            yield name, entry.panel, entry.help
