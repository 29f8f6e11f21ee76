"""Filters: functions of an iterator with their options bound; they pickle if their options do.

    filter = wds.map_dict(jpg=decode, cls=int)       # a stage for DataPipeline
    for sample in filter(samples): ...               # or used alone

A filter holds nothing between two samples, or only a count, so pipelines of filters resume from a state without
replaying.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from itertools import count as counter
from itertools import islice
from typing import Any

from penstock.distributed import Worker, World
from penstock.errors import ConfigError
from penstock.hashing import mix
from penstock.wds.autodecode import _xdecode, decode, xdecode
from penstock.wds.batching import _batched, batched, default_collation_fn, listed, unbatched, unlisted
from penstock.wds.caching import Cached, LMDBCached
from penstock.wds.curried import FilterFunction, RestCurried, _each, _matches, map, pipelinefilter
from penstock.wds.handlers import Handler, reraise_exception
from penstock.wds.iterators import Context, CountedStep, IteratorStep, Stage, Step, default_context, memoryless
from penstock.wds.shuffling import Shuffle, detshuffle, shuffle

__all__ = [
    "Cached",
    "FilterFunction",
    "LMDBCached",
    "_batched",
    "_xdecode",
    "associate",
    "batched",
    "decode",
    "default_collation_fn",
    "detshuffle",
    "extract_keys",
    "getfirst",
    "info",
    "listed",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "parse_field_spec",
    "pipelinefilter",
    "rename",
    "rename_keys",
    "rsample",
    "select",
    "shuffle",
    "slice",
    "to_tuple",
    "transform_with",
    "unbatched",
    "unlisted",
    "xdecode",
]

Samples = Iterable[Any]


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


# ------------------------------------------------------------------ samples by number


class slice(Stage):
    """A stage that selects samples by number, with the arguments of ``itertools.islice``."""

    def __init__(self, *args: int | None) -> None:
        islice((), *args)  # raises islice's own errors about invalid numbers
        start, stop, step = (0, *args, None) if len(args) == 1 else (*args, *(None,) * (3 - len(args)))
        self.numbers = (start or 0, stop, step or 1)

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Return a `Step` over the source."""
        return CountedStep(source, self._some, own)

    def _some(self, source: Step, count: int) -> Iterator[tuple[int, Any]]:
        start, stop, step = self.numbers
        if stop is not None and count >= stop:
            return
        for number, item in zip(counter(count), source, strict=False):
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
        """Return a `Step` over the source."""
        key = context.key("rsample", common=False)
        limit = int(self.p * (1 << 64))

        def some(source: Step, count: int) -> Iterator[tuple[int, Any]]:
            for number, item in zip(counter(count), source, strict=False):
                if mix(key, number) < limit:
                    yield number + 1, item

        return CountedStep(source, some, own)


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


def _unbatched(data: Samples) -> Iterator[Any]:
    return unbatched()(data)


def _unlisted(data: Samples) -> Iterator[Any]:
    return unlisted()(data)


info = RestCurried(_info)
log_keys = RestCurried(_log_keys)
map_dict = RestCurried(_map_dict)
map_tuple = RestCurried(_map_tuple)
select = RestCurried(_select)
rename = RestCurried(_rename)
rename_keys = RestCurried(_rename_keys)
extract_keys = RestCurried(_extract_keys)
associate = RestCurried(_associate)
to_tuple = RestCurried(_to_tuple)
