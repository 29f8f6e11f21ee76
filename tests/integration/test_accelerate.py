"""Hugging Face Accelerate: what `Accelerator.prepare` makes of our loaders is still made by Penstock, and resumes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from busy_support import HANG
from full_run import full_only
from gloo_support import start_ranks, write_rows
from integration_support import SIZES, Noisy, begin, deal, deal_again, gather, go_on, leave_to_accelerate
from interpreter_support import run
from loader_support import Range, Stream
from pairwise import each_value

import penstock as ps

pytest.importorskip("accelerate")
import accelerate
from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState

from penstock.errors import ConfigError
from penstock.integrations.accelerate import Accelerator, like, skip_first_batches

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*does not declare itself pure")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Accelerate keeps its state in singletons."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make(**how: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(Noisy(22), batch_size=4, shuffle="global", seed=5, **how)


def rows(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


HOW = [
    {},
    {"num_workers": 2, "executor": "thread"},
    {"num_workers": 2, "executor": "process", "persistent_workers": True},
]


@pytest.mark.parametrize("how", HOW, ids=["inline", "thread", "process"])
def test_prepared_loaders_are_ours(how: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True)
    loader = make(**how)
    prepared = accelerator.prepare(loader)
    assert prepared.base_dataloader is loader
    assert isinstance(prepared, ps.DataLoader)
    expected = make(**how)
    assert rows(prepared) == rows(expected)
    assert rows(prepared) == rows(expected)  # the second epoch is another one
    assert loader.stats()["batches"] == 12
    assert len(prepared) == 6
    assert prepared.total_batch_size == 4
    assert prepared.batch_size == 4


def test_loaders_of_torch_are_left_alone() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(make())
    torchs = torch.utils.data.DataLoader(Range(9), batch_size=2)
    assert type(accelerator.prepare(torchs).base_dataloader) is torch.utils.data.DataLoader
    assert rows(accelerator.prepare(torchs)) == rows(torchs)


def test_an_attribute_keeps_accelerate_off() -> None:
    loader = make()
    loader._is_accelerate_prepared = True  # type: ignore[assignment]
    assert Accelerator(cpu=True).prepare(loader) is loader
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
    with pytest.raises(AttributeError):
        ps.DataLoader.no_such_attribute  # type: ignore[attr-defined]  # noqa: B018


def test_accelerates_own_accelerator_is_refused() -> None:
    """It would make torch's loader."""
    with pytest.raises(ConfigError, match=r"from penstock\.integrations\.accelerate import Accelerator"):
        accelerate.Accelerator(cpu=True).prepare(make())


def test_accelerates_own_function_that_skips_is_refused() -> None:
    prepared = Accelerator(cpu=True).prepare(make())
    with pytest.raises(ConfigError, match="replace this prepared loader by torch's"):
        accelerate.skip_first_batches(prepared, 2)
    assert rows(skip_first_batches(prepared, 2)) == rows(make())[2:]


def test_skipping_in_a_loader_that_was_not_prepared_is_refused() -> None:
    """Accelerate would make torch's loader, which reads the order of epoch 0 whatever the loader's epoch is."""
    loader = make()
    with pytest.raises(ConfigError, match="prepare the DataLoader first"):
        skip_first_batches(loader, 2)
    with pytest.raises(ConfigError, match="prepare the DataLoader first"):
        Accelerator(cpu=True).skip_first_batches(loader, 2)
    torchs = torch.utils.data.DataLoader(Range(9), batch_size=2)
    assert rows(skip_first_batches(torchs, 2)) == rows(torchs)[2:]


def test_what_is_prepared_passes_accelerates_own_accelerator() -> None:
    prepared = Accelerator(cpu=True).prepare_data_loader(make())
    assert accelerate.Accelerator(cpu=True).prepare(prepared) is prepared


def test_preparing_twice_changes_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(make())
    assert accelerator.prepare(prepared) is prepared


