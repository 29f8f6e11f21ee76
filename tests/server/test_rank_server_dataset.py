"""`RankServerDataset`: row by row what `RankDataset` gives on the file, however it is asked; and what that costs."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_support import SHUFFLES, Counting, whole, write_kinds
from full_run import full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_support import FULL
from loader_conformance import travelled
from loader_support import draw_load

from penstock import Manifest, RankDataset, RankServerDataset
from penstock.errors import ConfigError, OrderError, PartitionError, ServerError, StateError, UnknownDataSetError
from penstock.server import Client, Server

MOST, MANY = 60, 20_000


class Service:
    """A server of a few manifests, and what it counted."""

    def __init__(self, folder: Path) -> None:
        path = folder / "meta.txt"
        path.write_text("".join(f"class {i // 10}/img {i}.jpg {i // 10}\n" for i in range(MOST)))
        (folder / "many.txt").write_text("".join(f"folder_{i // 100:06d}/{i:08d}.jpg {i}\n" for i in range(MANY)))
        self.sizes = {f"first{n}": Manifest.open(path)[:n] for n in range(MOST + 1)}
        self.kinds = write_kinds(folder)
        self.manifest, self.many = Manifest.open(path), Manifest.open(folder / "many.txt")
        self.seen = Counting()
        manifests: Any = {"meta": self.manifest, "many": self.many, **self.sizes, **self.kinds}
        self.server = Server(manifests, observer=self.seen)
        self.client = Client(self.server.address)

    def both(self, name: str, manifest: Manifest, **options: Any) -> tuple[RankDataset, RankServerDataset]:
        served = {key: options.pop(key) for key in ("page_rows",) if key in options}
        return RankDataset(manifest, **options), RankServerDataset(self.client, name, **options, **served)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("served"))
    with service.server:
        yield service
    assert set(service.seen.errors) <= {"UnknownDataSetError"}


def had(dataset: Any, size: int | None = None) -> list[Any]:
    """All items, in batches of this size."""
    n = len(dataset)
    step = size or max(1, n)
    return [item for i in range(0, n, step) for item in dataset.__getitems__(range(i, min(i + step, n)))]


class TestTheSameRows:
    @given(
        n=st.integers(0, MOST),
        world=st.integers(1, 9),
        mini_epochs=st.integers(1, 5),
        remainder=st.sampled_from(["pad", "drop", "uneven"]),
        kind=st.sampled_from(list(SHUFFLES)),
        seed=st.integers(-(1 << 63), (1 << 64) - 1),
        epoch=st.integers(0, 5),
        page_rows=st.sampled_from([1, 3, 8, 1000]),
        size=st.integers(1, 9),
        data=st.data(),
    )
    def test_for_any_arguments(
        self,
        service: Service,
        n: int,
        world: int,
        mini_epochs: int,
        remainder: str,
        kind: str,
        seed: int,
        epoch: int,
        page_rows: int,
        size: int,
        data: st.DataObject,
    ) -> None:
        rank = data.draw(st.integers(0, world - 1))
        local, served = service.both(
            f"first{n}",
            service.sizes[f"first{n}"],
            rank=rank,
            world_size=world,
            mini_epochs=mini_epochs,
            remainder=remainder,
            seed=seed,
            page_rows=page_rows,
            **SHUFFLES[kind],
        )
        for dataset in (local, served):
            dataset.set_epoch(epoch)
        for _ in range(mini_epochs + 1):
            assert (served.epoch, served.mini_epoch, len(served)) == (local.epoch, local.mini_epoch, len(local))
            assert had(served, size) == had(local)
            if len(local):
                some = data.draw(st.lists(st.integers(-len(local), len(local) - 1), max_size=5))
                assert served.__getitems__(some) == local.__getitems__(some)
            assert served.next_mini_epoch() == local.next_mini_epoch()
        served.close()

    @pytest.mark.parametrize("page_rows", [7, 1 << 14])
    def test_every_format(self, service: Service, page_rows: int) -> None:
        for name, manifest in service.kinds.items():
            local, served = service.both(name, manifest, rank=1, world_size=2, seed=3, load=whole, page_rows=page_rows)
            for _ in range(3):
                assert had(served, 4) == had(local), name
                assert [served[i] for i in range(len(served))] == had(local), name
                for dataset in (local, served):
                    dataset.next_mini_epoch()
            assert served.manifest.fingerprint == manifest.fingerprint
            assert served.manifest.schema == manifest.schema

    @pytest.mark.parametrize("access", ["in order", "in strides", "scattered", "one by one", "backwards", "at once"])
    def test_however_it_is_asked(self, service: Service, access: str) -> None:
        local, served = service.both("many", service.many, rank=2, world_size=3, mini_epochs=3, seed=1, page_rows=100)
        n = len(local)
        rng = random.Random(0)
        requests = {
            "in order": [range(i, min(i + 30, n)) for i in range(0, n, 30)],
            "in strides": [range(i, min(i + 30, n)) for i in range(60, n, 150)],
            "scattered": [[rng.randrange(n) for _ in range(30)] for _ in range(60)],
            "one by one": [[i] for i in range(300)],
            "backwards": [range(i + 29, i - 1, -1) for i in range(0, 900, 30)][::-1],
            "at once": [range(n), range(n - 1, -1, -1)],
        }[access]
        for _ in range(4):
            for rows in requests:
                assert served.__getitems__(rows) == local.__getitems__(rows), rows  # type: ignore[arg-type]
            if access == "one by one":
                assert [served[i] for i in range(200)] == [local[i] for i in range(200)]
            served.next_mini_epoch()
            local.next_mini_epoch()

    def test_items(self, service: Service) -> None:
        served = RankServerDataset(service.client, "meta", shuffle="none", rank=0, world_size=1)
        assert served[11] == ("class 1/img 11.jpg", 1, 11)
        assert served[-1] == served[np.int64(59)] == ("class 5/img 59.jpg", 5, 59)  # type: ignore[index]
        for outside in (60, -61):
            with pytest.raises(IndexError):
                served[outside]
            with pytest.raises(IndexError):
                served.__getitems__([0, outside])
        with pytest.raises(TypeError):
            served["0"]  # type: ignore[index]
        assert served.pure
        assert not served.fork_safe
        assert RankDataset(service.manifest).fork_safe

    def test_what_load_draws(self, service: Service) -> None:
        local, served = service.both("meta", service.manifest, rank=1, world_size=3, seed=4, load=draw_load)
        for _ in range(2):
            assert had(served, 7) == had(local)
            assert [served[i] for i in range(20)] == had(local)
            for dataset in (local, served):
                dataset.next_mini_epoch()


class TestStates:
    def test_every_count_resumes_here_and_on_the_file(self, service: Service) -> None:
        options: dict[str, Any] = {"rank": 1, "world_size": 2, "mini_epochs": 3, "seed": 1}
        local, served = service.both("first57", service.sizes["first57"], page_rows=4, **options)
        for dataset in (local, served):
            dataset.set_epoch(2)
            dataset.set_mini_epoch(1)
        everything = had(local)
        for count in range(len(everything) + 1):
            state = travelled(served.state_dict(count))
            assert state == local.state_dict(count)
            for other in service.both("first57", service.sizes["first57"], page_rows=4, **options):
                other.load_state_dict(state)
                assert (other.epoch, other.mini_epoch) == (2, 1)
                assert had(other, 3) == everything[count:]
                assert travelled(other.state_dict()) == state
                other.next_mini_epoch()
                rest = had(other, 3)
                other.set_mini_epoch(2)
                assert had(other) == rest

    @full_only("many ranks; test_rank_dataset.py has them without a server")
    @given(
        n=st.integers(0, 40),
        worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
        mini_epochs=st.integers(1, 4),
        remainder=st.sampled_from(["pad", "drop", "uneven"]),
        kind=st.sampled_from(list(SHUFFLES)),
    )
    @settings(max_examples=50 if FULL else 4)
    def test_other_numbers_of_ranks(
        self, service: Service, n: int, worlds: list[tuple[int, int]], mini_epochs: int, remainder: str, kind: str
    ) -> None:
        """Interrupted again and again, each time with other ranks: the same rows as from the file."""
        state: Any = None
        for world, count in worlds:
            for rank in range(world):
                options: dict[str, Any] = {"rank": rank, "world_size": world, "mini_epochs": mini_epochs, "seed": 1}
                options |= {"remainder": remainder, "page_rows": 3, **SHUFFLES[kind]}
                local, served = service.both(f"first{n}", service.sizes[f"first{n}"], **options)
                if state is not None:
                    local.load_state_dict(state)
                    served.load_state_dict(state)
                before = served.state_dict(min(count, len(served)))
                for _ in range(mini_epochs + 1):
                    assert had(served, 2) == had(local)
                    served.next_mini_epoch()
                    local.next_mini_epoch()
                served.close()
            state = travelled(before)

    def test_refusals(self, service: Service) -> None:
        served = RankServerDataset(service.client, "meta", rank=0, world_size=1, seed=1)
        for name, options, words in (
            ("first59", {"seed": 1}, "samples is 60 in the state and 59 here"),
            ("meta", {"seed": 2}, "seed is 1 in the state and 2 here"),
            ("meta", {"seed": 1, "shuffle": "none"}, "shuffle is 'global'"),
        ):
            other = RankServerDataset(service.client, name, rank=0, world_size=1, **options)  # type: ignore[arg-type]
            with pytest.raises(StateError, match=words):
                other.load_state_dict(served.state_dict(5))

    def test_growth_of_an_append_only_file(self, tmp_path: Path) -> None:
        path = tmp_path / "growing.txt"
        path.write_text("".join(f"{i}.jpg {i}\n" for i in range(20)))
        with Server({"growing": path}) as server:
            before = RankServerDataset(server.address, rank=0, world_size=2, seed=1)
            everything, state = had(before), before.state_dict(4)
            (tmp_path / "new").write_text(path.read_text() + "".join(f"{i}.jpg {i}\n" for i in range(20, 30)))
            (tmp_path / "new").rename(path)
            assert server.reload() == ["growing"]
            assert had(before, 2) == everything, "it goes on with the version that it began with"
            for world in (2, 1):
                grown = RankServerDataset(server.address, rank=0, world_size=world, seed=1, page_rows=2)
                with pytest.raises(StateError, match="samples is 20 in the state and 30 here"):
                    grown.load_state_dict(state)
                grown.load_state_dict(state, allow_growth=True)
                local = RankDataset(path, rank=0, world_size=world, seed=1)
                local.load_state_dict(state, allow_growth=True)
                for _ in range(3):
                    assert had(grown, 3) == had(local)
                    grown.next_mini_epoch()
                    local.next_mini_epoch()


class TestCost:
    """What the server sees."""

    def make(self, service: Service, **options: Any) -> RankServerDataset:
        return RankServerDataset(service.client, "many", **{"rank": 0, "world_size": 2, "seed": 1, **options})

    def test_a_batch_is_one_round_trip(self, service: Service) -> None:
        served = self.make(service)
        rng = np.random.default_rng(0)
        before = service.seen.messages, service.seen.sent
        for _ in range(20):
            served.__getitems__(rng.integers(0, len(served), 64).tolist())
        assert (service.seen.messages - before[0], service.seen.sent - before[1]) == (20, 20 * 64)

    @pytest.mark.parametrize("mini_epochs", [1, 40])
    def test_items_in_order_come_in_pages(self, service: Service, mini_epochs: int) -> None:
        local, served = service.both(
            "many", service.many, rank=0, world_size=2, seed=1, page_rows=100, mini_epochs=mini_epochs
        )
        before = service.seen.messages
        assert [served[i] for i in range(250)] == [local[i] for i in range(250)]
        assert service.seen.messages - before == 3

    def test_single_items_after_a_change_of_the_rows(self, service: Service) -> None:
        """The page in memory is of rows, not of positions."""
        local, served = service.both("many", service.many, rank=0, world_size=2, seed=1)
        first = [served[i] for i in range(10)]
        for dataset in (local, served):
            dataset.set_epoch(1)
        assert [served[i] for i in range(10)] == [local[i] for i in range(10)] != first
        kept = served.filtered(np.arange(0, MANY, 3))
        expected = local.filtered(np.arange(0, MANY, 3))
        assert [kept[i] for i in range(100)] == [expected[i] for i in range(100)]
        assert [served[i] for i in range(10)] == [local[i] for i in range(10)]

    def test_close_closes_the_connections_until_the_next_use(self, service: Service) -> None:
        served = RankServerDataset(service.server.address, "many", rank=0, world_size=2, seed=1)
        served.__getitems__(range(50))
        served.close()
        served.close()
        assert len(served.__getitems__(range(50))) == 50

    def test_two_iterators_at_different_places(self, service: Service) -> None:
        local, served = service.both("many", service.many, rank=0, world_size=2, seed=1, page_rows=100)
        places = []
        for dataset in (local, served):
            dataset.set_epoch(1)
        places.append(served.place)
        for dataset in (local, served):
            dataset.set_epoch(2)
        places.append(served.place)
        for i in range(0, 3000, 30):
            for place in places:
                rows = range(i, i + 30)
                assert served.load_samples(rows, None, place) == local.load_samples(rows, None, place)


class TestCopies:
    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
    def test_a_copy_is_at_the_same_place_and_on_its_own(self, service: Service, copier: Any) -> None:
        served = RankServerDataset(service.client, "many", rank=0, world_size=2, seed=1, page_rows=100)
        served.set_epoch(3)
        everything = had(served, 500)
        other = copier(served)
        assert other.epoch == 3
        other.set_epoch(4)
        assert served.epoch == 3
        other.set_epoch(3)
        assert had(other, 500) == everything


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"rank": 2, "world_size": 2}, PartitionError, "rank 2 is outside the world of 2"),
            ({"mini_epochs": 0}, PartitionError, "mini_epochs must be positive, got 0"),
            ({"shuffle": "random"}, ConfigError, "'global'"),
            ({"remainder": "repeat"}, ConfigError, "'uneven'"),
            ({"group": 2, "window": 3}, ConfigError, "window"),
            ({"seed": 1 << 64}, OrderError, "64-bit"),
            ({"page_rows": 0}, ConfigError, "page_rows"),
        ],
        ids=str,
    )
    def test_options(self, service: Service, options: dict[str, Any], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            RankServerDataset(service.client, "meta", **options)

    def test_names(self, service: Service) -> None:
        with pytest.raises(UnknownDataSetError, match="mata"):
            RankServerDataset(service.client, "mata")
        with pytest.raises(ServerError, match="meta"):
            RankServerDataset(service.client)

    def test_nobody_there(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a.jpg 1\n")
        with Server({"a": tmp_path / "a.txt"}) as server:
            address = server.address
        with pytest.raises(ServerError, match=address):
            RankServerDataset(Client(address, timeout=1, patience=1))
        with pytest.raises(ConfigError, match="grpc://"):
            RankServerDataset("somewhere")

    def test_rows_that_do_not_parse(self, tmp_path: Path) -> None:
        (tmp_path / "labels.txt").write_text("a.jpg 1\nb.jpg many\n" + "c.jpg 3\n" * 100)
        with Server({"labels": tmp_path / "labels.txt"}) as server:
            served = RankServerDataset(server.address, shuffle="none", rank=0, world_size=1, page_rows=10)
            with pytest.raises(ValueError, match="many"):
                had(served, 5)
            assert served[0] == ("a.jpg", 1, 0), "and the others do"


STRETCHES = st.lists(
    st.tuples(st.integers(0, MANY - 1), st.integers(0, 40), st.integers(0, 90), st.integers(1, 6)), max_size=8
)


@settings(max_examples=200 if FULL else 20)
@given(STRETCHES)
def test_batches_that_were_requested_in_advance(service: Service, stretches: list[tuple[int, int, int, int]]) -> None:
    """Batches of one size in equal steps, as a worker reads them, and what comes instead of the expected next one."""
    local, served = service.both("many", service.many, rank=0, world_size=1)
    for begin, size, step, count in stretches:
        for number in range(count):
            first = begin + number * step
            indices = list(range(min(first, MANY), min(first + size, MANY)))
            assert served.__getitems__(indices) == local.__getitems__(indices)


def test_batches_in_order_are_few_requests(service: Service) -> None:
    _, served = service.both("many", service.many, rank=0, world_size=1)
    before = service.seen.messages
    for begin in range(0, MANY, 32):
        served.__getitems__(range(begin, min(begin + 32, MANY)))
    assert service.seen.messages - before <= MANY // 2048 + 10
