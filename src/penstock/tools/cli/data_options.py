"""Options that describe the data of a job, for ``penstock plan`` and ``shuffle-quality``: a program, or plain numbers.

Plain numbers become a `penstock.Mixture`; a source with only a number of rows becomes a range. So plans and
measurements use the same arithmetic as training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.errors import ConfigError
from penstock.tools.cli.quantities import count
from penstock.wording import counted, kind_text

if TYPE_CHECKING:
    from penstock.loader.dataloader import DataLoader
    from penstock.tools.planning.data import DataPlan, SourcePlan
    from penstock.tools.quality.steps import SourceSpread, StepQuality

__all__ = ["DataOptions", "as_loader", "row_cells", "with_rows"]

_Found = TypeVar("_Found", "DataPlan", "StepQuality")
_DATA = {"rich_help_panel": "Data"}


@dataclass(frozen=True)
class DataOptions:
    """The sources of a mixture, from the command line."""

    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ROWS",
            help="A source: its number of rows, or a path for penstock.open; repeatable.",
            **_DATA,
        ),
    ] = None
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[POSITION:]NAME=W,...",
            help="Weights of the sources, from this sample of the job on; repeatable.",
            show_default="by number of rows",
            **_DATA,
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILTER",
            help="Rows of a source to keep: a number, a share (60%), an .npy file, or an expression over columns.",
            **_DATA,
        ),
    ] = None
    stop: Annotated[
        str | None,
        typer.Option(
            help="Samples of an epoch, or the end of an epoch: first or all, see Mixture.", show_default="all", **_DATA
        ),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether sources were given.

        Raises:
            BadParameter: options for sources, but no --source.
        """
        if not self.source and (self.weights or self.keep or self.stop is not None):
            raise typer.BadParameter("--weights, --keep and --stop need sources: add --source NAME=ROWS")
        return bool(self.source)

    def loader(
        self, batch_size: int, *, drop_last: bool = False, **share: Any
    ) -> tuple[DataLoader[Any], dict[str, int]]:
        """Return a loader over the mixture of the sources, and each source's number of rows before filters.

        Args:
            batch_size, drop_last: passed to the loader.
            share: arguments of `penstock.Mixture`.

        Raises:
            BadParameter: options that cannot be parsed, or a source without rows.
            ConfigError: an invalid mixture.
        """
        from penstock.datasets.rows import row_count
        from penstock.loader.dataloader import DataLoader

        opened = {name: _opened(text) for name, text in _pairs("--source", self.source or []).items()}
        filters = _pairs("--keep", self.keep or [])
        for name in filters:
            if name not in opened:
                raise typer.BadParameter(f"--keep {name}=...: no --source has this name")
        kept = {name: _filtered(data, filters.get(name)) for name, data in opened.items()}
        for name, data in kept.items():
            _check_rows(name, row_count(data), len(opened[name]), filters.get(name))
        mixture = self._mixture(kept, **share)
        rows = {name: len(data) for name, data in opened.items()}
        return DataLoader(mixture, batch_size=batch_size, drop_last=drop_last), rows

    def _mixture(self, sources: dict[str, Any], **share: Any) -> Any:
        from penstock.datasets.mixing import read_weights
        from penstock.datasets.mixture import Mixture
        from penstock.datasets.rows import row_count

        names, sizes = list(sources), list(map(row_count, sources.values()))
        stages = [_weights(text) for text in self.weights or []]
        if not stages or stages[0][0] > 0:
            stages.insert(0, (0, dict(zip(names, sizes, strict=True))))
        end = "all" if self.stop is None else self.stop
        stop: int | str = end if end in ("first", "all") else count(end)
        pairs = list(zip(sources.values(), read_weights(stages[0][1], names), strict=True))
        return Mixture(pairs, schedule=stages[1:] or None, stop=stop, names=names, **share)


def as_loader(target: str, batch_size: int) -> DataLoader[Any]:
    """Return a program's loader, or a loader over a program's dataset.

    Args:
        target: ``MODULE:NAME`` or ``FILE.py:NAME``.
        batch_size: used if the object is a dataset.

    Raises:
        ConfigError: no such object, or a torch loader.
    """
    from penstock.loader.dataloader import DataLoader
    from penstock.tools.cli.profile_source import load_object, names_a_loader

    if not names_a_loader(target):
        raise ConfigError(
            f"{target} names no data: write FILE.py:NAME of a dataset, a loader, or a function that returns one"
        )
    found = load_object(target)
    if isinstance(found, DataLoader):
        return found
    if not hasattr(found, "__getitem__") or not hasattr(found, "__len__"):
        raise ConfigError(
            f"{target} is {kind_text(found)}: name a map-style dataset, a penstock.DataLoader, or a function "
            "without arguments that returns one"
        )
    return DataLoader(found, batch_size=batch_size)


def with_rows(found: _Found, rows: dict[str, int]) -> _Found:
    """Return a plan or measurement, completed with each source's number of rows before filters."""
    sources: Any = tuple(replace(source, rows=rows[source.name]) for source in found.sources)
    return replace(found, sources=sources)


def row_cells(source: SourcePlan | SourceSpread) -> list[str]:
    """Return the first cells of a source in a table: name, rows, and the share that filters keep."""
    return [source.name, f"{source.rows:,}", f"{source.kept / source.rows:.1%}" if source.rows else ""]


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not (sign and name and value) or name in found:
            raise typer.BadParameter(f"{option} {text}: write it once for each source, for example {option} web=...")
        found[name] = value
    return found


def _weights(text: str) -> tuple[int, dict[str, float]]:
    """Parse one stage of weights: return its first position, and the weights by source name."""
    begin, colon, rest = text.partition(":")
    if not colon or "=" in begin:
        begin, rest = "0", text
    found: dict[str, float] = {}
    for part in rest.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name in found:
            raise typer.BadParameter(f"--weights {text}: {name} has two weights")
        try:
            found[name] = float(value)
        except ValueError:
            raise typer.BadParameter(f"--weights {text}: write it like 500M:web=0.7,books=0.3") from None
    return count(begin), found


def _opened(text: str) -> Any:
    """Return a range if the text is a number of rows, else the dataset that `penstock.open` returns."""
    if re.fullmatch(r"[0-9][0-9_.]*(e\+?[0-9]+)?[kmgtp]?i?", text, re.IGNORECASE):
        return range(count(text))
    from penstock.opening import open

    return open(text, rank=0, world_size=1)


def _check_rows(name: str, kept: int, rows: int, keep: str | None) -> None:
    """Raise `BadParameter` for a source without rows."""
    if not rows:
        raise typer.BadParameter(f"--source {name}=...: {name} is empty: leave it out")
    if not kept:
        raise typer.BadParameter(
            f"--keep {name}={keep}: this keeps none of {counted(rows, 'row')}: keep some, or leave the source out"
        )


def _filtered(data: Any, keep: str | None) -> Any:
    if keep is None:
        return data
    rows = len(data)
    share = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", keep)
    if share or re.fullmatch(r"[0-9][0-9_.]*(e\+?[0-9]+)?[kmgtp]?", keep, re.IGNORECASE):
        some = round(rows * float(share[1]) / 100) if share else count(keep)
        if some > rows:
            raise typer.BadParameter(f"--keep {keep}: the source has {rows:,} rows")
        # A plan needs only the number of remaining rows, not which rows they are.
        return range(some)
    from penstock.datasets.subset import Subset
    from penstock.tools.cli.expressions import parse_expression

    return Subset(data, keep if keep.endswith(".npy") else parse_expression(keep))
