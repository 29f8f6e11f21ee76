"""Tokenize a dataset once, in parallel; a killed job continues after its last finished shard.

    report = tokenize(ps.open("fineweb-*.parquet"), "tokens", "tokenizer.json", append_eos="<|endoftext|>")

    tokens/tokens.json          the source, the tokenizer, the options and the finished shards
    tokens/tokens-00000.bin     tokens; the index of documents lies beside it, see `penstock.tokens.folder`

Workers tokenize spans of rows: this process, processes of this machine, or a Ray cluster. This process writes the
results in row order. So the end of a shard depends only on the documents and ``shard_tokens``, and files have the same
bytes for any number of workers. A killed job continues after the last shard in ``tokens.json``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import Timeout

from penstock.cores import cores
from penstock.datasets.file_rows import file_rows, filters_in, row_name
from penstock.datasets.rows import excluded_rows, has_rows, load_rows, row_count
from penstock.datasets.subset import Subset
from penstock.errors import ConfigError, DataFileError, DataFileIOError, PenstockError, WorkerError
from penstock.plan.filter import CHUNK, KeptRows
from penstock.plan.source import Source
from penstock.processes import process_pool
from penstock.progress import progress_bar
from penstock.samplers.identity import holds_a_share
from penstock.storage import file_lock
from penstock.tokens.folder import INDEX, NAME, TokenFolder, TokenShard, TokenShardWriter
from penstock.tokens.megatron import CODES
from penstock.tokens.tokenizer import COLUMN, NO_THREADS, TextTokenizer, check_column, texts_of
from penstock.wording import kind_text

__all__ = ["TokenizeReport", "tokenize"]

_FORMATS = tuple(INDEX)
_EXECUTORS = ("process", "ray")

_SPAN = 1 << 19  # characters per task: a fraction of a second of work
_FIRST = 16  # rows per task at first, while text lengths are unknown
_SAMPLED = 16  # number of texts to hash for a source without a fingerprint
_UNFINISHED = re.compile(r"\.(tokens-\d{5,}\.(bin|idx|idx\.npy)|tokens\.json)\.[0-9a-f]{8}\.tmp")
_OF_MEGATRON = 65_500
"""Megatron uses uint16 for vocabularies below this size."""
_AHEAD = 3  # tasks in flight for each worker, so that a long task does not idle the others

_Span = tuple[int, int]


@dataclass(frozen=True)
class TokenizeReport:
    """The contents of a folder after `tokenize`.

    Attributes:
        shards: names of the shards.
        documents: total number of documents.
        tokens: total number of tokens.
        dtype: NumPy name of the tokens' type.
        kept: documents that an earlier job had finished.
    """

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
    """Tokenize all rows of a source into a folder that `penstock.DocumentDataset` opens.

    Args:
        source: a dataset from `penstock.open` whose samples are dicts with a text column, read in row order: the rows
            of all ranks that its filters keep and ``exclude=`` does not name. Or any picklable map-style dataset of
            texts or such dicts. Not a `penstock.Mixture`: tokenize its sources, and mix the folders.
        out: the output folder; created if missing.
        tokenizer, column, append_eos, add_special_tokens: see `penstock.TokenizedDataset`. A function needs an
            attribute ``fingerprint``, so that a resumed job does not mix two functions.
        dtype: type of the stored tokens. ``"auto"`` is the smaller of uint16 and uint32 (for Megatron uint16 and int32)
            that holds the vocabulary.
        format: ``"penstock"``, or ``"megatron"`` for pairs of ``.bin`` and ``.idx``.
        shard_tokens: most tokens of a shard; a longer document gets its own shard. A killed job loses its
            unfinished shard.
        workers: number of processes, or of concurrent tasks on the cluster; by default all cores. With more than one
            process a program needs ``if __name__ == "__main__":``.
        executor: ``"process"`` or ``"ray"``.
        address: address of the Ray cluster, see `penstock.RayOptions`. Its nodes read the source; this machine writes.
        progress: whether to show a progress bar. None: on a terminal only.

    Raises:
        ConfigError: invalid arguments, a dataset without stored rows such as a `penstock.Mixture`, a folder with other
            contents, or a folder into which another process tokenizes now.
        DataFileError: a row without text, a token that ``dtype`` cannot hold, a damaged ``tokens.json``.
        DataFileIOError: a file that cannot be written. Finished shards stay.
        WorkerError: a worker was killed.
        ClusterError: no Ray cluster.

    Document i is row i of these rows; an empty text is a document, too. Memory of this process: a bounded number of
    spans of half a megabyte of text, and 16 bytes for each document of the current shard.
    """
    if format not in _FORMATS:
        raise ConfigError(f"unknown format={format!r}: use one of {', '.join(map(repr, _FORMATS))}")
    if shard_tokens < 1:
        raise ConfigError("shard_tokens must be positive")
    if executor not in _EXECUTORS:
        raise ConfigError(f"unknown executor={executor!r}: use one of {', '.join(map(repr, _EXECUTORS))}")
    if workers is not None and workers < 1:
        raise ConfigError("workers must be positive")
    if address is not None and executor != "ray":
        raise ConfigError("address= is the address of a Ray cluster: use it with executor='ray', or leave it out")
    encoder = TextTokenizer(tokenizer, append_eos=append_eos, add_special_tokens=add_special_tokens)
    rows, column = _rows(source), column or COLUMN
    check_column(getattr(_stored(rows), "columns", None), column)
    kind = _dtype(dtype, format, encoder)
    work = _Work(rows, column, encoder, kind)
    options = {
        "source": _fingerprint(rows, work),
        "tokenizer": _tokenizer_fingerprint(encoder, tokenizer),
        "column": column,
        "end_token": encoder.end,
        "shard_tokens": shard_tokens,
    }
    where = Path(out)
    with _locked(where, TokenFolder(format, kind, row_count(rows), options)) as folder:
        kept = folder.documents
        if not folder.complete:
            with _start(work, executor, workers, address) as (run, count):
                _write(folder, where, rows, run, count, shard_tokens, progress)
    names = [shard.name for shard in folder.shards]
    return TokenizeReport(names, folder.documents, folder.tokens, kind, kept)


def _write(
    folder: TokenFolder, where: Path, source: Any, run: _Run, workers: int, shard_tokens: int, progress: bool | None
) -> None:
    """Tokenize the rows that are left in spans that take about the same time. The files do not depend on the spans."""
    stored, total, size = _stored(source), folder.rows, _FIRST
    blocks = stored.blocks() if hasattr(stored, "blocks") else None
    # A worker decodes a whole Parquet row group, even for a few of its rows.
    least = 1 if blocks is None else max(1, min(blocks[0] // 8, total // (4 * workers)))

    def spans() -> Iterator[tuple[int, int]]:
        stop = folder.documents
        while stop < total:
            begin, stop = stop, min(total, stop + max(size, least))
            yield begin, stop

    with (
        progress_bar("tokenizing", total, progress, in_bytes=False) as advance,
        TokenShardWriter(where, folder, shard_tokens) as writer,
    ):
        advance(folder.documents)
        for encoded in run(spans()):
            writer.write(encoded.tokens, encoded.lengths)
            documents = len(encoded.lengths)
            # The next texts may have other lengths, so the size grows gradually.
            size = min(max(int(_SPAN * documents / max(1, encoded.characters)), 1), 4 * size)
            advance(documents)
        writer.finish()


def _rows(source: Any) -> Any:
    """Return a dataset with the rows to tokenize, which `load_rows` reads in stored order."""
    if has_rows(source):
        if source.load is not None:
            raise ConfigError(
                f"this {type(source).__name__} has its own load=: leave it out, and name the text column with column="
            )
        return _without_excluded(source)
    if holds_a_share(source):
        raise ConfigError(
            f"tokenize reads the stored rows of one source, and {kind_text(source)} makes its items in an order "
            "of its own: tokenize each source into its own folder, and combine the folders. For some rows of one "
            "source, use penstock.Subset, not torch's"
        )
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise ConfigError(
            f"tokenize needs a map-style dataset (with __len__ and __getitem__), got {type(source).__name__}"
        )
    return source


def _stored(rows: Any) -> Any:
    """Return the source that has the columns and blocks of these rows."""
    return rows.source if has_rows(rows) else rows


def _without_excluded(source: Any) -> Any:
    """Return a dataset without its excluded rows, which an epoch replaces by others."""
    excluded = excluded_rows(source)
    if excluded is None or excluded.mark is None:
        return source
    rows = row_count(source)

    def left() -> Iterator[Any]:
        chunks = (np.arange(begin, min(begin + CHUNK, rows)) for begin in range(0, rows, CHUNK))
        return (chunk[~excluded.holds(chunk)] for chunk in chunks)

    return Subset(source, KeptRows.of_chunks(left, rows))


def _dtype(dtype: str, format: str, encoder: TextTokenizer) -> str:
    if dtype != "auto":
        try:
            kind = np.dtype(dtype)
        except TypeError:
            kind = np.dtype(float)
        known = [np.dtype(name) for name in CODES.values()] if format == "megatron" else [kind]
        if kind.kind not in "iu" or kind not in known:
            raise ConfigError(f"dtype={dtype!r} is not an integer type that the format {format!r} can store")
        return str(kind)
    largest = encoder.largest
    if largest is None:
        raise ConfigError("dtype='auto' needs the size of the vocabulary, which is unknown for a function: pass dtype=")
    if format == "megatron":
        return "uint16" if largest + 1 < _OF_MEGATRON else "int32"
    return "uint16" if largest < 1 << 16 else "uint32"


def _fingerprint(rows: Any, work: _Work) -> str:
    """Return the fingerprint of a source, or a hash of its length, its filters and some of its texts."""
    own = getattr(rows, "fingerprint", None)
    if isinstance(own, str):
        return own
    total = row_count(rows)
    sampled = sorted({k * (total - 1) // max(1, _SAMPLED - 1) for k in range(_SAMPLED)}) if total else []
    digest = xxhash.xxh3_128(" ".join([f"{total}", *(kept.fingerprint for kept in filters_in(rows))]).encode())
    for text in work.texts(sampled):
        digest.update(f"\n{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _tokenizer_fingerprint(encoder: TextTokenizer, given: Any) -> str:
    own = encoder.fingerprint
    found = own or getattr(given, "fingerprint", None)
    if not isinstance(found, str):
        raise ConfigError(
            "a tokenizer that is a function cannot be identified, and a resumed job must not mix two: give the "
            "function an attribute fingerprint = 'its name and version'"
        )
    if own is not None and not encoder.is_pure:
        raise ConfigError("this tokenizer is random, so each job would write other files: turn its dropout off")
    return found


@contextlib.contextmanager
def _locked(where: Path, wanted: TokenFolder) -> Iterator[TokenFolder]:
    """Create the folder, and lock it for this job; yield its contents with the shards finished so far."""
    try:
        where.mkdir(parents=True, exist_ok=True)
        with file_lock(where / NAME).acquire(timeout=0):
            yield _folder(where, wanted)
    except Timeout:
        raise ConfigError(f"another process tokenizes into {where}: wait for it, or name another folder") from None
    except OSError as error:
        if isinstance(error, PenstockError) or not str(error.filename).startswith(str(where)):
            raise
        raise DataFileIOError(f"cannot write {error.filename}: {error.strerror}") from error


def _folder(where: Path, wanted: TokenFolder) -> TokenFolder:
    """Return the contents of the folder, with the finished shards if it is of the same job. Remove the temporary files
    of a killed job.
    """
    for path in where.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
    if not (where / NAME).exists():
        if any(where.glob("tokens-*")):
            raise ConfigError(f"{where} holds other files named tokens-*: name another folder, or remove them")
        wanted.write(where)
        return wanted
    found = TokenFolder.read(str(where / NAME))
    if not found.shards and not found.complete:
        # Nothing is finished yet, so other options may replace the first ones.
        wanted.write(where)
        return wanted
    differ = [name for name in ("format", "dtype", "rows") if getattr(found, name) != getattr(wanted, name)]
    differ += [name for name, value in wanted.options.items() if found.options.get(name) != value]
    if differ:
        raise ConfigError(
            f"{where} holds tokens of another job ({', '.join(differ)} differ): name another folder, or "
            "remove its files first"
        )
    for number, shard in enumerate(found.shards):
        if not _is_there(where, found, shard):
            # Continue at the first missing or truncated shard: later ones are written again, with the same bytes.
            found.shards, found.complete = found.shards[:number], False
            break
    return found


def _is_there(where: Path, folder: TokenFolder, shard: TokenShard) -> bool:
    """Return whether both files of a shard have their size, and the index its content."""
    tokens, index = where / f"{shard.name}.bin", where / f"{shard.name}{INDEX[folder.format]}"
    size = shard.tokens * np.dtype(folder.dtype).itemsize
    if not tokens.is_file() or tokens.stat().st_size != size or not index.is_file():
        return False
    return xxhash.xxh3_128_hexdigest(index.read_bytes()) == shard.checksum[1]


# Workers.


class _Encoded(NamedTuple):
    """Documents: their concatenated tokens, the number of tokens in each, and the total number of characters."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    characters: int


