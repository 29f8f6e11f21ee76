"""In the place of torch's DataLoader: the same test body runs both and compares."""

from __future__ import annotations

import collections
import inspect
import warnings
from typing import Any

import pytest
import torch
from full_run import full_only
from loader_support import (
    Nested,
    Pair,
    Pairs,
    Squares,
    Stream,
    bad_init,
    batches,
    ended,
    noting_init,
    outcomes,
    plain,
    sum_collate,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import penstock as ps

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:Length of IterableDataset")

Generator = torch.Generator


class Bulk(Squares):
    """Items are what ``__getitem__`` is given."""

    def __getitem__(self, index: Any) -> Any:
        return torch.as_tensor(index)


def seeded(seed: int) -> Generator:
    generator = Generator()
    generator.manual_seed(seed)
    return generator


SAME: dict[str, Any] = {
    "plain": lambda D, **how: D(Squares(10), **how),
    "batches": lambda D, **how: D(Squares(10), batch_size=3, **how),
    "drop_last": lambda D, **how: D(Squares(10), batch_size=3, drop_last=True, **how),
    "positional": lambda D, **how: D(Squares(10), 4, False, **how),
    "shuffle": lambda D, **how: D(Squares(50), batch_size=7, shuffle=True, **how),
    "shuffle generator": lambda D, **how: D(Squares(50), 7, shuffle=True, generator=seeded(5), **how),
    "no batching": lambda D, **how: D(Pairs(5), batch_size=None, **how),
    "no batching, shuffled": lambda D, **how: D(Nested(5), batch_size=None, shuffle=True, **how),
    "bulk": lambda D, **how: D(Bulk(9), batch_size=None, sampler=[[1, 2], [3], [4, 5, 6]], **how),
    "tuples as indices": lambda D, **how: D(Bulk(9), sampler=[(1, 2), (3, 4)], batch_size=2, **how),
    "named tuples": lambda D, **how: D(Pairs(5), batch_size=2, **how),
    "nested": lambda D, **how: D(Nested(5), batch_size=2, **how),
    "collate_fn": lambda D, **how: D(Squares(9), batch_size=4, collate_fn=sum_collate, **how),
    "sampler list": lambda D, **how: D(Squares(9), sampler=[5, 5, 0], batch_size=2, **how),
    "sampler tensor": lambda D, **how: D(Bulk(9), sampler=torch.tensor([5, 0]), **how),
    "batch_sampler list": lambda D, **how: D(Squares(9), batch_sampler=[[1], [4, 2, 7], [3]], **how),
    "batch_sampler tuples": lambda D, **how: D(Squares(9), batch_sampler=[(1,), (4, 2)], **how),
    "RandomSampler": lambda D, **how: D(Squares(9), sampler=RandomSampler(Squares(9), True, 20), batch_size=6, **how),
    "SubsetRandomSampler": lambda D, **how: D(Squares(9), sampler=SubsetRandomSampler([2, 4, 6]), **how),
    "WeightedRandomSampler": lambda D, **how: D(Squares(3), sampler=WeightedRandomSampler([1, 2, 1], 9), **how),
    "DistributedSampler": lambda D, **how: D(
        Squares(9), sampler=torch.utils.data.DistributedSampler(Squares(9), 2, 1, seed=3), batch_size=2, **how
    ),
    "TensorDataset": lambda D, **how: D(TensorDataset(torch.arange(12).view(6, 2), torch.ones(6)), 4, **how),
    "list": lambda D, **how: D([1.5, 2.5, 3.5], 2, **how),
    "empty": lambda D, **how: D(Squares(0), 2, **how),
    "stream": lambda D, **how: D(Stream(11), batch_size=3, **how),
    "stream, drop_last": lambda D, **how: D(Stream(11), batch_size=3, drop_last=True, **how),
    "stream, no batching": lambda D, **how: D(Stream(4), batch_size=None, **how),
}


def lived(loader: Any) -> Any:
    """Three epochs, the second left early, and what the global generator then is."""
    torch.manual_seed(9)
    seen = [[shape(batch) for batch in loader]]
    for batch in loader if loader.generator is None else ():
        seen.append([shape(batch)])
        break
    seen.append([shape(batch) for batch in loader])
    return seen, torch.get_rng_state().tolist()


def shape(batch: Any) -> Any:
    """Values with their types."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), batch.tolist()
    if isinstance(batch, collections.abc.Mapping):
        return type(batch).__name__, {name: shape(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch).__name__, [shape(value) for value in batch]
    return type(batch).__name__, batch


@pytest.mark.parametrize("name", SAME)
def test_same_batches_and_same_global_generator(name: str) -> None:
    make = SAME[name]
    assert lived(make(ps.DataLoader)) == lived(make(TorchDataLoader))


@full_only(
    "workers for each; threads have all",
    but=["False-shuffle", "True-stream", "False-batch_sampler list", "True-named tuples"],
)
@pytest.mark.parametrize("name", ["shuffle", "no batching, shuffled", "named tuples", "batch_sampler list", "stream"])
@pytest.mark.parametrize("persistent", [False, True])
def test_same_with_worker_processes(name: str, persistent: bool) -> None:
    how = {"num_workers": 2, "persistent_workers": persistent}
    assert lived(SAME[name](ps.DataLoader, **how)) == lived(SAME[name](TorchDataLoader, **how))


@full_only("threads for each", but=["batch_sampler list", "stream, no batching"])
@pytest.mark.parametrize("name", [name for name in SAME if name != "empty"])
def test_same_in_threads(name: str) -> None:
    ours = lived(SAME[name](ps.DataLoader, num_workers=2, executor="thread"))
    shards = {"num_workers": 2} if "stream" in name else {}  # each thread is a worker with a share
    assert ours == lived(SAME[name](TorchDataLoader, **shards))


@pytest.mark.parametrize("name", SAME)
def test_same_length(name: str) -> None:
    found = []
    for kind in (ps.DataLoader, TorchDataLoader):
        try:
            found.append(len(SAME[name](kind)))
        except TypeError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_length_follows_the_data_set() -> None:
    data = [1, 2, 3]
    loader = ps.DataLoader(data, 2)  # type: ignore[arg-type,var-annotated]
    assert len(loader) == 2
    data += [4, 5, 6, 7]
    assert len(loader) == 4
    assert [item for batch in batches(loader) for item in batch] == data


def test_global_seed_gives_the_same_epochs_again() -> None:
    for how in ({}, {"num_workers": 1}, {"num_workers": 2, "executor": "thread"}):
        found = []
        for _ in range(2):
            torch.manual_seed(4)
            loader = ps.DataLoader(Squares(20), 3, shuffle=True, **how)  # type: ignore[arg-type,var-annotated]
            found.append([batches(loader), batches(loader)])
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]


BAD: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"batch_size": 0},
    {"batch_size": -3},
    {"batch_size": 2.5},
    {"batch_size": "4"},
    {"batch_size": True},
    {"drop_last": 1},
    {"batch_size": None, "drop_last": True},
    {"sampler": [1], "shuffle": True},
    {"sampler": [1], "batch_sampler": [[1]], "shuffle": True},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_sampler": [[1]], "shuffle": True},
    {"batch_sampler": [[1]], "drop_last": True},
    {"batch_sampler": [[1]], "sampler": [1]},
    {"prefetch_factor": 2},
    {"prefetch_factor": -1, "num_workers": 1},
    {"persistent_workers": True},
    {"multiprocessing_context": "fork"},
    {"multiprocessing_context": "teleport", "num_workers": 1},
    {"multiprocessing_context": 3, "num_workers": 1},
    {"dataset": Stream(3), "shuffle": True},
    {"dataset": Stream(3), "shuffle": False},
    {"dataset": Stream(3), "sampler": [1]},
    {"dataset": Stream(3), "batch_sampler": [[1]]},
    {"dataset": Squares(0), "shuffle": True},
    {"dataset": object(), "shuffle": True},
]


@pytest.mark.parametrize("options", BAD, ids=lambda options: " ".join(map(str, options)))
def test_refusals_are_torchs(options: dict[str, Any]) -> None:
    options = {"dataset": Squares(9), **options}
    said = []
    for kind in (ps.DataLoader, TorchDataLoader):
        try:
            made = kind(**options)
        except Exception as error:
            builtin = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
            said.append((builtin if builtin is not Exception else type(error), str(error)))
        else:
            said.append(f"accepted: {made!r}"[:8])
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["batch_size", "sampler", "batch_sampler", "drop_last", "dataset"])
def test_attributes_are_fixed(name: str) -> None:
    loader = ps.DataLoader(Squares(4), 2)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
        setattr(loader, name, getattr(loader, name))


def test_signature_begins_like_torchs() -> None:
    ours, torchs = (inspect.signature(kind.__init__).parameters for kind in (ps.DataLoader, TorchDataLoader))
    assert [name for name in ours if name in torchs] == list(torchs)
    for name, parameter in torchs.items():
        assert ours[name].default == parameter.default, name
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ours if name not in torchs)


def test_is_generic_and_has_torchs_attributes() -> None:
    assert ps.DataLoader[int] is not None
    loader = ps.DataLoader(Squares(8), 2, num_workers=2, timeout=3, prefetch_factor=5, persistent_workers=True)
    torchs = TorchDataLoader(Squares(8), 2, num_workers=2, timeout=3, prefetch_factor=5, persistent_workers=True)
    for name, value in vars(torchs).items():
        if isinstance(value, int | float | str | bool | None):
            assert getattr(loader, name) == value, name
    assert isinstance(loader, TorchDataLoader)
    assert loader._auto_collation is True
    assert isinstance(loader.batch_sampler, torch.utils.data.Sampler)
    assert loader.batch_sampler.batch_size == 2


def test_attributes_set_later_take_effect() -> None:
    for how in ({}, {"num_workers": 1}, {"num_workers": 1, "executor": "thread"}):
        loader = ps.DataLoader(Squares(4), 2, **how)  # type: ignore[arg-type,var-annotated]
        assert batches(loader) == [[0, 1], [4, 9]]
        loader.collate_fn = sum_collate
        assert batches(loader) == [1, 13]


def test_worker_init_marks_the_workers_own_copy() -> None:
    for seed in (None, 1):
        data = Squares(8)
        loader = ps.DataLoader(data, num_workers=2, worker_init_fn=noting_init, seed=seed)
        assert outcomes(loader) == [[0], [1], [4], [9], "IndexError", "IndexError", "IndexError", "IndexError"]
        assert data.n == 8


@pytest.mark.parametrize("how", [{"num_workers": 2}, {"num_workers": 2, "executor": "thread"}])
@pytest.mark.parametrize("seed", [None, 1])
def test_errors_of_worker_init_arrive_with_their_type(how: dict[str, Any], seed: int | None) -> None:
    loader = ps.DataLoader(Pairs(8), worker_init_fn=bad_init, seed=seed, **how)  # type: ignore[var-annotated]
    with (
        ended(iter(loader)) as iterator,
        pytest.raises(ValueError, match=r"worker [01] cannot start"),
    ):
        next(iterator)


def test_worker_seeds_are_torchs() -> None:
    found = []
    for kind in (ps.DataLoader, TorchDataLoader):
        torch.manual_seed(2)
        found.append(batches(kind(Seeds(4), num_workers=2)))
    assert found[0] == found[1]


class Seeds(Squares):
    def __getitem__(self, index: int) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return torch.initial_seed(), info.seed, info.id, info.num_workers, torch.rand(())


def test_pin_memory_without_an_accelerator_only_warns() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    for how in ({}, {"num_workers": 1, "executor": "thread"}):
        with pytest.warns(UserWarning, match="no accelerator is found"):
            assert batches(ps.DataLoader(Squares(4), 2, pin_memory=True, **how)) == [[0, 1], [4, 9]]  # type: ignore[arg-type]


def test_pinned_batches_with_an_accelerator() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no accelerator")
    for how in ({}, {"num_workers": 1, "executor": "thread"}, {"num_workers": 1}):
        made = list(ps.DataLoader(Nested(4), 2, pin_memory=True, **how))  # type: ignore[arg-type,var-annotated]
        assert all(batch["image"].is_pinned() for batch in made)
        assert plain(made) == batches(TorchDataLoader(Nested(4), 2))


def test_too_many_workers_warn_at_construction() -> None:
    with pytest.warns(UserWarning, match="This DataLoader will create 500 worker processes"):
        ps.DataLoader(Squares(4), num_workers=500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.DataLoader(Squares(4), num_workers=1)


def test_collate_keeps_what_torch_keeps() -> None:
    samples = [Pair(1, "a"), Pair(2, "b")]
    loader = ps.DataLoader(samples, 2)  # type: ignore[arg-type,var-annotated]
    assert shape(next(iter(loader))) == shape(default_collate(samples))
    with pytest.raises(RuntimeError, match="equal size"):
        next(iter(ps.DataLoader([[1, 2], [3]], 2)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="default_collate"):
        next(iter(ps.DataLoader([object(), object()], 2)))  # type: ignore[arg-type]
