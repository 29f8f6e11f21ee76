"""The same pipelines with WebDataset itself, where it is installed: equal results and equal errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wds_support import write_shards, write_tar

import penstock.wds as ours

theirs: Any = pytest.importorskip("webdataset")

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


def plain(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        return ("array", item.dtype.str, item.tolist())
    if isinstance(item, dict):
        return {key: plain(item[key]) for key in sorted(item)}
    if isinstance(item, tuple | list):
        return (type(item).__name__, [plain(x) for x in item])
    return item.item() if isinstance(item, np.generic) else item


def outcome(package: Any, urls: Any, chain: Callable[[Any, Any], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = chain(package, package.WebDataset(urls, shardshuffle=False))
            return [plain(item) for item in dataset]
    except Exception as error:
        kinds = (KeyError, OSError, ValueError)
        return next((kind for kind in kinds if isinstance(error, kind)), ValueError)


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_results(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path, 3)
    urls = str(tmp_path / "{000..002}.tar")
    assert outcome(ours, urls, CHAINS[name]) == outcome(theirs, urls, CHAINS[name])


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
