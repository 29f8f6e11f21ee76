"""Random compositions of filters, mixtures, packs and batches, on 1 to 64 ranks that change, with weights that change.

One rank that reads whole epochs is the measure: its list of units (items, or batches of a `TokenBudgetBatchSampler`)
gives each position its content. Whatever the ranks and batch sizes, wherever a run stops and goes on, rank r of W has
the positions r, r + W, ... of what is left. So global batches are the same for the same product of ranks and batch
size.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from composition_support import Draw, DrawIds, DrawLines, DrawRows, Lengthy, length_of
from full_run import examples
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from packed_support import spans

from penstock import (
    ArrayDataset,
    DataLoader,
    DistributedSampler,
    Ledger,
    Manifest,
    Mixture,
    PackedDataset,
    RankDataset,
    Subset,
    TableDataset,
    TokenBudgetBatchSampler,
    generator,
)
from penstock.errors import ConfigError
from penstock.random import sample_scope

ALONE = {"rank": 0, "world_size": 1}


class Piece(NamedTuple):
    """A document, or a part of one, in a unit; with the draw of the item that it is in."""

    document: int
    begin: int
    length: int
    draw: int


Unit = tuple[Piece, ...]


class Node(NamedTuple):
    """A composition.

    Attributes:
        make: returns the data set of a rank; the options say which, and the seed. Without an order of its own it
            ignores them.
        documents: at each row that a filter is over.
        own: whether it has an order of its own.
        sources: which documents each source has, of a mixture.
        parts: the same of the sources inside of those, too: a filter leaves something of each.
        rows: the documents by the rows of a ledger, where those are others.
        packed: whether its items are packs.
        changing: whether it is a mixture whose weights may be changed.
        text: what it is, for the report of an example.
    """

    make: Callable[..., Any]
    documents: list[int]
    own: bool
    text: str
    sources: tuple[list[int], ...] = ()
    parts: tuple[list[int], ...] = ()
    rows: list[int] | None = None
    packed: bool = False
    changing: bool = False

    def __repr__(self) -> str:
        return self.text


# What is drawn.


class Leaves:
    """Data sets of documents with numbers that nobody else has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = itertools.count()

    def draw(self, data: Any) -> Node:
        size, kind = data.draw(st.integers(2, 14)), data.draw(st.sampled_from(["user", "array", "table", "manifest"]))
        first = 20 * next(self._count)
        ids = list(range(first, first + size))
        text = f"{kind} {ids}"
        if kind == "user":
            return Node(lambda **_: Lengthy(ids), ids, False, text)
        make = getattr(self, f"_{kind}")(ids, data)
        return Node(lambda **deal: make(**{**ALONE, "seed": 1, **deal}), ids, True, text, rows=ids)

    def _array(self, ids: list[int], data: Any) -> Callable[..., Any]:
        path = self._folder / f"{ids[0]}-{len(ids)}.npy"
        np.save(path, np.array(ids))
        order = data.draw(
            st.sampled_from([{}, {"shuffle": "block", "block_size": 3, "window": 2}, {"shuffle": "none"}])
        )
        return lambda **deal: ArrayDataset(path, load=DrawRows(), **order, **deal)

    def _table(self, ids: list[int], data: Any) -> Callable[..., Any]:
        path = self._folder / f"{ids[0]}-{len(ids)}.parquet"
        pq.write_table(pa.table({"id": ids}), path, row_group_size=4)
        return lambda **deal: TableDataset(path, load=DrawIds(), **deal)

    def _manifest(self, ids: list[int], data: Any) -> Callable[..., Any]:
        path = self._folder / f"{ids[0]}-{len(ids)}.txt"
        path.write_text("".join(f"{number}.jpg {number}\n" for number in ids))
        return lambda **deal: RankDataset(Manifest.open(path), load=DrawLines(), **deal)


