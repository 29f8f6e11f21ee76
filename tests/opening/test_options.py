"""The options of `penstock.open`: those of the constructors, and errors of ours for all others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import penstock as ps
from penstock.errors import ConfigError
from penstock.opening.kinds import DATASETS, OF_IMAGES, image_options, options_of, parameters

sys.path.insert(0, str(Path(__file__).parents[1] / "shards"))
from lerobot_support import write_lerobot
from mds_writer import write_mds
from shard_support import write_shards
from sound_support import write_sound
from video_support import write_video


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / name / "1.jpg")
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "1.npy", np.zeros(2))
    np.save(tmp_path / "rows.npy", np.zeros((2, 2)))
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    (tmp_path / "train.txt").write_text("a.jpg 1\n")
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "x.parquet")
    shards = write_shards(tmp_path, [2])
    (tmp_path / "s.tar.gz").write_bytes(b"")
    write_mds(tmp_path / "mds", {"x": "int"}, [{"x": 1}])
    write_video(tmp_path / "a.mp4", 3)
    write_sound(tmp_path / "a.wav", 0.1)
    return {
        "LeRobot folders": (write_lerobot(tmp_path / "arm", [2], cameras=()).root, {}),
        "MDS folders": (tmp_path / "mds", {}),
        "a folder of arrays": (tmp_path / "arrays", {}),
        "a folder of images": (tmp_path / "images", {}),
        "arrays": (tmp_path / "rows.npy", {}),
        "compressed shards": (tmp_path / "s.tar.gz", {}),
        "documents": (tmp_path / "tokens.bin", {"dtype": "uint16", "end_token": 3}),
        "manifests": (tmp_path / "train.txt", {}),
        "recordings": (tmp_path / "a.wav", {"seconds": 1}),
        "shards": (shards, {}),
        "tables": (tmp_path / "x.parquet", {}),
        "tokens": (tmp_path / "tokens.bin", {"dtype": "uint16", "sequence_length": 2}),
        "videos": (tmp_path / "a.mp4", {}),
    }


@pytest.mark.parametrize("kind", DATASETS)
def test_wrong_options_are_errors_of_ours(kind: str, sources: dict[str, tuple[Any, dict[str, Any]]]) -> None:
    source, options = sources[kind]
    with pytest.raises(ConfigError, match=r"not take sede=: did you mean seed=\?; they take "):
        ps.open(source, **options, sede=1)
    # With these a Parquet file is a manifest, and any file holds tokens.
    others = parameters(ps.Manifest.open).keys() if kind == "tables" else set()
    names = {name for other in DATASETS for name in options_of(other)} | image_options().keys()
    names -= {*(others - options_of(kind).keys()), "sequence_length", "process_group", "mesh", "dtype"}
    for name in sorted(names - (image_options().keys() if kind in OF_IMAGES else set())):
        if name not in options_of(kind):
            with pytest.raises(ConfigError, match=f"{name}="):
                ps.open(source, **{**options, name: None})
        elif name != "decode":
            with pytest.raises(ps.errors.PenstockError):
                ps.open(source, **{**options, name: object()})


def test_messages_say_which_kind_takes_an_option(sources: dict[str, tuple[Any, dict[str, Any]]]) -> None:
    images, shards = sources["a folder of images"][0], sources["shards"][0]
    with pytest.raises(ConfigError, match=r"stride=: it is for recordings, token files and videos; .*take flip"):
        ps.open(images, stride=3)
    with pytest.raises(ConfigError, match="copy a manifest on a slow file system to a local disk"):
        ps.open(images, preload=True)
    with pytest.raises(ConfigError, match=r"load=penstock\.LoadImage"):
        ps.open(sources["compressed shards"][0], size=8)
    with pytest.raises(ConfigError, match="load= and size= both define how images are decoded"):
        ps.open(images, size=8, load=len)
    with pytest.raises(ConfigError, match="samples of shards have keys"):
        ps.open(shards, size=8, row=True)
    with pytest.raises(ConfigError, match=r"no column of images\. The columns are x\..* no options of images"):
        ps.open(sources["tables"][0], size=8)
    with pytest.raises(ConfigError, match="no column of encoded images"):
        ps.open(sources["MDS folders"][0], size=8)
    with pytest.raises(ConfigError, match=r"batch_size=: it is for the DataLoader"):
        ps.open(images, size=8, batch_size=4)
    with pytest.raises(ConfigError, match=r"did you mean columns=, a list of names\?"):
        ps.open(sources["tables"][0], size=8, column="x")
    assert len(ps.open(images, size=8, load=None)) == 2  # None is the default


def test_a_transform_that_is_none_is_named(sources: dict[str, tuple[Any, dict[str, Any]]]) -> None:
    with pytest.raises(ConfigError, match="a transform is a list of steps, or one step"):
        ps.open(sources["a folder of images"][0], transform=3)  # type: ignore[call-overload]
