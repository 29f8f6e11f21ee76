"""``penstock lengths``: count the length of every document, for packing; a killed run continues when run again.

The report is printed to standard output, or as one JSON object with ``--json``; the progress bar to standard error.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.tools.cli.manifest_options import Json, console, duration, pairs, print_json, shown

__all__ = ["command"]


def command(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Tables, their folder or a pattern such as 'part-*.parquet'; or files of tokens with document ends.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The .npy file to write the lengths to.", show_default=False)],
    column: Annotated[
        str | None,
        typer.Option(
            help="Column of a table: lists, texts or integers.", show_default="input_ids, or text with a tokenizer"
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json, to count the tokens of text.", show_default=False)
    ] = None,
    append_eos: Annotated[
        str | None, typer.Option(help="Token after each document, as text or id.", show_default=False)
    ] = None,
    special_tokens: Annotated[bool, typer.Option(help="Count the special tokens that the tokenizer adds.")] = True,
    end_token: Annotated[
        int | None, typer.Option(help="Token id that ends each document in files of tokens.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Integer type of raw files of tokens: uint16, ...", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the lengths of documents to a file, for PackedDataset(lengths=) and penstock plan --packing."""
    from penstock.datasets.lengths import count_lengths

    if tokenizer is None and (append_eos is not None or not special_tokens):
        raise typer.BadParameter("--append-eos and --no-special-tokens need --tokenizer")
    if tokenizer is not None and end_token is not None:
        raise typer.BadParameter("--tokenizer is for text, and --end-token for files of tokens: use one of them")
    started = time.perf_counter()
    files = source[0] if len(source) == 1 else source
    if tokenizer is not None:
        dataset: Any = _tokenized(files, tokenizer, column or "text", append_eos, special_tokens)
        name = None
    elif end_token is not None or _has_documents(source):
        dataset, name = _documents(files, column, end_token, dtype), None
    else:
        name = column or "input_ids"
        dataset = _table(files, name)
    found = count_lengths(dataset, out, column=name, progress=False if as_json else None)
    seconds = time.perf_counter() - started
    if as_json:
        print_json({"out": out, **found._asdict(), "seconds": seconds})
        return
    kept = f", {found.kept:,} of them counted earlier" if found.kept else ""
    mean = f"{found.tokens / found.samples:,.1f} on average, " if found.samples else ""
    rows = [
        ("documents", f"{found.samples:,} in {duration(seconds)}{kept}"),
        ("length", f"{found.tokens:,} in total, {mean}{found.longest:,} at most"),
    ]
    console().print(pairs(shown(str(out)), rows))


_WHOLE: dict[str, Any] = {"rank": 0, "world_size": 1, "shuffle": "none"}
"""Arguments that select all rows in stored order."""


def _table(files: str | list[str], column: str) -> Any:
    from penstock.opening import open as open_source

    return open_source(files, columns=[column], **_WHOLE)


def _tokenized(files: str | list[str], tokenizer: Path, column: str, end: str | None, special_tokens: bool) -> Any:
    from penstock.datasets.tokenized import TokenizedDataset

    return TokenizedDataset(
        _table(files, column),
        tokenizer,
        column=column,
        append_eos=int(end) if end is not None and end.isdecimal() else end,
        add_special_tokens=special_tokens,
    )


def _has_documents(source: list[str]) -> bool:
    """Return whether these token files have an index of documents, from ``penstock tokenize`` or Megatron."""
    return all(
        Path(name, "tokens.json").is_file() or Path(name).name == "tokens.json" or Path(name).suffix == ".idx"
        for name in source
    )


def _documents(files: str | list[str], column: str | None, end_token: int | None, dtype: str | None) -> Any:
    from penstock.datasets.tokens import DocumentDataset

    if column is not None:
        raise typer.BadParameter("--column is for tables, but these are files of tokens: leave it out")
    return DocumentDataset(files, end_token=end_token, dtype=dtype, **_WHOLE)
