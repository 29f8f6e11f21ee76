"""Images through `penstock.open`: each kind of source, classes, executors, ranks, resume."""

from __future__ import annotations

import io
import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import penstock as ps
from penstock.errors import ManifestError, ManifestIOError, UnknownClassesError
from penstock.images.sizes import Sizes, measure, sizes_path, write_sizes
from penstock.images.transforms import HorizontalFlip, RandomResizedCrop

sys.path.insert(0, str(Path(__file__).parents[1] / "shards"))
from mds_writer import write_mds
from shard_support import make_tar

NAMES = ["ant", "bee", "cat"]
COUNT = 24


def picture(value: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (16, 12), (value * 10,) * 3).save(out, "PNG")
    return out.getvalue()


def folder(path: Path) -> Path:
    for number in range(COUNT):
        where = path / NAMES[number % 3] / f"{number:02d}.png"
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(picture(number))
    return path


def source_of(kind: str, path: Path) -> tuple[Any, dict[str, Any]]:
    if kind == "folder":
        return folder(path / "images"), {}
    if kind == "manifest":
        folder(path / "images")
        lines = [f"{NAMES[i % 3]}/{i:02d}.png {i % 3}\n" for i in range(COUNT)]
        (path / "train.txt").write_text("".join(lines))
        return path / "train.txt", {"root": path / "images", "classes": NAMES}
    if kind == "shards":
        members = [
            (f"{i:02d}.{end}", picture(i) if end == "png" else str(i % 3).encode())
            for i in range(COUNT)
            for end in ("cls", "png")
        ]
        (path / "a.tar").write_bytes(make_tar(members))
        return path / "a.tar", {}
    if kind == "mds":
        samples = [{"image": picture(i), "label": i % 3, "number": i} for i in range(COUNT)]
        return write_mds(path / "mds", {"image": "png", "label": "int", "number": "int"}, samples), {}
    if kind == "arrays":
        pixels = np.arange(0, 10 * COUNT, 10, np.uint8).reshape(COUNT, 1, 1, 1)
        np.save(path / "pixels.npy", np.broadcast_to(pixels, (COUNT, 12, 16, 3)))
        np.save(path / "classes.npy", np.arange(COUNT) % 3)
        return path / "pixels.npy", {"labels": path / "classes.npy"}
    said = {"info": {"features": {"img": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": NAMES}}}}
    images = pa.array([{"bytes": picture(i), "path": None} for i in range(COUNT)])
    table = pa.table({"img": images, "label": [i % 3 for i in range(COUNT)]})
    table = table.replace_schema_metadata({"huggingface": json.dumps(said)})
    with pa.ipc.new_file(str(path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    return path / "t.arrow", {"split": None}


KINDS = ["folder", "manifest", "shards", "mds", "table", "arrays"]


def values(batches: Any) -> list[list[int]]:
    return [images[:, 0, 0, 0].tolist() for images, _ in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind: str, tmp_path: Path) -> None:
    source, options = source_of(kind, tmp_path)
    dataset = ps.open(source, size=8, seed=1, **options)
    assert isinstance(dataset, ps.ImageDataset)
    assert len(dataset) == COUNT
    wanted = None
    for how in ({}, {"num_workers": 2, "executor": "thread"}, {"num_workers": 2, "executor": "process"}):
        with ps.DataLoader(ps.open(source, size=8, seed=1, **options), batch_size=4, **how) as loader:
            batches = list(loader)
        found = values(batches)
        assert sorted(value for batch in found for value in batch) == [i * 10 for i in range(COUNT)]
        assert all(value // 10 % 3 == label for x, y in batches for value, label in zip(x[:, 0, 0, 0], y, strict=True))
        wanted = wanted or found
        assert found == wanted
    # Resume in the middle, in a data set opened anew.
    loader, again = (ps.DataLoader(ps.open(source, size=8, seed=1, **options), batch_size=4) for _ in range(2))
    run = iter(loader)
    had = values([next(run), next(run)])
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert had + values(again) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_ranks(kind: str, tmp_path: Path) -> None:
    source, options = source_of(kind, tmp_path)
    shares = [ps.open(source, size=8, seed=1, rank=rank, world_size=3, **options) for rank in range(3)]
    for share in shares:
        share.set_epoch(2)
    assert sorted(int(image[0, 0, 0]) for share in shares for image, _ in map(share.__getitem__, range(8))) == [
        i * 10 for i in range(COUNT)
    ]


def test_transforms(tmp_path: Path) -> None:
    dataset = ps.open(folder(tmp_path), transform=[RandomResizedCrop(6), HorizontalFlip()], seed=0)
    assert dataset[0][0].shape == (3, 6, 6)
    assert ps.open(tmp_path, size=None)[0][0].shape == (3, 12, 16)
    path, label, row = ps.open(tmp_path, shuffle="none")[3]
    assert (Path(path).parent.name, label, row) == ("ant", 0, 3)


@pytest.mark.parametrize("kind", ["folder", "manifest", "table"])
def test_classes(kind: str, tmp_path: Path) -> None:
    source, options = source_of(kind, tmp_path)
    for dataset in (ps.open(source, size=8, **options), ps.open(source, **options)):
        for each in (dataset, pickle.loads(pickle.dumps(dataset))):
            assert each.classes == NAMES
            assert each.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}


def test_classes_are_those_of_the_labels(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "b").mkdir()  # without images: it keeps its number
    dataset: Any = ps.open(tmp_path, shuffle="none")
    assert dataset.classes == ["ant", "b", "bee", "cat"]
    assert all(
        dataset.classes[label] == Path(path).parent.name for path, label, _ in map(dataset.__getitem__, range(COUNT))
    )


def test_what_is_hidden_is_neither_a_class_nor_an_image(tmp_path: Path) -> None:
    """A notebook and a Mac leave such things behind, and they would move the labels of all classes."""
    folder(tmp_path)
    for name in (".ipynb_checkpoints/00.png", "bee/.ipynb_checkpoints/00.png", "bee/._00.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"no image")
    dataset: Any = ps.open(tmp_path, shuffle="none")
    assert dataset.classes == NAMES
    assert sorted(Path(path).name for path, _, _ in dataset) == [f"{number:02d}.png" for number in range(COUNT)]


def test_hidden_arrays_are_left_out(tmp_path: Path) -> None:
    for name in ("1.npy", "._1.npy"):
        np.save(tmp_path / name, np.zeros(2))
    assert [row for _, row in ps.open(tmp_path)] == [0]


def test_names_that_nobody_said(tmp_path: Path) -> None:
    source, _ = source_of("shards", tmp_path)
    dataset = ps.open(source, size=8)
    assert not hasattr(dataset, "classes")
    with pytest.raises(UnknownClassesError, match="class names of this"):
        _ = dataset.classes
    dataset.classes = ["own"]
    assert dataset.class_to_idx == {"own": 0}


def test_compressed_shards_by_load(tmp_path: Path) -> None:
    import gzip

    source, _ = source_of("shards", tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(source.read_bytes()))
    items = list(ps.open(tmp_path / "a.tar.gz", load=ps.LoadImage(size=8), buffer_bytes=0))
    assert [(int(image[0, 0, 0]), label) for image, label in items] == [(i * 10, i % 3) for i in range(COUNT)]


def test_names_of_classes_and_files_are_read_back(tmp_path: Path) -> None:
    odd = [" cats", "cats", "cats ", "\tcats", "\ufeffcats", "a\rb", "c\u2028d", "#e", '"f', "g 7", "\x85h"]
    for number, name in enumerate(odd):
        where = tmp_path / "images" / name / f" {name} .png"
        where.parent.mkdir(parents=True)
        where.write_bytes(picture(number))
    dataset = ps.open(tmp_path / "images", row=True, shuffle="none", rank=0, world_size=1)
    assert dataset.classes == sorted(odd)
    assert {dataset.classes[label]: int(image[0, 0, 0]) // 10 for image, label, _ in dataset} == {
        name: number for number, name in enumerate(odd)
    }
    paths = ps.open(tmp_path / "images")
    assert sorted(Path(path) for path, *_ in paths) == sorted((tmp_path / "images").glob("*/*.png"))


def test_a_name_with_a_line_break_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder(tmp_path / "images")
    (tmp_path / "images" / "ant" / "a\nb.png").write_bytes(picture(1))
    with pytest.raises(ManifestError, match=r"a\\nb\.png.*line break.*rename it"):
        ps.open(tmp_path / "images")


def test_a_file_that_is_added_leaves_running_jobs_as_they_are(tmp_path: Path) -> None:
    first = ps.open(folder(tmp_path / "images"), size=8, shuffle="none", rank=0, world_size=1)
    sent = pickle.dumps(first)
    (tmp_path / "images" / "ant" / "new.png").write_bytes(picture(5))
    second = ps.open(tmp_path / "images", size=8, shuffle="none", rank=0, world_size=1)
    there = pickle.loads(sent)
    assert len(there) == COUNT == len(second) - 1
    assert [label for _, label in there] == [label for _, label in first]


def test_folders_with_the_same_names_have_sizes_of_their_own(tmp_path: Path) -> None:
    first, second = (ps.open(folder(tmp_path / name), size=8).source.manifest for name in ("full", "small"))
    write_sizes(first, *measure(first)[:2])
    with pytest.raises(ManifestIOError, match="no such file"):
        Sizes.open(sizes_path(second), second)
    again = ps.open(tmp_path / "full", size=8).source.manifest
    assert len(Sizes.open(sizes_path(again), again)) == COUNT


def test_a_class_folder_without_images_is_said(tmp_path: Path) -> None:
    folder(tmp_path / "images")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.open(tmp_path / "images", size=8)
    (tmp_path / "images" / "aardvark").mkdir()
    with pytest.warns(UserWarning, match="'aardvark' contains no images, and counts as a class"):
        dataset = ps.open(tmp_path / "images", size=8)
    assert dataset.classes == ["aardvark", *NAMES]
