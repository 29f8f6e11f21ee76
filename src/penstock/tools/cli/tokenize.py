"""``penstock tokenize``: tokenize text into files, on all cores or a Ray cluster; a killed run continues.

The report is printed to standard output, or as one JSON object with ``--json``; the progress bar to standard error.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.tools.cli import quantities
from penstock.tools.cli.manifest_options import Json, console, duration, pairs, print_json, shown

__all__ = ["command"]


def _tokens(text: str) -> int:
    count = quantities.count(text)
    if count < 1:
        raise typer.BadParameter(f"{text!r} tokens are too few for a shard")
    return count


def command(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Tables with a text column, their folder, or a pattern such as 'part-*.parquet'.",
            show_default=False,
        ),
    ],
    *,
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Output folder of the tokens.", show_default=False)],
    column: Annotated[str, typer.Option(help="Column with the text.")] = "text",
    append_eos: Annotated[
        str | None, typer.Option(help="Token after each document, as text or id.", show_default=False)
    ] = None,
    special_tokens: Annotated[bool, typer.Option(help="Let the tokenizer add its special tokens.")] = True,
    format: Annotated[str, typer.Option(help="'penstock', or 'megatron' for pairs of .bin and .idx.")] = "penstock",
    dtype: Annotated[str, typer.Option(help="Type of the tokens: uint16, uint32, or auto for the smallest.")] = "auto",
    shard_tokens: Annotated[
        int, typer.Option(parser=_tokens, metavar="COUNT", help="Most tokens of a shard.", show_default="100M")
    ] = 100_000_000,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes.", show_default="all cores")] = None,
    executor: Annotated[str, typer.Option(help="'process', or 'ray' for a cluster.")] = "process",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster: HOST:PORT or 'local'.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokenize text into files that ps.DocumentDataset opens. A killed run continues when run again."""
    from penstock.opening import open as open_source
    from penstock.tokenizing import tokenize

    started = time.perf_counter()
    found = open_source(source[0] if len(source) == 1 else source, columns=[column])
    report = tokenize(
        found,
        out,
        tokenizer,
        column=column,
        append_eos=int(append_eos) if append_eos is not None and append_eos.isdecimal() else append_eos,
        add_special_tokens=special_tokens,
        dtype=dtype,
        format=format,
        shard_tokens=shard_tokens,
        workers=workers,
        executor=executor,
        address=address,
        progress=False if as_json else None,
    )
    seconds = time.perf_counter() - started
    if as_json:
        numbers = {"documents": report.documents, "tokens": report.tokens, "kept": report.kept, "seconds": seconds}
        print_json({"folder": out, "shards": report.shards, "dtype": report.dtype, **numbers})
        return
    kept = f", {report.kept:,} of them from an earlier run" if report.kept else ""
    rows = [
        ("shards", f"{len(report.shards):,} of {report.dtype}"),
        ("documents", f"{report.documents:,}{kept}"),
        ("tokens", f"{report.tokens:,} in {duration(seconds)}"),
    ]
    console().print(pairs(shown(str(out)), rows))