def test_gradient_accumulation_sees_the_end_of_the_epoch() -> None:
    """Accelerate steps at the last batch of an epoch also if the accumulation is not full."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make())
    steps = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.float()).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.append(accelerator.sync_gradients)
    assert steps == [False, False, False, True, False, True]


def test_remainder_is_cut_off_in_metrics() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(make())
    gathered = [accelerator.gather_for_metrics(batch).shape[0] for batch in prepared]
    assert gathered == [4, 4, 4, 4, 4, 2]


@full_only("workers at each position", but=["inline", "thread", "1-process", "6-process", "11-process"])
@pytest.mark.parametrize("how", HOW, ids=["inline", "thread", "process"])
@pytest.mark.parametrize("had", [1, 3, 5, 6, 8, 11])
def test_save_state_and_load_state_go_on_at_the_batch(tmp_path: Path, how: dict[str, Any], had: int) -> None:
    """Six batches an epoch; saved after so many, in a loop over epochs."""
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=stateful)
    prepared = accelerator.prepare(make(**how))
    seen: list[Any] = []
    for _ in range(3):
        for batch in prepared:
            seen.append(batch.tolist())
            if len(seen) == had:
                accelerator.save_state(str(tmp_path / "state"))
    assert len(seen) == 18
    _reset()
    accelerator = Accelerator(cpu=True, dataloader_config=stateful)
    prepared = accelerator.prepare(make(**how))
    accelerator.load_state(str(tmp_path / "state"))
    first = prepared.base_dataloader.epoch
    rest = [batch.tolist() for _ in range(first, 3) for batch in prepared]
    assert rest == seen[had:]


def _reset() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_states_are_those_of_the_loader_itself() -> None:
    prepared = Accelerator(cpu=True).prepare(make())
    iterator = iter(prepared)
    next(iterator)
    next(iterator)
    loader = make()
    loader.load_state_dict(prepared.state_dict())
    expected = make()
    assert rows(loader) == rows(expected)[2:]


def test_epoch_can_be_set() -> None:
    prepared = Accelerator(cpu=True).prepare(make())
    prepared.set_epoch(3)
    expected = make()
    expected.set_epoch(3)
    assert rows(prepared) == rows(expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda: ps.DataLoader(Range(7), batch_size=2),
        lambda: ps.DataLoader(Range(7), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: ps.DataLoader(Range(7), batch_sampler=[[1], [2, 3]]),
        lambda: ps.DataLoader(Stream(7), batch_size=2),
        lambda: ps.DataLoader(Stream(7), batch_size=2, num_workers=2),
        lambda: ps.DataLoader(Range(7), batch_size=2, sampler=[5, 4, 1]),
    ],
    ids=["plain", "generator", "batch sampler", "stream", "stream with workers", "sampler"],
)
def test_loaders_without_a_seed(build: Callable[[], ps.DataLoader[Any]]) -> None:
    prepared = Accelerator(cpu=True).prepare(build())
    assert isinstance(prepared.base_dataloader, ps.DataLoader)
    assert rows(prepared) == rows(build())


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 2},
        {"num_workers": 2, "prefetch_factor": 3},
        {"num_workers": 1, "threads_per_worker": 2},
        {"num_workers": 3, "executor": "thread"},
    ],
)
def test_what_makes_batches_goes_on_making_them(how: dict[str, Any]) -> None:
    """Small batches keep their depth unless the user chose another."""
    loader = make(**how)
    config, same = loader.config, like(loader, batch_sampler=loader.batch_sampler).config
    for value in ("small_batch_depth", "depth", "kind", "workers", "threads"):
        assert getattr(same, value) == getattr(config, value)


@full_only("an interpreter that imports Accelerate")
def test_loaders_that_are_older_than_the_import_are_kept() -> None:
    script = """
        import sys
        import penstock as ps
        from torch.utils.data import TensorDataset
        import torch

        loader = ps.DataLoader(TensorDataset(torch.arange(22)), batch_size=4, shuffle="global", seed=5)
        expected = [batch.tolist() for batch, in loader]
        loader.set_epoch(0)
        assert "accelerate" not in sys.modules

        from penstock.integrations.accelerate import Accelerator

        prepared = Accelerator(cpu=True).prepare(loader)
        assert isinstance(prepared.base_dataloader, ps.DataLoader)
        prepared.set_epoch(0)
        assert [batch.tolist() for batch, in prepared] == expected
    """
    done = run(["-c", textwrap.dedent(script)], timeout=HANG)
    assert done.returncode == 0, done.stderr


def test_dispatched_batches_are_ours_too() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    prepared = accelerator.prepare(make())
    assert isinstance(prepared.base_dataloader, ps.DataLoader)
    assert rows(prepared) == rows(make())


@pytest.mark.parametrize("seed", [None, 5])
def test_seedable_sampler_of_accelerate(seed: int | None) -> None:
    """It takes the place of torch's shuffle, and not of ours."""
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=11)
    loader = ps.DataLoader(Noisy(22), 4, shuffle=True, seed=seed)
    prepared = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    assert isinstance(prepared.base_dataloader, ps.DataLoader)
    found = [[[int(sample[0]) for sample in batch] for batch in rows(prepared)] for _ in range(2)]
    _reset()
    torchs = torch.utils.data.DataLoader(Range(22), 4, shuffle=True)
    theirs = Accelerator(cpu=True, dataloader_config=config).prepare(torchs)
    assert (found == [rows(theirs) for _ in range(2)]) == (seed is None)
    assert found[0] != found[1]


