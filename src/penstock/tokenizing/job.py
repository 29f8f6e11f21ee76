"""Tokenizing a data set once: parallel, atomic, and going on where it was killed.

    report = tokenize(ps.open("fineweb-*.parquet"), "tokens", "tokenizer.json", append_eos="<|endoftext|>")

    tokens/tokens.json          what was tokenized and how, and the shards that are finished
    tokens/tokens-00000.bin     tokens, and beside it where its documents are: see `penstock.tokens.folder`

Workers tokenize spans of rows; this process writes what they give, in the order of the rows. So where a shard ends
follows from the documents and ``shard_tokens`` alone, files are the same bytes for any number of workers, and a job
that was killed goes on behind the last shard that ``tokens.json`` names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import Timeout

from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError, DataFileIOError, PenstockError
from penstock.progress import progress_bar
from penstock.storage import file_lock
from penstock.tokenizing.task import Work
from penstock.tokenizing.workers import check_executor, start
from penstock.tokens.folder import INDEX, NAME, Shard, TokenFolder
from penstock.tokens.megatron import CODES
from penstock.tokens.texts import COLUMN, check_column
from penstock.tokens.tokenizer import TextTokenizer
from penstock.tokens.writer import ShardWriter

__all__ = ["FORMATS", "TokenizeReport", "tokenize"]

FORMATS = tuple(INDEX)

_SPAN = 1 << 19  # characters of a task: a fraction of a second
_FIRST = 16  # rows of the first tasks, before it is known how long texts are
_SAMPLED = 16  # texts that tell a source that says nothing of itself
_OF_MEGATRON = 65_500
"""Megatron itself takes uint16 for vocabularies that are smaller than this."""


@dataclass(frozen=True)
class TokenizeReport:
    """What a folder holds now, and how many of its documents were there before."""

    shards: list[str]
    documents: int
    tokens: int
    dtype: str
    kept: int


def tokenize(
    source: Any,
    out: str | os.PathLike[str],
    tokenizer: Any,
    *,
    column: str | None = None,
    append_eos: int | str | None = None,
    add_special_tokens: bool = True,
    dtype: str = "auto",
    format: str = "penstock",
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
    executor: str = "process",
    address: str | None = None,
    progress: bool | None = None,
) -> TokenizeReport:
    """Tokenize all rows of a source into a folder, which `penstock.DocumentDataset` opens.

    Args:
        source: a data set of ours whose samples are dicts with a column of text (`penstock.open`), its rows in their
            own order; or any map-style data set of text or such dicts, which pickles.
        out: the folder; made if it is not there.
        tokenizer, column, append_eos, add_special_tokens: see `penstock.TokenizedDataset`. A function of text must say
            which one it is, by an attribute ``fingerprint``, since a job that goes on must not mix two of them.
        dtype: of the tokens in the files; ``"auto"`` takes the smallest of uint16 and uint32 (in Megatron's format
            uint16 and int32) that holds the vocabulary.
        format: ``"penstock"``, or ``"megatron"`` for pairs of ``.bin`` and ``.idx``.
        shard_tokens: a shard ends before it has more tokens; one document always fits. A job that was killed loses what
            it had of one shard.
        workers: processes, or tasks at a time on the cluster; by default all cores. More than one process need the
            ``if __name__ == "__main__":`` of a program.
        executor: ``"process"`` or ``"ray"``.
        address: of the Ray cluster, see `penstock.RayOptions`. Its machines read the source, this one writes.
        progress: show a bar: True, False, or None on a terminal.

    Raises:
        ConfigError: arguments that make no sense, a folder that holds something else, or that another process
            tokenizes into now.
        DataFileError: a row without text, a token that ``dtype`` cannot hold, a damaged ``tokens.json``.
        DataFileIOError: a file that cannot be written. Shards that are finished stay.
        WorkerError: a worker was killed.
        ClusterError: no Ray cluster.

    Document i is row i of the source; empty texts are documents, too. This process holds a bounded number of spans of
    half a megabyte of text, and eight bytes for each document of the shard at hand.
    """
    _check(format, shard_tokens)
    check_executor(executor, workers, address)
    encoder = TextTokenizer(tokenizer, append_eos=append_eos, add_special_tokens=add_special_tokens)
    rows, column = _rows(source), column or COLUMN
    check_column(getattr(rows, "columns", None), column)
    kind = _dtype(dtype, format, encoder)
    work = Work(rows, column, encoder, kind)
    options = {
        "source": _fingerprint(rows, work),
        "tokenizer": _tokenizer_fingerprint(encoder, tokenizer),
        "column": column,
        "end_token": encoder.end,
        "shard_tokens": shard_tokens,
    }
    with _own(Path(out), TokenFolder(format, kind, len(rows), options)) as (where, folder):
        kept = folder.documents
        if not folder.complete:
            with start(work, executor, workers, address) as (run, count):
                _write(folder, where, run, _Spans(rows, kept, count), shard_tokens, progress)
    names = [shard.name for shard in folder.shards]
    return TokenizeReport(names, folder.documents, folder.tokens, kind, kept)


def _check(format: str, shard_tokens: int) -> None:
    if format not in FORMATS:
        raise ConfigError(f"unknown format={format!r}: use one of {', '.join(map(repr, FORMATS))}")
    if shard_tokens < 1:
        raise ConfigError("shard_tokens must be positive")


def _write(folder: TokenFolder, where: Path, run: Any, spans: _Spans, most: int, progress: bool | None) -> None:
    with (
        progress_bar("tokenizing", folder.rows, progress, in_bytes=False) as advance,
        ShardWriter(where, folder, most) as writer,
    ):
        advance(folder.documents)
        for encoded in run(iter(spans)):
            writer.write(encoded.tokens, encoded.lengths)
            spans.learn(len(encoded.lengths), encoded.characters)
            advance(len(encoded.lengths))
        writer.finish()


class _Spans:
    """Spans of rows that are about equal work. What they are does not show in the files.

    Args:
        source: the rows.
        first: row that is not done.
        workers: who share them.
    """

    def __init__(self, source: Any, first: int, workers: int) -> None:
        self._total, self._at, self._size = len(source), first, _FIRST
        blocks = source.blocks() if hasattr(source, "blocks") else None
        # A worker decodes a row group of Parquet whole, whatever it needs of it.
        self._least = 1 if blocks is None else max(1, min(blocks[0] // 8, self._total // (4 * workers)))

    def learn(self, rows: int, characters: int) -> None:
        """Take note of how long texts are."""
        wanted = int(_SPAN * rows / max(1, characters))
        # Texts of one place need not be like those of the next.
        self._size = min(max(wanted, 1), 4 * self._size)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self._at < self._total:
            begin, self._at = self._at, min(self._total, self._at + max(self._size, self._least))
            yield begin, self._at


def _rows(source: Any) -> Any:
    """Return what gives the rows in their own order."""
    if isinstance(source, SourceDataset):
        if source.load is not None:
            raise ConfigError(f"this {type(source).__name__} has a load= of its own: leave it out, and name the column")
        return source.source
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise ConfigError(f"tokenize needs a data set with a length and samples by number, got {type(source).__name__}")
    return source


def _dtype(dtype: str, format: str, encoder: TextTokenizer) -> str:
    if dtype != "auto":
        try:
            kind = np.dtype(dtype)
        except TypeError:
            kind = np.dtype(float)
        known = [np.dtype(name) for name in CODES.values()] if format == "megatron" else [kind]
        if kind.kind not in "iu" or kind not in known:
            raise ConfigError(f"dtype={dtype!r} is no type of integers that files in the format {format!r} have")
        return str(kind)
    largest = encoder.largest
    if largest is None:
        raise ConfigError("dtype='auto' needs to know the vocabulary, which a function does not say: give dtype=")
    if format == "megatron":
        return "uint16" if largest + 1 < _OF_MEGATRON else "int32"
    return "uint16" if largest < 1 << 16 else "uint32"


def _fingerprint(rows: Any, work: Work) -> str:
    """Return the identity of a source: its own, or its length and some of its texts."""
    own = getattr(rows, "fingerprint", None)
    if isinstance(own, str):
        return own
    total = len(rows)
    sampled = sorted({k * (total - 1) // max(1, _SAMPLED - 1) for k in range(_SAMPLED)}) if total else []
    digest = xxhash.xxh3_128(f"{total}".encode())
    for text in work.texts(sampled):
        digest.update(f"\n{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _tokenizer_fingerprint(encoder: TextTokenizer, given: Any) -> str:
    found = encoder.fingerprint or getattr(given, "fingerprint", None)
    if not isinstance(found, str):
        raise ConfigError(
            "a function does not say which one it is, and a job that goes on must not mix two: give it an attribute "
            "fingerprint = 'its name and version'"
        )
    if encoder.fingerprint is not None and not encoder.is_pure:
        raise ConfigError("this tokenizer draws at random (dropout): files would differ from job to job")
    return found


@contextlib.contextmanager
def _own(where: Path, wanted: TokenFolder) -> Iterator[tuple[Path, TokenFolder]]:
    """Make the folder, and have it alone: it, and what is in it of the wanted one."""
    with _reported(where):
        where.mkdir(parents=True, exist_ok=True)
        with _alone(where):
            yield where, _folder(where, wanted)


@contextlib.contextmanager
def _reported(where: Path) -> Iterator[None]:
    """Say which folder the system's errors are about."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PenstockError) or not str(error.filename).startswith(str(where)):
            raise
        raise DataFileIOError(f"cannot write {error.filename}: {error.strerror}") from error


