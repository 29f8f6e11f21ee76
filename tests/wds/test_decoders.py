"""Decoding by extension, image specifications, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from wds_support import write_tar

import penstock
import penstock.wds as wds
from penstock.errors import NotAllowedError
from penstock.wds import allow as allow_function


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.setattr(importlib.import_module("penstock.wds.utils"), "_allowed", set())


def encoded(array: Any, format: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, format)
    return out.getvalue()


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
PNG = encoded(PIXELS, "PNG")


def one(tmp_path: Path, fields: dict[str, bytes], *args: Any, **kw: Any) -> dict[str, Any]:
    url = write_tar(tmp_path / "one.tar", [(f"a.{name}", data) for name, data in fields.items()])
    sample = next(iter(wds.WebDataset(url).decode(*args, **kw)))
    return {name: value for name, value in sample.items() if not name.startswith("__")}


def test_usual_formats(tmp_path: Path) -> None:
    array = np.arange(6).reshape(2, 3)
    tensor = io.BytesIO()
    torch.save({"x": torch.ones(2)}, tensor)
    npz = io.BytesIO()
    np.savez(npz, a=array)
    found = one(
        tmp_path,
        {
            "txt": "é".encode(),
            "cls": b"7",
            "json": b'{"a": [1]}',
            "npy": wds.numpy_dumps(array),
            "npz": npz.getvalue(),
            "pth": tensor.getvalue(),
            "txt.gz": gzip.compress(b"zipped"),
            "bin": b"\0\1",
            "jpg": b"left alone",
        },
    )
    assert found["txt"] == "é"
    assert found["cls"] == 7
    assert found["json"] == {"a": [1]}
    assert (found["npy"] == array).all()
    assert (found["npz"]["a"] == array).all()
    assert found["pth"]["x"].tolist() == [1, 1]
    assert found["txt.gz"] == "zipped"
    assert found["bin"] == b"\0\1"
    assert found["jpg"] == b"left alone"


@pytest.mark.parametrize("mode", ["l", "rgb", "rgba"])
def test_image_specifications(tmp_path: Path, mode: str) -> None:
    expected = np.array(Image.fromarray(PIXELS).convert(mode.upper()))
    fields = {"png": PNG}
    array = one(tmp_path, fields, mode + "8")["png"]
    assert array.dtype == np.uint8
    assert (array == expected).all()
    floats = one(tmp_path, fields, mode)["png"]
    assert floats.dtype == np.float32
    assert np.allclose(floats, expected / 255)
    tensor = one(tmp_path, fields, f"torch{mode}8")["png"]
    first = expected if mode == "l" else expected.transpose(2, 0, 1)
    assert tensor.dtype == torch.uint8
    assert (tensor.numpy() == first).all()
    assert np.allclose(one(tmp_path, fields, f"torch{mode}")["png"].numpy(), first / 255)
    picture = one(tmp_path, fields, f"pil{mode}")["png"]
    assert picture.mode == mode.upper()
    assert (np.array(picture) == expected).all()


def test_jpeg_is_what_pillow_makes_of_it(tmp_path: Path) -> None:
    smooth = np.add.outer(np.arange(64), np.arange(48))[..., None].repeat(3, 2).astype(np.uint8)
    data = encoded(smooth, "JPEG")
    pillow = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    assert (one(tmp_path, {"jpg": data}, "rgb8")["jpg"] == pillow).all()


def test_pil_and_torch_alone_and_unknown_names(tmp_path: Path) -> None:
    assert one(tmp_path, {"png": PNG}, "pil")["png"].mode == "RGB"
    assert one(tmp_path, {"png": PNG}, "torch")["png"].dtype == torch.float32
    with pytest.raises(ValueError, match="Unknown imagespec: rgb16"):
        one(tmp_path, {"png": PNG}, "rgb16")


def test_own_decoders_come_first(tmp_path: Path) -> None:
    fields = {"seg.png": PNG, "png": PNG, "cls": b"3"}
    found = one(tmp_path, fields, wds.handle_extension("seg.png cls", lambda data: len(data)), "rgb8")
    assert found["seg.png"] == len(PNG)
    assert found["png"].shape == (5, 7, 3)
    assert found["cls"] == 1
    found = one(tmp_path, fields, lambda key, data: "mine" if key == ".cls" else None)
    assert found["cls"] == "mine"
    assert one(tmp_path, fields, "rgb8", only=["cls"])["png"] == PNG
    assert one(tmp_path, fields, "rgb8", only="png")["cls"] == b"3"
    assert one(tmp_path, {"txt.gz": b"x"}, pre=[], post=[])["txt.gz"] == b"x"


def test_decoding_twice_needs_partial(tmp_path: Path) -> None:
    url = write_tar(tmp_path / "a.tar", [("a.cls", b"3")])
    with pytest.raises(Exception, match="partial=True"):
        next(iter(wds.WebDataset(url).decode().decode()))
    assert next(iter(wds.WebDataset(url).decode().decode(partial=True)))["cls"] == 3


def test_errors_name_shard_sample_and_field(tmp_path: Path) -> None:
    url = write_tar(tmp_path / "a.tar", [("a.cls", b"x"), ("b.cls", b"3")])
    with pytest.raises(wds.DecodingError, match=r"a.tar: sample 'a': cls cannot be decoded: ValueError") as caught:
        list(wds.WebDataset(url).decode())
    assert (caught.value.url, caught.value.key, caught.value.k) == (url, "a", "cls")
    assert isinstance(caught.value.__cause__, ValueError)
    assert [s["cls"] for s in wds.WebDataset(url).decode(handler=wds.ignore_and_continue)] == [3]
    with pytest.warns(UserWarning, match="sample 'a': cls"):
        assert [s["cls"] for s in wds.WebDataset(url).decode(handler=wds.warn_and_continue)] == [3]
    broken = write_tar(tmp_path / "b.tar", [("a.png", PNG[:50])])
    with pytest.raises(wds.DecodingError):
        list(wds.WebDataset(broken).decode("rgb8"))


def test_pickles_are_refused_until_allowed(tmp_path: Path) -> None:
    fields = {"pyd": pickle.dumps([1, 2])}
    url = write_tar(tmp_path / "a.tar", [("a.pyd", fields["pyd"])])
    with pytest.raises(NotAllowedError, match=r'one.tar: sample .a.: .*allow\("pickle"\)'):
        one(tmp_path, fields)
    with pytest.raises(NotAllowedError):
        list(wds.WebDataset(url).decode(handler=wds.ignore_and_continue))
    assert one(tmp_path, fields, allow=("pickle",))["pyd"] == [1, 2]
    assert next(iter(wds.WebDataset(url, allow=("pickle",)).decode()))["pyd"] == [1, 2]
    allow_function("pickle")
    assert one(tmp_path, fields)["pyd"] == [1, 2]
    with pytest.raises(ValueError, match="cannot allow 'shell'"):
        wds.allow("shell")


def test_torch_objects_are_refused_until_allowed(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save(Path("x"), out)
    with pytest.raises(NotAllowedError, match="more than tensors"):
        one(tmp_path, {"pth": out.getvalue()})
    assert one(tmp_path, {"pth": out.getvalue()}, allow="torch")["pth"] == Path("x")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_what_is_allowed_holds_in_workers(tmp_path: Path, method: str) -> None:
    url = write_tar(tmp_path / "a.tar", [("a.pyd", pickle.dumps(5))])
    wds.allow("pickle")
    dataset = wds.WebDataset(url).decode().to_tuple("pyd")
    loader = penstock.DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    assert [int(x[0]) for x in loader] == [5]


def test_xdecode(tmp_path: Path) -> None:
    url = write_tar(tmp_path / "a.tar", [("a.txt", b"t"), ("a.json", b"[1]"), ("a.bin", b"b")])
    sample = next(iter(wds.WebDataset(url).xdecode(("*.json", json.load))))
    assert (sample["txt"], sample["json"], sample["bin"]) == ("t", [1], b"b")
    with pytest.raises(ValueError, match=r"No decoder found for json\."):
        next(iter(wds.WebDataset(url).xdecode()))
    assert next(iter(wds.WebDataset(url).xdecode(must_decode=False)))["json"] == b"[1]"


@pytest.mark.parametrize("extension", ["ten", "tb"])
def test_tenbin_is_an_error_that_says_what_to_do(tmp_path: Path, extension: str) -> None:
    with pytest.raises(wds.DecodingError) as caught:
        one(tmp_path, {extension: b"~TenBin~"})
    assert "handle_extension" in str(caught.value.__cause__)
    assert one(tmp_path, {extension: b"~TenBin~"}, wds.handle_extension(extension, len)) == {extension: 8}


def test_postscript_is_not_run_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import EpsImagePlugin

    from penstock.images.decode import decode

    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow looks for it once
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch '{tmp_path}/was-run'\n")
    (tmp_path / "gs").chmod(0o755)
    program = encoded(PIXELS, "EPS")
    for how in ("pil", "rgb8", "rgb"):
        with pytest.raises(wds.DecodingError, match="PostScript"):
            one(tmp_path, {"jpg": program}, how)
    with pytest.raises(penstock.errors.ImageError, match="PostScript"):
        decode(program, backend="pillow")
    assert not (tmp_path / "was-run").exists()