class _Work:
    """Tokenizes rows of a `Source` or a map-style dataset; picklable if that is."""

    def __init__(self, source: Any, column: str, tokenizer: TextTokenizer, dtype: str) -> None:
        self._source, self._column, self._tokenizer = source, column, tokenizer
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def texts(self, rows: Sequence[int]) -> list[str]:
        """Return the texts of these rows."""
        if isinstance(self._source, Source):
            samples = self._source.records(np.asarray(rows))
        else:
            samples = load_rows(self._source, rows, None)
        return texts_of(samples, self._column, lambda place: self._name(rows[place]))

    def _name(self, row: int) -> str:
        """Return file and row of a row before filters, for messages."""
        return row_name(self._source, int(file_rows(self._source, np.array([row]))[0]))

    def encode(self, start: int, stop: int) -> _Encoded:
        """Return the tokens of rows ``start`` to ``stop - 1``. Errors name file and row."""
        texts = self.texts(range(start, stop))
        # There is a worker for each core already, so the tokenizer starts no threads.
        documents = self._tokenizer.encode(texts, threads=False, name=lambda place: self._name(start + place))
        lengths = np.array([len(document) for document in documents], np.int64)
        tokens = np.concatenate([np.empty(0, np.int64), *documents])
        limits = np.iinfo(self._dtype)
        if len(tokens) and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            k = int(((tokens < limits.min) | (tokens > limits.max)).argmax())
            name = self._name(start + int(np.cumsum(lengths).searchsorted(k, "right")))
            raise DataFileError(
                f"{name} has the token {tokens[k]}, which {self._dtype} cannot hold: use a larger dtype="
            )
        return _Encoded(tokens.astype(self._dtype), lengths, sum(map(len, texts)))


