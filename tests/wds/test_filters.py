"""The fluid methods and filters, one by one."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from wds_support import classes, write_shards, write_tar

import penstock as ps
import penstock.wds as wds
from penstock.wds import filters


@pytest.fixture
def urls(tmp_path: Path) -> str:
    return write_shards(tmp_path, 3)


def test_a_sample_has_its_key_shard_and_path(urls: str) -> None:
    sample = next(iter(wds.WebDataset(urls)))
    path = urls.replace("{000..002}", "000")
    assert sample == {
        "__key__": "000000",
        "__url__": path,
        "__local_path__": path,
        "txt": b"text 0",
        "cls": b"0",
    }


def test_the_article_s_chain(urls: str) -> None:
    dataset = wds.WebDataset(urls).shuffle(100).decode().to_tuple("txt", "cls").batched(7)
    batches = list(dataset)
    assert [len(b[0]) for b in batches] == [7, 7, 7, 7, 2]
    assert sorted(classes(batches)) == list(range(30))
    assert isinstance(batches[0], tuple)
    assert isinstance(batches[0][1], np.ndarray)


def test_batched_without_partial_and_unbatched_again(urls: str) -> None:
    dataset = wds.WebDataset(urls).decode().to_tuple("txt", "cls").batched(7, partial=False)
    assert len(classes(dataset)) == 28
    assert classes(dataset.unbatched()) == list(range(28))
    assert classes(wds.WebDataset(urls).decode().batched(4).unbatched()) == list(range(30))


def test_listed_and_unlisted(urls: str) -> None:
    lists = wds.WebDataset(urls).decode().to_tuple("cls").listed(8)
    assert [len(x) for x in lists] == [8, 8, 8, 6]
    assert classes(lists.unlisted()) == list(range(30))


def test_collation_stacks_tensors_and_arrays_and_lists_the_rest() -> None:
    batch = filters.default_collation_fn([(1, torch.ones(2), np.ones(3), "a"), (2, torch.ones(2), np.ones(3), "b")])
    assert batch[0].tolist() == [1, 2]
    assert batch[1].shape == (2, 2)
    assert batch[2].shape == (2, 3)
    assert batch[3] == ["a", "b"]
    with pytest.raises(ValueError, match="keys don't match in different samples"):
        filters.default_collation_fn([{"a": 1}, {"b": 1}])


@pytest.mark.parametrize("sample", [1, "ab", torch.ones(2)])
def test_collation_of_samples_without_columns_says_what_to_do(sample: Any) -> None:
    with pytest.raises(
        ValueError, match=f"of type {type(sample).__name__}, only dicts and tuples: use to_tuple before"
    ):
        filters.default_collation_fn([sample, sample])


def test_map_drops_none_and_keeps_the_key(urls: str) -> None:
    dataset = wds.WebDataset(urls).map(lambda s: {"cls": int(s["cls"])} if int(s["cls"]) % 2 else None)
    samples = list(dataset)
    assert classes(samples) == list(range(1, 30, 2))
    assert samples[0]["__key__"] == "000001"


def test_select_slice_and_map_tuple(urls: str) -> None:
    dataset = wds.WebDataset(urls).decode().select(lambda s: s["cls"] % 3 == 0).to_tuple("txt", "cls")
    assert classes(dataset) == list(range(0, 30, 3))
    assert classes(dataset.slice(2, 8, 2)) == [6, 12, 18]
    assert next(iter(dataset.map_tuple(None, lambda n: n + 100))) == ("text 0", 100)


def test_rename_and_what_is_missing(urls: str) -> None:
    assert "text" in next(iter(wds.WebDataset(urls).rename(text="caption;txt")))
    assert set(next(iter(wds.WebDataset(urls).rename(text="txt", keep=False)))) == {"text"}
    with pytest.raises(ValueError, match="didn't find"):
        list(wds.WebDataset(urls).rename(x="png"))
    with pytest.raises(ValueError, match="didn't find"):
        list(wds.WebDataset(urls).to_tuple("png;jpg", "cls"))
    with pytest.raises(KeyError):
        list(wds.WebDataset(urls).map_dict(png=int))
    assert next(iter(wds.WebDataset(urls).to_tuple("png cls", missing_is_error=False))) == (None, b"0")
    assert list(wds.WebDataset(urls).to_tuple("png", handler=wds.ignore_and_continue)) == []


def test_extract_and_rename_keys_by_patterns(urls: str) -> None:
    assert next(iter(wds.WebDataset(urls).extract_keys("*.txt", "cls"))) == (b"text 0", b"0")
    assert set(next(iter(wds.WebDataset(urls).rename_keys(text="txt")))) == {"text"}
    assert set(next(iter(wds.WebDataset(urls).rename_keys(text="txt", keep_unselected=True)))) >= {"text", "__key__"}
    with pytest.raises(ValueError, match="Not all patterns"):
        list(wds.WebDataset(urls).rename_keys(("image", "*.png")))
    with pytest.raises(ValueError, match=r"Cannot find \['\*.png'\] in sample keys"):
        list(wds.WebDataset(urls).extract_keys("*.png"))


def test_associate_and_log_keys_and_info(urls: str, tmp_path: Path) -> None:
    log, out = tmp_path / "log.txt", io.StringIO()
    dataset = wds.WebDataset(urls).associate({"000001": {"weight": 2}}).log_keys(str(log)).info(stream=out, n=1)
    samples = list(dataset)
    assert samples[1]["weight"] == 2
    assert log.read_text().splitlines()[29] == "29\tNone\tNone\t000029"
    assert "000000" in out.getvalue()
    assert "000001" not in out.getvalue()


def test_rsample_takes_about_so_many_and_others_every_epoch(tmp_path: Path) -> None:
    dataset = wds.WebDataset(write_shards(tmp_path, 4, 250)).rsample(0.3)
    first, second = classes(dataset), classes(dataset)
    assert 220 < len(first) < 380
    assert first != second


def test_shuffle_of_nothing_and_of_one_and_its_size(urls: str) -> None:
    assert list(wds.shuffle(10)(iter([]))) == []
    assert list(wds.shuffle(10)(iter([5]))) == [5]
    assert list(wds.shuffle(0)(iter(range(5)))) == list(range(5))
    mixed = list(wds.shuffle(100, initial=50)(iter(range(1000))))
    assert sorted(mixed) == list(range(1000))
    assert mixed != list(range(1000))
    assert max(abs(at - item) for at, item in enumerate(mixed)) > 100


def test_filters_are_stages_and_pickle(urls: str) -> None:
    stages = [
        wds.SimpleShardList(urls),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.shuffle(5),
        wds.decode("rgb8"),
        wds.rename(text="txt"),
        wds.map_dict(cls=abs),
        wds.to_tuple("text", "cls"),
        wds.batched(4),
        wds.unbatched(),
        wds.slice(3),
    ]
    again = pickle.loads(pickle.dumps(wds.DataPipeline(*stages)))
    assert list(again) == list(wds.DataPipeline(*stages))


def test_any_iterable_or_function_can_be_a_stage(urls: str) -> None:
    pipeline = wds.DataPipeline(lambda: iter(range(4)), None, [lambda src: (x + 1 for x in src)], wds.map(str))
    assert list(pipeline) == ["1", "2", "3", "4"]
    pipeline.append(wds.map(int))
    assert list(pipeline.compose(wds.slice(2))) == [1, 2]
    with pytest.raises(ValueError, match="not a valid pipeline stage"):
        list(wds.DataPipeline(range(3), 5))

    class Twice(wds.PipelineStage):
        def run(self, src):  # type: ignore[no-untyped-def, override]
            for x in src:
                yield x
                yield x

    assert list(wds.DataPipeline(range(2), Twice())) == [0, 0, 1, 1]


def test_own_filters(urls: str) -> None:
    @wds.pipelinefilter
    def plus(src, n):  # type: ignore[no-untyped-def]
        for x in src:
            yield x + n

    assert list(wds.DataPipeline(range(3), plus(10))) == [10, 11, 12]


def test_length_is_what_was_said(urls: str) -> None:
    dataset = wds.WebDataset(urls)
    with pytest.raises(TypeError, match="has no len"):
        len(dataset)
    assert dataset
    assert len(dataset.with_length(17)) == 17
    assert type(dataset) is wds.WebDataset
    assert len(list(dataset)) == 30


def test_repeat_and_with_epoch(urls: str) -> None:
    assert len(classes(wds.WebDataset(urls).repeat(2))) == 60
    assert len(classes(wds.WebDataset(urls).repeat(nbatches=35))) == 35
    dataset = wds.WebDataset(urls).with_epoch(20)
    assert classes(dataset) + classes(dataset) + classes(dataset) == [*range(30), *range(30)]


def _numbers(urls: str) -> Any:
    return wds.WebDataset(urls).to_tuple("cls").map(lambda item: int(item[0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda urls: _numbers(urls),
        lambda urls: wds.WebLoader(_numbers(urls), batch_size=None),
        lambda urls: ps.DataLoader(_numbers(urls).with_epoch(20), batch_size=None),
    ],
)
def test_another_with_epoch_holds_from_the_next_epoch_on(make: Callable[[str], Any], urls: str) -> None:
    loader, other = make(urls), make(urls)
    sized, same = (made.dataset if isinstance(made, ps.DataLoader) else made for made in (loader, other))
    sized.with_epoch(20)
    assert list(loader) == list(range(20))
    sized.with_epoch(3)
    assert [list(loader), list(loader)] == [[20, 21, 22], [23, 24, 25]]
    same.with_epoch(3)
    other.load_state_dict(loader.state_dict())
    assert list(other) == [26, 27, 28]
    sized.append(wds.map(lambda number: -1))
    assert list(loader) == [-1, -1, -1]


def test_a_stream_without_samples_ends_instead_of_looking_for_ever(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 1)
    with pytest.raises(ValueError, match="yields no samples"):
        list(wds.WebDataset(urls).select(lambda s: False).with_epoch(3))


def test_used_as_a_context_manager(urls: str) -> None:
    with wds.WebDataset(urls) as dataset:
        next(iter(dataset))


def test_cached_in_memory(urls: str) -> None:
    read = []
    dataset = wds.WebDataset(urls).map(lambda s: read.append(1) or s).mcached()
    assert classes(dataset) == classes(dataset) == list(range(30))
    assert len(read) == 30


def test_retired_names_say_what_to_use() -> None:
    for name in ("MultiShardSample", "LRUCleanup", "tenbin"):
        with pytest.raises(AttributeError, match="use "):
            getattr(wds, name)
        with pytest.raises(ValueError, match=name):
            getattr(wds, name)
    assert not hasattr(wds, "MultiShardSample")
    with pytest.raises(ImportError, match=r"penstock\.wds has no MultiShardSample; use RandomMix"):
        exec("from penstock.wds import MultiShardSample")


def test_every_name_is_there() -> None:
    assert [name for name in wds.__all__ if not hasattr(wds, name)] == []


def test_small_things() -> None:
    assert wds.getfirst({"a": 1}, "b;a") == 1
    assert wds.transform_with((1, 2), [str, None]) == ["1", 2]
    assert list(wds.MockDataset(7, 2)) == [7, 7]
    assert list(wds.FluidWrapper(range(3)).map(str)) == ["0", "1", "2"]
    five = wds.with_epoch(range(3), 5)
    assert list(five) + list(five) == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert len(wds.with_length(range(3), 9)) == 9
    assert list(wds.repeatedly(range(3), nbatches=5)) == [0, 1, 2, 0, 1]
    assert len(list(wds.repeatedly(range(3), nepochs=2))) == 6
    assert sorted(set(wds.slice(50)(wds.resampled()(iter(range(3)))))) == [0, 1, 2]
    assert wds.filters.parse_field_spec("a;b c") == [["a", "b"], ["c"]]


def test_names_within_a_shard(tmp_path: Path) -> None:
    url = write_tar(
        tmp_path / "a.tar",
        [("d.1/a.JPG", b"1"), ("d.1/a.seg.png", b"2"), ("__meta__/x.txt", b"3"), ("README", b"4"), ("d.1/b.jpg", b"5")],
    )
    assert [{k: v for k, v in s.items() if not k.startswith("__")} for s in wds.WebDataset(url)] == [
        {"jpg": b"1", "seg.png": b"2"},
        {"jpg": b"5"},
    ]
    only = wds.WebDataset(url, select_files=lambda name: name.lower().endswith("jpg"))
    assert [s["__key__"] for s in only] == ["d.1/a", "d.1/b"]
    moved = wds.WebDataset(url, rename_files=lambda name: name.replace("JPG", "x").replace("jpg", "x"))
    assert all("x" in s for s in moved)
