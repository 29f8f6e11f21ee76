"""`ServerDataset` and `RankServerDataset`: datasets whose manifest is on a metadata server.

    dataset = RankServerDataset(["grpc://a:8815", "grpc://b:8815"], "train", mini_epochs=4, seed=0)
    loader = DataLoader(dataset, batch_size=256, num_workers=8)      # everything else as with RankDataset

The rows, their order and the states are the same as for the file; a state of one can be loaded into the other. The
order is computed here, and rows are requested by number. Memory: a batch, for a manifest of any length.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np
import pyarrow as pa

from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record
from penstock.order.permutation import Indices, normalise
from penstock.plan.share import EpochView, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.random import load_each
from penstock.sources.batched import BatchedDataset

if TYPE_CHECKING:
    from penstock.server import Client
    from penstock.server.remote_manifest import RemoteManifest

__all__ = ["RankServerDataset", "ServerDataset"]

_PAGE_ROWS = 64
_TOGETHER = 2048  # rows that are requested together in advance


class ServerDataset(BatchedDataset):
    """All rows of a served manifest, as a map-style dataset; put a sampler on top.

    Args:
        address: ``"host:port"``, several of these that serve the same data, or a `penstock.server.Client` (with tokens,
            certificates and timeouts).
        name: the name of the served dataset; optional if the server has only one.
        load: ``load(record)`` converts the record to the item. By default the item is the tuple ``(path, label, row)``.
        page_rows: rows that are sent together when items are read one by one.

    Raises:
        ServerError: no server answers, the token is wrong, the name is unknown, or the data has another version.
        ConfigError: ``page_rows`` is not positive.
        ManifestError: (on access) a row cannot be parsed.

    Cost: a batch (``__getitems__``) is one round trip. So is a single item; it comes with those that follow it, so the
    next ``page_rows - 1`` items come from memory. Each process and thread opens its own connection at first use.

    The dataset keeps the version of the manifest that was current when you created it, even after the server loads a
    newer file.
    """

    fork_safe = False
    """False: gRPC does not survive a fork, so a fork server starts the worker processes."""

    def __init__(
        self,
        address: str | Sequence[str] | Client,
        name: str | None = None,
        *,
        load: Callable[[Record], Any] | None = None,
        page_rows: int = _PAGE_ROWS,
    ) -> None:
        self._client, self.manifest = _connect(address, name)
        """The served manifest."""
        self._page = _Page(self.manifest, page_rows)
        self.load = load
        self.pure: bool = not self.own_items and (load is None or bool(getattr(load, "pure", False)))
        """Whether items depend only on the manifest and `penstock.generator`, see `RankDataset`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.manifest!r}"

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> Any:
        row, size = operator.index(index), len(self)
        if not -size <= row < size:
            raise IndexError(f"index {index} is out of range for a dataset of {size} rows")
        row %= size
        record = self._page.record(row, lambda count: np.arange(row, min(row + count, size)))
        return _item(record) if self.load is None else self.load(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items at several indices, in one round trip."""
        return ServerDataset.load_samples(self, indices, None)

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        """Return the items at several indices, each made in the scope of its key."""
        records = self.records(indices)
        return list(map(_item, records)) if self.load is None else load_each(self.load, records, keys)

    def records(self, indices: Sequence[int]) -> list[Record]:
        """Return the manifest's records at several indices, before ``load``."""
        return self.manifest.records(normalise(indices, len(self)))

    def close(self) -> None:
        """Close the connections. Idempotent; further use opens them again."""
        self._client.close()


class RankServerDataset(SourceDataset):
    """A `RankDataset` over a served manifest: the same rows in the same order, with the same methods and states.

    Args:
        address, name, page_rows: see `ServerDataset`.
        load, rank, world_size, seed, shuffle, ...: see `RankDataset`.

    Raises:
        ServerError: no server answers, the token is wrong, the name is unknown, or the data has another version.
        ConfigError, PartitionError: invalid arguments.
        ManifestError: (on access) a row cannot be parsed.

    The server stores nothing about a job. The rows of a rank follow from the arguments, so any of the servers can
    answer, even after a restart.

    Cost: once batches are read in order, the next ones are requested in advance: a batch waits for no round trip. Other
    batches are one round trip each. Single items in order are sent ``page_rows`` at a time.
    """

    def __init__(
        self,
        address: str | Sequence[str] | Client,
        name: str | None = None,
        *,
        load: Callable[[Record], Any] | None = None,
        page_rows: int = _PAGE_ROWS,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        if share.get("locality", "none") != "none":
            raise ConfigError(
                f"{type(self).__name__}: leave locality= out. It is for data that nodes read and cache themselves; "
                "here the server sends the rows, and nodes cache nothing"
            )
        self._client, self.manifest = _connect(address, name)
        """The served manifest."""
        self._page, self._ahead = _Page(self.manifest, page_rows), _Ahead()
        super().__init__(self.manifest, SharePlan(self.manifest, **share), load)

    def _read(self, view: EpochView, local: Indices) -> list[Record]:
        manifest = cast("RemoteManifest", self.source)
        return manifest.parse(self._ahead.gather(manifest, view, local), view.rows(local))

    def _read_one(self, view: EpochView, local: int, row: int) -> Record:
        return self._page.record(row, lambda count: view.rows(np.arange(local, min(local + count, len(view)))))

    def _items(self, records: list[Any]) -> list[Any]:
        return list(map(_item, records))

    def close(self) -> None:
        """Close the connections. Idempotent; further use opens them again."""
        self._client.close()


def _item(record: Record) -> tuple[str, Any, int]:
    """Return the item of a dataset without ``load``."""
    return record.path, record.label, record.row


class _Ahead(threading.local):
    """The batches that a thread reads next, requested in advance if it reads a view in equal steps."""

    def __init__(self) -> None:
        self._place: tuple[EpochView | None, int] = None, 0
        self._begin = self._step = self._size = 0
        self._batches: Iterator[pa.RecordBatch] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Ahead, ()

    def gather(self, manifest: RemoteManifest, view: EpochView, local: Indices) -> pa.RecordBatch:
        """Return the rows of some samples of a view, in their stored form."""
        batches, self._batches = self._batches, None  # dropped if this batch is another one
        begin, place, last = int(local[0]) if len(local) else 0, (view, os.getpid()), self._begin
        was_here, self._place, self._begin = place == self._place, place, begin
        size = min(self._size, len(view) - begin)
        is_next = was_here and size > 0 and begin == last + self._step
        if not is_next or not np.array_equal(local, np.arange(begin, begin + size)):
            self._size = len(local)
            self._step = begin - last if was_here and begin > last else len(local)
            return manifest.gather(view.rows(local))
        if batches is None:
            batches = _in_advance(manifest, view, range(begin, len(view), self._step), size)
        batch = next(batches)
        self._batches = batches
        return batch


def _in_advance(manifest: RemoteManifest, view: EpochView, begins: range, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the batches that begin at these samples; several small ones are one request."""
    together = max(1, _TOGETHER // size)
    groups = range(0, len(begins), together)

    def rows(first: int) -> Indices:
        samples = [np.arange(begin, min(begin + size, len(view))) for begin in begins[first : first + together]]
        return view.rows(np.concatenate(samples))

    for first, batch in zip(groups, manifest.gather_ahead(map(rows, groups)), strict=True):
        for number in range(len(begins[first : first + together])):
            yield batch.slice(number * size, size)


class _Page:
    """Records one by one, in few round trips: the last page of rows, in the order in which they will be read.

    A row is parsed when it is read, so an invalid row does not affect its neighbours. Thread-safe.
    """

    def __init__(self, manifest: Manifest, page_rows: int) -> None:
        if page_rows < 1:
            raise ConfigError(f"page_rows= must be positive, got {page_rows}")
        self._manifest, self._page_rows = manifest, page_rows
        self._held: tuple[dict[int, int], pa.RecordBatch | None] = {}, None

    def record(self, row: int, following: Callable[[int], Indices]) -> Record:
        """Return the record of a row; ``following(count)`` returns the row and those after it, up to ``count``."""
        places, batch = self._held
        if batch is None or row not in places:
            rows = following(self._page_rows)
            batch = self._manifest.gather(rows)
            places = {number: place for place, number in enumerate(rows.tolist())}
            self._held = places, batch
        return self._manifest.parse(batch.slice(places[row], 1), np.array([row]))[0]


def _connect(address: str | Sequence[str] | Client, name: str | None) -> tuple[Client, Manifest]:
    """Return the client, and the current version of the dataset's manifest."""
    from penstock.server import Client

    client = address if isinstance(address, Client) else Client(address)
    return client, client.manifest(name)
