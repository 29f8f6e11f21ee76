"""``wds.utils.enforce_security = True``: what is refused although it is allowed."""

from __future__ import annotations

import importlib
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from wds_support import classes, write_shards, write_tar

import penstock as ps
import penstock.wds as wds
from penstock.errors import NotAllowedError

KINDS = ("pipe", "pickle", "torch")
SECURE = "is refused while penstock.wds.utils.enforce_security is True"


@pytest.fixture(autouse=True)
def secure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("penstock.wds.utils"), "_allowed", set(KINDS))
    monkeypatch.setattr(wds.utils, "enforce_security", True)


def one(fields: dict[str, bytes]) -> Any:
    return next(wds.decode(allow=KINDS)(iter([{"__key__": "a", "__url__": "x", **fields}])))


@pytest.mark.parametrize("handler", [wds.reraise_exception, wds.ignore_and_continue])
def test_commands_and_local_files_are_refused(tmp_path: Path, handler: Any) -> None:
    urls = write_shards(tmp_path, 2)
    for url in (f"pipe:cat {urls}", urls, f"file:{urls}", f"{tmp_path}/"):
        with pytest.raises(NotAllowedError, match=SECURE):
            list(wds.WebDataset(url, allow=KINDS, handler=handler))
    for url in ("pipe:true", str(tmp_path / "000.tar")):
        with pytest.raises(NotAllowedError, match=SECURE):
            wds.gopen(url, allow=("pipe",))
    with pytest.raises(NotAllowedError, match=SECURE):
        wds.ShardWriter("pipe:cat > /dev/null %d").write({"__key__": "a", "txt": "x"})
    wds.utils.enforce_security = False
    assert classes(wds.WebDataset(f"pipe:cat {urls}")) == list(range(20))


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd"])
def test_pickles_are_refused(extension: str) -> None:
    with pytest.raises(NotAllowedError, match=SECURE):
        one({extension: pickle.dumps([1])})
    with pytest.raises(NotAllowedError, match=SECURE):
        list(wds.xdecode()(iter([{"__key__": "a", "x.pyd": pickle.dumps([1])}])))


def test_of_torch_files_tensors_alone_are_read() -> None:
    out, tensors = io.BytesIO(), io.BytesIO()
    torch.save(Path("x"), out)
    torch.save(torch.ones(2), tensors)
    with pytest.raises(NotAllowedError, match=SECURE):
        one({"pth": out.getvalue()})
    assert one({"pth": tensors.getvalue()})["pth"].tolist() == [1, 1]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_it_holds_in_workers(tmp_path: Path, method: str) -> None:
    url = write_tar(tmp_path / "a.tar", [("a.pyd", pickle.dumps([1]))])
    dataset = wds.WebDataset([url], allow=KINDS).decode()
    loader = ps.DataLoader(dataset, batch_size=None, num_workers=1, executor="process", multiprocessing_context=method)
    with loader, pytest.raises(NotAllowedError, match=SECURE):
        list(loader)


def test_it_travels_with_a_pipeline_and_never_switches_off() -> None:
    packed = pickle.dumps(wds.WebDataset("x.tar"))
    wds.utils.enforce_security = False
    open_one = pickle.dumps(wds.WebDataset("x.tar"))
    pickle.loads(packed)
    assert wds.utils.enforce_security is True
    pickle.loads(open_one)
    assert wds.utils.enforce_security is True