_Run = Callable[[Iterator[_Span]], Iterator[_Encoded]]
"""Maps spans of rows to their documents, in order. Spans are consumed lazily."""


@contextlib.contextmanager
def _start(work: _Work, executor: str, workers: int | None, address: str | None) -> Iterator[tuple[_Run, int]]:
    """Start the workers; yield a function that runs tasks on them, and their number. They stop when the block ends."""
    if executor == "ray":
        yield _on_ray(work, workers, address)
        return
    count = cores() if workers is None else workers
    if count == 1:
        yield (lambda spans: (work.encode(*span) for span in spans)), 1
        return
    with process_pool(count, _begin, work) as pool:

        def run(spans: Iterator[_Span]) -> Iterator[_Encoded]:
            try:
                yield from _in_order(spans, lambda span: pool.submit(_encode, span), lambda task: task.result(), count)
            except BrokenProcessPool as error:
                raise WorkerError(
                    "a worker was killed (out of memory?): run the same job again, and it continues"
                ) from error

        yield run, count


def _in_order(
    spans: Iterator[_Span], submit: Callable[[_Span], Any], result: Callable[[Any], _Encoded], workers: int
) -> Iterator[_Encoded]:
    """Yield results in the order of their spans, with a bounded number of tasks in flight."""
    waiting: deque[Any] = deque()
    for span in spans:
        waiting.append(submit(span))
        if len(waiting) >= _AHEAD * workers:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())


