"""The methods that build a pipeline: each returns a new pipeline with one more stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from penstock.wds import autodecode, filters
from penstock.wds.caching import Cached, LMDBCached
from penstock.wds.handlers import Handler, reraise_exception
from penstock.wds.pipeline import DataPipeline
from penstock.wds.retired import RetiredError
from penstock.wds.shuffling import Shuffle

__all__ = ["FluidInterface", "FluidWrapper"]


class FluidInterface:
    """Methods for classes with ``compose(stage)``. Arguments are those of the filters with the same names."""

    _allow: tuple[str, ...] = ()

    def compose(self, *args: Any) -> Self:
        """Return a pipeline with more stages."""
        raise NotImplementedError

    def batched(
        self,
        batchsize: int,
        collation_fn: Callable[[list[Any]], Any] | None = filters.default_collation_fn,
        partial: bool = True,
    ) -> Self:
        """Batch samples, combining columns; ``partial`` keeps a last batch that is not full."""
        return self.compose(filters.batched(batchsize, collation_fn=collation_fn, partial=partial))

    def unbatched(self) -> Self:
        """Split batches into samples."""
        return self.compose(filters.unbatched())

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Batch samples into lists."""
        return self.compose(filters.listed(batchsize, partial))

    def unlisted(self) -> Self:
        """Split lists into samples."""
        return self.compose(filters.unlisted())

    def log_keys(self, logfile: str | None = None) -> Self:
        """Write the keys of samples to a file."""
        return self.compose(filters.log_keys(logfile))

    def info(self, *args: Any, **kw: Any) -> Self:
        """Print some of the samples to standard error, or ``stream``."""
        return self.compose(filters.info(*args, **kw))

    def shuffle(self, size: int, **kw: Any) -> Self:
        """Shuffle samples in a buffer of ``size``; below 1 the order does not change."""
        return self if size < 1 else self.compose(Shuffle(size, **kw))

    def map(self, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """Apply ``f`` to each sample; a result of None drops the sample."""
        return self.compose(filters.map(f, handler=handler))

    def decode(self, *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Self:
        """Decode fields: ``decode("rgb8")``, see `penstock.wds.autodecode`."""
        return self.compose(autodecode.decode(*args, handler=handler, **{"allow": self._allow, **kw}))

    def map_dict(self, handler: Handler = reraise_exception, **kw: Callable[[Any], Any]) -> Self:
        """Apply one function to each named field."""
        return self.compose(filters.map_dict(handler=handler, **kw))

    def select(self, predicate: Callable[[Any], bool], **kw: Any) -> Self:
        """Keep the samples for which the predicate is true."""
        return self.compose(filters.select(predicate, **kw))

    def to_tuple(self, *args: str, **kw: Any) -> Self:
        """Turn samples into tuples: ``to_tuple("jpg;png", "cls")``."""
        return self.compose(filters.to_tuple(*args, **kw))

    def map_tuple(self, *args: Callable[[Any], Any] | None, handler: Handler = reraise_exception) -> Self:
        """Apply one function to each field of a tuple; None leaves a field unchanged."""
        return self.compose(filters.map_tuple(*args, handler=handler))

    def slice(self, *args: int | None) -> Self:
        """Select samples by number, like ``itertools.islice``."""
        return self.compose(filters.slice(*args))

    def rename(self, **kw: Any) -> Self:
        """Rename fields: ``rename(image="jpg;png")``; ``keep=False`` drops all others."""
        return self.compose(filters.rename(**kw))

    def rsample(self, p: float = 0.5) -> Self:
        """Keep each sample with probability ``p``."""
        return self.compose(filters.rsample(p))

    def rename_keys(self, *args: Any, **kw: Any) -> Self:
        """Rename fields that match patterns: ``rename_keys(image="*.jpg")``."""
        return self.compose(filters.rename_keys(*args, **kw))

    def extract_keys(self, *args: str, **kw: Any) -> Self:
        """Turn samples into tuples of the fields that match: ``extract_keys("*.jpg;*.png", "*.cls")``."""
        return self.compose(filters.extract_keys(*args, **kw))

    def associate(self, associator: Any, **kw: Any) -> Self:
        """Add fields from a mapping by key, or from a function of the key."""
        return self.compose(filters.associate(associator, **kw))

    def xdecode(self, *args: Any, **kw: Any) -> Self:
        """Decode fields with functions of an open file, chosen by patterns."""
        return self.compose(autodecode.xdecode(*args, **kw))

    def mcached(self) -> Self:
        """Cache the samples of the first epoch in memory."""
        return self.compose(Cached())

    def lmdb_cached(self, *args: Any, **kw: Any) -> Self:
        """Cache the samples of the first epoch in an LMDB file."""
        return self.compose(LMDBCached(*args, **kw))

    def ddp_equalize(self, *args: Any, **kw: Any) -> Self:
        """Raise `RetiredError`, which names the replacement."""
        raise RetiredError("ddp_equalize")


class FluidWrapper(DataPipeline, FluidInterface):
    """These methods for any iterable."""

    def __init__(self, initial: Any) -> None:
        super().__init__(initial)
