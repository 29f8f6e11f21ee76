"""Filters: functions of an iterator with their options bound; they pickle if their options do.

    filter = wds.map_dict(jpg=decode, cls=int)       # a stage for DataPipeline
    for sample in filter(samples): ...               # or used alone

A filter holds nothing between two samples, or only a count, so pipelines of filters resume from a state without
replaying.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import update_wrapper
from itertools import islice
from typing import Any

import numpy as np
import torch

from penstock.distributed import Worker, World
from penstock.errors import ConfigError
from penstock.hashing import mix
from penstock.wds.autodecode import Decoder, DecodingError, unpickle_loads
from penstock.wds.handlers import Handler, decide, reraise_exception
from penstock.wds.pipeline import (
    Context,
    CountedStep,
    FlatMapStep,
    IteratorStep,
    Stage,
    Step,
    default_context,
    memoryless,
)
from penstock.wds.shuffling import Shuffle
from penstock.wds.utils import PipelineStage, pytorch_worker_info

Samples = Iterable[Any]


class FilterFunction(PipelineStage):
    """A generator function of an iterator, with its options bound."""

    def __init__(self, f: Callable[..., Iterator[Any]], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw
        self.memoryless = getattr(f, "memoryless", False)

    def run(self, src: Any = None) -> Iterator[Any]:
        """Return the filtered iterator."""
        return self.f(src, *self.args, **self.kw)

    def __call__(self, src: Samples) -> Iterator[Any]:
        return self.run(src)

    def __repr__(self) -> str:
        return f"<{self.f.__name__} {self.args} {self.kw}>"


class pipelinefilter:
    """A filter made of a generator function, whose first argument is the source: ``filter(option, ...)`` is a stage.

    To resume, it runs again from the start of the epoch, unless the function is marked `memoryless`.
    """

    def __init__(self, f: Callable[..., Iterator[Any]]) -> None:
        self.f = f
        update_wrapper(self, f)

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        return FilterFunction(self.f, *args, **kw)


RestCurried = pipelinefilter


# ------------------------------------------------------------------ samples of any kind


@memoryless
def _map(data: Samples, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Iterator[Any]:
    """Apply ``f`` to each sample. A result of None drops the sample; a dict keeps the sample's ``__key__``.

    Args:
        f: a function of one sample.
        handler: handles errors of ``f``, such as `warn_and_continue`; by default they are raised.
    """
    return _each(data, handler, f, is_map=True)


def _each(data: Samples, handler: Handler, f: Callable[[Any], Any], *, is_map: bool = False) -> Iterator[Any]:
    """Apply ``f`` to each sample; errors go to the handler. ``is_map``: with the rules of `_map` for its results."""
    for sample in data:
        try:
            result = f(sample)
        except Exception as error:
            if decide(handler, error):
                continue
            return
        if is_map:
            if result is None:
                continue
            if isinstance(sample, dict) and isinstance(result, dict) and "__key__" in sample:
                result["__key__"] = sample["__key__"]
        yield result


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a field's name matches one of the patterns, with a leading dot or without."""
    return any(fnmatch(name, pattern) or fnmatch("." + name, pattern) for pattern in patterns)


# ------------------------------------------------------------------ samples as dicts


def getfirst(a: Mapping[str, Any], keys: str | list[str], default: Any = None, missing_is_error: bool = True) -> Any:
    """Return the first existing one of several fields (``"jpg;png"``).

    Raises:
        ConfigError: (a ValueError) none exists and ``missing_is_error`` is set.
    """
    names = keys.split(";") if isinstance(keys, str) else keys
    for name in names:
        if name in a:
            return a[name]
    if missing_is_error:
        raise ConfigError(f"didn't find {names} in {list(a)}")
    return default


def parse_field_spec(fields: str | list[str] | tuple[str, ...]) -> list[list[str]]:
    """Parse ``"jpg;png cls"`` into ``[["jpg", "png"], ["cls"]]``."""
    parts = fields.split() if isinstance(fields, str) else fields
    return [part.split(";") if isinstance(part, str) else list(part) for part in parts]


def transform_with(sample: Any, transformers: Any) -> Any:
    """Apply one function to each field of a tuple. None leaves a field unchanged; surplus functions are not called."""
    if not transformers:
        return sample
    result = list(sample)
    for number, function in enumerate(transformers[: len(result)]):
        if function is not None:
            result[number] = function(result[number])
    return result


