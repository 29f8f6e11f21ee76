"""Shards that are cut, damaged or missing, and what handlers make of them."""

from __future__ import annotations

import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from wds_support import classes, write_shards, write_tar

import penstock.wds as wds
from penstock.errors import ConfigError, ShardError


@pytest.fixture
def urls(tmp_path: Path) -> str:
    """Three shards, of which the second ends within its eighth sample."""
    urls = write_shards(tmp_path, 3)
    path = tmp_path / "001.tar"
    path.write_bytes(path.read_bytes()[: 7 * 2048 + 700])
    return urls


def test_a_cut_shard_is_tarfile_s_error_and_names_shard_and_byte(urls: str) -> None:
    with pytest.raises(tarfile.ReadError, match=r"001.tar: ends at byte 15036") as caught:
        list(wds.WebDataset(urls))
    assert isinstance(caught.value, ShardError)


@pytest.mark.parametrize("handler", [wds.ignore_and_continue, wds.warn_and_continue])
def test_continue_drops_what_is_not_whole_and_goes_on(urls: str, handler: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert classes(wds.WebDataset(urls, handler=handler)) == [*range(17), *range(20, 30)]  # type: ignore[arg-type]


def test_stop_ends_the_stream(urls: str) -> None:
    assert classes(wds.WebDataset(urls, handler=wds.ignore_and_stop)) == list(range(17))
    with pytest.warns(UserWarning, match=r"001\.tar"):
        assert classes(wds.WebDataset(urls, handler=wds.warn_and_stop)) == list(range(17))


def test_a_cut_sample_never_joins_the_next_shard_s(tmp_path: Path) -> None:
    first = write_tar(tmp_path / "a.tar", [("x.jpg", b"1" * 600), ("x.cls", b"1" * 600)])
    second = write_tar(tmp_path / "b.tar", [("x.cls", b"2"), ("x.txt", b"3")])
    path = tmp_path / "a.tar"
    path.write_bytes(path.read_bytes()[:2300])
    samples = list(wds.WebDataset([first, second], handler=wds.ignore_and_continue))
    assert [(s["__url__"], s["cls"]) for s in samples] == [(second, b"2")]


def test_missing_files(tmp_path: Path, urls: str) -> None:
    missing = str(tmp_path / "nothing.tar")
    with pytest.raises(OSError, match=r"nothing\.tar"):
        list(wds.WebDataset(missing))
    good = str(tmp_path / "000.tar")
    assert len(list(wds.WebDataset([missing, good], handler=wds.ignore_and_continue))) == 10
    assert list(wds.WebDataset([missing, good], handler=wds.ignore_and_stop, empty_check=False)) == []


def test_duplicates(tmp_path: Path) -> None:
    url = write_tar(tmp_path / "a.tar", [("x.jpg", b"1"), ("x.JPG", b"2"), ("y.jpg", b"3")])
    with pytest.raises(ValueError, match=r"x.JPG: duplicate file name in tar file jpg \['__key__', '__url__', 'jpg'\]"):
        list(wds.WebDataset(url))
    assert [s["jpg"] for s in wds.WebDataset(url, handler=wds.ignore_and_continue)] == [b"1", b"3"]


def test_what_is_no_data_set(tmp_path: Path) -> None:
    for urls, message in (
        (5, "cannot handle urls of type <class 'int'>"),
        ("list.json", "unimplemented"),
        ("mix.yaml", "penstock.Mixture"),
        ([], "empty"),
    ):
        with pytest.raises(ValueError, match=message):
            wds.WebDataset(urls)
    with pytest.raises(ValueError, match=r"cache directory /not/there does not exist"):
        wds.WebDataset("a.tar", cache_dir="/not/there")
    with pytest.raises(ValueError, match="pipeline stage received no data at all"):
        list(wds.DataPipeline(iter([]), wds.non_empty))
    with pytest.raises(ValueError, match="needs a source"):
        list(wds.DataPipeline())


def test_folders_lists_and_globs(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 3)
    for spec in (
        f"{tmp_path}/",
        f"{tmp_path}/*.tar",
        f"{tmp_path}/000.tar::{tmp_path}/00{{1,2}}.tar",
        [f"{tmp_path}/00{{0..1}}.tar", tmp_path / "002.tar"],
        f"file:{urls}",
    ):
        assert classes(wds.WebDataset(spec)) == list(range(30))


def test_the_parts_for_stages_of_one_s_own(urls: str) -> None:
    from penstock.wds.tariterators import (
        base_plus_ext,
        group_by_keys,
        tar_file_expander,
        tar_file_iterator,
        url_opener,
        valid_sample,
    )

    def stage(src):  # type: ignore[no-untyped-def]
        streams = url_opener(src, handler=wds.ignore_and_continue)
        return group_by_keys(tar_file_expander(streams, handler=wds.ignore_and_continue))

    found = list(wds.DataPipeline(wds.SimpleShardList(urls), wds.split_by_worker, stage))
    assert classes(s for s in found if "cls" in s) == [*range(17), *range(20, 30)]
    with wds.gopen(urls.replace("{000..002}", "001")) as cut:
        assert len(list(tar_file_iterator(cut, handler=wds.ignore_and_stop))) > 7
    assert base_plus_ext("a/b.c/d.seg.png") == ("a/b.c/d", "seg.png")
    assert base_plus_ext("a/b") == (None, None)
    assert valid_sample({"a": 1})
    assert not valid_sample({})
    assert not valid_sample({"a": 1, "__bad__": True})


@pytest.mark.parametrize("nshards", [None, float("inf"), 2.0])
def test_a_number_of_draws_is_whole(nshards: Any) -> None:
    with pytest.raises(ConfigError, match="whole number of shards"):
        wds.ResampledShards(["a.tar"], nshards=nshards)