def filtered(data: Any, node: Node) -> Node:
    """A filter that leaves something of each source: a mask, or rows in any order."""
    parts = node.parts or (node.documents,)
    masks = [data.draw(st.lists(st.booleans(), min_size=len(p), max_size=len(p))) for p in parts]
    for part, some in zip(parts, masks, strict=True):
        some[next(at for at, number in enumerate(part) if length_of(number))] = True
    mask = list(itertools.chain.from_iterable(masks))
    keep: Any = np.array(mask)
    if not node.sources and data.draw(st.booleans()):
        keep = np.array(data.draw(st.permutations(np.flatnonzero(keep).tolist())))
    kept = [node.documents[row] for row in (np.flatnonzero(keep) if keep.dtype == bool else keep).tolist()]
    left = {
        name: tuple([number for number in part if number in kept] for part in getattr(node, name))
        for name in ("sources", "parts")
    }
    text = f"Subset({node}, {keep.tolist()})"
    return node._replace(make=lambda **deal: Subset(node.make(**deal), keep), documents=kept, text=text, **left)


def packed(data: Any, node: Node, capacity: int, most: int | None) -> Node:
    """Packs of a node's documents; of a mixture, the mixture of packs."""
    lengths = [length_of(number) for number in node.documents]
    order = data.draw(st.sampled_from([{}, {}, {"order": "block", "block_size": 4}]))
    options: Any = {"lengths": lengths, "max_documents": most, "load": Draw(), **order}

    def make(**deal: Any) -> Any:
        if node.sources:
            return PackedDataset(node.make(**deal), capacity, **options)
        return PackedDataset(node.make(), capacity, **options, **{**ALONE, "seed": 2, **deal})

    text = f"PackedDataset({node}, {capacity}, {most}, {order})"
    return Node(make, node.documents, True, text, node.sources, node.parts, packed=True, changing=node.changing)


def mixed(data: Any, nodes: list[Node]) -> Node:
    weight = st.sampled_from([1, 2, 3, 5])
    weights = [data.draw(weight) for _ in nodes]
    mode = data.draw(st.sampled_from(["repeat", "proportion", "stop", "schedule", "schedule"]))
    options: dict[str, Any] = {"mode": mode}
    if mode == "repeat":
        weights = [data.draw(st.sampled_from([1, 1, 2])) for _ in nodes]
    elif mode == "stop":
        options = {"stop": data.draw(st.integers(1, 60))}
    elif mode == "schedule":
        begins = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=3, unique=True).map(sorted))
        options = {"stop": data.draw(st.integers(1, 60)), "schedule": [(b, drawn_weights(data, nodes)) for b in begins]}
    else:
        options["stop"] = data.draw(st.sampled_from(["first", "all"]))
    options["shuffle"] = data.draw(st.sampled_from(["global", "block", "none"]))

    def make(**deal: Any) -> Any:
        pairs = [(node.make(), w) for node, w in zip(nodes, weights, strict=True)]
        return Mixture(pairs, **options, **{**ALONE, "seed": 3, **deal})

    documents = [number for node in nodes for number in node.documents]
    text = f"Mixture({list(zip(nodes, weights, strict=True))}, {options})"
    sources = tuple(node.documents for node in nodes)
    parts = tuple(part for node in nodes for part in node.parts or (node.documents,))
    return Node(make, documents, True, text, sources, parts, packed=nodes[0].packed, changing=mode != "repeat")


def drawn_weights(data: Any, sources: Any) -> list[int]:
    return data.draw(st.lists(st.integers(0, 4), min_size=len(sources), max_size=len(sources)).filter(any))


