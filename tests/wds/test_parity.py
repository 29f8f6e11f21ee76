"""The same pipelines with WebDataset itself, where it is installed: equal results and equal errors."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from wds_support import write_shards, write_tar

import penstock.wds as ours

theirs: Any = pytest.importorskip("webdataset")

NAMED = {"__key__": "k", "a/B.txt": b"t", "cls": b"1", "png": b"p"}

_out = io.BytesIO()
Image.fromarray(np.arange(105, dtype=np.uint8).reshape(5, 7, 3)).save(_out, "PNG")
PNG = _out.getvalue()

CHAINS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda w, d: d,
    "decode": lambda w, d: d.decode(),
    "only": lambda w, d: d.decode(only=["cls"]),
    "handler": lambda w, d: d.decode(w.handle_extension("txt", len)),
    "tuple": lambda w, d: d.to_tuple("txt;png", "cls"),
    "tuple in one": lambda w, d: d.to_tuple("png;txt cls __key__"),
    "missing": lambda w, d: d.to_tuple("png"),
    "missing passed over": lambda w, d: d.to_tuple("png", handler=w.ignore_and_continue),
    "rename": lambda w, d: d.rename(text="txt", number="cls"),
    "rename alone": lambda w, d: d.rename(text="txt", keep=False),
    "rename missing": lambda w, d: d.rename(text="png"),
    "rename keys": lambda w, d: d.rename_keys(text="txt", keep_unselected=True),
    "rename keys alone": lambda w, d: d.rename_keys(text="txt"),
    "rename keys missing": lambda w, d: d.rename_keys(text="png"),
    "extract": lambda w, d: d.extract_keys("*.txt", "cls"),
    "extract missing": lambda w, d: d.extract_keys("*.png"),
    "map dict": lambda w, d: d.map_dict(cls=int),
    "map dict missing": lambda w, d: d.map_dict(png=int),
    "map": lambda w, d: d.map(lambda s: {"n": int(s["cls"])}),
    "map stopped": lambda w, d: d.map(lambda s: 1 // (int(s["cls"]) - 12), handler=w.ignore_and_stop),
    "select": lambda w, d: d.select(lambda s: int(s["cls"]) % 2),
    "slice": lambda w, d: d.slice(3, 20, 4),
    "slice to": lambda w, d: d.slice(7),
    "batched": lambda w, d: d.decode().to_tuple("txt", "cls").batched(8),
    "batched dicts": lambda w, d: d.decode().batched(8),
    "not partial": lambda w, d: d.decode().to_tuple("txt", "cls").batched(8, partial=False),
    "unbatched": lambda w, d: d.decode().to_tuple("txt", "cls").batched(8).unbatched(),
    "own collation": lambda w, d: d.to_tuple("cls").batched(8, collation_fn=list),
    "listed": lambda w, d: d.to_tuple("cls").listed(8),
    "map tuple": lambda w, d: d.to_tuple("txt", "cls").map_tuple(None, int),
    "repeat": lambda w, d: d.repeat(2).to_tuple("cls"),
    "epoch": lambda w, d: d.to_tuple("cls").with_epoch(47),
    "compose": lambda w, d: d.compose(w.map_dict(cls=int), w.to_tuple("cls")),
    "round robin": lambda w, d: w.RoundRobin([d, d.slice(5)]),
    "round robin, longest": lambda w, d: w.RoundRobin([d, d.slice(5)], longest=True),
    "no handler": lambda w, d: d.decode(lambda key, data: 1 // 0),
    "unknown": lambda w, d: d.decode("rgb7"),
}


FILTERS: dict[str, Callable[[Any], Any]] = {
    "rename keys drops the others": lambda w: w.rename_keys(text="*.txt", c="cls")([dict(NAMED)]),
    "rename keys, the last pattern counts": lambda w: w.rename_keys(
        ("rest", "*"), text="b.txt", duplicate_is_error=False
    )([dict(NAMED)]),
    "rename keys by extension": lambda w: w.rename_keys(c="*.cls", must_match=False)([dict(NAMED)]),
    "extract keys, alternatives in a list": lambda w: w.extract_keys(["*.jpg", "*.png"], "cls")([dict(NAMED)]),
    "xdecode, a program's own comes first": lambda w: w.xdecode(
        ("*.txt", lambda stream: stream.read() + b"!"), ("cls", False), must_decode=False
    )([dict(NAMED)]),
    "xdecode of values that are no bytes": lambda w: w.xdecode(("n", lambda n: n + 1))([{"n": 1}]),
    "xdecode of what begins with one underscore": lambda w: w.xdecode()([{"_meta": b"x"}]),
    "map keeps the key": lambda w: w.map(lambda s: {"__key__": "other"})([dict(NAMED)]),
    "map tuple with more functions": lambda w: w.map_tuple(int, int, int)([("1", "2")]),
    "decode of what is decoded": lambda w: w.decode()([{"txt": "x"}]),
    "decode of nothing": lambda w: w.decode(partial=True)([{"txt": None}]),
    "decode of odd fields": lambda w: w.decode()([{"__x__": b"\xff", "txt": b"a"}]),
    "unbatched tensor": lambda w: w.unbatched()([np.ones((2, 2))]),
    "slice below 0": lambda w: w.slice(-1)(iter(range(9))),
    "slice of step 0": lambda w: w.slice(0, 5, 0)(iter(range(9))),
    "a stage as source": lambda w: w.DataPipeline(
        type("Source", (w.PipelineStage,), {"run": lambda self, src=None: iter([1, 2])})()
    ),
    "no source": lambda w: w.DataPipeline(5),
    "commands in lists": lambda w: w.SimpleShardList(["pipe:cat {a,b}.tar"]),
    "shapes": lambda w: w.batched(2)([(np.ones(2),), (np.ones(3),)]),
    "images": lambda w: [
        (spec, w.imagehandler(spec)(".png", PNG).shape)
        for spec in ("l", "l8", "torchl", "torchl8", "torchrgb", "rgba8")
    ],
    "other names for images": lambda w: [w.imagehandler("l8")(".EPS.Vda", PNG)],
    "by the module's names": lambda w: [
        *w.filters._batched([(1,), (2,), (3,)], 2),
        *w.filters._unbatched([([1, 2],)]),
        *w.filters._unlisted([[1], [2]]),
        *w.filters._rsample([1, 2], 1.0),
        *w.filters._xdecode([{"b.txt": b"x"}]),
        *w.mix.RoundRobin([[1], [2]]),
        *w.extradatasets.MockDataset(1, 2),
        w.autodecode.decoders["cls"](b"3"),
        w.compat.WebDataset is w.WebDataset,
        w.pytorch.IterableDataset.__name__,
        w.__version__,
    ],
}


def plain(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        return ("array", item.dtype.str, item.tolist())
    if isinstance(item, dict):
        return {key: plain(item[key]) for key in sorted(item)}
    if isinstance(item, tuple | list):
        return (type(item).__name__, [plain(x) for x in item])
    return item.item() if isinstance(item, np.generic) else item


def outcome(package: Any, urls: Any, chain: Callable[[Any, Any], Any]) -> Any:
    return items(lambda: chain(package, package.WebDataset(urls, shardshuffle=False)))


def items(make: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [plain(item) for item in make()]
    except AssertionError:
        return AssertionError
    except Exception as error:
        kinds = (KeyError, OSError, ValueError)
        return next((kind for kind in kinds if isinstance(error, kind)), ValueError)


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_results(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path, 3)
    urls = str(tmp_path / "{000..002}.tar")
    assert outcome(ours, urls, CHAINS[name]) == outcome(theirs, urls, CHAINS[name])


@pytest.mark.parametrize("name", FILTERS)
def test_the_same_filters(name: str) -> None:
    importlib.import_module("webdataset.extradatasets")
    assert items(lambda: FILTERS[name](ours)) == items(lambda: FILTERS[name](theirs))


def test_the_same_samples_of_a_function_as_a_stage(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 2)

    def found(package: Any) -> Any:
        return items(lambda: package.DataPipeline(package.SimpleShardList(urls), package.tarfile_samples, bare))

    assert found(ours) == found(theirs)


def bare(src: Any) -> Any:
    """Samples without the path of their shard, which only ours have."""
    for sample in src:
        sample.pop("__local_path__", None)
        yield sample


def test_the_same_samples_of_odd_names(tmp_path: Path) -> None:
    names = [
        "a.b.c",
        "A.JPG",
        "d/.hidden",
        "d/a.b",
        "./x.y",
        "__x__.txt",
        "__m__/a.txt",
        "d/__m__/b.txt",
        "nodot",
        "e/f.",
    ]
    url = write_tar(tmp_path / "odd.tar", [(name, str(i).encode()) for i, name in enumerate(names)])
    assert outcome(ours, url, CHAINS["plain"]) == outcome(theirs, url, CHAINS["plain"])
