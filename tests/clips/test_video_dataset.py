"""`VideoDataset`: clips in any order, by any executor, from anywhere; what is wrong with a file is said."""

from __future__ import annotations

import gc
import os
import pickle
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import cli_support
import numpy as np
import pyarrow as pa
import pytest
import torch
from interpreter_support import METHODS
from loader_conformance import check_elastic, check_end_of_pass, check_load_into_used, check_resume
from loader_support import EXECUTORS, plain
from store_server import Store
from video_support import all_frames, clip_of, picture, write_video

import penstock as ps
from penstock.clips.clip_index import VIDEO, ClipIndex
from penstock.errors import (
    ClipError,
    ConfigError,
    DataFileChangedError,
    DataFileError,
    DataFileIOError,
    StateError,
    UnknownClassesError,
)
from penstock.images.transforms import ColorJitter, Normalize, RandomResizedCrop, ToTensor

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTHS = {"ant/a.mp4": 40, "ant/b.mkv": 25, "bee/c.mp4": 7, "cat/d.mp4": 60, "cat/e.ts": 30}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of different lengths in folders of three classes."""
    root = tmp_path_factory.mktemp("videos")
    for number, (name, frames) in enumerate(LENGTHS.items()):
        (root / name).parent.mkdir(exist_ok=True)
        write_video(root / name, frames, pictures=lambda frame, number=number: picture(100 * number + frame))
    return root


@pytest.fixture(scope="module")
def shown(folder: Path) -> dict[str, list[Any]]:
    """The frames of each video."""
    return {name: all_frames(folder / name) for name in LENGTHS}


def paths(folder: Path) -> list[str]:
    return [str(folder / name) for name in LENGTHS]


def test_clips_of_a_stride(folder: Path, shown: dict[str, list[Any]]) -> None:
    dataset = ps.VideoDataset(paths(folder), frames=4, step=3, stride=8, shuffle="none")
    expected = [
        (name, begin) for name, count in LENGTHS.items() for begin in (range(0, count - 9, 8) if count >= 10 else [0])
    ]
    assert len(dataset) == len(expected)
    for (video, said), (name, begin) in zip((dataset[row] for row in range(len(dataset))), expected, strict=True):
        assert (said["path"], said["frame"]) == (str(folder / name), begin)
        assert said["seconds"] == pytest.approx(shown[name][begin].time - shown[name][0].time, abs=1e-6)
        assert video.dtype is torch.uint8
        assert video.is_contiguous()
        assert np.array_equal(video.numpy(), clip_of(shown[name], range(begin, begin + 12, 3)))


def test_clips_at_random_starts(folder: Path, shown: dict[str, list[Any]]) -> None:
    dataset = ps.VideoDataset(paths(folder), frames=4, step=2, seed=1)
    starts: dict[str, set[int]] = {}
    for epoch in range(12):
        dataset.set_epoch(epoch)
        for row in range(len(dataset)):
            video, said = dataset[row]
            name = os.path.relpath(said["path"], folder)
            assert np.array_equal(video.numpy(), clip_of(shown[name], range(said["frame"], said["frame"] + 8, 2)))
            starts.setdefault(name, set()).add(said["frame"])
    assert set(starts) == set(LENGTHS)
    assert starts["bee/c.mp4"] == {0}
    assert len(starts["cat/d.mp4"]) > 6
    again = ps.VideoDataset(paths(folder), frames=4, step=2, seed=1)
    again.set_epoch(11)
    assert all(torch.equal(again[row][0], dataset[row][0]) for row in range(len(dataset)))
    fixed = ps.VideoDataset(paths(folder), frames=4, random_start=False)
    assert {fixed[row][1]["frame"] for row in range(len(fixed))} == {0}


def test_a_short_file_repeats_its_last_frame(folder: Path, shown: dict[str, list[Any]]) -> None:
    video, _ = ps.VideoDataset(folder / "bee/c.mp4", frames=5, step=2)[0]
    assert np.array_equal(video.numpy(), clip_of(shown["bee/c.mp4"], [0, 2, 4, 6, 6]))


def test_folders_are_classes(folder: Path, tmp_path: Path) -> None:
    dataset = ps.VideoDataset(folder, frames=2, size=16, shuffle="none")
    assert dataset.classes == ["ant", "bee", "cat"]
    assert dataset.class_to_idx["cat"] == 2
    assert [dataset[row][1] for row in range(len(dataset))] == [0, 0, 1, 2, 2]
    others = ps.VideoDataset(folder, frames=2, labels=["a", "b", "c", "d", "e"], shuffle="none")
    assert [others[row][1] for row in range(5)] == ["a", "b", "c", "d", "e"]
    with pytest.raises(UnknownClassesError):
        _ = others.classes
    with pytest.raises(StateError):
        dataset.load_state_dict(others.state_dict())
    shutil.copy(folder / "bee/c.mp4", tmp_path / "c.mp4")
    assert ps.VideoDataset(tmp_path, frames=2)[0][1]["path"] == str(tmp_path / "c.mp4")
    (tmp_path / "more").mkdir()
    shutil.copy(folder / "bee/c.mp4", tmp_path / "more")
    with pytest.raises(ConfigError, match=r"beside them the file 'c\.mp4'"):
        ps.VideoDataset(tmp_path)
    with pytest.raises(ConfigError, match="contains no file of this kind"):
        ps.VideoDataset(tmp_path_of_nothing(tmp_path))


def tmp_path_of_nothing(folder: Path) -> Path:
    (folder / "nothing").mkdir()
    return folder / "nothing"


def test_all_frames_of_a_clip_are_transformed_alike(folder: Path) -> None:
    """The same frame all the time gives the same picture all the time, whatever is drawn."""
    still = folder.parent / "still.mp4"
    write_video(still, 12, pictures=lambda number: picture(0), options={"qp": "1", "bf": "0"}, gop=1)
    steps = [RandomResizedCrop(20), ColorJitter(0.5, 0.5, 0.5), ToTensor(), Normalize((0.5,), (0.5,))]
    dataset = ps.VideoDataset([still], frames=6, transform=steps, seed=4)
    clips = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        video = dataset[0][0]
        assert video.shape == (6, 3, 20, 20)
        assert (video.dtype, video.is_contiguous()) == (torch.float32, True)
        assert (video - video[0]).abs().max() < 0.1
        clips.append(video)
    assert not torch.allclose(clips[0], clips[1])
    flipped = [ps.VideoDataset([still], frames=6, size=24, flip=True, seed=seed)[0][0] for seed in range(8)]
    plain_clip = ps.VideoDataset([still], frames=6, size=24)[0][0]
    mirrored = [torch.equal(clip, plain_clip.flip(3)) for clip in flipped]
    assert all(torch.equal(clip, plain_clip) for clip, yes in zip(flipped, mirrored, strict=True) if not yes)
    assert 0 < sum(mirrored) < 8


def torchs_own(image: Any) -> Any:
    """Draw from torch's global generator."""
    return np.roll(np.asarray(image), int(torch.randint(0, 16, ())), axis=1)