def drawn_node(data: Any, leaves: Leaves) -> Node:
    """A composition of a few levels."""

    def some(node: Node) -> Node:
        return filtered(data, node) if data.draw(st.booleans()) else node

    top = data.draw(st.sampled_from(["rows", "packs", "mixture", "packs of a mixture", "mixture of packs", "mixtures"]))
    capacity, most = data.draw(st.integers(2, 24)), data.draw(st.sampled_from([None, None, 3]))
    count = 1 if top in ("rows", "packs") else data.draw(st.integers(1, 3))
    nodes = [some(leaves.draw(data)) for _ in range(count)]
    if top == "mixture of packs":
        nodes = [some(packed(data, node, capacity, most)) for node in nodes]
    if top == "mixtures":
        nodes[0] = some(mixed(data, [nodes[0], some(leaves.draw(data))]))
    node = nodes[0] if count == 1 and top in ("rows", "packs") else some(mixed(data, nodes))
    return some(packed(data, node, capacity, most)) if top.startswith("packs") else node


class Job(NamedTuple):
    """A composition, and how it is dealt."""

    node: Node
    options: dict[str, Any]
    remainder: str
    drop_last: bool = False
    balance: int | None = None
    executor: dict[str, Any] = {}

    @property
    def budget(self) -> bool:
        return "max_tokens" in self.options

    def loader(self, rank: int, world: int, batch: int) -> Any:
        deal = {"rank": rank, "world_size": world, "seed": 7, "remainder": self.remainder}
        if self.node.own:
            balance = {} if self.balance is None else {"balance": self.balance}
            dealt = {"batch_size": batch, "drop_last": self.drop_last}
            return DataLoader(self.node.make(**deal, **balance), collate_fn=list, **dealt, **self.executor)
        data = self.node.make()
        if self.budget:
            lengths = [length_of(number) for number in self.node.documents]
            batches = TokenBudgetBatchSampler(lengths, data_source=data, **deal, **self.options)
            return DataLoader(data, batch_sampler=batches, collate_fn=list, **self.executor)
        deal["num_replicas"] = deal.pop("world_size")
        sampler = DistributedSampler(data, **deal, **self.options)
        return DataLoader(data, batch, sampler=sampler, drop_last=self.drop_last, collate_fn=list, **self.executor)

    def units(self, batch: list[Any]) -> list[Unit]:
        """The units of a batch."""
        items = [pieces(item) for item in batch]
        return [tuple(itertools.chain.from_iterable(items))] if self.budget else items


def pieces(item: dict[str, Any]) -> Unit:
    if "cu_seqlens" in item:
        return tuple(Piece(*span, item["draw"]) for span in spans(item))
    return (Piece(item["id"], 0, len(item["input_ids"]), item["draw"]),)


class Stage(NamedTuple):
    """A part of a run: so many steps on so many ranks; after ``change`` of them the weights are changed."""

    world: int
    batch: int
    steps: int
    change: int


def drawn_job(data: Any, node: Node) -> Job:
    remainder = data.draw(st.sampled_from(["pad", "pad", "drop", "uneven"]))
    drop_last = data.draw(st.sampled_from([False, False, True]))
    if node.own:
        balance = data.draw(st.sampled_from([None, 1, 2, 3])) if node.packed and not node.sources else None
        return Job(node, {}, remainder, drop_last and balance is None, balance)
    if data.draw(st.booleans()):
        options = {"max_tokens": data.draw(st.integers(10, 60)), "classes": data.draw(st.integers(1, 8))}
        return Job(node, {**options, "longest": data.draw(st.sampled_from(["alone", "drop"]))}, remainder)
    return Job(node, {"shuffle": data.draw(st.sampled_from(["global", "block", "none"]))}, remainder, drop_last)


WORLDS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 33, 64])


def drawn_stages(data: Any, job: Job, n: int) -> list[Stage]:
    stages = []
    for _ in range(data.draw(st.integers(1, 3))):
        world = data.draw(WORLDS if job.remainder != "drop" else WORLDS.map(lambda world: min(world, n)))
        batch = 1 if job.budget else job.balance or data.draw(st.integers(1, 4))
        if stages and data.draw(st.integers(0, 2)) == 0:
            world, batch = stages[-1][:2]
        steps = data.draw(st.integers(1, 2 * math.ceil(n / (world * batch)) + 1))
        stages.append(Stage(world, batch, steps, data.draw(st.integers(0, steps))))
    return stages