@memoryless
def _select(data: Samples, predicate: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the samples for which ``predicate`` is true."""
    return (sample for sample in data if predicate(sample))


@memoryless
def _rename(
    data: Samples, handler: Handler = reraise_exception, keep: bool = True, **kw: str | list[str]
) -> Iterator[Any]:
    """Rename fields: ``rename(image="jpg;png")`` takes the first existing one of several.

    Args:
        handler: handles the error of a sample that has none of them.
        keep: also keep the fields that are not named.
    """
    olds = {old for names in kw.values() for old in (names.split(";") if isinstance(names, str) else names)}

    def one(sample: dict[str, Any]) -> dict[str, Any]:
        renamed = {new: getfirst(sample, names) for new, names in kw.items()}
        if not keep:
            return renamed
        return {**{name: value for name, value in sample.items() if name not in olds}, **renamed}

    return _each(data, handler, one)


@memoryless
def _associate(data: Samples, associator: Any, **kw: Any) -> Iterator[Any]:
    """Add fields to samples: those that ``associator`` returns for their ``__key__``.

    Args:
        associator: a mapping from key to dict, or a function of the key and ``kw`` that returns a dict.
    """
    for sample in data:
        key = sample["__key__"]
        extra = associator(key, **kw) if callable(associator) else associator.get(key, {})
        sample.update(extra)
        yield sample


@memoryless
def _map_dict(data: Samples, handler: Handler = reraise_exception, **kw: Callable[[Any], Any]) -> Iterator[Any]:
    """Apply one function to each named field: ``map_dict(jpg=decode, cls=int)``.

    Args:
        handler: handles errors, including that of a missing field.
    """

    def one(sample: dict[str, Any]) -> dict[str, Any]:
        for name, function in kw.items():
            sample[name] = function(sample[name])
        return sample

    return _each(data, handler, one)


@memoryless
def _to_tuple(
    data: Samples,
    *args: str,
    handler: Handler = reraise_exception,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
) -> Iterator[Any]:
    """Yield tuples of fields: ``to_tuple("jpg;png", "cls")`` takes the first existing one of several.

    Args:
        handler: handles errors.
        missing_is_error: raise an error for a missing field; otherwise its value is None.
        none_is_error: raise an error for a value of None; by default, the same as ``missing_is_error``.
    """
    fields = parse_field_spec(args[0] if len(args) == 1 else args)
    refuse_none = missing_is_error if none_is_error is None else none_is_error

    def one(sample: dict[str, Any]) -> tuple[Any, ...]:
        result = tuple([getfirst(sample, names, missing_is_error=missing_is_error) for names in fields])
        if refuse_none and any(value is None for value in result):
            raise ConfigError(
                f"to_tuple {fields}: some of these fields are missing or None in a sample with {list(sample)}"
            )
        return result

    return _each(data, handler, one)


@memoryless
def _map_tuple(
    data: Samples, *args: Callable[[Any], Any] | None, handler: Handler = reraise_exception
) -> Iterator[Any]:
    """Apply one function to each field of a tuple; None leaves a field unchanged.

    Args:
        handler: handles errors of the functions.
    """
    return _each(data, handler, lambda sample: tuple(transform_with(sample, args)))


@memoryless
def _extract_keys(
    source: Samples, *patterns: str | list[str], duplicate_is_error: bool = True, ignore_missing: bool = False
) -> Iterator[Any]:
    """Yield tuples of the fields that match patterns: ``extract_keys("*.jpg;*.png", "*.cls")``.

    Args:
        duplicate_is_error: raise `ConfigError` if several fields match one pattern; otherwise take the first one.
        ignore_missing: leave out a pattern without a match; otherwise raise `ConfigError`.
    """
    alternatives = parse_field_spec(patterns)  # type: ignore[arg-type]
    for sample in source:
        result = []
        for pattern in alternatives:
            found = [name for name in sample if _matches(name, pattern)]
            if not found and ignore_missing:
                continue
            if not found:
                raise ConfigError(f"Cannot find {pattern} in sample keys {sample.keys()}.")
            if len(found) > 1 and duplicate_is_error:
                raise ConfigError(f"Multiple sample keys {sample.keys()} match {pattern}.")
            result.append(sample[found[0]])
        yield tuple(result)


@memoryless
def _rename_keys(
    source: Samples,
    *args: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    **kw: str,
) -> Iterator[Any]:
    """Rename fields that match patterns: ``rename_keys(image="*.jpg")``, or pairs ``("image", "*.jpg")``.

    Args:
        keep_unselected: keep the fields that no pattern matches.
        must_match: raise `ConfigError` for a pattern without a match.
        duplicate_is_error: raise `ConfigError` if two fields get one name; otherwise take the first one.
    """
    # The last match wins; patterns are compared with the last component of a name, in lower case.
    renamings = [(pattern, new) for new, pattern in (*args, *kw.items())][::-1]
    for sample in source:
        result: dict[str, Any] = {}
        matched = dict.fromkeys((pattern for pattern, _ in renamings), False)
        for name, value in sample.items():
            base = name.rpartition("/")[2].lower()
            found = next(((pattern, new) for pattern, new in renamings if fnmatch(base, pattern)), None)
            if found is None:
                if keep_unselected:
                    result[name] = value
                continue
            matched[found[0]] = True
            if found[1] in result and duplicate_is_error:
                raise ConfigError(f"Duplicate value in sample {sample.keys()} after rename: {found[1]}.")
            result.setdefault(found[1], value)
        if must_match and not all(matched.values()):
            raise ConfigError(f"Not all patterns ({matched}) matched sample keys ({sample.keys()}).")
        yield result


# ------------------------------------------------------------------ decoding


def decode(*args: Any, handler: Handler = reraise_exception, **kw: Any) -> FilterFunction:
    """Return a filter that decodes samples; options are those of `Decoder`."""
    return FilterFunction(_map, Decoder(args, **kw), handler=handler)


_XDEFAULTS = (
    ("*.bin", lambda stream: stream.read()),
    ("*.txt", lambda stream: stream.read().decode("utf-8")),
    ("*.pyd", lambda stream: unpickle_loads(stream.read())),
)


@memoryless
def _xdecode(
    source: Iterable[Any], *args: Any, must_decode: bool = True, defaults: Any = _XDEFAULTS, **kw: Any
) -> Iterator[Any]:
    """Decode fields with functions of an open file, by pattern: ``xdecode(("*.png", decode), must_decode=False)``."""
    # The last match wins, so a program's decoders override the defaults. False leaves a field unchanged.
    known = [*defaults, *args, *((f"*.{name}", function) for name, function in kw.items())][::-1]
    for sample in source:
        result = dict(sample)
        for name, data in sample.items():
            base = name.rpartition("/")[2].lower()
            if base.startswith("__"):
                continue
            found = next((function for pattern, function in known if _matches(base, [pattern])), None)
            if found:
                result[name] = found(io.BytesIO(data) if isinstance(data, bytes) else data)
            elif found is None and must_decode:
                raise DecodingError(sample.get("__url__"), sample.get("__key__"), name, sample) from ValueError(
                    f"No decoder found for {name}."
                )
        yield result


# ------------------------------------------------------------------ samples by number


class slice(Stage):
    """A stage that selects samples by number, with the arguments of ``itertools.islice``."""

    def __init__(self, *args: int | None) -> None:
        islice((), *args)  # raises islice's own errors about invalid numbers
        start, stop, step = (0, *args, None) if len(args) == 1 else (*args, *(None,) * (3 - len(args)))
        self.numbers = (start or 0, stop, step or 1)

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        return CountedStep(source, self._some, own)

    def _some(self, source: Step, count: int) -> Iterator[tuple[int, Any]]:
        start, stop, step = self.numbers
        if stop is not None and count >= stop:
            return
        for number, item in enumerate(source, count):
            if number >= start and (number - start) % step == 0:
                yield number + 1, item
            if stop is not None and number + 1 >= stop:
                return


class rsample(Stage):
    """A stage that keeps each sample with probability ``p``, a function of the seed, epoch and number of the sample."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ConfigError(f"p must be between 0 and 1, got {p}")
        self.p = p

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        key = context.key("rsample", common=False)
        limit = int(self.p * (1 << 64))

        def some(source: Step, count: int) -> Iterator[tuple[int, Any]]:
            for number, item in enumerate(source, count):
                if mix(key, number) < limit:
                    yield number + 1, item

        return CountedStep(source, some, own)


# ------------------------------------------------------------------ batches


def default_collation_fn(samples: Sequence[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Collate samples, all dicts or all tuples, into a batch.

    Args:
        samples: one sample or more.
        combine_tensors: stack tensors and arrays, which must have the same shape.
        combine_scalars: combine numbers into an array.

    Raises:
        ConfigError: the samples have different keys, or are neither dicts nor tuples.
        AssertionError: arrays have different shapes.
    """
    assert len(samples) > 0
    first = samples[0]
    if isinstance(first, dict):
        if any(sample.keys() != first.keys() for sample in samples):
            raise ConfigError("keys don't match in different samples")
        return {name: _column([s[name] for s in samples], combine_tensors, combine_scalars) for name in first}
    if not isinstance(first, tuple | list):
        raise ConfigError(
            f"cannot batch samples of type {type(first).__name__}, only dicts and tuples: use to_tuple before "
            "batched, or pass collation_fn= (None makes a batch a list of samples)"
        )
    columns = zip(*samples, strict=True)
    return tuple([_column(list(values), combine_tensors, combine_scalars) for values in columns])


def _column(values: list[Any], tensors: bool, scalars: bool) -> Any:
    first = values[0]
    if isinstance(first, int | float | np.generic):
        return np.array(values) if scalars else values
    if isinstance(first, torch.Tensor | np.ndarray) and tensors:
        shapes = {tuple(value.shape) for value in values}
        assert len(shapes) == 1, f"all shapes must be equal in collation, got {shapes}"
        return torch.stack(values) if isinstance(first, torch.Tensor) else np.array(values)
    return values


@memoryless
def _batched(
    data: Samples,
    batchsize: int = 20,
    collation_fn: Callable[[list[Any]], Any] | None = default_collation_fn,
    partial: bool = True,
) -> Iterator[Any]:
    """Yield batches of samples.

    Args:
        batchsize: samples in a batch.
        collation_fn: turns a list of samples into a batch; None makes the list the batch.
        partial: keep a last batch that is smaller.
    """
    batch: list[Any] = []
    for sample in data:
        batch.append(sample)
        if len(batch) >= batchsize:
            # The batch must not outlive this point: the state would have to hold it.
            full, batch = batch, []
            yield full if collation_fn is None else collation_fn(full)
    if batch and partial:
        yield batch if collation_fn is None else collation_fn(batch)


@memoryless
def _listed(data: Samples, batchsize: int = 20, partial: bool = True) -> Iterator[Any]:
    """Yield lists of ``batchsize`` samples; with ``partial`` the last one may be shorter."""
    return _batched(data, batchsize, None, partial)


def _rows(batch: Any) -> Iterator[Any]:
    """Yield the samples of a batch: dicts from a dict of columns, tuples from a tuple or list of columns."""
    if isinstance(batch, dict):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))
    elif isinstance(batch, tuple | list):
        yield from zip(*batch, strict=True)
    else:
        raise ConfigError(f"unknown sample type: {type(batch)}")


class Unpack(Stage):
    """A stage that splits batches into items with a function of a batch."""

    def __init__(self, items: Callable[[Any], Iterable[Any]]) -> None:
        self.items = items

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        return FlatMapStep(source, self._numbered, own)

    def _numbered(self, batch: Any, position: int | None) -> Iterator[tuple[int, Any]]:
        for number, item in enumerate(self.items(batch)):
            if position is None or number > position:
                yield number, item


def unbatched() -> Unpack:
    """Split batches into samples; undoes `batched`."""
    return Unpack(_rows)


def unlisted() -> Unpack:
    """Split lists into samples; undoes `listed`."""
    return Unpack(iter)


# ------------------------------------------------------------------ caches


class Cached(PipelineStage):
    """A cache in memory, in each persistent worker."""

    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Any = None) -> Iterator[Any]:
        """Yield the samples of the source the first time, and the cached ones after that."""
        if self.cached is not None:
            yield from self.cached
            return
        kept = []
        for sample in source:
            yield sample
            kept.append(sample)
        self.cached = kept

    def __getstate__(self) -> dict[str, Any]:
        return {"cached": None}


class LMDBCached(PipelineStage):
    """A cache in an LMDB file (extra ``lmdb``). Samples are pickled, so the file must be trusted.

    Args:
        fname: path of the file. With several ranks or workers, each has a file of its own, with its rank, the number of
            ranks, its number and the number of workers after the name: ``kept.lmdb.0-1-1-2``.
        map_size: the largest size of the file, in bytes.
        pickler: an object or module with ``dumps`` and ``loads``.
        chunksize: samples per transaction.
    """

    def __init__(self, fname: str, map_size: float = 1e12, pickler: Any = pickle, chunksize: int = 500) -> None:
        self.fname, self.map_size, self.chunksize = fname, int(map_size), chunksize
        self._dumps, self._loads = pickler.dumps, pickler.loads  # a module cannot be pickled, its functions can

    def run(self, source: Any = None) -> Iterator[Any]:
        """Yield the samples of the source the first time, and those in the file after that."""
        import lmdb

        rank, ranks, worker, workers = pytorch_worker_info()
        name = self.fname if ranks * workers == 1 else f"{self.fname}.{rank}-{ranks}-{worker}-{workers}"
        with lmdb.open(name, map_size=self.map_size, subdir=False) as base:
            with base.begin() as txn:
                whole = txn.get(b"_")
            if whole is not None:
                with base.begin() as txn:
                    for key, value in txn.cursor():
                        if key != b"_":
                            yield self._loads(bytes(value))
                return
            with base.begin(write=True) as txn:
                # An epoch that was left may have written more samples than this one has.
                txn.drop(base.open_db(), delete=False)
            chunk: list[tuple[bytes, bytes]] = []
            for number, sample in enumerate(source):
                yield sample
                chunk.append((b"%012d" % number, self._dumps(sample)))
                if len(chunk) >= self.chunksize:
                    self._write(base, chunk)
                    chunk = []
            self._write(base, [*chunk, (b"_", b"whole")])

    @staticmethod
    def _write(base: Any, chunk: list[tuple[bytes, bytes]]) -> None:
        with base.begin(write=True) as txn, txn.cursor() as cursor:
            cursor.putmulti(chunk)


# ------------------------------------------------------------------ printing and logging


@memoryless
def _info(
    data: Samples,
    fmt: str | None = None,
    n: int = 3,
    every: int = -1,
    width: int = 50,
    stream: Any = None,
    name: str = "",
) -> Iterator[Any]:
    """Print samples and pass them on.

    Args:
        fmt: a format string over the fields; by default each field's name, type and value.
        n: print the first ``n`` samples.
        every: also print every ``every``-th sample, if positive.
        width: characters per line.
        stream: file to print to; by default standard error.
        name: printed before each sample.
    """
    out = sys.stderr if stream is None else stream
    for number, sample in enumerate(data):
        if number < n or (every > 0 and (number + 1) % every == 0):
            if fmt is None:
                fields = sample.items() if isinstance(sample, dict) else enumerate(sample)
                lines = [f"    {key!s:<12} {type(value).__name__:<10} {value!r}"[:width] for key, value in fields]
                print(f"--- {name}", *lines, sep="\n", file=out)
            else:
                print(fmt.format(**sample) if isinstance(sample, dict) else fmt.format(*sample), file=out)
        yield sample


@memoryless
def _log_keys(data: Samples, logfile: str | None = None) -> Iterator[Any]:
    """Append a line for each sample to a file, if one is given: number, worker, rank and key, separated by tabs."""
    if logfile in (None, ""):
        yield from data
        return
    with open(str(logfile), "a") as stream:
        for number, sample in enumerate(data):
            fields = [number, *(sample.get(name) for name in ("__worker__", "__rank__", "__key__"))]
            stream.write("\t".join([str(field) for field in fields]) + "\n")
            stream.flush()
            yield sample


def _shuffle(
    data: Samples, bufsize: int = 1000, initial: int = 100, rng: Any = None, seed: Any = None, handler: Any = None
) -> Iterator[Any]:
    """Shuffle like `shuffle`, as a function of the data; with ``rng`` or ``seed``, alike in all workers."""
    how = Shuffle(bufsize, initial, rng, seed, handler)
    context = default_context()
    if how.seed is not None:
        context = context._replace(world=World(0, 1), worker=Worker(0, 1))
    return how.begin(IteratorStep(data), context, None)


def _rsample(data: Samples, p: float = 0.5) -> Iterator[Any]:
    return rsample(p)(data)


_unbatched, _unlisted = unbatched(), unlisted()

map = pipelinefilter(_map)
batched = pipelinefilter(_batched)
listed = pipelinefilter(_listed)
info = pipelinefilter(_info)
log_keys = pipelinefilter(_log_keys)
map_dict = pipelinefilter(_map_dict)
map_tuple = pipelinefilter(_map_tuple)
select = pipelinefilter(_select)
rename = pipelinefilter(_rename)
rename_keys = pipelinefilter(_rename_keys)
extract_keys = pipelinefilter(_extract_keys)
associate = pipelinefilter(_associate)
to_tuple = pipelinefilter(_to_tuple)
xdecode = pipelinefilter(_xdecode)
