"""`ServerDataset` and `RankServerDataset`: datasets whose manifest is on a metadata server.

    dataset = RankServerDataset(["grpc://a:8815", "grpc://b:8815"], "train", mini_epochs=4, seed=0)
    loader = DataLoader(dataset, batch_size=256, num_workers=8)      # everything else as with RankDataset

The rows, their order and the states are the same as for the file; a state of one can be loaded into the other. Memory:
``cache_bytes`` in each process that reads, for a manifest of any length.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from penstock.datasets.server_reader import ServerReader
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record
from penstock.order.permutation import normalise
from penstock.plan.share import EpochView, SharePlan
from penstock.plan.share_options import ShareOptions, check_share
from penstock.random import load_each
from penstock.server.protocol import PAGE_ROWS
from penstock.sources.batched import BatchedDataset

if TYPE_CHECKING:
    from penstock.server import Client

__all__ = ["RankServerDataset", "ServerDataset"]

_CACHE_BYTES = 16 << 20


class ServerDataset(BatchedDataset):
    """All rows of a served manifest, as a map-style dataset; put a sampler on top.

    Args:
        address: ``"host:port"``, several of these that serve the same data, or a `penstock.server.Client` (with tokens,
            certificates and timeouts).
        name: the name of the served dataset; optional if the server has only one.
        load: ``load(record)`` converts the record to the item. By default the item is the tuple ``(path, label, row)``.
        cache_bytes: memory for rows that are read ahead, in each process that reads.
        page_rows: rows in a page of the read-ahead.

    Raises:
        ServerError: no server answers, the token is wrong, the name is unknown, or the data has another version.
        ConfigError: a size is not positive.
        ManifestError: (on access) a row cannot be parsed.

    Cost: a batch (``__getitems__``) is one round trip; so is a single item. Rows that are requested in order are read
    ahead in pages. If all rows fit into ``cache_bytes``, they are fetched at once and cached, as soon as single
    requests have cost as much. Each process and thread opens its own connection at first use.

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
        cache_bytes: int = _CACHE_BYTES,
        page_rows: int = PAGE_ROWS,
    ) -> None:
        client, name, manifest = _connect(address, name)
        self._plan = SharePlan(manifest, rank=0, world_size=1, shuffle="none", remainder="uneven")
        self._server_reader = ServerReader(client, name, self._plan, cache_bytes=cache_bytes, page_rows=page_rows)
        self.load = load
        self.pure: bool = not self.own_items and (load is None or bool(getattr(load, "pure", False)))
        """Whether items depend only on the manifest and `penstock.generator`, see `RankDataset`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.manifest!r}"

    @property
    def manifest(self) -> Manifest:
        """The served manifest."""
        return cast(Manifest, self._plan.source)

    def __len__(self) -> int:
        return len(self._plan.source)

    def __getitem__(self, index: int) -> Any:
        view = self._plan.view()
        position, row = view.locate(operator.index(index))
        record = self._server_reader.record(view, position, row)
        return (record.path, record.label, record.row) if self.load is None else self.load(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items at several indices, in one round trip."""
        return ServerDataset.load_samples(self, indices, None)

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        """Return the items at several indices, each made in the scope of its key."""
        records = self.records(indices)
        if self.load is None:
            return [(record.path, record.label, record.row) for record in records]
        return load_each(self.load, records, keys)

    def records(self, indices: Sequence[int]) -> list[Record]:
        """Return the manifest's records at several indices, before ``load``."""
        return self._server_reader.records(self._plan.view(), normalise(indices, len(self)))

    def close(self) -> None:
        """Stop the read-ahead. Also runs when the dataset is deleted. Further use starts the read-ahead again."""
        self._server_reader.close()


class RankServerDataset(SourceDataset):
    """A `RankDataset` over a served manifest: the same rows in the same order, with the same methods and states.

    Args:
        address, name, cache_bytes, page_rows: see `ServerDataset`.
        load, rank, world_size, seed, shuffle, ...: see `RankDataset`.

    Raises:
        ServerError: no server answers, the token is wrong, the name is unknown, or the data has another version.
        ConfigError, PartitionError: invalid arguments.
        ManifestError: (on access) a row cannot be parsed.

    The server stores nothing about a job. The rows of a rank follow from the arguments, so any of the servers can
    answer, even after a restart.

    Cost: sequential access to a mini-epoch reads from memory; a thread fetches pages ahead, and at the end the first
    pages of the next mini-epoch. Random access, by a sampler or by one of many workers, takes one round trip per batch.
    A rank's rows that fit into ``cache_bytes`` are fetched as a whole as soon as this costs less.
    """

    def __init__(
        self,
        address: str | Sequence[str] | Client,
        name: str | None = None,
        *,
        load: Callable[[Record], Any] | None = None,
        cache_bytes: int = _CACHE_BYTES,
        page_rows: int = PAGE_ROWS,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        if share.get("locality", "none") != "none":
            raise ConfigError(
                f"{type(self).__name__}: leave locality= out. It is for data that nodes read and cache themselves; "
                "here the server sends the rows, and nodes cache nothing"
            )
        client, name, manifest = _connect(address, name)
        plan = SharePlan(manifest, **share)
        self._server_reader = ServerReader(client, name, plan, cache_bytes=cache_bytes, page_rows=page_rows)
        super().__init__(manifest, plan, load, reader=self._server_reader)

    @property
    def manifest(self) -> Manifest:
        """The served manifest."""
        return cast(Manifest, self.source)

    def _read_one(self, view: EpochView, local: int, row: int) -> Record:
        return self._server_reader.record(view, local, row)

    def _items(self, records: list[Any]) -> list[Any]:
        return [(record.path, record.label, record.row) for record in records]

    def close(self) -> None:
        """Stop the read-ahead. Also runs when the dataset is deleted. Further use starts the read-ahead again."""
        self._server_reader.close()


def _connect(address: str | Sequence[str] | Client, name: str | None) -> tuple[Client, str, Manifest]:
    """Return the client, the dataset's name, and the current version of its manifest."""
    from penstock.server import Client

    client = address if isinstance(address, Client) else Client(address)
    name = client.info().name if name is None else name
    return client, name, client.manifest(name)
