"""``penstock ledger``: list the rows in a step of a job, or the steps that use a row, computed from the plan.

The answer is printed to standard output, or as one JSON object with ``--json``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import ConfigError, StateError
from penstock.plan.cursor import STATE_ENTRY, unpack
from penstock.tools.cli.manifest_options import Json, console, pairs, print_json, shown
from penstock.wording import kind_text

if TYPE_CHECKING:
    from penstock.ledger.ledger import Ledger

__all__ = ["command"]

_SHOWN = 16  # largest number of rows of a step in the table


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:LOADER",
            help="The job's loader in a module or a .py file, or a function that returns it.",
            show_default=False,
        ),
    ],
    *,
    step: Annotated[
        int | None, typer.Option(min=0, help="List the rows of this step, counted from 0 over all epochs.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="With --step: only the batch of this rank.")] = None,
    row: Annotated[int | None, typer.Option(min=0, help="List the steps with this row.")] = None,
    source: Annotated[str | None, typer.Option(help="With --row, in a mixture: name or number of its source.")] = None,
    epoch: Annotated[
        int | None, typer.Option(min=0, help="With --row: in this epoch.", show_default="the loader's")
    ] = None,
    until: Annotated[int | None, typer.Option(min=0, help="With --row: count its uses before this step.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks of the job.", show_default="the loader's")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="File with a state of the loader: JSON, or a torch checkpoint.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the rows in step N of a job, or the steps with a row. The job needs no log."""
    from penstock.ledger.ledger import Ledger
    from penstock.loader.dataloader import DataLoader
    from penstock.tools.cli.profile_source import load, names_a_loader

    if (step is None) == (row is None):
        raise typer.BadParameter("use either --step or --row")
    if not names_a_loader(target):
        raise ConfigError(
            f"{target} names no loader: write FILE.py:NAME of a DataLoader or a function that returns one"
        )
    loader = load(target)
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"{target} is {kind_text(loader)}, but a ledger needs a penstock.DataLoader")
    ledger = Ledger(loader, state=None if state is None else _read_state(state), world_size=world_size)
    answer = _step(ledger, step, rank) if step is not None else _row(ledger, row, _source(source), epoch, until)
    if as_json:
        print_json(answer)
        return
    lines = [(name, _in_words(value)) for name, value in answer.items() if value is not None]
    console().print(pairs(shown(target), lines))


def _step(ledger: Ledger, step: int, rank: int | None) -> dict[str, Any]:
    found = ledger.rows(step, rank=rank)
    mixed = bool(len(found.sources)) and int(found.sources.max()) >= 0
    return {
        "step": step,
        "epoch": found.epoch,
        "world_size": ledger.layout(step).ranks,
        "batch_size": ledger.layout(step).batch_size,
        "rows": found.rows.tolist(),
        "ranks": found.ranks.tolist(),
        "sources": found.sources.tolist() if mixed else None,
        "keys": None if found.keys is None else found.keys.tolist(),
    }


def _source(given: str | None) -> int | str:
    """Return a source as an int if the text is a number, else as a name."""
    if given is None:
        return -1
    return int(given) if given.isdecimal() else given


def _row(ledger: Ledger, row: int | None, source: int | str, epoch: int | None, until: int | None) -> dict[str, Any]:
    assert row is not None
    found = ledger.steps(row, source=source, epoch=epoch)
    seen = None if until is None else ledger.seen(row, until=until, source=source)
    return {
        "row": row,
        "steps": [occurrence.step for occurrence in found],
        "ranks": [occurrence.rank for occurrence in found],
        "seen": seen,
    }


def _in_words(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:,}"
    rest = f" ... {len(value):,} in total" if len(value) > _SHOWN else ""
    return ", ".join(map(str, value[:_SHOWN])) + rest if value else "none"


def _read_state(path: Path) -> Mapping[str, Any]:
    """Return the first loader state in a file, however deeply nested."""
    try:
        content = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError):
        import torch

        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise StateError(
                f"{path} is neither JSON nor a file of torch.save that loads with weights_only=True, or it was cut "
                "off: save loader.state_dict() in it"
            ) from error
    found = _loader_state(content)
    if found is None:
        raise StateError(
            f"{path} holds no state of a loader: save loader.state_dict() in it as JSON or with torch.save"
        )
    return found


def _loader_state(content: Any) -> Mapping[str, Any] | None:
    if not isinstance(content, Mapping):
        return None
    old = "version" in content and "sampler" in content  # before version 3: `unpack` says so
    if old or (STATE_ENTRY in content and "sampler" in unpack(content, of="DataLoader")):
        return content
    return next((found for value in content.values() if (found := _loader_state(value)) is not None), None)
