"""Programs written for WebDataset, with the import changed: the article's, its manual's, and a large trainer's."""

from __future__ import annotations

import io
import logging
import multiprocessing
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from busy_support import HANG
from PIL import Image
from wds_support import worker, world, write_tar

import penstock.wds as wds
from penstock.wds.filters import _shuffle
from penstock.wds.tariterators import base_plus_ext, tar_file_expander, url_opener, valid_sample


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight shards of twelve images with captions; every fifth has no caption."""
    folder, rng = tmp_path_factory.mktemp("captions"), np.random.default_rng(0)
    for shard in range(8):
        members = []
        for number in range(shard * 12, shard * 12 + 12):
            out = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(out, "JPEG")
            members.append((f"{number:05d}.jpg", out.getvalue()))
            members.append((f"{number:05d}.json", b'{"number": %d}' % number))
            if number % 5:
                members.append((f"{number:05d}.txt", f"caption {number}".encode()))
        write_tar(folder / f"{shard:02d}.tar", members)
    return str(folder / "{00..07}.tar")


def log_and_continue(exn: Exception) -> bool:
    logging.warning("Handling webdataset error (%r). Ignoring.", exn)
    return True


class detshuffle2(wds.PipelineStage):
    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1) -> None:
        self.bufsize, self.initial, self.seed, self.epoch = bufsize, initial, seed, epoch

    def run(self, src: Any = None) -> Any:
        self.epoch += 1
        rng = random.Random()
        rng.seed(self.seed + self.epoch)
        return _shuffle(src, self.bufsize, self.initial, rng)


def group_nothrow(data: Any, handler: Any = None) -> Any:
    current: dict[str, Any] = {}
    for file in data:
        prefix, suffix = base_plus_ext(file["fname"])
        if prefix is None:
            continue
        if current.get("__key__") != prefix or suffix in current:
            if valid_sample(current):
                yield current
            current = {"__key__": prefix, "__url__": file["__url__"]}
        current[str(suffix).lower()] = file["data"]
    if valid_sample(current):
        yield current


def samples_nothrow(src: Any, handler: Any = log_and_continue) -> Any:
    streams = url_opener(src, handler=handler)
    return group_nothrow(tar_file_expander(streams, handler=handler), handler=handler)


def has_caption_and_image(sample: dict[str, Any]) -> bool:
    return "txt" in sample and any(e in sample for e in ("png", "jpg", "jpeg", "webp"))


def preprocess(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((8, 8)))).permute(2, 0, 1)


def tokenize(text: str) -> int:
    return int(text.split()[1])


def trainer_s(urls: str, *, batches: int | None, workers: int, resampled: bool = False) -> Any:
    pipeline: list[Any] = [wds.ResampledShards(urls) if resampled else wds.SimpleShardList(urls)]
    if not resampled:
        pipeline += [detshuffle2(bufsize=100, initial=10, seed=3), wds.split_by_node, wds.split_by_worker]
    pipeline += [samples_nothrow, wds.shuffle(bufsize=20, initial=5)]
    pipeline += [
        wds.select(has_caption_and_image),
        wds.decode("pilrgb", handler=log_and_continue),
        wds.rename(image="jpg;png;jpeg;webp", text="txt"),
        wds.map_dict(image=preprocess, text=tokenize),
        wds.to_tuple("image", "text"),
        wds.batched(4, partial=batches is None),
    ]
    dataset = wds.DataPipeline(*pipeline)
    if batches is not None:
        dataset = dataset.with_epoch(batches)
    return wds.WebLoader(dataset, batch_size=None, shuffle=False, num_workers=workers, persistent_workers=workers > 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_with_pairs_of_images_and_captions(urls: str, workers: int) -> None:
    loader = trainer_s(urls, batches=None, workers=workers)
    loader.num_batches = 5
    texts = [int(t) for images, texts in loader for t in texts if images.shape[1:] == (3, 8, 8)]
    assert sorted(texts) == [n for n in range(96) if n % 5]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("resampled", [False, True])
def test_its_epochs(urls: str, workers: int, resampled: bool) -> None:
    loader = trainer_s(urls, batches=6, workers=workers, resampled=resampled)
    assert [len(list(loader)) for _ in range(2)] == [6 * max(1, workers)] * 2


def test_its_ranks_read_different_samples(urls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[int] = Counter()
    for rank in range(2):
        with world(monkeypatch, rank, 2):
            for number in range(2):
                loader = trainer_s(urls, batches=None, workers=0)  # its own shuffle counts epochs by itself
                with worker(monkeypatch, number, 2):
                    found.update(int(t) for _, texts in loader.loader.dataset for t in texts)
    assert found == dict.fromkeys([n for n in range(96) if n % 5], 1)


def test_the_manual_s_fluid_form(urls: str) -> None:
    dataset = (
        wds.WebDataset(urls, shardshuffle=100, nodesplitter=wds.split_by_node)
        .shuffle(50)
        .decode("rgb")
        .to_tuple("jpg;png;jpeg", "json")
        .map_tuple(lambda image: image.mean(), lambda info: info["number"])
        .batched(16)
    )
    loader = wds.WebLoader(dataset, num_workers=2, batch_size=None)
    loader = loader.unbatched().shuffle(100).batched(16)
    numbers = [int(n) for _, batch in loader for n in batch]
    assert sorted(numbers) == list(range(96))


def test_the_manual_s_pipeline_form(urls: str) -> None:
    dataset = wds.DataPipeline(
        wds.SimpleShardList(urls),
        wds.shuffle(100),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.shuffle(1000),
        wds.decode("torchrgb"),
        wds.to_tuple("jpg", "json"),
        wds.map_tuple(None, lambda info: info["number"]),
        wds.batched(16),
    )
    loader = wds.WebLoader(dataset, num_workers=3, batch_size=None)
    batches = list(loader)
    assert sorted(int(n) for _, numbers in batches for n in numbers) == list(range(96))
    assert batches[0][0].shape == (16, 3, 16, 16)


def one_rank(urls: str, store: str, rank: int) -> None:
    """Steps with an all_reduce each, as training has."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dataset = wds.WebDataset(urls, shardshuffle=100, nodesplitter=wds.split_by_node)
    batches = dataset.shuffle(10).decode().to_tuple("json").batched(3)
    loader = wds.WebLoader(batches, batch_size=None, num_workers=1, multiprocessing_context="fork").with_epoch(20)
    for _ in range(2):
        steps = 0
        for _ in loader:
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            assert total.item() == 2
            steps += 1
        assert steps == 20
    torch.distributed.destroy_process_group()


def test_the_article_s_ranks(urls: str, tmp_path: Path) -> None:
    """Two ranks, gloo, one all_reduce a step: it ends, though the shards are not equal."""
    three = urls.replace("{00..07}", "{00..02}")
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=one_rank, args=(three, str(tmp_path / "store"), rank)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=HANG)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0]