# Several ranks.


@full_only("two ranks for each", but=["global-options0", "None-options2"])
@pytest.mark.parametrize(
    ("shuffle", "options"), each_value(["global", None], [{}, {"split_batches": True}, {"even_batches": False}])
)
def test_ranks_share_the_batches_of_one(shuffle: str | None, options: dict[str, Any]) -> None:
    """As Accelerate deals those of torch's loader over the same order, sample by sample."""
    found = start_ranks(2, deal, 2, shuffle, options)
    for n in SIZES:
        for ours, theirs, draws_of_one, made in (rank[n] for rank in found):
            assert ours == theirs
            assert draws_of_one
            assert made == len(ours)


def test_two_ranks_resume_what_three_began() -> None:
    begun = start_ranks(3, begin, 3)
    ended = start_ranks(2, go_on, 2, begun[0][1])
    seen = [index for rank, _ in begun for index in rank] + [index for rank in ended for index in rank]
    assert sorted(seen) == list(range(48))


@full_only("two ranks for each", but=["DistributedSampler", "RankDataset"])
@pytest.mark.parametrize(
    "kind", ["DistributedSampler", "RankDataset", "torch's DistributedSampler", "somebody's", "GroupedBatchSampler"]
)
def test_loaders_that_are_dealt_already_are_not_dealt_again(tmp_path: Path, kind: str) -> None:
    found = start_ranks(2, deal_again, 2, str(write_rows(tmp_path, 20)), kind)
    assert sorted(index for rank in found for index in rank) == list(range(20))


def test_metrics_have_each_sample_once_whoever_splits(tmp_path: Path) -> None:
    """Of 76 samples on three ranks, two repeat their last one, and these are not the last of those gathered."""
    ranks = start_ranks(3, gather, 3, str(write_rows(tmp_path, 76)))
    assert ranks[0] == ranks[1] == ranks[2]
    for name, found in ranks[0].items():
        if name == "unequal":
            assert "equally many batches on all ranks, but some have 7 and others 6" in found
        elif name in ("sampler over a dataset", "groups"):
            assert "gather_for_metrics cannot tell which samples" in found
        elif name == "loader, drop_last":
            assert len(found) == len(set(found)) == 72
        else:
            assert found == list(range(76)), name


@full_only("two ranks for each", but=["generator", "stream"])
@pytest.mark.parametrize("kind", ["global generator", "generator", "stream", "stream of every rank"])
def test_without_a_seed_accelerate_deals(kind: str) -> None:
    found = start_ranks(2, leave_to_accelerate, 2, kind)
    for epoch in range(2):
        seen = [index for ours, _ in found for batch in ours[epoch] for index in batch]
        assert sorted(seen) == list(range(24))
    assert all(made for _, made in found)
