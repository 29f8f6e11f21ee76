"""maskrcnn-benchmark's two factories of samplers."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import SamplerError
from penstock.samplers import (
    BatchSampler,
    DistributedSampler,
    GroupedBatchSampler,
    IterationBasedBatchSampler,
    RandomSampler,
    SequentialSampler,
    aspect_ratio_groups,
    make_batch_data_sampler,
    make_data_sampler,
)


class Images:
    """Image shapes as a maskrcnn-benchmark data set offers them."""

    def __init__(self, n: int = 50) -> None:
        rng = np.random.default_rng(0)
        self.shapes = [(int(h), int(w)) for h, w in rng.integers(1, 9, (n, 2))]

    def __len__(self) -> int:
        return len(self.shapes)

    def get_img_info(self, index: int) -> dict[str, int]:
        return {"height": self.shapes[index][0], "width": self.shapes[index][1]}


def test_data_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_data_sampler(range(5), False, False)) is SequentialSampler
    shuffled = make_data_sampler(range(5), True, False)
    assert type(shuffled) is RandomSampler
    assert list(shuffled) == list(make_data_sampler(range(5), True, False)), "repeats without a state"
    assert type(make_data_sampler(range(5), "block", False)) is RandomSampler
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    distributed = make_data_sampler(range(6), False, True)
    assert type(distributed) is DistributedSampler
    assert list(distributed) == [1, 3, 5]


@pytest.mark.parametrize("bounds", [True, 1, [1.0], [0.5, 2.0], (2.0, 0.5, 1.0)])
def test_batches_by_aspect_ratio(bounds: Any) -> None:
    images = Images()
    bins = sorted(bounds if isinstance(bounds, list | tuple) else [1])
    groups = [bisect.bisect_right(bins, h / w) for h, w in images.shapes]
    batches = make_batch_data_sampler(images, make_data_sampler(images, True, False), bounds, 4)
    assert isinstance(batches, GroupedBatchSampler)
    assert batches.order == "first"
    listed = list(batches)
    assert len(batches) == len(listed)
    assert all(len({groups[i] for i in batch}) == 1 for batch in listed)
    assert sorted(i for batch in listed for i in batch) == list(range(50))
    places = {index: place for place, index in enumerate(make_data_sampler(images, True, False))}
    assert [places[batch[0]] for batch in listed] == sorted(places[batch[0]] for batch in listed)


def test_iterations_resume_by_number_alone() -> None:
    images = Images()

    def make(start: int) -> Any:
        return make_batch_data_sampler(images, make_data_sampler(images, True, False), True, 4, 40, start)

    whole = list(make(0))
    assert isinstance(make(0), IterationBasedBatchSampler)
    for start in (1, 13, 14, 29, 40):
        assert list(make(start)) == whole[start:]
        assert len(make(start)) == 40 - start


def test_without_grouping() -> None:
    batches = make_batch_data_sampler(range(5), SequentialSampler(range(5)), False, 2)
    assert isinstance(batches, BatchSampler)
    assert list(batches) == [[0, 1], [2, 3], [4]]
    with pytest.raises(SamplerError, match="needs num_iters"):
        make_batch_data_sampler(range(5), SequentialSampler(range(5)), False, 2, start_iter=3)
    with pytest.raises(SamplerError, match="aspect_grouping"):
        make_batch_data_sampler(range(5), SequentialSampler(range(5)), False, 2, sizes="x")


def test_where_groups_come_from(tmp_path: Path) -> None:
    from penstock.images.sizes import write_sizes
    from penstock.manifest import Manifest

    class WithArray(list[int]):
        group_ids = np.array([0, 1, 0])

    class WithFunction(list[int]):
        def group_ids(self) -> Any:
            return [0, 1, 1]

    assert aspect_ratio_groups(WithArray([1, 2, 3])).tolist() == [0, 1, 0]
    assert aspect_ratio_groups(WithFunction([1, 2, 3])).tolist() == [0, 1, 1]
    with pytest.raises(SamplerError, match="penstock manifest sizes"):
        aspect_ratio_groups([1, 2, 3])
    flat = Images(2)
    flat.shapes[1] = (3, 0)
    with pytest.raises(SamplerError, match="image 1 has no height or width"):
        aspect_ratio_groups(flat)
    meta = tmp_path / "meta.txt"
    meta.write_text("a 0\nb 1\nc 2\n")
    path = write_sizes(Manifest.open(meta), np.array([1, 2, 9], np.int32), np.array([2, 1, 2], np.int32))
    assert aspect_ratio_groups([1, 2, 3], [0.3, 1.0], sizes=path).tolist() == [2, 1, 0]