# The run, and what it ought to be.


class Pass(NamedTuple):
    """What the ranks had in one pass: batches by step and rank, None where a rank had none."""

    epoch: int
    stage: Stage
    consumed: int
    """Positions that the job had of the epoch before."""
    first: int
    """Steps of the epoch before, if all of them were dealt like this; else -1."""
    batches: list[list[list[Unit] | None]]
    over: bool
    """Whether it went to the end of the epoch."""


def positions(job: Job, n: int, consumed: int, stage: Stage) -> list[list[list[int]]]:
    """The positions of each rank's batches, by rank and step, of what is left of an epoch."""
    world, batch = stage.world, stage.batch
    rest = n - consumed
    share = rest // world if job.remainder == "drop" else -(-rest // world)
    end = n if job.remainder == "uneven" else consumed + share * world
    found = []
    for rank in range(world):
        mine = range(consumed + rank, end, world)
        batches = [list(mine[at : at + batch]) for at in range(0, len(mine), batch)]
        found.append([part for part in batches if len(part) == batch or not job.drop_last])
    return found


class Run:
    """A job that stops and goes on with other ranks."""

    def __init__(self, job: Job, n: int) -> None:
        self.job, self.n = job, n
        self.passes: list[Pass] = []
        self.changes: list[tuple[int, list[int]]] = []
        self.state: Any = None
        self._at: tuple[int, int, int] = 0, 0, 0  # epoch, positions that were consumed, steps if all are alike
        self._layout: tuple[int, int] | None = None

    def go_on(self, stage: Stage, weights: list[int] | None) -> None:
        loaders = [self.job.loader(rank, stage.world, stage.batch) for rank in range(stage.world)]
        for loader in loaders if self.state is not None else ():
            loader.load_state_dict(self.state)
        left, change, empty = stage.steps, stage.change, 0
        while left and empty < 2:
            iterators, batches, over = [iter(loader) for loader in loaders], [], False
            epoch = loaders[0].epoch
            while left and not over:
                if change == 0 and weights is not None:
                    self._change(loaders, weights)
                change -= 1
                had = [next(iterator, None) for iterator in iterators]
                over = all(batch is None for batch in had)
                if not over:
                    batches.append([None if batch is None else self.job.units(batch) for batch in had])
                    left -= 1
            self._note(epoch, stage, batches, over)
            empty = 0 if batches else empty + 1
        states = [json.dumps(loader.state_dict()) for loader in loaders]
        assert len(states[0]) < 1500
        if self.job.remainder != "uneven":
            assert len(set(states)) == 1, "ranks that had equally many batches have the same state"
        self.state = json.loads(states[0])
        for loader in loaders:
            loader.close()

    def _note(self, epoch: int, stage: Stage, batches: list[Any], over: bool) -> None:
        if epoch != self._at[0]:
            self._at, self._layout = (epoch, 0, 0), None
        _, consumed, first = self._at
        alike = consumed == 0 or self._layout == stage[:2]
        self.passes.append(Pass(epoch, stage, consumed, first if alike and first >= 0 else -1, batches, over))
        consumed = min(consumed + len(batches) * stage.world * stage.batch, self.n)
        if self.job.node.own and self.job.remainder == "drop" and consumed + stage.world > self.n:
            consumed = self.n  # what was left out stays out, on any ranks
        self._at, self._layout = (epoch, consumed, first + len(batches) if alike and first >= 0 else -1), stage[:2]

    def _change(self, loaders: list[Any], weights: list[int]) -> None:
        """Change the weights where the rank that is ahead says that it is possible."""
        at = loaders[0].epoch * self.n
        try:
            begin = loaders[-1].dataset.set_weights(weights, at=at)
        except ConfigError as error:
            begin = int(str(error).split("first possible position is ")[1].split(";")[0])
            assert loaders[-1].dataset.set_weights(weights, at=begin) == begin
        for loader in loaders[:-1]:
            assert loader.dataset.set_weights(weights, at=begin) == begin
        self.changes.append((begin, weights))


