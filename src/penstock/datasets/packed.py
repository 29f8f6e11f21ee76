"""`PackedDataset`: pack documents of different lengths into sequences of one length, with little padding.

documents = DocumentDataset("tokens")                       # or any other map-style dataset of documents
packs = PackedDataset(documents, 8192, seed=0)
for batch in DataLoader(packs, batch_size=8, num_workers=4):
    batch["input_ids"]                                      # int64 (8, 8192)

Packing depends only on the lengths of the documents, so the packs of an epoch are computed (`penstock.order.packing`)::

    position -> pack -> lengths of its documents -> documents of these lengths, different in each epoch

Each token of each document occurs once per epoch, on any number of ranks. At least 99.9 % of the tokens are real, not
padding. Memory: a few MB for the types of packs; the list of documents by length is a mapped file.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Self, Unpack, cast

import numpy as np
import numpy.typing as npt
import torch

from penstock.datasets.lengths import document_lengths, filtered_lengths, last_filter
from penstock.datasets.mixture import Mixture
from penstock.datasets.packs import DEFAULT_BLOCK_SIZE, BlockPacks, PackedDocuments, PackPlan, Packs
from penstock.datasets.rows import check_rows, excluded_rows, load_rows
from penstock.datasets.source_dataset import EpochVaryingDataset, SourceDataset
from penstock.datasets.subset import Subset
from penstock.errors import ConfigError, DataFileError
from penstock.hashing import mix
from penstock.order.permutation import Indices, normalise
from penstock.plan.share import MiniEpoch
from penstock.plan.share_options import PartitionOptions, check_share
from penstock.random import in_sample, load_each
from penstock.stages import stage
from penstock.wording import kind_text

__all__ = ["IGNORED", "PackedDataset", "collate_packed"]

IGNORED = -100
"""The label of positions without a loss: the default ``ignore_index`` of torch's cross entropy."""

_OPTIONS = PartitionOptions.__annotations__.keys()


