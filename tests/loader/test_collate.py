"""The default collate function: torch's values, and images keep their channels_last memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loader_support import EXECUTORS, Squares
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock import DataLoader
from penstock.loader.collate import collate

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Images(Squares):
    pure = True
    channels_last = True

    def __getitem__(self, index: int) -> Any:
        image = torch.arange(5 * 6 * 3, dtype=torch.uint8).view(5, 6, 3) + index
        return {"image": image.permute(2, 0, 1), "label": index}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("seed", [None, 1])
def test_channels_last_is_kept_in_every_executor(executor: str, seed: int | None) -> None:
    loader = DataLoader(Images(7), 3, executor=executor, num_workers=EXECUTORS[executor], seed=seed)
    for number, batch in enumerate(loader):
        expected = default_collate([Images(7)[index] for index in range(3 * number, min(3 * number + 3, 7))])
        assert torch.equal(batch["image"], expected["image"])
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
        assert batch["label"].tolist() == expected["label"].tolist()


def test_other_peoples_images_come_as_from_torch() -> None:
    class Theirs(Images):
        channels_last = False

    batch = next(iter(DataLoader(Theirs(7), 3)))
    assert batch["image"].is_contiguous()


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(3, 4, 5), torch.ones(3, 4, 5)],
        [torch.zeros(4, 5, 3).permute(2, 0, 1), torch.ones(3, 4, 5)],
        [torch.zeros(3, 4, 5), torch.ones(4, 5, 3).permute(2, 0, 1)],
        [torch.zeros(6, 8)[:, ::2], torch.ones(6, 8)[:, ::2]],
        [torch.zeros(1, 1, 3).permute(2, 0, 1)] * 2,
        [torch.zeros(4, 0, 3).permute(2, 0, 1)] * 2,
        [torch.zeros(8, 8, 8)[::2, ::2, ::2]] * 3,
        [torch.tensor(1.5), torch.tensor(2.5)],
        [(1, "a", {"x": 2.0}), (3, "b", {"x": 4.0})],
    ],
)
def test_values_are_torchs(samples: list[Any]) -> None:
    ours, torchs = collate(samples), default_collate(samples)
    if isinstance(torchs, torch.Tensor):
        assert ours.dtype == torchs.dtype
        assert ours.shape == torchs.shape
        assert torch.equal(ours, torchs)
    else:
        assert str(ours) == str(torchs)


def test_unequal_images_are_refused_in_torchs_words() -> None:
    samples = [torch.zeros(4, 5, 3).permute(2, 0, 1), torch.zeros(5, 5, 3).permute(2, 0, 1)]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collate(samples)


def test_tensor_subclasses_and_registered_types_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        pass

    monkeypatch.setitem(default_collate_fn_map, Named, lambda batch, *, collate_fn_map=None: len(batch))
    assert collate([Named(), Named()]) == 2


@pytest.mark.parametrize(
    "numbers",
    [[1, -2, 3], [0.5, 1.5], [True, False], [1, 2.5], [2**63 - 1, -(2**63)], [1, True], [float("nan"), 1.0]],
    ids=str,
)
def test_pythons_numbers_become_what_torch_makes_of_them(numbers: list[Any]) -> None:
    made, expected = collate(numbers), default_collate(numbers)
    assert made.dtype is expected.dtype
    assert torch.equal(made.nan_to_num(7), expected.nan_to_num(7))
    made.resize_(100)  # the memory is a tensor's own


def test_a_number_beyond_64_bits_is_refused_in_torchs_words() -> None:
    for make in (collate, default_collate):
        with pytest.raises(ValueError, match="Overflow"):
            make([1, 2**63])