def whole_epochs(job: Job, count: int, changes: list[tuple[int, list[int]]]) -> list[list[Unit]]:
    """The units of epochs, as one rank reads them."""
    job = job._replace(drop_last=False, remainder="uneven", executor={})
    loader = job.loader(0, 1, 1 if job.budget else 5)
    for begin, weights in changes:
        assert loader.dataset.set_weights(weights, at=begin) == begin
    epochs = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        epochs.append([unit for batch in loader for unit in job.units(batch)])
    return epochs


def check_batches(run: Run, epochs: list[list[Unit]]) -> None:
    """Each rank has its positions; a global batch is the same set, however it is dealt."""
    job, n = run.job, run.n
    for epoch, stage, consumed, _, batches, over in run.passes:
        expected = positions(job, n, consumed, stage)
        if job.remainder != "uneven":
            assert len(set(map(len, expected))) == 1, "all ranks have equally many batches"
        if over:
            assert len(batches) == max(map(len, expected))
        unit, size = epochs[epoch], stage.world * stage.batch
        for step, had in enumerate(batches):
            wanted = [of_rank[step] if step < len(of_rank) else None for of_rank in expected]
            real = Counter[Any]()
            for mine, places in zip(had, wanted, strict=True):
                assert (mine is None) == (places is None)
                for found, place in zip(mine or (), places or (), strict=True):
                    # Where packs are dealt by cost, a rank has others of the same global batch.
                    if job.balance is None:
                        assert bare(found) == bare(unit[place % n])
                        assert place >= n or found == unit[place]
                    real[bare(found)] += place < n
            begin = consumed + step * size
            whole = unit[begin : begin + size]
            if job.remainder == "drop" or job.drop_last:
                whole = [unit[place] for places in wanted for place in places or () if place < n]
            assert +real == Counter(map(bare, whole)), "the global batch"


def bare(unit: Unit) -> tuple[Any, ...]:
    """A unit without the draws, which are others where it is repeated."""
    return tuple(piece[:3] for piece in unit)


def check_whole(job: Job, epochs: list[list[Unit]]) -> None:
    """Each source is gone through again and again: so often, or once more, has the job had each of its tokens."""
    data = job.node.make()
    parts = job.node.sources or (job.node.documents,)
    sources = data.sources if job.node.sources else [data]
    source_of = {number: at for at, part in enumerate(parts) for number in part}
    had, units = [Counter[Any]() for _ in parts], [0] * len(parts)
    for epoch in epochs:
        for unit in epoch:
            at = source_of[unit[0].document]
            units[at] += 1
            had[at].update(itertools.chain.from_iterable(map(tokens, unit)))
        if not job.node.sources:
            assert max(had[0].values(), default=1) <= 1, "no document twice in an epoch"
            left = {token for number in parts[0] for token in tokens(Piece(number, 0, length_of(number), 0))}
            if job.node.packed:
                left = {(number, at) for number, at in left if length_of(number)}
            if job.options.get("longest") == "drop":
                left = {(number, at) for number, at in left if length_of(number) <= job.options["max_tokens"]}
            assert set(had[0]) == left
            had[0].clear()
    for part, source, found, count in zip(parts, sources, had, units, strict=True) if job.node.sources else ():
        size, once = once_through(source, part)
        times = count // size
        for token, number in once.items():
            assert times * number <= found[token] <= (times + (count % size > 0)) * number
        assert set(found) <= set(once)


def once_through(source: Any, documents: list[int]) -> tuple[int, Counter[Any]]:
    """How many items a source of a mixture has, and how often each token is in them."""
    if isinstance(source, Mixture):
        every = [piece for item in source for piece in pieces(item)]
        return len(source), Counter(itertools.chain.from_iterable(map(tokens, every)))
    every = [Piece(number, 0, length_of(number), 0) for number in documents]
    if isinstance(source, PackedDataset):
        return source.packs, Counter(itertools.chain.from_iterable(map(tokens, (p for p in every if p.length))))
    return len(documents), Counter(itertools.chain.from_iterable(map(tokens, every)))