class PackedDataset(SourceDataset, EpochVaryingDataset):
    """Packs of documents, split across ranks. A map-style dataset of one rank's packs in one mini-epoch.

    Args:
        dataset: the documents: any map-style dataset of all data, not of one rank's samples. An item is a
            one-dimensional sequence of integers (tensor, array or list), or a dict with one under ``input_ids``. For a
            `penstock.Mixture` the result is a mixture of packs, see below.
        capacity: tokens in a pack. A longer document is cut into full packs and a remainder.
        lengths: tokens in each document: an array, the path of an ``.npy`` file, or the name of a column of the
            dataset. By default the dataset's own ``lengths``.
        max_documents: the largest number of documents in a pack.
        order: ``"global"`` packs documents from anywhere together. ``"block"`` packs each block of ``block_size``
            documents separately, and shuffles the blocks: for tables, shards and stores that are faster to read
            sequentially.
        block_size: documents in a block, 262,144 by default. All blocks are packed once, in 0.02 to 0.15 s each, and
            stored in the user's cache, one byte per document; after that, entering a block takes 8 ms.
        pad_token: the token that pads a pack after its last document.
        balance: number of packs in a rank's batch. The packs of each global batch, which stay the same, are then split
            across ranks by the cost of attention (the sum of squares of document lengths).
        exclude: rows of documents to leave out, at most 100,000; see below.
        load: ``load(pack)`` converts the dict to the item, in the scope of the pack's own `penstock.generator`.
        rank, world_size, process_group, mesh, mini_epochs, seed, remainder: see `penstock.RankDataset`.

    Raises:
        ConfigError, PartitionError, SamplerError, OrderError: invalid arguments, unknown lengths, or a dataset of one
            rank's samples.
        DataFileError: (on access) a document does not have the length in ``lengths``.

    An item is a dict of int64 tensors, with padding at the end only:

    * ``input_ids`` (capacity,)
    * ``labels`` (capacity,): the next token; -100 (no loss) at the end of a document and for padding
    * ``position_ids`` (capacity,): 0, 1, 2, ... within each document; each part of a cut document begins at 0, too
    * ``document_ids`` (capacity,): 0, 1, 2, ... by document; -1 for padding
    * ``cu_seqlens`` (``max_documents``, or the documents of the largest pack, + 2,): the start of each document, the
      end of the last one and of the padding; then the capacity, repeated, so that all packs have one shape.

    Each epoch combines documents differently. Empty documents are in no pack. A document that draws random numbers has
    its own `penstock.generator`, seeded by the pack's position and its number in the pack. A state has a few integers
    and can be loaded on another number of ranks. The class index takes one pass over the lengths, once; from the user's
    cache, a process then opens it in 0.1 s.

    **Excluded documents.** Another document of the same length, drawn from (seed, epoch, document), replaces each
    excluded one, token for token. If all documents of that length are excluded, one of the next length replaces it, or,
    for the longest, a shorter one followed by padding. Everything else stays the same, so an earlier state can still be
    loaded. Documents that the dataset itself excludes are excluded here too.

    **Mixtures.** ``PackedDataset(Mixture(...), capacity)`` packs each source separately and mixes the packs. Weights,
    ``stop=`` and the schedule still count documents; they are converted by the number of packs that a document of each
    source fills. In ``Mixture([(PackedDataset(a, n), 0.7), ...])``, weights count packs, and thus tokens; give all of
    them the same ``max_documents=``, so that ``cu_seqlens`` have one shape.

    >>> packs = PackedDataset([[1, 2, 3], [4, 5], [6]], 4, lengths=[3, 2, 1], rank=0, world_size=1)
    >>> sorted(pack["input_ids"].tolist() for pack in packs)
    [[1, 2, 3, 0], [4, 5, 6, 0]]
    """

    def __new__(cls, dataset: Any = None, capacity: int = 1, **options: Any) -> PackedDataset:
        """Return a mixture of packs for a mixture, else a dataset of packs."""
        if cls is PackedDataset and isinstance(dataset, Mixture):
            return cast(PackedDataset, _packed_mixture(dataset, capacity, **options))
        return super().__new__(cls)

    def __init__(
        self,
        dataset: Any,
        capacity: int,
        *,
        lengths: Any = None,
        max_documents: int | None = None,
        order: str = "global",
        block_size: int | None = None,
        pad_token: int = 0,
        balance: int | None = None,
        exclude: Any = None,
        load: Callable[[Any], Any] | None = None,
        **deal: Unpack[PartitionOptions],
    ) -> None:
        check_share(type(self), deal, load, known=_OPTIONS)
        if isinstance(dataset, EpochVaryingDataset):
            raise ConfigError(f"{kind_text(dataset)} is already packed: give the documents")
        check_rows(dataset, "a PackedDataset")
        capacity, pad_token = _integer("capacity", capacity, 1), _integer("pad_token", pad_token, 0)
        balance = None if balance is None else _integer("balance", balance, 1)
        if order not in ("global", "block"):
            raise ConfigError(f"unknown order {order!r}: use 'global' or 'block'")
        if block_size is not None:
            if order != "block":
                raise ConfigError(f"block_size={block_size!r} needs order='block', got order={order!r}")
            block_size = _integer("block_size", block_size, 1)
        self._options: dict[str, Any] = {"max_documents": max_documents, "order": order, "block_size": block_size}
        self._options |= {"pad_token": pad_token, "balance": balance, "load": load, **deal}
        self.dataset = dataset
        """The documents."""
        self.lengths = document_lengths(dataset, lengths)
        """The number of tokens of each document."""
        given = dataset, capacity, self.lengths, max_documents, excluded_rows(dataset, exclude)
        self._packs = Packs(*given) if order == "global" else BlockPacks(*given, block_size or DEFAULT_BLOCK_SIZE)
        self.capacity = capacity
        self.pad_token = pad_token
        super().__init__(self._packs, PackPlan(self._packs, order, balance, **deal), load)
        self.pure = self.pure and bool(getattr(dataset, "pure", False))
        self.releases_gil = bool(getattr(dataset, "releases_gil", False))
        self.fork_safe = bool(getattr(dataset, "fork_safe", True))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return ()

    # Properties and lookups.

    @property
    def packs(self) -> int:
        """The number of packs in an epoch, over all ranks."""
        return len(self._packs)

    @property
    def fill(self) -> float:
        """The fraction of real tokens in all packs."""
        return self._packs.tokens / max(1, self.packs * self.capacity)

    @property
    def density(self) -> float:
        """The average number of documents in a pack; each part of a cut document counts."""
        return self._packs.pieces / max(1, self.packs)

    def documents(self, packs: npt.ArrayLike, turn: int | None = None) -> PackedDocuments:
        """Return the documents of packs in an epoch ``turn``, by default the current one.

        ``packs`` are numbers of packs, 0 to ``self.packs - 1``: int64 of shape (n,). `rows` returns those at indices.
        """
        return self._packs.documents(normalise(packs, self.packs), self.seed, self.epoch if turn is None else turn)

    def packs_of(self, row: int, turn: int | None = None) -> Indices:
        """Return the packs of an epoch ``turn``, by default the current one, that contain the document in a row, in the
        order of its tokens; several for a long document.
        """
        (row,) = normalise([row], len(self.lengths)).tolist()
        return self._packs.packs_of(row, self.seed, self.epoch if turn is None else turn)

    def costs(self, packs: npt.ArrayLike) -> Indices:
        """Return the cost of attention over packs: the sum of squares of their documents' lengths."""
        return self._packs.costs(normalise(packs, self.packs))

    # Items.

    def __getitem__(self, index: int) -> Any:
        return PackedDataset.__getitems__(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return PackedDataset.load_samples(self, indices, None if in_sample() else self.keys(indices))

    def load_samples(
        self, indices: Sequence[int], keys: Sequence[int] | None, place: MiniEpoch | None = None
    ) -> list[Any]:
        view = self.plan.view(place)
        return self.load_pass(view.epoch, view.rows(view.local(indices)).tolist(), keys)

    def load_pass(self, turn: int, rows: Sequence[int], keys: Sequence[int] | None) -> list[Any]:
        # A pass through the packs is an epoch.
        found = self.documents(np.asarray(rows, dtype=np.int64), turn)
        tokens = self._tokens(found, keys)
        splits = found.splits.tolist()
        packs = [self._pack(tokens[begin:end]) for begin, end in itertools.pairwise(splits)]
        return packs if self.load is None else load_each(self.load, packs, keys)

    def _tokens(self, found: PackedDocuments, keys: Sequence[int] | None) -> list[torch.Tensor]:
        """Return the tokens of each part. A document with several parts is read once, or with keys once per pack."""
        of_pack = np.repeat(np.arange(len(found.splits) - 1), np.diff(found.splits))
        # A document's random numbers depend only on its pack, not on the other packs of this call.
        reads = found.rows if keys is None else found.rows * len(keys) + of_pack
        _, first, where = np.unique(reads, return_index=True, return_inverse=True)
        rows, own = found.rows[first], None
        if keys is not None:
            numbers, packs = first - found.splits[of_pack[first]], of_pack[first].tolist()
            own = [mix(keys[pack], number) for pack, number in zip(packs, numbers.tolist(), strict=True)]
        with stage("read"):
            items = load_rows(self.dataset, rows.tolist(), own)
        expected = self.lengths[rows].tolist()
        documents = [_document_tokens(*args) for args in zip(items, expected, rows.tolist(), strict=True)]
        spans = zip(where.tolist(), found.begins.tolist(), found.lengths.tolist(), strict=True)
        return [documents[at][begin : begin + length] for at, begin, length in spans]

    def _pack(self, documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths = [len(document) for document in documents]
        used = sum(lengths)
        ids = torch.full((self.capacity,), self.pad_token, dtype=torch.int64)
        torch.cat(documents, out=ids[:used])
        ends = np.cumsum(lengths)
        labels = torch.full_like(ids, IGNORED)
        labels[: used - 1] = ids[1:used]
        labels[ends - 1] = IGNORED
        document_ids = torch.full_like(ids, -1)
        document_ids[:used] = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        positions = np.arange(self.capacity)
        positions[:used] -= np.repeat(ends - lengths, lengths)
        positions[used:] -= used
        bounds = torch.full((self._packs.bounds,), self.capacity, dtype=torch.int64)
        bounds[0] = 0
        bounds[1 : len(ends) + 1] = torch.from_numpy(ends)
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": torch.from_numpy(positions),
            "document_ids": document_ids,
            "cu_seqlens": bounds,
        }

    # Filters.

    def filtered(self, keep: Any) -> SourceDataset:
        """Return the packs of some of the documents, see `penstock.Subset`."""
        documents = Subset(self.dataset, keep)
        kept = last_filter(documents)
        excluded = self._packs.excluded
        exclude = None if excluded is None else excluded.among(kept).rows
        lengths = filtered_lengths(self.lengths, kept.find, len(kept))
        return PackedDataset(documents, self.capacity, lengths=lengths, exclude=exclude, **self._options)

    def excluding(self, exclude: Any) -> Self:
        excluded = self._packs.excluded
        rows = np.asarray(exclude) if excluded is None else excluded.with_rows(np.asarray(exclude)).rows
        made = PackedDataset(self.dataset, self.capacity, lengths=self.lengths, exclude=rows, **self._options)
        made._packs.bounds = self._packs.bounds
        return cast(Self, made)

    @property
    def filter_rows(self) -> int:
        return len(self.lengths)


def collate_packed(packs: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return a batch of packs with the bounds of all documents in one row, for variable-length attention kernels.

    ``cu_seqlens`` is int32 of shape (documents + 1,), over the batch as one sequence of ``len(packs) * capacity``
    tokens; padding counts as a document. ``max_seqlen`` is the length of the longest document, an int. All other
    tensors are stacked.

    >>> packs = PackedDataset([[1, 2, 3], [4, 5], [6]], 4, lengths=[3, 2, 1], rank=0, world_size=1)
    >>> collate_packed([packs[0], packs[1]])["cu_seqlens"].dtype
    torch.int32
    """
    capacity = len(packs[0]["input_ids"])
    batch: dict[str, Any] = {
        name: torch.stack([pack[name] for pack in packs]) for name in packs[0] if name != "cu_seqlens"
    }
    bounds = torch.cat([torch.unique(pack["cu_seqlens"])[:-1] + i * capacity for i, pack in enumerate(packs)])
    bounds = torch.cat([bounds, bounds.new_tensor([capacity * len(packs)])])
    batch["cu_seqlens"] = bounds.to(torch.int32)
    batch["max_seqlen"] = int(bounds.diff().max())
    return batch


def _integer(name: str, value: Any, least: int) -> int:
    """Return an option as an integer.

    Raises:
        ConfigError: it is not an integer, or is less than ``least``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ConfigError(f"{name}= takes an integer of {least} or more, got {value!r}")
    return operator.index(value)


def _document_tokens(item: Any, expected: int, row: int) -> torch.Tensor:
    """Return the tokens of a document."""
    if isinstance(item, dict) and "input_ids" not in item:
        raise DataFileError(f"document {row} is a dict without input_ids: its keys are {', '.join(map(str, item))}")
    tokens = torch.as_tensor(item["input_ids"] if isinstance(item, dict) else item)
    if tokens.is_floating_point() and len(tokens):
        raise DataFileError(f"document {row} has the dtype {tokens.dtype}, but tokens must be integers")
    if tokens.ndim != 1 or len(tokens) != expected:
        raise DataFileError(
            f"document {row} has {len(tokens) if tokens.ndim == 1 else tuple(tokens.shape)} tokens, but lengths= says "
            f"{expected}: count the lengths again, with these documents and this tokenizer"
        )
    return tokens.to(torch.int64)


def _packed_mixture(
    mixture: Mixture, capacity: int, *, lengths: Any = None, exclude: Any = None, **options: Any
) -> Mixture:
    """Return the mixture of packs for a mixture of documents.

    Args:
        mixture, capacity: of documents, and tokens in a pack.
        lengths: None for the sources' own lengths, a list with the lengths of each source, or an array over all
            sources, one after the other.
        exclude: documents by source, as in `Mixture`; the mixture's own excluded documents are excluded anyway.
        options: of each `PackedDataset`. The mixture splits packs across ranks.

    Raises:
        ConfigError: an option that the mixture decides, or lengths that do not fit the sources.
    """
    wrong = sorted(options.keys() & {"balance", *PartitionOptions.__annotations__})
    if wrong:
        raise ConfigError(
            f"{wrong[0]}= cannot be set for a packed mixture: leave it out here, or set it in the Mixture if it has it"
        )
    sources = mixture.sources
    if any(isinstance(source, Mixture) for source in sources):
        raise ConfigError("a mixture inside a mixture cannot be packed: add its sources to the outer mixture")
    parts = [
        PackedDataset(source, capacity, lengths=own, exclude=exclude, rank=0, world_size=1, seed=number, **options)
        for number, (source, own, exclude) in enumerate(
            zip(sources, _lengths_by_source(lengths, sources), mixture.excluded_by_source(exclude), strict=True)
        )
    ]
    for part in parts:
        part._packs.bounds = max(other._packs.bounds for other in parts)
    ratios = [Fraction(part.packs, max(1, len(part.lengths))) for part in parts]
    return mixture.rescaled(parts, ratios)


def _lengths_by_source(lengths: Any, sources: Sequence[Any]) -> list[Any]:
    """Return the lengths of each source."""
    if lengths is None:
        return [None] * len(sources)
    if (
        isinstance(lengths, list | tuple)
        and len(lengths) == len(sources)
        and not all(isinstance(n, int) for n in lengths)
    ):
        return list(lengths)
    every = np.load(lengths, mmap_mode="r") if isinstance(lengths, str) else np.asarray(lengths)
    ends = np.cumsum([0, *map(len, sources)])
    if every.shape != (int(ends[-1]),):
        raise ConfigError(
            f"lengths= has shape {every.shape}, but the {len(sources)} sources have {int(ends[-1])} documents"
        )
    return [every[begin:end] for begin, end in itertools.pairwise(ends.tolist())]
