"""Threads that a data set starts for itself: their draws repeat if they are given generators, else they are warned."""

from __future__ import annotations

import json
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from full_run import full_only
from loader_support import batches
from own_threads_support import Forgetful, OwnThreads, raise_warnings
from torch.utils.data import Dataset

import penstock as ps
from penstock import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "thread": {"executor": "thread", "num_workers": 2},
    "process": {"executor": "process", "num_workers": 2, "multiprocessing_context": "fork"},
    "process with threads": {
        "executor": "process",
        "num_workers": 1,
        "threads_per_worker": 2,
        "multiprocessing_context": "forkserver",
    },
}


@full_only("many starts of workers", but=["process", "thread", "inline"])
@pytest.mark.parametrize("name", EXECUTORS)
def test_threads_with_generators_draw_the_same_everywhere(name: str) -> None:
    def seen(**how: Any) -> list[Any]:
        loader = DataLoader(OwnThreads(), 4, shuffle=True, seed=5, **how)
        return [json.dumps(batch) for _ in range(2) for batch in batches(loader)]

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        truth, made = seen(), seen(**EXECUTORS[name])
    assert made == truth
    assert len(set(truth)) == 10


def test_draws_of_samples_and_their_threads_all_differ() -> None:
    _, own, parts = next(iter(DataLoader(OwnThreads(), 20, seed=5)))
    drawn = [*own.tolist(), *parts.flatten().tolist()]
    assert len(set(drawn)) == len(drawn) == 20 * (1 + 3 * 50)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", EXECUTORS)
def test_threads_without_generators_are_warned(name: str) -> None:
    init = None if name == "inline" else raise_warnings
    texts = [text for batch in DataLoader(Forgetful(8), 4, worker_init_fn=init, **EXECUTORS[name]) for text in batch]
    assert len(texts) == 8
    assert all("penstock.generator().spawn(n)" in text for text in texts)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_transform_of_ours_follows_the_generator_that_its_thread_was_given() -> None:
    from penstock.images.transforms import RandomCrop

    pixels = np.arange(64 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 64, 3)
    crop = RandomCrop(8)
    found: list[Any] = []

    def work(seed: int) -> None:
        with ps.use_generator(np.random.default_rng(seed)):
            found.append(np.asarray(crop(pixels)).tolist())

    for seed in (1, 1, 2):
        thread = threading.Thread(target=work, args=(seed,))
        thread.start()
        thread.join()
    assert found[0] == found[1] != found[2]


class Waiting(Dataset[int]):
    """Its samples are being made until somebody else has drawn."""

    def __init__(self) -> None:
        self.begun, self.drawn = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.begun.set()
        assert self.drawn.wait(60)
        return index


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_main_thread_may_draw_while_threads_make_batches() -> None:
    data = Waiting()
    loader = DataLoader(data, 2, executor="thread", num_workers=1)
    iterator = iter(loader)
    assert data.begun.wait(60)
    ps.generator().random()
    data.drawn.set()
    assert len(list(iterator)) == 2