def tokens(piece: Piece) -> Iterator[tuple[int, int]]:
    number, begin, length, _ = piece
    return ((number, at) for at in range(begin, begin + max(1, length)))


# The ledger.


def documents_of(node: Node, data: Any, source: int) -> list[int]:
    """The documents by the rows of a ledger."""
    if source < 0:
        return node.documents if node.packed or not node.own or node.rows is None else node.rows
    inside = data.sources[source]
    return [item["id"] for item in inside] if isinstance(inside, Mixture) else node.sources[source]


def check_ledger(run: Run) -> None:
    """The ledger says what was delivered, of any loader of the job; back from rows, it finds all steps."""
    job = run.job
    data = job.node.make()
    known = {at: documents_of(job.node, data, at) for at in range(-1, len(job.node.sources))}
    for number, (epoch, stage, consumed, first, batches, over) in enumerate(run.passes):
        if first < 0:
            continue
        asked = job.loader(0, 1 if number % 2 else stage.world, stage.batch)
        asked.load_state_dict(run.state)
        ledger = Ledger(asked, world_size=stage.world)
        begin = epoch * ledger.steps_per_epoch + first
        found = Counter[tuple[int, int, int, int]]()
        for step, had in enumerate(batches, begin):
            for rank, mine in enumerate(had):
                said = ledger.rows(step, rank=rank)
                assert said.epoch == epoch
                rows = list(zip(said.rows.tolist(), said.sources.tolist(), strict=True))
                every = [piece for unit in mine or () for piece in unit]
                assert [known[source][row] for row, source in rows] == [piece.document for piece in every]
                assert said.keys is not None
                assert [drawn(key) for key in said.keys] == [piece.draw for piece in every]
                found.update({(*row, step, rank) for row in rows})
        if over and not first and not consumed:
            check_inverse(ledger, epoch, found, known, job)


def check_inverse(ledger: Ledger, epoch: int, found: Counter[Any], known: dict[int, list[int]], job: Job) -> None:
    for source, rows in known.items():
        for row in range(len(rows)) if (source < 0) == (not job.node.sources) else ():
            steps = {(o.step, o.rank) for o in ledger.steps(row, source=source, epoch=epoch)}
            assert steps == {place[2:] for place in found if place[:2] == (row, source)}
            assert all(o.epoch == epoch for o in ledger.steps(row, source=source, epoch=epoch))


def drawn(key: int) -> int:
    with sample_scope(key):
        return int(generator().integers(1 << 40))


def check_composition(data: Any, folder: Path, **executor: Any) -> None:
    leaves = Leaves(folder)
    job = drawn_job(data, drawn_node(data, leaves))._replace(executor=executor)
    n = len(whole_epochs(job, 1, [])[0])
    stages = drawn_stages(data, job, n)
    weights = drawn_weights(data, job.node.sources) if job.node.changing and data.draw(st.booleans()) else None
    note(f"{job}\n{n} units, {stages}, {weights}")
    run = Run(job, n)
    for number, stage in enumerate(stages):
        run.go_on(stage, weights if number == 0 or data.draw(st.booleans()) else None)
    last = max(one.epoch for one in run.passes)
    epochs = whole_epochs(job, last + 1, run.changes)
    check_batches(run, epochs)
    check_whole(job, epochs)
    check_ledger(run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compositions")


@given(st.data())
@settings(max_examples=examples(40, 1500), deadline=None)
def test_compositions(folder: Path, data: Any) -> None:
    check_composition(data, folder)


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*does not declare itself pure")
@given(st.data())
@settings(max_examples=examples(2, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_compositions_in_workers(folder: Path, executor: str, data: Any) -> None:
    check_composition(data, folder, executor=executor, num_workers=2)
