"""The methods by which a pipeline is built up: each gives another pipeline with one stage more."""

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
    """For classes that have ``compose(stage)``. Arguments are those of the filters of the same names."""

    _allow: tuple[str, ...] = ()

    def compose(self, *args: Any) -> Self:
        """Another pipeline, with more stages."""
        raise NotImplementedError

    def batched(
        self,
        batchsize: int,
        collation_fn: Callable[[list[Any]], Any] | None = filters.default_collation_fn,
        partial: bool = True,
    ) -> Self:
        """Batches of samples, columns combined; ``partial`` gives the last one too, if it is not full."""
        return self.compose(filters.batched(batchsize, collation_fn=collation_fn, partial=partial))

    def unbatched(self) -> Self:
        """The samples of batches."""
        return self.compose(filters.unbatched())

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Lists of samples."""
        return self.compose(filters.listed(batchsize, partial))

    def unlisted(self) -> Self:
        """The samples of lists."""
        return self.compose(filters.unlisted())

    def log_keys(self, logfile: str | None = None) -> Self:
        """Write the keys of samples to a file."""
        return self.compose(filters.log_keys(logfile))

    def info(self, *args: Any, **kw: Any) -> Self:
        """Print some of the samples to standard error, or ``stream``."""
        return self.compose(filters.info(*args, **kw))

    def shuffle(self, size: int, **kw: Any) -> Self:
        """Another order, out of a buffer of ``size`` samples; below 1 the same."""
        return self if size < 1 else self.compose(Shuffle(size, **kw))

    def map(self, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """``f`` of each sample; those of which it is None are left out."""
        return self.compose(filters.map(f, handler=handler))

    def decode(self, *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Self:
        """Values in the place of bytes: ``decode("rgb8")``, see `penstock.wds.autodecode`."""
        return self.compose(autodecode.decode(*args, handler=handler, **{"allow": self._allow, **kw}))

    def map_dict(self, handler: Handler = reraise_exception, **kw: Callable[[Any], Any]) -> Self:
        """Fields by a function each."""
        return self.compose(filters.map_dict(handler=handler, **kw))

    def select(self, predicate: Callable[[Any], bool], **kw: Any) -> Self:
        """Those samples of which the predicate is true."""
        return self.compose(filters.select(predicate, **kw))

    def to_tuple(self, *args: str, **kw: Any) -> Self:
        """Samples as tuples: ``to_tuple("jpg;png", "cls")``."""
        return self.compose(filters.to_tuple(*args, **kw))

    def map_tuple(self, *args: Callable[[Any], Any] | None, handler: Handler = reraise_exception) -> Self:
        """Fields of tuples by a function each; None leaves one as it is."""
        return self.compose(filters.map_tuple(*args, handler=handler))

    def slice(self, *args: int | None) -> Self:
        """As ``itertools.islice``."""
        return self.compose(filters.slice(*args))

    def rename(self, **kw: Any) -> Self:
        """New names of fields: ``rename(image="jpg;png")``; ``keep=False`` leaves out all others."""
        return self.compose(filters.rename(**kw))

    def rsample(self, p: float = 0.5) -> Self:
        """Each sample with a probability."""
        return self.compose(filters.rsample(p))

    def rename_keys(self, *args: Any, **kw: Any) -> Self:
        """New names by patterns: ``rename_keys(image="*.jpg")``."""
        return self.compose(filters.rename_keys(*args, **kw))

    def extract_keys(self, *args: str, **kw: Any) -> Self:
        """Tuples by patterns: ``extract_keys("*.jpg;*.png", "*.cls")``."""
        return self.compose(filters.extract_keys(*args, **kw))

    def associate(self, associator: Any, **kw: Any) -> Self:
        """Add fields from a mapping by key, or a function of it."""
        return self.compose(filters.associate(associator, **kw))

    def xdecode(self, *args: Any, **kw: Any) -> Self:
        """Fields by functions of an open file, chosen by patterns."""
        return self.compose(autodecode.xdecode(*args, **kw))

    def mcached(self) -> Self:
        """Keep the samples of the first epoch in memory, for all others."""
        return self.compose(Cached())

    def lmdb_cached(self, *args: Any, **kw: Any) -> Self:
        """Keep them in an LMDB file."""
        return self.compose(LMDBCached(*args, **kw))

    def ddp_equalize(self, *args: Any, **kw: Any) -> Self:
        """Retired; raises, and says what to use."""
        raise RetiredError("ddp_equalize")


class FluidWrapper(DataPipeline, FluidInterface):
    """Those methods for anything that can be iterated."""

    def __init__(self, initial: Any) -> None:
        super().__init__(initial)