# The work of this worker process, by a key. On a cluster a task may run in any process, which caches the last work.
_works: dict[str, _Work] = {}


def _begin(work: _Work) -> None:
    """Store the work in a worker process, and turn off the tokenizer's threads there."""
    _works[""] = work
    os.environ[NO_THREADS] = "false"


def _encode(span: _Span) -> _Encoded:
    return _works[""].encode(*span)


def _encode_there(key: str, pickled: bytes, span: _Span) -> _Encoded:
    if key not in _works:
        _works.clear()
        _works[key] = pickle.loads(pickled)
    return _works[key].encode(*span)


def _on_ray(work: _Work, workers: int | None, address: str | None) -> tuple[_Run, int]:
    from penstock.loader.executors.ray.cluster import attach, ray

    attach(address)
    # Ray would unpickle the work, and so open the source, for each task.
    pickled = ray.put(pickle.dumps(work))
    key = secrets.token_hex(8)
    task = ray.remote(num_cpus=1)(_encode_there)
    count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def take(reference: Any) -> _Encoded:
        try:
            found: _Encoded = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"a task on the Ray cluster was lost: {error}. Run the same job again, and it continues"
            ) from error
        return found

    def run(spans: Iterator[_Span]) -> Iterator[_Encoded]:
        return _in_order(spans, lambda span: task.remote(key, pickled, span), take, count)

    return run, count
