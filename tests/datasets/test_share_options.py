"""Options that all data sets of ours share: wrong ones are refused before a source is opened, by the class called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, PenstockError

FAMILIES: dict[str, Callable[..., Any]] = {
    "RankDataset": lambda **options: ps.RankDataset("missing.txt", **options),
    "MPDataset": lambda **options: ps.MPDataset("missing.txt", batch_size=2, **options),
    "ShardDataset": lambda **options: ps.ShardDataset("missing.tar", **options),
    "MDSDataset": lambda **options: ps.MDSDataset("missing", **options),
    "TableDataset": lambda **options: ps.TableDataset("missing.parquet", **options),
    "TokenDataset": lambda **options: ps.TokenDataset("missing.npy", sequence_length=4, **options),
    "ArrayDataset": lambda **options: ps.ArrayDataset("missing.npy", **options),
    "AudioDataset": lambda **options: ps.AudioDataset("missing.wav", **options),
    "VideoDataset": lambda **options: ps.VideoDataset("missing.mp4", **options),
    "LeRobotDataset": lambda **options: ps.LeRobotDataset("missing", **options),
    "RankServerDataset": lambda **options: ps.RankServerDataset("127.0.0.1:1", "missing", **options),
    "Mixture": lambda **options: ps.Mixture([(range(4), 1)], **options),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_option_names_the_class_and_the_closest_one(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'sed': did you mean 'seed'"):
        FAMILIES[name](sed=1)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'zzz'$"):
        FAMILIES[name](zzz=1)


def test_a_subclass_is_named() -> None:
    class Birds(ps.RankDataset):
        def __init__(self, path: str, *, feathers: bool = True, **options: Any) -> None:
            super().__init__(path, **options)

    with pytest.raises(TypeError, match=r"^Birds\(\) .* 'feather': did you mean 'feathers'"):
        Birds("missing.txt", feather=False)


WRONG: list[dict[str, Any]] = [
    *({"mini_epochs": value} for value in (1.5, "2", None, True)),
    *({"seed": value} for value in ("a", 1.0, None)),
    {"rank": "0", "world_size": 2},
    {"rank": 0, "world_size": "2"},
    *({"shuffle": value} for value in (3, True, ["global"])),
    *({"shuffle": "block", "block_size": value} for value in ("4", 1.5)),
    {"shuffle": "block", "window": 1.5},
    *({"remainder": value} for value in (3, [])),
]


@pytest.mark.parametrize("options", WRONG)
@pytest.mark.parametrize("name", FAMILIES)
def test_values_of_another_type_are_errors_of_ours(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: \w+= takes "):
        FAMILIES[name](**options)


WITHOUT_LOAD = ("Mixture", "VideoDataset", "AudioDataset", "LeRobotDataset")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_LOAD])
def test_load_is_a_function(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: load= takes a function, or None, got 3"):
        FAMILIES[name](load=3)
    with pytest.raises(ConfigError, match=f"^{name}: group= takes an integer"):
        FAMILIES[name](group="a")


def test_integers_of_numpy_are_integers() -> None:
    of_numpy = ps.Mixture([(range(8), 1)], seed=np.int64(3), rank=np.int32(0), world_size=np.int32(2))
    assert list(of_numpy) == list(ps.Mixture([(range(8), 1)], seed=3, rank=0, world_size=2))


SAMPLERS: list[Callable[[], Any]] = [
    lambda: ps.DistributedSampler(range(8), num_replicas="2"),  # type: ignore[arg-type]
    lambda: ps.DistributedSampler(range(8), num_replicas=2, rank="1"),  # type: ignore[arg-type]
    lambda: ps.InfiniteSampler(range(8), world_size=1.5, rank=0),  # type: ignore[arg-type]
    lambda: ps.GroupedBatchSampler(ps.SequentialSampler(range(8)), [0] * 8, 2, world_size="2", rank=0),  # type: ignore[arg-type]
    lambda: ps.DistributedSampler(range(8), seed="a"),  # type: ignore[arg-type]
    lambda: ps.DistributedSampler(range(8), shuffle=3),
    lambda: ps.DistributedSampler(range(8), shuffle=["global"]),  # type: ignore[arg-type]
    lambda: ps.RandomSampler(range(8), shuffle="global", seed=1.5),  # type: ignore[arg-type]
    lambda: ps.RandomSampler(range(8), shuffle="block", block_size="4"),  # type: ignore[arg-type]
    lambda: ps.InfiniteSampler(range(8), shuffle="block", window=1.5),  # type: ignore[arg-type]
    lambda: ps.WeightedRandomSampler([1.0] * 8, 8, seed="a"),  # type: ignore[arg-type]
    lambda: ps.DataLoader(range(8), shuffle=["global"]),  # type: ignore[arg-type]
    lambda: ps.DataLoader(range(8), shuffle=3),  # type: ignore[arg-type]
    lambda: ps.DataLoader(range(8), seed="a"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("make", SAMPLERS)
def test_samplers_and_loaders_refuse_other_types_by_errors_of_ours(make: Callable[[], Any]) -> None:
    with pytest.raises(PenstockError, match=r"must be (an )?integers?|takes True, False"):
        make()


def test_loaders_take_the_truth_of_torch_and_numpy() -> None:
    for yes in (True, 1, np.True_):
        assert sorted(map(int, ps.DataLoader(range(8), batch_size=None, shuffle=yes))) == [*range(8)]  # type: ignore[arg-type]
    for no in (False, 0, np.False_, None):
        assert [*map(int, ps.DataLoader(range(8), batch_size=None, shuffle=no))] == [*range(8)]  # type: ignore[arg-type]