def test_transforms_of_others_draw_once_for_a_clip(folder: Path) -> None:
    still = folder.parent / "still.mp4"
    write_video(still, 12, pictures=lambda number: picture(0), options={"qp": "1", "bf": "0"}, gop=1)
    dataset = ps.VideoDataset([still] * 6, frames=6, transform=[torchs_own], seed=1)
    assert not dataset.pure
    loader = ps.DataLoader(dataset, batch_size=6, seed=1)
    first, again = next(iter(loader))[0], next(iter(ps.DataLoader(dataset, batch_size=6, seed=1)))[0]
    assert torch.equal(first, again)
    assert (first.int() - first[:, :1].int()).abs().max() <= 2
    assert len({clip.numpy().tobytes() for clip in first}) > 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor_makes_the_same_batches(folder: Path, executor: str) -> None:
    def run(executor: str) -> list[Any]:
        dataset = ps.VideoDataset(folder, frames=4, size=(20, 24), flip=True, seed=2)
        loader = ps.DataLoader(dataset, batch_size=2, executor=executor, num_workers=EXECUTORS[executor])
        return [plain(batch) for _ in range(2) for batch in loader]

    assert run(executor) == run("inline")


def test_clips_are_written_where_the_batch_is(folder: Path) -> None:
    dataset = ps.VideoDataset(folder, frames=4, size=16, shuffle="none")
    memory: list[torch.Tensor] = []

    def into(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory.append(torch.empty(shape, dtype=dtype))
        return memory[0]

    items = dataset.load_samples(range(5), dataset.keys(range(5)), into=into)
    assert memory[0].shape == (5, 4, 3, 16, 16)
    assert [item[0].data_ptr() for item in items] == [row.data_ptr() for row in memory[0]]
    assert torch.equal(memory[0], torch.stack([dataset[row][0] for row in range(5)]))


N = 13


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Videos whose label is their number."""
    root = tmp_path_factory.mktemp("numbered")
    return [
        str(write_video(root / f"{number}.mp4", 8, pictures=lambda frame, number=number: picture(number + frame)))
        for number in range(N)
    ]


def test_resume(numbered: list[str]) -> None:
    def loader(rank: int = 0, world: int = 1, **options: Any) -> Any:
        share = {"rank": rank, "world_size": world, "seed": 2, **options}
        dataset = ps.VideoDataset(numbered, frames=2, size=8, labels=range(N), **share)
        return ps.DataLoader(dataset, batch_size=2)

    check_resume(lambda: loader(mini_epochs=2))
    check_resume(lambda: loader(rank=1, world=2))
    check_elastic(loader, lambda batch: batch[1].tolist(), N, [(2, 2), (3, 1), (1, 3)])
    check_end_of_pass(loader)
    check_load_into_used(loader)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_resume_by_another_executor(numbered: list[str], executor: str) -> None:
    def loader(executor: str) -> Any:
        dataset = ps.VideoDataset(numbered, frames=2, size=8, labels=range(N), seed=2)
        return ps.DataLoader(dataset, batch_size=2, executor=executor, num_workers=EXECUTORS[executor])

    check_resume(lambda: loader("inline"), passes=2, positions=range(0, 14, 3), other=lambda: loader(executor))


@pytest.mark.parametrize("method", METHODS)
def test_workers_of_every_start_method(numbered: list[str], method: str) -> None:
    dataset = ps.VideoDataset(numbered, frames=2, size=8, labels=range(N))
    expected = [plain(batch) for batch in ps.DataLoader(dataset, batch_size=4)]
    dataset.set_epoch(0)
    loader = ps.DataLoader(dataset, batch_size=4, num_workers=2, executor="process", multiprocessing_context=method)
    assert [plain(batch) for batch in loader] == expected


def test_pickles_are_handles(folder: Path) -> None:
    dataset = ps.VideoDataset(folder, frames=2, size=8)
    data = pickle.dumps(dataset)
    assert len(data) < 6000
    again = pickle.loads(data)
    assert torch.equal(again[1][0], dataset[1][0])
    assert again.classes == dataset.classes


def test_mixtures_and_filters_have_clips(folder: Path, numbered: list[str]) -> None:
    clips = ps.VideoDataset(numbered, frames=2, size=8, labels=range(N))
    some = ps.Subset(clips, range(4))
    assert sorted(label for _, label in (some[row] for row in range(len(some)))) == [0, 1, 2, 3]
    mixture = ps.Mixture([(clips, 1), (ps.VideoDataset(folder, frames=2, size=8), 1)], stop="first")
    batch = next(iter(ps.DataLoader(mixture, batch_size=4)))
    assert batch[0].shape == (4, 2, 3, 8, 8)


class TestIndex:
    def test_it_is_kept_in_the_cache(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        ps.VideoDataset(folder)
        (kept,) = (tmp_path / "penstock/clips").iterdir()
        changed = kept.stat().st_mtime_ns
        ps.VideoDataset(folder, frames=3)
        assert kept.stat().st_mtime_ns == changed
        kept.write_bytes(kept.read_bytes()[:100])
        assert len(ps.VideoDataset(folder)) == 5
        assert kept.stat().st_mtime_ns != changed

    def test_it_lies_where_one_says(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        place = tmp_path / "all.arrow"
        dataset = ps.VideoDataset(folder, index=place, shuffle="none")
        assert place.exists()
        assert not (tmp_path / "cache/penstock/clips").exists()
        assert len(ClipIndex(place, VIDEO, "")) == 5
        again = ps.VideoDataset(folder, index=place, shuffle="none")
        assert torch.equal(again[4][0], dataset[4][0])
        assert len(ps.VideoDataset(paths(folder)[:3], index=place)) == 3
        place.write_bytes(b"something else")
        with pytest.raises(DataFileError, match="is not an index of videos"):
            ps.VideoDataset(folder, index=place)
        with pytest.raises(DataFileIOError, match="pass another path with index="):
            ps.VideoDataset(folder, index=folder / "ant/a.mp4/index")

    def test_it_is_made_again_by_the_command(self, folder: Path, tmp_path: Path) -> None:
        path, index = tmp_path / "a.mp4", tmp_path / "index"
        shutil.copy(folder / "bee/c.mp4", path)
        ps.VideoDataset([path], index=index)
        shutil.copy(folder / "ant/a.mp4", path)
        with pytest.raises(DataFileChangedError, match="penstock clips index"):
            ps.VideoDataset([path], index=index)[0]
        cli_support.said("clips", "index", path, "--out", index)
        assert ps.VideoDataset([path], index=index, frames=40)[0][0].shape[0] == 40
        # One of an older version, too, which no data set takes.
        with pa.memory_map(str(index)) as file:
            table = pa.ipc.open_file(file).read_all()
        with pa.ipc.new_file(str(index), table.schema.with_metadata({"penstock": "videos 1"})) as out:
            out.write_table(table)
        with pytest.raises(DataFileError, match="build it again"):
            ps.VideoDataset([path], index=index)
        cli_support.said("clips", "index", path, "--out", index)
        assert len(ps.VideoDataset([path], index=index)) == 1
        with pa.ipc.new_file(str(tmp_path / "table"), pa.schema([("a", pa.int64())])):
            pass
        with pytest.raises(DataFileError, match="is not an index of videos, so it is not overwritten"):
            cli_support.said("clips", "index", path, "--out", tmp_path / "table")
        (tmp_path / "words").write_text("no index")
        with pytest.raises(DataFileError):
            cli_support.said("clips", "index", path, "--out", tmp_path / "words")
        assert (tmp_path / "words").read_text() == "no index"

    def test_it_serves_some_of_its_files(self, folder: Path, tmp_path: Path) -> None:
        """In any order, as a folder, rows of a list; and after all were moved."""
        index = tmp_path / "index"
        whole = ps.VideoDataset(folder, index=index, frames=2, size=16, shuffle="none")
        made = index.read_bytes()
        shutil.copytree(folder, tmp_path / "moved/deep")
        for root in (folder, tmp_path / "moved/deep"):
            some = [root / name for name in ("cat/d.mp4", "ant/b.mkv", "cat/d.mp4")]
            rows = [{"path": "bee/c.mp4", "label": 0}, {"path": "ant/a.mp4", "end": 1.0, "label": 1}]
            makes: list[Any] = [
                (lambda some=some: ps.VideoDataset(some, index=index, frames=2, size=16, shuffle="none"), [3, 1, 3]),
                (
                    lambda root=root: ps.VideoDataset(root / "ant", index=index, frames=2, size=16, shuffle="none"),
                    [0, 1],
                ),
                (
                    lambda root=root, rows=rows: ps.VideoDataset(
                        root, clips=rows, index=index, frames=2, size=16, shuffle="none", random_start=False
                    ),
                    [2, 0],
                ),
            ]
            for make, numbers in makes:
                dataset = make()
                for found in (dataset, pickle.loads(pickle.dumps(dataset))):
                    assert found.lengths.tolist() == [2] * len(numbers)
                    records = [found.files.records([row])[0] for row in range(len(numbers))]
                    expected = [whole.files.records([number])[0] for number in numbers]
                    assert [os.path.basename(one.path) for one in records] == [
                        os.path.basename(one.path) for one in expected
                    ]
                    assert all(str(one.path).startswith(str(root)) for one in records)
                    assert found[0][0].shape == (2, 3, 16, 16)
        with pytest.raises(DataFileError, match=r"is the index of other files: it does not contain 'e\.mp4'"):
            ps.VideoDataset([folder / "ant/a.mp4", folder / "ant/e.mp4"], index=index)
        assert index.read_bytes() == made

    def test_a_pickle_is_of_its_index(self, folder: Path, tmp_path: Path) -> None:
        names = [folder / "ant/a.mp4", folder / "bee/c.mp4"]
        data = pickle.dumps(ps.VideoDataset(names, index=tmp_path / "index", labels=[0, 1]))
        assert len(pickle.loads(data)) == 2
        (tmp_path / "index").unlink()
        ps.VideoDataset(names[::-1], index=tmp_path / "index")
        with pytest.raises(DataFileChangedError, match="was built again for other files"):
            pickle.loads(data)

    def test_one_that_is_damaged(self, folder: Path, tmp_path: Path) -> None:
        """Where Arrow says what lies where, and in what is known of each file, damage is an error."""
        whole = ClipIndex(ps.VideoDataset(folder, index=tmp_path / "whole").files.index.path, VIDEO, str(folder))
        data, draw, damaged = Path(whole.path).read_bytes(), np.random.default_rng(0), 0
        for number in range(400):
            changed = bytearray(data)
            at = int(draw.integers(1500))
            changed[at if number % 2 else len(data) - 1 - at] ^= 1 << int(draw.integers(8))
            (tmp_path / "changed").write_bytes(changed)
            try:
                found = ClipIndex(tmp_path / "changed", VIDEO, str(folder))
                for file in range(len(found)):
                    found.error(file), found.path_of(file), found.coding(file), found.packets(file)
            except DataFileError:
                damaged += 1
        assert damaged > 100

    def test_files_may_be_moved(self, folder: Path, tmp_path: Path) -> None:
        dataset = ps.VideoDataset(folder, index=tmp_path / "all.arrow", size=16, shuffle="none")
        moved = shutil.copytree(folder, tmp_path / "bucket/elsewhere", copy_function=shutil.copyfile)
        for name in LENGTHS:
            os.utime(moved / name, (1, 1))
        again = ps.VideoDataset(moved, index=tmp_path / "all.arrow", size=16, shuffle="none")
        assert again.fingerprint == dataset.fingerprint
        assert all(torch.equal(again[row][0], dataset[row][0]) for row in range(5))
        with Store(tmp_path) as store:
            addresses = [f"{store.url}/bucket/elsewhere/{name}" for name in LENGTHS]
            remote = ps.VideoDataset(addresses, index=tmp_path / "all.arrow", size=16, shuffle="none")
            assert store.counts()["requests"] == {}
            assert all(torch.equal(remote[row][0], dataset[row][0]) for row in range(5))

    def test_a_file_that_was_changed_is_noticed(self, folder: Path, tmp_path: Path) -> None:
        path = tmp_path / "a.mp4"
        shutil.copy(folder / "ant/a.mp4", path)
        dataset = ps.VideoDataset([path], index=tmp_path / "index.arrow")
        first = dataset[0]
        shutil.copy(folder / "cat/d.mp4", path)
        for at_hand in (ps.VideoDataset([path], index=tmp_path / "index.arrow"), pickle.loads(pickle.dumps(dataset))):
            with pytest.raises(DataFileChangedError, match="penstock clips index"):
                at_hand[0]
        renewed = ps.VideoDataset([path])
        assert not torch.equal(renewed[0][0], first[0])


class TestStores:
    def test_ranges_are_read(self, folder: Path, tmp_path: Path) -> None:
        """Of an object in a store no more than the groups of pictures that a clip needs."""
        (tmp_path / "bucket").mkdir()
        write_video(tmp_path / "bucket/long.mp4", 600, gop=20, options={"bf": "2", "qp": "20"})
        with Store(tmp_path) as store:
            address = f"{store.url}/bucket/long.mp4"
            dataset = ps.VideoDataset([address], frames=4, step=2, seed=3)
            local = ps.VideoDataset([tmp_path / "bucket/long.mp4"], frames=4, step=2, seed=3)
            packets = dataset.files.index.packets(0)
            for epoch in range(10):
                for one in (dataset, local):
                    one.set_epoch(epoch)
                store.reset()
                video, said = dataset[0]
                assert torch.equal(video, local[0][0])
                frame = said["frame"]
                runs = packets.decode_ranges(np.unique(frame + 2 * np.arange(4)))
                needed = sum(int(packets.size[first : last + 1].sum()) for first, last, _ in runs)
                counts = store.counts()
                assert counts["bytes"] <= 1.2 * needed
                assert counts["requests"]["GET"] <= 3

    def test_signatures_are_not_kept(self, folder: Path, tmp_path: Path) -> None:
        """The same objects at addresses that are signed anew have the same index, in which is no signature."""
        (tmp_path / "bucket").mkdir()
        names = ["a.mp4", "b.mp4"]
        for name, source in zip(names, ("ant/a.mp4", "bee/c.mp4"), strict=True):
            shutil.copy(folder / source, tmp_path / "bucket" / name)
        with ps.TarWriter(str(tmp_path / "bucket/c.tar")) as writer:
            writer.write({"__key__": "x", "mp4": (folder / "bee/c.mp4").read_bytes()})
        with Store(tmp_path) as store:
            for index in (None, tmp_path / "index.arrow"):
                found, scanned = [], []
                for time in ("20260101", "20260102"):
                    signed = f"?X-Amz-Date={time}&X-Amz-Signature=secret{time}"
                    store.reset()
                    dataset = ps.VideoDataset(
                        [f"{store.url}/bucket/{name}{signed}" for name in names], frames=2, shuffle="none", index=index
                    )
                    scanned.append(store.counts()["bytes"])
                    found.append(dataset.files.index.path)
                    assert torch.equal(pickle.loads(pickle.dumps(dataset))[1][0], dataset[1][0])
                    assert b"secret" not in Path(found[-1]).read_bytes()
                assert found[0] == found[1]
                assert scanned[1] < scanned[0] / 10
            packed = ps.VideoDataset(f"{store.url}/bucket/c.tar{signed}", frames=2)
            assert packed[0][0].shape == (2, 3, 48, 64)

    def test_an_object_that_is_not_there(self, tmp_path: Path, folder: Path) -> None:
        (tmp_path / "bucket").mkdir()
        shutil.copy(folder / "ant/a.mp4", tmp_path / "bucket")
        with Store(tmp_path) as store:
            dataset = ps.VideoDataset(
                [f"{store.url}/bucket/a.mp4", f"{store.url}/bucket/b.mp4"], frames=2, shuffle="none"
            )
            assert dataset[0][0].shape == (2, 3, 48, 64)
            with pytest.raises(ClipError, match=r"b\.mp4"):
                dataset[1]


class TestWrongFiles:
    @pytest.fixture
    def wrong(self, tmp_path: Path, folder: Path) -> list[str]:
        whole = (folder / "ant/a.mp4").read_bytes()
        (tmp_path / "empty.mp4").write_bytes(b"")
        (tmp_path / "text.mp4").write_text("no video " * 100)
        (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])  # without the table at its end
        with ps.TarWriter(str(tmp_path / "tar.mp4")) as writer:
            writer.write({"__key__": "a", "txt": "b"})
        return [str(tmp_path / f"{name}.mp4") for name in ("empty", "text", "cut", "tar", "missing")]

    def test_their_rows_are_errors_that_name_them(self, wrong: list[str], folder: Path) -> None:
        dataset = ps.VideoDataset([*wrong, folder / "ant/a.mp4"], frames=2, shuffle="none", labels=range(6))
        assert len(dataset) == 6
        for row, path in enumerate(wrong):
            with pytest.raises(ClipError, match=os.path.basename(path)):
                dataset[row]
        assert dataset[5][1] == 5

    def test_what_a_damaged_file_raises_is_an_error_of_its_row(self, tmp_path: Path, numbered: list[str]) -> None:
        """Bytes changed here and there, in files of several kinds."""
        draw = np.random.default_rng(0)
        kinds = ["a.mp4", "a.mkv", "a.ts", "a.avi", "a.flv", "a.h264"]
        wrong = []
        for kind in kinds:
            codec = {"a.avi": "mpeg4", "a.flv": "flv"}.get(kind, "libx264")
            whole = write_video(tmp_path / kind, 12, codec=codec).read_bytes()
            for number in range(20):
                data = bytearray(whole)
                for at in draw.integers(len(data), size=1 + number * 3).tolist():
                    data[at] = int(draw.integers(256))
                path = tmp_path / f"{number}-{kind}"
                path.write_bytes(data[: len(data) - 7 * number])
                wrong.append(str(path))
        dataset = ps.VideoDataset([*wrong, numbered[0]], frames=3, size=8, shuffle="none", labels=range(121))
        said = {}
        for row in range(120):
            try:
                assert dataset[row][0].shape == (3, 3, 8, 8)
            except ClipError as error:
                said[row] = str(error)
        assert len(said) > 10
        assert all(os.path.basename(wrong[row]) in words for row, words in said.items())
        assert dataset[120][1] == 120

    def test_pipes_and_odd_names(self, tmp_path: Path, numbered: list[str]) -> None:
        os.mkfifo(tmp_path / "pipe.mp4")
        odd = os.fsencode(tmp_path) + b"/caf\xe9.mp4"
        shutil.copy(numbered[0], odd)
        dataset = ps.VideoDataset([tmp_path / "pipe.mp4", Path(os.fsdecode(odd))], frames=2, shuffle="none")
        with pytest.raises(ClipError, match="is not a regular file"):
            dataset[0]
        assert dataset[1][0].shape == (2, 3, 48, 64)

    def test_a_name_that_is_none(self, tmp_path: Path, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"nothing\.mp4 does not exist"):
            ps.VideoDataset(tmp_path / "nothing.mp4")
        with ps.TarWriter(str(tmp_path / "a.TAR")) as writer:
            writer.write({"__key__": "a", "mp4": (folder / "bee/c.mp4").read_bytes()})
        assert ps.VideoDataset(tmp_path / "a.TAR", frames=2)[0][0].shape == (2, 3, 48, 64)
        with pytest.raises(ConfigError, match=r"a\.TAR' is a tar archive, and other files are not"):
            ps.VideoDataset([tmp_path / "a.TAR", folder / "bee/c.mp4"])

    def test_files_that_cannot_be_opened(self, tmp_path: Path, numbered: list[str]) -> None:
        """Each is an error of its row."""
        (tmp_path / "loop.mp4").symlink_to(tmp_path / "loop.mp4")
        wrong = [str(tmp_path / "loop.mp4"), str(tmp_path / ("long" * 100))]
        dataset = ps.VideoDataset([*wrong, numbered[0]], frames=2, shuffle="none", labels=range(3))
        for row in range(2):
            with pytest.raises(ClipError, match="cannot be opened"):
                dataset[row]
        assert dataset[2][1] == 2
        with pytest.raises(ConfigError, match="cannot be the name of a file"):
            ps.VideoDataset([str(tmp_path / "zero\0.mp4"), numbered[0]], frames=2)

    def test_links_that_lead_back(self, folder: Path, tmp_path: Path) -> None:
        shutil.copytree(folder, tmp_path / "videos")
        (tmp_path / "videos/ant/again").symlink_to(tmp_path / "videos/ant")
        (tmp_path / "videos/ant/others").symlink_to(folder / "bee")
        assert len(ps.VideoDataset(tmp_path / "videos")) == 6

    def test_a_list_of_folders(self, folder: Path) -> None:
        """Their files, without classes."""
        dataset = ps.VideoDataset([folder / "ant", folder / "bee", folder / "cat/d.mp4"], frames=2, shuffle="none")
        assert [os.path.relpath(dataset[row][1]["path"], folder) for row in range(4)] == list(LENGTHS)[:4]
        for nothing, words in (
            ([], "the list is empty"),
            (3, "a source must be a path"),
            ([3], "a source must be a path"),
        ):
            with pytest.raises(ConfigError, match=words):
                ps.VideoDataset(nothing)  # type: ignore[arg-type]

    def test_a_playlist_opens_no_other_file(self, tmp_path: Path, numbered: list[str]) -> None:
        shutil.copy(numbered[0], tmp_path / "secret.mp4")
        (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile secret.mp4\n")
        with pytest.raises(ClipError, match=r"list\.mp4"):
            ps.VideoDataset([tmp_path / "list.mp4"], frames=2)[0]

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_loaders_skip_them(self, wrong: list[str], numbered: list[str], executor: str) -> None:
        dataset = ps.VideoDataset([*wrong, *numbered], frames=2, size=8, labels=range(5 + N))
        loader = ps.DataLoader(
            dataset, batch_size=4, on_error="skip", executor=executor, num_workers=EXECUTORS[executor]
        )
        with pytest.warns(UserWarning, match="cannot be loaded"):
            labels = [label for batch in loader for label in batch[1].tolist()]
        assert sorted(labels) == list(range(5, 5 + N))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frames": 0}, "frames= takes a positive number"),
        ({"frames": 2.5}, "frames= takes a positive number"),
        ({"step": -1}, "step= takes a positive number"),
        ({"stride": 0}, "stride= takes a positive number"),
        ({"stride": 4, "random_start": True}, "random_start"),
        ({"random_start": 1}, "random_start= takes True or False"),
        ({"labels": [1]}, "1 labels for 5 files"),
        ({"labels": "abcde"}, "one label for each file"),
        ({"size": 0}, "size must be a positive int"),
        ({"size": 8, "transform": []}, "without transform"),
        ({"transform": 3}, "a transform is a list of steps"),
        ({"max_pixels": 0}, "max_pixels"),
        ({"max_pixels": 1 << 40}, "max_pixels"),
        ({"frames": 10**30}, "frames= takes a positive number"),
        ({"flip": "no"}, "flip= takes True or False"),
        ({"size": True}, "size= one or two integers"),
        ({"labels": {0: 1}}, "one label for each file"),
        ({"index": 3}, "index= takes the path"),
    ],
)
def test_arguments(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ps.VideoDataset(folder, **options)


def test_a_frame_of_too_many_pixels(folder: Path) -> None:
    for name in ("ant/a.mp4", "cat/e.ts"):
        with pytest.raises(ClipError, match=rf"{name}' has frames of 3,072 pixels, more than max_pixels=1000: pass"):
            ps.VideoDataset([folder / name], max_pixels=1000)[0]


def test_an_argument_that_there_is_not(folder: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'frmes': did you mean 'frames'"):
        ps.VideoDataset(folder, frmes=1)


@pytest.mark.parametrize("ending", ["mp4", "ts"])
def test_open_files_and_decoders_stay_few(tmp_path: Path, ending: str) -> None:
    """Also those that are read through a demuxer, with threads that none of them has."""
    path = write_video(tmp_path / f"a.{ending}", 12)
    many = [shutil.copy(path, tmp_path / f"{number}.{ending}") for number in range(80)]
    dataset = ps.VideoDataset(many, frames=2, size=8)
    dataset[0]
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    tasks = len(os.listdir("/proc/self/task"))
    gc.disable()
    try:
        for _ in range(2):
            for row in range(len(dataset)):
                dataset[row]
        assert len(os.listdir("/proc/self/fd")) - before < 40
        assert len(os.listdir("/proc/self/task")) <= tasks
        assert threading.active_count() == threads
    finally:
        gc.enable()


class Collects:
    """A step that has Python collect its garbage."""

    def __call__(self, image: Any) -> Any:
        gc.collect()
        return image


def test_forks_free_what_their_parent_has_open(tmp_path: Path) -> None:
    paths = [write_video(tmp_path / f"{number}.ts", 24) for number in range(2)]
    dataset = ps.VideoDataset(paths, frames=2, stride=6, transform=[Collects()])
    expected = [plain(dataset[row]) for row in range(len(dataset))]
    loader = ps.DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=100)
    assert sorted(map(str, map(plain, loader))) == sorted(map(str, expected))


class Draws:
    """A step that draws from the generators of the process, one after the other."""

    def __call__(self, image: Any) -> Any:
        return torch.full((3, 4, 4), random.randrange(256) + np.random.randint(256), dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:.*does not declare itself pure")
def test_threads_draw_once_for_a_clip(numbered: list[str]) -> None:
    dataset = ps.VideoDataset([name for name in numbered for _ in range(3)], frames=8, transform=[Draws()])
    loader = ps.DataLoader(dataset, batch_size=1, executor="thread", num_workers=4)
    for clip, _ in loader:
        assert (clip == clip[:, :1]).all()
