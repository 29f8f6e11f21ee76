"""`penstock.open`: each source its data set."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sound_support import write_sound
from video_support import write_video

import penstock as ps
from penstock.datasets.mds import MDSDataset
from penstock.errors import ConfigError, DataFileError
from penstock.storage import Storage

sys.path.insert(0, str(Path(__file__).parents[1] / "shards"))
from shard_support import make_tar, write_shards


def jpeg(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path, "JPEG")


def test_manifests(write_manifest: Callable[..., Path]) -> None:
    path = write_manifest(30)
    dataset = ps.open(path, root="/data", seed=1)
    assert isinstance(dataset, ps.RankDataset)
    assert len(dataset) == 30
    assert dataset[0][0].startswith("/data/")
    assert len(ps.open([path, path])) == 60  # type: ignore[arg-type]
    storage = Storage(idle=5)
    assert ps.open(path, storage=storage).manifest.storage is storage  # type: ignore[attr-defined]


def test_shards(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3, 4])
    for source in (paths, f"{tmp_path}/s-000{{0,1}}.tar", f"{tmp_path}/s-*.tar", "::".join(paths), tmp_path):
        dataset = ps.open(source, shuffle="none", load=len)
        assert isinstance(dataset, ps.ShardDataset)
        assert len(dataset) == 7
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress(Path(paths[0]).read_bytes()))
    stream = ps.open(packed)
    assert isinstance(stream, ps.StreamShards)
    assert len(list(stream)) == 3
    (tmp_path / "packed").mkdir()
    packed.rename(tmp_path / "packed" / "a.tar.gz")
    assert len(list(ps.open(tmp_path / "packed"))) == 3  # type: ignore[call-overload]
    (tmp_path / "b.tar.gz").touch()
    with pytest.raises(ConfigError, match=r"both plain and compressed shards \(b\.tar\.gz\); give one kind"):
        ps.open(tmp_path)


def test_folders(tmp_path: Path) -> None:
    for i in range(6):
        jpeg(tmp_path / "images" / f"c{i % 2}" / f"{i} x.jpg")
    dataset = ps.open(tmp_path / "images", shuffle="none")
    assert isinstance(dataset, ps.RankDataset)
    assert [Path(dataset[i][0]).name for i in range(6)] == [
        "0 x.jpg",
        "2 x.jpg",
        "4 x.jpg",
        "1 x.jpg",
        "3 x.jpg",
        "5 x.jpg",
    ]
    assert [dataset[i][1] for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert len(ps.ImageDataset(dataset)[5][0]) == 3
    jpeg(tmp_path / "images" / "c1" / "9.jpg")
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "c1" / "8.GIF")
    assert len(ps.open(tmp_path / "images")) == 8  # type: ignore[arg-type]
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "index.json").write_text('{"version": 2, "shards": []}')
    assert isinstance(ps.open(tmp_path / "mds"), MDSDataset)


def test_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for source, message in (
        (tmp_path / "x.bin", "unknown kind of data"),
        (tmp_path / "none", "no such file or folder"),
        (tmp_path / "empty", "needs a folder with index.json"),
        ([tmp_path / "a.tar", tmp_path / "b.txt"], "manifests and shards in one source"),
    ):
        with pytest.raises(ConfigError, match=message):
            ps.open(source)


@pytest.mark.parametrize(
    "sources",
    [["https://host/a.bin?sig=SECRET"], ["https://host/a.tar?X-Amz-Signature=SECRET", "https://host/b.txt?sig=SECRET"]],
)
def test_signatures_are_not_shown(sources: list[str]) -> None:
    with pytest.raises(ConfigError, match="https://host/a") as caught:
        ps.open(sources)
    assert "SECRET" not in str(caught.value)


def test_images_of_shards(tmp_path: Path) -> None:
    def image(value: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (16, 16), (value,) * 3).save(out, "PNG")
        return out.getvalue()

    members = [(f"{i:02d}.{e}", image(i) if e == "png" else str(i).encode()) for i in range(12) for e in ("cls", "png")]
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar(members))
    images = ps.ImageDataset(ps.ShardDataset(path, seed=0), size=8)
    for options in ({}, {"num_workers": 2, "executor": "process"}, {"num_workers": 2}):
        loader = ps.DataLoader(images, batch_size=4, **options)
        seen = []
        for batch, labels in loader:
            assert batch.shape == (4, 3, 8, 8)
            assert batch[:, 0, 0, 0].tolist() == labels.tolist()
            seen += labels.tolist()
        assert sorted(seen) == list(range(12))
    assert ps.ImageDataset(ps.ShardSet(path))[3][1] == 3
    with pytest.raises(ConfigError, match="keys"):
        ps.ImageDataset(ps.ShardSet(path), row=True)[0]
    path.write_bytes(make_tar([("a.txt", b"")]))
    with pytest.raises(ps.ImageDataset and ValueError, match="has no image"):
        ps.ImageDataset(ps.ShardSet(path))[0]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tables", {"split": 0.1}, r"split= takes the name of a split, such as 'train', got 0\.1"),
        ("tables", {"split": ["train"]}, "split= takes the name of a split"),
        ("tables", {"columns": 3}, "columns= takes a list of names"),
        ("tables", {"images": 3}, "images= takes 'rgb', 'pil' or 'bytes', got 3"),
        ("tables", {"cache_bytes": "1 GB"}, "cache_bytes= takes a number of bytes, got '1 GB'"),
        ("train.txt", {"root": 3}, "root= takes a folder or an address"),
        ("train.txt", {"label": 3}, "label= takes a type"),
        ("train.txt", {"columns": [3]}, "columns must be a list of names or a mapping"),
        ("train.txt", {"seed": "1"}, "seed= takes an integer, got '1'"),
        ("train.txt", {"rank": 1.0}, "rank= takes an integer"),
        ("train.txt", {"world_size": True}, "world_size= takes an integer"),
        ("train.txt", {"shuffle": True}, "shuffle= takes the name of an order"),
        ("train.txt", {"mini_epochs": None, "remainder": 3}, "remainder= takes 'pad'"),
        ("rows.npy", {"labels": 3}, "labels= takes files"),
        ("rows.npy", {"labels": [0, 1]}, r"labels= takes files, as str, Path or a list of these, got \[0, 1\]"),
        ("rows.npy", {"storage": {"anon": True}}, r"such as Storage\(options=\{'anon': True\}\), got"),
        ("rows.npy", {"sequence_length": "8"}, "sequence_length= takes an integer"),
    ],
)
def test_options_of_another_type(tmp_path: Path, name: str, options: dict[str, Any], words: str) -> None:
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "tables" / "train.parquet")
    (tmp_path / "train.txt").write_text("a.jpg 1\n")
    np.save(tmp_path / "rows.npy", np.zeros((2, 2)))
    with pytest.raises(ConfigError, match=words):
        ps.open(tmp_path / name, **options)


def test_messages_say_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "1.txt").write_text("hi")
    jpeg(tmp_path / "flat" / "1.jpg")
    monkeypatch.chdir(tmp_path)
    for source, words in (
        ("missing", f"missing: there is no such file or folder in {tmp_path}"),
        ("~/missing", "'~' is not expanded: give the full path"),
        ("empty", r"empty: an empty folder\. `open` needs"),
        ("texts", r"a folder with 2 folders \(a, b\), in which there are 2 \.txt files\. `open` needs .*LoadBytes"),
        ("flat", r"a folder with 1 \.jpg file\. `open` needs .* ps\.open\('train\.txt', root='flat', size="),
        ("flat/1.jpg", "a single image. Give a folder"),
        (["flat", "texts"], "a folder among several sources"),
        ([], "the list is empty. Pass a path"),
        ("", "a name is empty. Pass a path"),
        ("*.nothing", r"no file matches \*\.nothing"),
        ("grpc://host:7000", r"metadata server\. Open it with RankServerDataset\('grpc://host:7000'"),
        ("memory://nowhere/images", r"it has no index\.json\. Folders with one subfolder .* local disk"),
    ):
        with pytest.raises(ps.errors.PenstockError, match=words):
            ps.open(source)


def test_folders_of_splits_are_no_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            jpeg(tmp_path / split / name / "1.jpg")
    for options in ({}, {"split": "train"}):
        with pytest.raises(ConfigError, match=r"folders train, val are splits.*open one split, such as '.*/train'"):
            ps.open(tmp_path, size=8, **options)  # type: ignore[call-overload]
    assert ps.open(tmp_path / "train", size=8).classes == ["ant", "bee"]
    jpeg(tmp_path / "plane" / "small" / "1.jpg")  # a class beside them: a class may be called "train"
    assert ps.open(tmp_path, size=8).classes == ["plane", "train", "val"]


@pytest.mark.parametrize("source", [None, 5, ["a.txt", 5], b"a.txt"])
def test_a_source_that_is_none(source: Any) -> None:
    with pytest.raises(ConfigError, match="a source must be a path or URL, as str or Path, or a list of these; got"):
        ps.open(source)


def test_empty_files_of_json_lines(tmp_path: Path) -> None:
    empty, full = tmp_path / "00.jsonl", tmp_path / "01.jsonl"
    empty.write_text("")
    full.write_text('{"text": "a"}\n{"text": "b"}\n')
    data = ps.open([empty, full], shuffle="none")
    assert isinstance(data, ps.TableDataset)
    assert [row["text"] for row in data] == ["a", "b"]
    with pytest.raises(DataFileError):
        ps.open([empty])


def test_clips(tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "videos" / name).mkdir(parents=True)
        (tmp_path / "sounds" / name).mkdir(parents=True)
        write_video(tmp_path / "videos" / name / "a.mp4", 8)
        write_sound(tmp_path / "sounds" / name / "a.flac", 0.5, codec="flac", rate=8_000)
    videos = ps.open(tmp_path / "videos", frames=4, size=16, shuffle="none")
    assert isinstance(videos, ps.VideoDataset)
    assert videos.classes == ["ant", "bee"]
    assert videos[1][0].shape == (4, 3, 16, 16)
    assert videos[1][1] == 1
    sounds = ps.open(tmp_path / "sounds", seconds=0.1, stride=0.05, channels=1)
    assert isinstance(sounds, ps.AudioDataset)
    assert len(sounds) == 18
    assert isinstance(ps.open(str(tmp_path / "videos/*/a.mp4"), labels=[3, 4]), ps.VideoDataset)
    assert isinstance(ps.open(str(tmp_path / "sounds/ant/a.flac")), ps.AudioDataset)
    with pytest.raises(ConfigError, match="recordings and videos in one source"):
        ps.open([tmp_path / "videos/ant/a.mp4", tmp_path / "sounds/ant/a.flac"])
    with pytest.raises(ConfigError, match="videos do not take seconds=: it is for recordings"):
        ps.open(tmp_path / "videos", seconds=1)
    with pytest.raises(ConfigError, match="index= takes a path, as str or Path, got True"):
        ps.open(tmp_path / "videos", index=True)
