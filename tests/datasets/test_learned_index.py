"""Entries that are learned while images are decoded: known to all processes, never wrong, and lost one at a time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jpeg_support import by_opencv, jpeg, noise

import penstock as ps
from penstock import DataLoader, ImageDataset, Manifest
from penstock.errors import ManifestError, ManifestIOError
from penstock.images import native
from penstock.images.entries import ROW, TABLE, ImageIndex, find_index, write_index
from penstock.images.transforms import RandomResizedCrop

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built"),
]

N = 24
JPEGS = N - 2
"""The others are a progressive JPEG, which has no entries, and a PNG."""


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    import cv2

    names = [f"{number}.jpg" for number in range(N - 1)] + ["picture.png"]
    for number in range(N - 1):
        (tmp_path / names[number]).write_bytes(jpeg(noise(90 + 17 * number, 250 - 7 * number, number)))
    (tmp_path / names[N - 2]).write_bytes(by_opencv(noise(50, 60), cv2.IMWRITE_JPEG_PROGRESSIVE, 1))
    cv2.imwrite(str(tmp_path / "picture.png"), noise(90, 90))
    (tmp_path / "train.txt").write_text("".join(f"{name} {number}\n" for number, name in enumerate(names)))
    return Manifest.open(tmp_path / "train.txt", root=tmp_path, cache_dir=tmp_path / "cache")


def dataset(manifest: Manifest, index: Any = "learn") -> ImageDataset:
    return ImageDataset(manifest, transform=[RandomResizedCrop(32)], index=index)


def epoch(data: ImageDataset, **how: Any) -> torch.Tensor:
    return torch.cat([images for images, _ in DataLoader(data, batch_size=4, seed=5, **how)])


def learned_path(manifest: Manifest) -> Path:
    return find_index(manifest, learn=True).path


def known(manifest: Manifest) -> dict[int, int]:
    """Bytes of the entries of each row of which something is known, 0 for one that has none."""
    path = learned_path(manifest)
    table = path.read_bytes()[TABLE : TABLE + N * ROW.size]
    rows = {row: ROW.unpack_from(table, row * ROW.size) for row in range(N)}
    return {row: size for row, (_, digest, size) in rows.items() if digest}


def all_sound(manifest: Manifest) -> None:
    """Every row that is known is that of its file."""
    index = find_index(manifest)
    for record in manifest.records(range(N)):
        assert index.is_of(record.row, Path(record.path).read_bytes())


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 0},
        {"num_workers": 2, "executor": "thread"},
        {"num_workers": 2, "executor": "process", "multiprocessing_context": "fork"},
        {"num_workers": 2, "executor": "process", "multiprocessing_context": "spawn"},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_what_one_epoch_learns_the_next_uses(manifest: Manifest, how: dict[str, Any]) -> None:
    expected = epoch(dataset(manifest, None))
    assert torch.equal(epoch(dataset(manifest), **how), expected)
    learned = known(manifest)
    assert sum(size > 0 for size in learned.values()) >= JPEGS - 4  # not of images whose crop is all of them
    assert N - 1 not in learned  # the PNG
    all_sound(manifest)
    size = learned_path(manifest).stat().st_size
    assert torch.equal(epoch(dataset(manifest), **how), expected)
    if len(learned) == N - 1:
        assert learned_path(manifest).stat().st_size == size
    assert torch.equal(epoch(dataset(manifest, True)), expected)


def test_an_image_is_known_to_all_as_soon_as_it_is_kept(manifest: Manifest) -> None:
    here, there, read = find_index(manifest, learn=True), find_index(manifest, learn=True), find_index(manifest)
    assert here.learns
    assert there.learns
    assert not read.learns
    data = Path(manifest[3].path).read_bytes()
    assert read.entries(3, data) is None
    made = here.entries(3, data)
    assert made == native.entries_of(data)
    there.learns = False
    assert there.entries(3, data) == read.entries(3, data) == made
    assert pickle.loads(pickle.dumps(here)).entries(3, data) == made
    nothing = Path(manifest[N - 2].path).read_bytes()
    assert here.entries(N - 2, nothing) is None
    assert known(manifest)[N - 2] == 0


def test_many_threads_learn_at_once(manifest: Manifest) -> None:
    index = find_index(manifest, learn=True)
    files = [Path(record.path).read_bytes() for record in manifest.records(range(N))]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: index.entries(k % N, files[k % N]), range(4 * N)))
    assert found == [native.entries_of(data) for data in files] * 4
    all_sound(manifest)


def _learn(manifest: Manifest, turns: int) -> None:
    index = find_index(manifest, learn=True)
    for turn in range(turns * N):
        record = manifest[turn % N]
        index.entries(record.row, Path(record.path).read_bytes())


def test_processes_that_are_killed_lose_nothing_that_others_wrote(manifest: Manifest) -> None:
    context = multiprocessing.get_context("fork")
    for turn in range(8):
        workers = [context.Process(target=_learn, args=(manifest, 1)) for _ in range(3)]
        for worker in workers:
            worker.start()
        time.sleep(0.004 * turn)
        for worker in workers[:2]:
            worker.kill()
        for worker in workers:
            worker.join()
        all_sound(manifest)
    assert workers[2].exitcode == 0
    assert len(known(manifest)) == N - 1


def test_a_changed_file_and_a_damaged_row_are_learned_anew(manifest: Manifest) -> None:
    expected = epoch(dataset(manifest))
    record = manifest[5]
    index = find_index(manifest, learn=True)
    old = Path(record.path).read_bytes()
    index.entries(5, old)
    new = jpeg(noise(200, 210, 99))
    Path(record.path).write_bytes(new)
    assert index.entries(5, new) == native.entries_of(new)
    all_sound(manifest)
    Path(record.path).write_bytes(old)
    assert index.entries(5, old) == native.entries_of(old)
    with open(index.path, "r+b") as file:
        file.seek(TABLE)
        file.write(np.random.default_rng(0).bytes(N * ROW.size))
    assert torch.equal(epoch(dataset(manifest)), expected)
    assert torch.equal(epoch(dataset(manifest)), expected)


def test_one_that_was_made_is_used_first(manifest: Manifest) -> None:
    learned = find_index(manifest, learn=True)
    assert not find_index(manifest).learns
    assert find_index(manifest).path == learned.path
    report = write_index(manifest)
    assert find_index(manifest).path == report.path
    old = Path(manifest[4].path).read_bytes()
    new = jpeg(noise(200, 210, 99))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = pickle.loads(pickle.dumps(find_index(manifest, learn=True)))
        assert index.entries(4, old) == native.entries_of(old)
        assert 4 not in known(manifest), "it was there"
        assert index.entries(4, new) == native.entries_of(new)
    assert known(manifest)[4] > 0


@pytest.mark.parametrize("damage", [b"", b"PSENTRY", None])
def test_one_that_was_made_and_is_damaged_is_named_and_left_out(manifest: Manifest, damage: bytes | None) -> None:
    path = write_index(manifest).path
    path.write_bytes(path.read_bytes()[:1000] if damage is None else damage)
    with pytest.raises(ManifestError):
        find_index(manifest)
    with pytest.warns(UserWarning, match="Entries are learned instead"):
        index = find_index(manifest, learn=True)
    data = Path(manifest[1].path).read_bytes()
    assert index.entries(1, data) == native.entries_of(data)


def test_the_same_list_of_other_images_has_its_own(manifest: Manifest, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for record in manifest.records(range(JPEGS)):
        (other / Path(record.path).name).write_bytes(jpeg(noise(64, 64, record.row)))
    twin = Manifest.open(tmp_path / "train.txt", root=other, cache_dir=tmp_path / "cache")
    assert twin.whole_fingerprint == manifest.whole_fingerprint
    for turn in range(2):
        for which in (manifest, twin):
            index, before = find_index(which, learn=True), learned_path(which).stat().st_size if turn else 0
            for record in which.records(range(JPEGS)):
                index.entries(record.row, Path(record.path).read_bytes())
            assert learned_path(which).stat().st_size == before or not turn


def test_a_truncated_one_is_begun_again(manifest: Manifest) -> None:
    first = find_index(manifest, learn=True)
    os.truncate(first.path, TABLE + 3)
    data = Path(manifest[1].path).read_bytes()
    assert find_index(manifest, learn=True).entries(1, data) == native.entries_of(data)


def test_one_that_was_replaced_keeps_nothing_more(manifest: Manifest) -> None:
    index = find_index(manifest, learn=True)
    os.replace(index.path, index.path.with_suffix(".old"))
    index.path.write_bytes(b"another")
    data = Path(manifest[1].path).read_bytes()
    with pytest.warns(UserWarning, match="it was replaced"):
        assert index.entries(1, data) == native.entries_of(data)
    assert index.entries(2, data) is None
    assert index.path.read_bytes() == b"another"


@pytest.mark.parametrize("size", [0, TABLE + 3, TABLE + N * ROW.size])
@pytest.mark.parametrize(
    "how", [{"num_workers": 0}, {"num_workers": 2, "executor": "thread"}, {"num_workers": 2}], ids=str
)
def test_one_that_is_cut_off_meanwhile_ends_nothing(manifest: Manifest, how: dict[str, Any], size: int) -> None:
    expected = epoch(dataset(manifest, None))
    data = dataset(manifest)
    assert data.load.index.learns
    batches = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*truncated while it was open.*decoding takes longer")
        for images, _ in DataLoader(data, batch_size=4, seed=5, **how):
            batches.append(images.clone())
            os.truncate(data.load.index.path, size)
    assert torch.equal(torch.cat(batches), expected)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting takes root")
def test_one_that_cannot_be_written_to_is_used(manifest: Manifest) -> None:
    index = find_index(manifest, learn=True)
    files = [Path(record.path).read_bytes() for record in manifest.records(range(2))]
    index.entries(0, files[0])
    place = str(index.path.parent)
    if subprocess.run(["mount", "--bind", "-o", "ro", place, place], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.warns(UserWarning, match="cannot keep entries"):
            read = find_index(manifest, learn=True)
        assert read.entries(0, files[0]) == native.entries_of(files[0])
        assert read.entries(1, files[1]) is None
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_folder_that_cannot_be_written_to(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    bad = Manifest.open(tmp_path / "train.txt", root=tmp_path, cache_dir=tmp_path / "manifest")
    with pytest.raises(ManifestIOError, match="file"):
        ImageIndex.learn("a.entries", str(tmp_path / "file"), bad.whole_fingerprint, N)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting takes root")
def test_a_full_disk_is_said_once(manifest: Manifest, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        index = ImageIndex.learn("a.entries", str(small), manifest.whole_fingerprint, N)
        files = [Path(record.path).read_bytes() for record in manifest.records(range(JPEGS))]
        with pytest.warns(UserWarning, match="cannot keep entries") as caught:
            found = [index.entries(row, data) for row, data in enumerate(files)]
        assert len(caught) == 1
        made = found.index(None)
        assert 0 < made < JPEGS
        assert found == [*map(native.entries_of, files[:made])] + [None] * (JPEGS - made)
        del index
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_open_takes_it(manifest: Manifest, tmp_path: Path) -> None:
    how: dict[str, Any] = {"root": tmp_path, "cache_dir": tmp_path / "cache", "index": "learn", "seed": 5}
    data = ps.open(tmp_path / "train.txt", transform=[RandomResizedCrop(32)], **how)
    epoch(data)
    assert len(known(manifest)) > N // 2