@contextlib.contextmanager
def _alone(where: Path) -> Iterator[None]:
    """Nobody else on this machine tokenizes into the folder meanwhile."""
    lock = file_lock(where / NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"another process tokenizes into {where}: wait for its end, or name another folder") from None
    try:
        yield
    finally:
        lock.release()


def _folder(where: Path, wanted: TokenFolder) -> TokenFolder:
    """Return what is in the folder: finished shards of the same job, or nothing."""
    _remove_unfinished(where)
    if not (where / NAME).exists():
        if any(where.glob("tokens-*")):
            raise ConfigError(f"{where} holds files tokens-* of something else: name another folder, or remove them")
        wanted.write(where)
        return wanted
    found = TokenFolder.read(str(where / NAME))
    if not found.shards and not found.complete:
        # Nothing is lost by other options: the first ones may have been a mistake.
        wanted.write(where)
        return wanted
    differ = [name for name in ("format", "dtype", "rows") if getattr(found, name) != getattr(wanted, name)]
    differ += [name for name, value in wanted.options.items() if found.options.get(name) != value]
    if differ:
        raise ConfigError(
            f"{where} holds tokens that were made otherwise ({', '.join(differ)} differ): name another folder, or "
            "remove them first"
        )
    there = [_is_there(where, found, shard) for shard in found.shards]
    if not all(there):
        # Cut before the first one that is missing: the others are made again, to the same bytes.
        found.shards = found.shards[: there.index(False)]
        found.complete = False
    return found


def _is_there(where: Path, folder: TokenFolder, shard: Shard) -> bool:
    tokens, index = where / f"{shard.name}.bin", where / f"{shard.name}{INDEX[folder.format]}"
    size = shard.tokens * np.dtype(folder.dtype).itemsize
    return tokens.is_file() and index.is_file() and tokens.stat().st_size == size


def _remove_unfinished(where: Path) -> None:
    """Remove what a job that was killed has left of files."""
    unfinished = re.compile(r"\.(tokens-\d{5,}\.(bin|idx|idx\.npy)|tokens\.json)\.[0-9a-f]{8}\.tmp")
    for name in os.listdir(where):
        if unfinished.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(where / name)
