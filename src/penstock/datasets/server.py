"""`ServerDataset` and `RankServerDataset`: data sets whose manifest is on a metadata server.

    dataset = RankServerDataset(["grpc://a:7000", "grpc://b:7000"], "train", mini_epochs=4, seed=0)
    loader = DataLoader(dataset, batch_size=256, num_workers=8)      # everything else as with RankDataset

Promises: the same rows, in the same order, with the same states, as from the file; a state of one loads into the other.
Memory: ``cache_bytes`` for each process that reads, however long the manifest is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from penstock.datasets.pages import Pages
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
    """All rows of a served manifest, as a map-style data set; put a sampler on top.

    Args:
        address: ``"host:port"``, several of them that serve the same, or a `penstock.server.Client` (which has tokens,
            certificates and deadlines).
        name: of the served data set; may be left out where there is only one.
        load: ``load(record)`` makes the item; by default an item is the tuple ``(path, label, row)``.
        cache_bytes: memory for rows that are read ahead, in each process that reads.
        page_rows: rows of a page that is read ahead.

    Raises:
        ServerError: no server answers, a wrong token, an unknown name, or another version of the data.
        ConfigError: sizes that are not positive.
        ManifestError: (on access) a row does not parse.

    Cost: a batch (``__getitems__``) is one round trip, and so is a single item. Rows that are asked for in order are
    read ahead in pages; all rows are fetched at once, and then kept, where they fit into ``cache_bytes`` and single
    requests have come to cost as much. Connections are opened where the data set is used, in every process and thread.

    The version of the manifest is that of the moment when the data set was made: it goes on with that one when the
    server is told to load a newer file.
    """

    fork_safe = False
    """Processes are started by a fork server: gRPC does not survive a fork."""

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
        self._pages = Pages(client, name, self._plan, cache_bytes=cache_bytes, page_rows=page_rows)
        self.load = load
        self.pure: bool = not self.own_items and (load is None or bool(getattr(load, "pure", False)))
        """Whether items depend on the manifest and `penstock.generator` alone, see `RankDataset`."""

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
        record = self._pages.record(view, position, row)
        return (record.path, record.label, record.row) if self.load is None else self.load(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items at several indices at once, in one round trip."""
        return ServerDataset.load_samples(self, indices, None)

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        """The items at several indices, each made in the scope of its key."""
        records = self.records(indices)
        if self.load is None:
            return [(record.path, record.label, record.row) for record in records]
        return load_each(self.load, records, keys)

    def records(self, indices: Sequence[int]) -> list[Record]:
        """The manifest's records at these indices, whatever ``load`` makes of them."""
        return self._pages.records(self._plan.view(), normalise(indices, len(self)))

    def close(self) -> None:
        """Stop reading ahead. Happens by itself when the data set goes; one that is used again begins anew."""
        self._pages.close()


class RankServerDataset(SourceDataset):
    """`RankDataset` over a served manifest: the same rows in the same order, the same methods and states.

    Args:
        address, name, cache_bytes, page_rows: as in `ServerDataset`.
        rank, world_size, mini_epochs, group, seed, remainder, shuffle, block_size, window, load, process_group: as in
            `RankDataset`.

    Raises:
        ServerError: no server answers, a wrong token, an unknown name, or another version of the data.
        ConfigError, PartitionError: arguments that make no sense.
        ManifestError: (on access) a row does not parse.

    The server keeps nothing of a job: what a rank gets follows from the arguments, so it does not matter which of the
    servers answers, or whether it was restarted.

    Cost: who goes through a mini-epoch in order reads from memory, into which a thread fetches pages ahead of him, and
    at the end those of the next mini-epoch. What is asked for by a sampler, or by one of many workers, comes in one
    round trip a batch; a slice that fits into ``cache_bytes`` is fetched as a whole once that is less.
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
                f"{type(self).__name__}: a server sends every node whatever it asks for, and nodes keep nothing: "
                "locality= is for data that nodes read themselves, so leave it out"
            )
        client, name, manifest = _connect(address, name)
        plan = SharePlan(manifest, **share)
        self._pages = Pages(client, name, plan, cache_bytes=cache_bytes, page_rows=page_rows)
        super().__init__(manifest, plan, load, reader=self._pages)

    @property
    def manifest(self) -> Manifest:
        """The served manifest."""
        return cast(Manifest, self.source)

    def _read_one(self, view: EpochView, local: int, row: int) -> Record:
        return self._pages.record(view, local, row)

    def _items(self, records: list[Any]) -> list[Any]:
        return [(record.path, record.label, record.row) for record in records]

    def close(self) -> None:
        """Stop reading ahead. Happens by itself when the data set goes; one that is used again begins anew."""
        self._pages.close()


def _connect(address: str | Sequence[str] | Client, name: str | None) -> tuple[Client, str, Manifest]:
    """The client, the data set's name, and its manifest in the version of now."""
    from penstock.server import Client

    client = address if isinstance(address, Client) else Client(address)
    name = client.info().name if name is None else name
    return client, name, client.manifest(name)
