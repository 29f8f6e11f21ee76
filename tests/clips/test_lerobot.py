"""`LeRobotDataset`: frames, windows and pictures of LeRobot's format v3, against the numbers that were written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot_support import FPS, HEIGHT, TASKS, WIDTH, Written, action_of, grid_of, picture_of, state_of, write_lerobot
from loader_conformance import check_elastic, check_end_of_pass, check_load_into_used, check_resume
from loader_support import EXECUTORS, plain
from video_support import all_frames

import penstock as ps
from penstock.clips.lerobot import LeRobotFiles
from penstock.clips.lerobot_load import nearest
from penstock.errors import (
    ClipError,
    ConfigError,
    DataFileChangedError,
    DataFileError,
    DataFileIOError,
    ImageError,
    PenstockError,
    StateError,
)
from penstock.images.transforms import Normalize, RandomResizedCrop, ToTensor

TOP, WRIST, STILL = "observation.images.top", "observation.images.wrist", "observation.still"
LENGTHS = [7, 5, 9, 4, 6]
N = sum(LENGTHS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Five episodes in three files of tables, and videos of two cameras, cut at other episodes."""
    root = tmp_path_factory.mktemp("robots") / "arm"
    return write_lerobot(root, LENGTHS, images=[STILL], task_column="__index_level_0__")


@pytest.fixture(scope="module")
def shown(written: Written) -> dict[str, list[Any]]:
    """What the cameras show at each frame, counted over all: the pixels of whole decodes, (3, height, width)."""
    pixels = {}
    for camera in written.cameras:
        files = sorted((written.root / "videos" / camera).glob("*/*.mp4"))
        frames = [frame.to_ndarray(format="rgb24") for file in files for frame in all_frames(file)]
        pixels[camera] = [torch.from_numpy(frame.transpose(2, 0, 1)) for frame in frames]
        assert len(pixels[camera]) == N
    return pixels


def copy_of(written: Written, folder: Path) -> Path:
    """Return a copy of a data set, to be damaged."""
    return shutil.copytree(written.root, folder / "copy")


def opened(root: Path | str, **options: Any) -> ps.LeRobotDataset:
    return ps.LeRobotDataset(root, **{"shuffle": "none", **options})


def test_a_row_is_a_frame(written: Written, shown: dict[str, list[Any]]) -> None:
    dataset = ps.open(written.root, shuffle="none")
    assert isinstance(dataset, ps.LeRobotDataset)
    assert len(dataset) == N
    for index in range(N):
        item = dataset[index]
        episode, place = written.place_of(index)
        expected = {
            "observation.state": torch.from_numpy(state_of(index)),
            "action": torch.from_numpy(action_of(index)),
            "observation.grid": torch.from_numpy(grid_of(index)),
            "next.done": torch.tensor(place == LENGTHS[episode] - 1),
            "number": torch.tensor(index),
            "timestamp": torch.tensor(place / FPS),
            "frame_index": torch.tensor(place),
            "episode_index": torch.tensor(episode),
            "index": torch.tensor(index),
            "task_index": torch.tensor(written.task_of(episode)),
            STILL: torch.from_numpy(picture_of(0, index).transpose(2, 0, 1)),
            **{camera: shown[camera][index] for camera in written.cameras},
        }
        assert item.pop("task") == TASKS[written.task_of(episode)]
        assert item.pop("note") == f"frame {index}"
        assert item.keys() == expected.keys()
        for name, value in expected.items():
            assert (item[name].dtype, item[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(item[name], value), name
        assert item[TOP].is_contiguous()


def test_the_frames_of_videos_are_those_that_were_written(written: Written) -> None:
    dataset = opened(written.root)
    for index in range(N):
        for camera, name in enumerate(written.cameras):
            expected = picture_of(camera, index).transpose(2, 0, 1).astype(int)
            differ = [
                np.abs(dataset[index][name].numpy() - expected).mean(),
                np.abs(dataset[index][name].numpy() - picture_of(camera, index + 1).transpose(2, 0, 1)).mean(),
            ]
            assert differ[0] < differ[1] / 2


def test_what_the_data_set_says_of_itself(written: Written) -> None:
    dataset = opened(written.root)
    assert dataset.meta.fps == FPS
    assert dataset.meta.tasks == dict(enumerate(TASKS))
    assert dataset.meta.total_episodes == len(LENGTHS)
    assert dataset.meta.features["action"]["shape"] == [2]
    assert dataset.meta.stats["action"]["mean"].tolist() == [1.0, 2.0]
    assert repr(dataset).startswith(f"LeRobotDataset of <LeRobotFiles of {N} frames in 5 episodes: {written.root}>\n")


class TestWindows:
    WINDOWS = {
        "action": [-0.2, 0.0, 0.1, 0.5],
        "timestamp": [-0.1, 0.0],
        "observation.state": [0.0],
        TOP: [-0.1, 0.0, 0.3],
        WRIST: [0.2],
        STILL: [0.1],
    }

    def test_they_stay_in_the_episode(self, written: Written, shown: dict[str, list[Any]]) -> None:
        dataset = opened(written.root, delta_timestamps=self.WINDOWS)
        for index in range(N):
            item = dataset[index]
            episode, place = written.place_of(index)
            for name, times in self.WINDOWS.items():
                wanted = [place + round(time * FPS) for time in times]
                inside = [min(max(k, 0), LENGTHS[episode] - 1) for k in wanted]
                frames = [written.begins[episode] + k for k in inside]
                masks = torch.tensor([k != within for k, within in zip(wanted, inside, strict=True)])
                assert torch.equal(item[f"{name}_is_pad"], masks)
                assert torch.equal(item[name], self.expected(name, frames, inside, shown))

    def expected(self, name: str, frames: list[int], places: list[int], shown: dict[str, list[Any]]) -> torch.Tensor:
        if name == "timestamp":
            return torch.tensor([place / FPS for place in places])
        if name in (TOP, WRIST):
            video = torch.stack([shown[name][frame] for frame in frames])
            return video[0] if len(frames) == 1 else video  # as LeRobot does
        if name == STILL:
            return torch.stack([torch.from_numpy(picture_of(0, frame).transpose(2, 0, 1)) for frame in frames])
        values = {"action": action_of, "observation.state": state_of}[name]
        return torch.from_numpy(np.stack([values(frame) for frame in frames]))

    def test_times_are_rounded_as_lerobot_does(self, written: Written) -> None:
        """By Python's `round`, within the tolerance."""
        dataset = opened(written.root, delta_timestamps={"action": [0.1 + 5e-5, 0.1 - 5e-5]}, columns=["action"])
        assert torch.equal(dataset[0]["action"][0], dataset[0]["action"][1])
        assert dataset.files.windows == {"action": (1, 1)}
        coarse = opened(written.root, delta_timestamps={"action": [0.13]}, tolerance_s=0.04, columns=["action"])
        assert coarse.files.windows == {"action": (1,)}

    @pytest.mark.parametrize(
        ("windows", "words"),
        [
            ({"action": [0.05]}, r"has 0.05 s, not a whole number of frames of 1/10 s"),
            ({"action": []}, "non-empty list"),
            ({"action": 0.1}, "must be a non-empty list of seconds"),
            ({"action": ["0.1"]}, "must be a non-empty list of seconds"),
            ({"action": [float("nan")]}, "must be a non-empty list of seconds"),
            ({"acton": [0.1]}, "contains 'acton', but the features of .* are .*action"),
            ({"note": [0.1]}, "names 'note', which is text"),
            ([0.1], "a dict of feature to list of seconds"),
        ],
    )
    def test_wrong_ones(self, written: Written, windows: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            opened(written.root, delta_timestamps=windows)

    def test_a_window_of_what_is_not_read(self, written: Written) -> None:
        with pytest.raises(ConfigError, match="not among columns="):
            opened(written.root, columns=["action"], delta_timestamps={TOP: [0.1]})


class TestChoice:
    def test_episodes(self, written: Written) -> None:
        whole = opened(written.root, columns=["action", TOP], delta_timestamps={"action": [-0.1, 0.0, 0.1]})
        some = opened(
            written.root, episodes=[4, 1, 4], columns=["action", TOP], delta_timestamps={"action": [-0.1, 0.0, 0.1]}
        )
        rows = [row for episode in (1, 4) for row in range(written.begins[episode], sum(LENGTHS[: episode + 1]))]
        assert some.files.episodes.tolist() == [1, 4]
        assert [plain(some[row]) for row in range(len(some))] == [plain(whole[row]) for row in rows]
        with pytest.raises(StateError):
            some.load_state_dict(whole.state_dict())

    def test_no_more_files_are_opened_than_hold_them(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        shutil.rmtree(root / "data/chunk-001")
        shutil.rmtree(root / "videos" / WRIST / "chunk-001")
        (root / "videos" / TOP / "chunk-000/file-001.mp4").unlink()
        some = opened(root, episodes=[2, 1])
        whole = opened(written.root)
        assert [plain(some[row]) for row in range(14)] == [plain(whole[row]) for row in range(7, 21)]
        with pytest.raises(DataFileIOError, match=r"data/chunk-001/file-000\.parquet"):
            opened(root)

    def test_columns(self, written: Written, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        dataset = opened(written.root, columns=["action"])
        place = {"timestamp", "frame_index", "episode_index", "index", "task_index", "task"}
        assert dataset[0].keys() == {"action"} | place
        assert dataset.files.index is None
        assert not (tmp_path / "penstock/clips").exists(), "no video is looked at"
        whole = opened(written.root)
        assert dataset.fingerprint == whole.fingerprint
        dataset.load_state_dict(whole.state_dict())

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"episodes": [5]}, "has no episode 5: it has 5 episodes"),
            ({"episodes": [-1]}, "has no episode -1"),
            ({"episodes": []}, "have no frames"),
            ({"episodes": ["1"]}, "a list of numbers, got '1' in it"),
            ({"episodes": 3}, "a list of numbers, got 3"),
            ({"episodes": "0:3"}, "a list of numbers, got '0:3'"),
            ({"columns": "action"}, "a list of names"),
            ({"columns": ["acton"]}, "contains 'acton', but the features of .* are .*action"),
            ({"tolerance_s": 0}, "a positive number of seconds"),
            ({"tolerance_s": "1"}, "a positive number of seconds"),
            ({"size": 0}, "size must be a positive int"),
            ({"size": 8, "transform": []}, "without transform"),
            ({"transform": 3}, "a transform is a list of steps"),
            ({"max_pixels": 0}, "max_pixels"),
            ({"index": True}, "index= takes a path"),
            ({"cache_bytes": 0}, "cache_bytes"),
        ],
    )
    def test_wrong_ones(self, written: Written, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            opened(written.root, **options)

    def test_files_that_are_open(self, written: Written) -> None:
        files = LeRobotFiles(written.root, columns=[TOP], tolerance_s=1e-3)
        assert plain(opened(files)[3]) == plain(opened(written.root, columns=[TOP])[3])
        with pytest.raises(ConfigError, match=r"episodes: give these to LeRobotFiles\(\.\.\.\)"):
            opened(files, episodes=[1])


class TestPictures:
    def test_size(self, written: Written) -> None:
        item = opened(written.root, size=(16, 24), delta_timestamps={TOP: [-0.1, 0.0]})[9]
        assert [item[name].shape for name in (TOP, WRIST, STILL)] == [(2, 3, 16, 24), (3, 16, 24), (3, 16, 24)]

    def test_a_camera_gets_one_crop_in_an_item(self, tmp_path: Path) -> None:
        root = write_lerobot(tmp_path / "arm", [6], images=[STILL], cameras=(TOP,)).root
        steps = [RandomResizedCrop(12), ToTensor(), Normalize((0.5,), (0.5,))]
        windows = {name: [0.0, 0.0, 0.0] for name in (TOP, STILL)}
        dataset = ps.LeRobotDataset(root, transform=steps, delta_timestamps=windows, seed=3)
        assert dataset.pure
        item = dataset[0]
        for name in (TOP, STILL):
            assert (item[name].shape, item[name].dtype) == ((3, 3, 12, 12), torch.float32)
            assert torch.equal(item[name], item[name][:1].expand(3, -1, -1, -1))
        assert not torch.allclose(item[TOP], item[STILL], atol=0.2), "each camera has a crop of its own"
        again = ps.LeRobotDataset(root, transform=steps, delta_timestamps=windows, seed=3)
        assert plain(again[0]) == plain(item)
        again.set_epoch(1)
        assert plain(again[0]) != plain(item)

    def test_frames_of_an_item_are_decoded_together(self, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
        dataset = opened(written.root, columns=[TOP, WRIST], delta_timestamps={TOP: [-0.3, -0.1, 0.0]})
        reader, asked = dataset.load.reader, []  # type: ignore[union-attr]
        frames = reader.frames
        monkeypatch.setattr(reader, "frames", lambda file, numbers: asked.append(len(numbers)) or frames(file, numbers))
        dataset[5]
        assert asked == [3, 1]

    def test_maps_of_depths_are_refused(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        for said in ({"info": {"is_depth_map": True}}, {"video_info": {"video.is_depth_map": True}}):
            change_info(root, lambda info, said=said: info["features"][WRIST].update(said))
            with pytest.raises(ConfigError, match=rf"'{WRIST}' is a depth map.*columns=\[.*action"):
                opened(root)
            assert WRIST not in opened(root, columns=["action", TOP])[0]


def change_info(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change ``meta/info.json``."""
    info = json.loads((root / "meta/info.json").read_text())
    change(info)
    (root / "meta/info.json").write_text(json.dumps(info))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor_makes_the_same_batches(written: Written, executor: str) -> None:
    def run(executor: str) -> list[Any]:
        windows = {"action": [0.0, 0.1, 0.2], TOP: [-0.1, 0.0]}
        steps = [RandomResizedCrop(12)]
        dataset = ps.LeRobotDataset(written.root, delta_timestamps=windows, transform=steps, seed=2)
        loader = ps.DataLoader(dataset, batch_size=4, executor=executor, num_workers=EXECUTORS[executor])
        return [plain(batch) for _ in range(2) for batch in loader]

    assert run(executor) == run("inline")


def test_batches(written: Written) -> None:
    dataset = opened(written.root, delta_timestamps={"action": [0.0, 0.1], TOP: [-0.1, 0.0]})
    batch = next(iter(ps.DataLoader(dataset, batch_size=6)))
    assert batch[TOP].shape == (6, 2, 3, HEIGHT, WIDTH)
    assert batch[WRIST].shape == (6, 3, HEIGHT, WIDTH)
    assert batch["action"].shape == (6, 2, 2)
    assert batch["action_is_pad"].shape == (6, 2)
    assert batch["task"] == [TASKS[0]] * 6


@pytest.mark.parametrize("options", [{}, {"shuffle": "block"}, {"shuffle": "block", "block_size": 4}])
def test_every_row_comes_once_in_an_epoch(written: Written, options: dict[str, Any]) -> None:
    ranks = [
        ps.LeRobotDataset(written.root, columns=["number"], rank=rank, world_size=2, remainder="uneven", **options)
        for rank in range(2)
    ]
    numbers = [int(item["number"]) for dataset in ranks for item in (dataset[row] for row in range(len(dataset)))]
    assert sorted(numbers) == list(range(N))
    assert numbers != list(range(N))


def test_resume(written: Written) -> None:
    def loader(rank: int = 0, world: int = 1, **options: Any) -> Any:
        share = {"rank": rank, "world_size": world, "seed": 2, **options}
        windows = {"action": [0.0, 0.1]}
        dataset = ps.LeRobotDataset(written.root, columns=["action", "number"], delta_timestamps=windows, **share)
        return ps.DataLoader(dataset, batch_size=4)

    check_resume(lambda: loader(mini_epochs=2))
    check_resume(lambda: loader(rank=1, world=2))
    check_elastic(loader, lambda batch: batch["number"].tolist(), N, [(2, 2), (3, 1), (1, 4)])
    check_end_of_pass(loader)
    check_load_into_used(loader)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_resume_by_another_executor(written: Written, executor: str) -> None:
    def loader(executor: str) -> Any:
        dataset = ps.LeRobotDataset(written.root, columns=[TOP, "action"], transform=[RandomResizedCrop(8)], seed=2)
        return ps.DataLoader(dataset, batch_size=4, executor=executor, num_workers=EXECUTORS[executor])

    check_resume(lambda: loader("inline"), passes=2, positions=range(0, 16, 5), other=lambda: loader(executor))


def test_workers_that_are_spawned(written: Written) -> None:
    dataset = ps.LeRobotDataset(written.root, size=8)
    expected = [plain(batch) for batch in ps.DataLoader(dataset, batch_size=8)]
    dataset.set_epoch(0)
    loader = ps.DataLoader(dataset, batch_size=8, num_workers=2, executor="process", multiprocessing_context="spawn")
    assert [plain(batch) for batch in loader] == expected


class TestPickles:
    def test_they_are_handles(self, written: Written) -> None:
        dataset = opened(written.root, delta_timestamps={"action": [0.0, 0.1]}, episodes=[0, 3], size=8)
        data = pickle.dumps(dataset)
        assert len(data) < 10_000
        again = pickle.loads(data)
        assert again.fingerprint == dataset.fingerprint
        assert [plain(again[row]) for row in range(11)] == [plain(dataset[row]) for row in range(11)]

    def test_episodes_that_came_later_are_not_in_them(self, tmp_path: Path) -> None:
        root = tmp_path / "arm"
        write_lerobot(root, [3, 3], per_table=1, cameras=())
        dataset = opened(root)
        data, before = pickle.dumps(dataset), dataset.state_dict()
        times = [(path, path.stat()) for path in root.glob("data/*/*")]
        write_lerobot(root, [3, 3, 3], per_table=1, cameras=())
        for path, stat in times:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        again = pickle.loads(data)
        assert (len(again), again.fingerprint) == (6, dataset.fingerprint)
        grown = opened(root)
        assert len(grown) == 9
        grown.load_state_dict(before, allow_growth=True)
        with pytest.raises(StateError):
            grown.load_state_dict(before)


def test_mixtures_and_filters(written: Written) -> None:
    dataset = ps.LeRobotDataset(written.root, columns=["number"])
    some = ps.Subset(dataset, range(4))
    assert sorted(int(some[row]["number"]) for row in range(len(some))) == [0, 1, 2, 3]
    other = ps.LeRobotDataset(written.root, columns=["number"], episodes=[1])
    batch = next(iter(ps.DataLoader(ps.Mixture([(dataset, 1), (other, 1)], stop="first"), batch_size=4)))
    assert batch["number"].shape == (4,)


class TestOpen:
    def test_it_takes_the_options(self, written: Written) -> None:
        dataset = ps.open(written.root, episodes=[1], columns=[TOP], size=8, seed=4, delta_timestamps={TOP: [0.0, 0.1]})
        assert isinstance(dataset, ps.LeRobotDataset)
        assert dataset[0][TOP].shape == (2, 3, 8, 8)
        with pytest.raises(ConfigError, match=r"LeRobot folders do not take flip=: .*they take .*delta_timestamps"):
            ps.open(written.root, flip=True)

    def test_older_formats_are_to_be_converted(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        for version in ("v2.1", "v2.0", "1.6"):
            change_info(root, lambda info, version=version: info.update(codebase_version=version))
            with pytest.raises(DataFileError, match=rf"info\.json: .*{version}.*convert_dataset_v21_to_v30"):
                ps.open(root)
        change_info(root, lambda info: info.update(codebase_version="v4.0"))
        with pytest.raises(DataFileError, match=r"v4\.0, which is newer than v3\.0"):
            ps.open(root)
        change_info(root, lambda info: info.update(codebase_version="v3.1"))
        assert len(ps.open(root)) == N

    def test_stores_are_left_out(self) -> None:
        with pytest.raises(ConfigError, match="read from a local folder: copy this one there"):
            ps.LeRobotDataset("s3://bucket/pusht")
        with pytest.raises(ConfigError, match="takes a folder, as str or Path"):
            ps.LeRobotDataset(["pusht"])  # type: ignore[arg-type]


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a table anew."""
    pq.write_table(change(pq.read_table(path)), path)


def without(column: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns([column])


def with_values(column: str, values: list[Any]) -> Callable[[pa.Table], pa.Table]:
    """Return what puts values to the beginning of a column."""

    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(column)
        new = pa.array(values + table[column].to_pylist()[len(values) :], table.schema.field(column).type)
        return table.set_column(place, column, new)

    return change


EPISODES, TASKS_FILE, DATA = "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet", "data/chunk-000/file-000"


class TestWrongFiles:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", r"info\.json is not JSON"),
            ("[]", r"info\.json is not a JSON object"),
            ("{}", "codebase_version is None"),
            ('{"codebase_version": "new"}', "codebase_version is 'new'"),
            ('{"codebase_version": "v3.0"}', "fps must be a positive number, not None"),
            ('{"codebase_version": "v3.0", "fps": 0}', "fps must be a positive number, not 0"),
            ('{"codebase_version": "v3.0", "fps": 10}', "names no features"),
            ('{"codebase_version": "v3.0", "fps": 10, "features": {"a": 1}}', "'a' has no dtype"),
        ],
    )
    def test_info(self, written: Written, tmp_path: Path, text: str, words: str) -> None:
        root = copy_of(written, tmp_path)
        (root / "meta/info.json").write_text(text)
        with pytest.raises(DataFileError, match=words):
            opened(root)

    @pytest.mark.parametrize(
        "path",
        [
            "data/{episode_chunk}/{episode_index}.parquet",
            "data/{chunk_index.__class__}/{file_index}",
            "../{chunk_index}",
            "/data/{file_index:03d}",
            "{chunk_index:999999999d}",
            3,
        ],
    )
    def test_info_that_names_no_files(self, written: Written, tmp_path: Path, path: Any) -> None:
        root = copy_of(written, tmp_path)
        change_info(root, lambda info: info.update(data_path=path))
        with pytest.raises(DataFileError, match=r"data_path is .*, not a template of a path within the folder"):
            opened(root)
        change_info(root, lambda info: info["features"].pop("index"))
        with pytest.raises(DataFileError, match="has no feature 'index'"):
            opened(root)

    @pytest.mark.parametrize(
        "name", ["meta/info.json", TASKS_FILE, "meta/episodes", f"{DATA}.parquet", "data/chunk-001"]
    )
    def test_files_that_are_missing(self, written: Written, tmp_path: Path, name: str) -> None:
        root = copy_of(written, tmp_path)
        if (root / name).is_dir():
            shutil.rmtree(root / name)
        else:
            (root / name).unlink()
        with pytest.raises(DataFileIOError, match=name):
            opened(root)

    @pytest.mark.parametrize("name", [TASKS_FILE, EPISODES, f"{DATA}.parquet"])
    def test_files_that_are_cut_off(self, written: Written, tmp_path: Path, name: str) -> None:
        root = copy_of(written, tmp_path)
        (root / name).write_bytes((root / name).read_bytes()[:200])
        with pytest.raises(DataFileError, match=f"{name}.* truncated"):
            opened(root)

    @pytest.mark.parametrize(
        ("name", "change", "words"),
        [
            (TASKS_FILE, without("task_index"), "not task_index and task"),
            (EPISODES, without("data/file_index"), "no column 'data/file_index'"),
            (EPISODES, without(f"videos/{TOP}/from_timestamp"), "no column 'videos/.*/from_timestamp'"),
            (EPISODES, with_values("episode_index", [1, 0]), "do not follow one another"),
            (EPISODES, with_values("episode_index", [9]), "are not numbered from 0 on"),
            (EPISODES, with_values("dataset_to_index", [6]), "do not follow one another"),
            (EPISODES, with_values("dataset_to_index", [None]), "missing or invalid numbers"),
            (f"{DATA}.parquet", lambda table: table.slice(0, 11), "has 11 rows, and meta/episodes says 12"),
            (f"{DATA}.parquet", without("action"), "'action'"),
        ],
    )
    def test_tables_that_say_something_else(
        self, written: Written, tmp_path: Path, name: str, change: Any, words: str
    ) -> None:
        root = copy_of(written, tmp_path)
        rewrite(root / name, change)
        with pytest.raises(PenstockError, match=words):
            opened(root)

    def test_rows_that_are_other_frames(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        rewrite(root / f"{DATA}.parquet", with_values("index", [0, 1, 7]))
        dataset = opened(root)
        assert int(dataset[1]["index"]) == 1
        with pytest.raises(DataFileError, match=rf"{DATA}\.parquet, row 2 is frame 7 of episode 0, .* says 2 of"):
            dataset[2]

    def test_a_task_that_there_is_not(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        rewrite(root / f"{DATA}.parquet", with_values("task_index", [8]))
        with pytest.raises(DataFileError, match="no task 8"):
            opened(root)[0]

    def test_rows_without_numbers(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        rewrite(root / f"{DATA}.parquet", with_values("action", [[1.0]]))
        assert opened(root, columns=["action"])[0]["action"].shape == (1,)
        with pytest.raises(DataFileError, match=rf"{DATA}\.parquet, row 0, or a row near it: 'action'"):
            opened(root, columns=["action"], delta_timestamps={"action": [0.0, 0.1]})[0]

    def test_an_image_that_is_missing(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        rewrite(root / f"{DATA}.parquet", with_values(STILL, [{"bytes": None, "path": None}]))
        dataset = opened(root, columns=[STILL])
        with pytest.raises(ImageError, match=rf"{DATA}\.parquet, row 0: the image is missing"):
            dataset[0]
        assert dataset[1][STILL].shape == (3, HEIGHT, WIDTH)

    def test_a_table_that_is_changed_meanwhile(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        dataset = opened(root, columns=["action"])
        os.utime(root / f"{DATA}.parquet", (1, 1))
        for at_hand in (dataset, pickle.loads(pickle.dumps(dataset))):
            with pytest.raises(DataFileChangedError):
                at_hand[0]

    def test_statistics(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        (root / "meta/stats.json").write_text('{"action": 3}')
        with pytest.raises(DataFileError, match=r"stats\.json does not map features to numbers"):
            _ = opened(root).meta.stats
        (root / "meta/stats.json").unlink()
        assert opened(root).meta.stats == {}


class TestVideos:
    def test_a_time_without_a_frame(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        rewrite(root / EPISODES, with_values(f"videos/{TOP}/from_timestamp", [0.0, 0.74]))
        dataset = opened(root, columns=[TOP])
        assert dataset[6][TOP].shape == (3, HEIGHT, WIDTH)
        where = rf"videos/{TOP}/chunk-000/file-000\.mp4', episode 1: no frame at 0\.840000 s"
        with pytest.raises(ClipError, match=rf"{where}\. The nearest is at 0\.8") as raised:
            dataset[8]
        assert raised.value.__notes__ == [f"while the feature {TOP!r} was loaded"]
        assert opened(root, columns=[TOP], tolerance_s=0.05)[8][TOP].shape == (3, HEIGHT, WIDTH)

    def test_a_video_that_is_too_short(self, written: Written, tmp_path: Path) -> None:
        root = copy_of(written, tmp_path)
        name = f"videos/{TOP}/chunk-000/file-001.mp4"
        shutil.copy(root / f"videos/{WRIST}/chunk-001/file-000.mp4", root / name)
        dataset = opened(root, columns=[TOP])
        with pytest.raises(ClipError, match=rf"{name}', episode 4: no frame at 0\.\d+ s\. The nearest is at 0\.5"):
            dataset[N - 1]

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_one_that_is_missing(self, written: Written, tmp_path: Path, executor: str) -> None:
        root = copy_of(written, tmp_path)
        (root / f"videos/{TOP}/chunk-000/file-001.mp4").unlink()
        dataset = opened(root, columns=[TOP])
        with pytest.raises(ClipError, match=rf"{TOP}/chunk-000/file-001\.mp4"):
            dataset[N - 1]
        loader = ps.DataLoader(
            dataset, batch_size=4, on_error="skip", executor=executor, num_workers=EXECUTORS[executor]
        )
        with pytest.warns(UserWarning, match="cannot be loaded"):
            indices = {index for batch in loader for index in batch["index"].tolist()}
        assert indices == set(range(sum(LENGTHS[:3])))

    def test_the_index_lies_where_one_says(self, written: Written, tmp_path: Path) -> None:
        place = tmp_path / "arm.clips"
        dataset = opened(written.root, index=place)
        assert place.exists()
        assert plain(opened(written.root, index=place)[4]) == plain(dataset[4])
        for options in ({"columns": [TOP]}, {"episodes": [2, 4]}):
            some, expected = opened(written.root, index=place, **options), opened(written.root, **options)
            assert plain(some[3]) == plain(expected[3])


def test_nearest_times() -> None:
    times = np.array([0.0, 1.0, 2.0])
    assert nearest(times, np.array([-3.0, 0.4, 0.5, 0.6, 1.0, 1.9, 7.0])).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert nearest(times[:1], np.array([-3.0, 0.0, 0.6])).tolist() == [0, 0, 0]


def test_pickles_hold_what_was_asked_for(written: Written) -> None:
    """Whatever their owner does to it later; and what can be gone through once only."""
    windows = {"action": [0.0, 1 / FPS]}
    dataset = ps.LeRobotDataset(written.root, delta_timestamps=windows, episodes=iter([0, 2]), columns=iter(["action"]))
    windows["action"].append(2 / FPS)
    again = pickle.loads(pickle.dumps(dataset))
    assert len(again) == len(dataset) == LENGTHS[0] + LENGTHS[2]
    assert again[0]["action"].shape == dataset[0]["action"].shape == (2, 2)
    with pytest.raises(ConfigError, match="episodes: give these to LeRobotFiles"):
        ps.LeRobotDataset(dataset.files, episodes=np.array([0, 1]))


def test_lerobots_own_library_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its windows, masks, tasks and pictures; colours as its decoder rounds them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    library = pytest.importorskip("lerobot.datasets.lerobot_dataset", exc_type=ImportError)
    written = write_lerobot(tmp_path / "arm", LENGTHS)
    windows = {
        "action": [0.0, 1 / FPS, 2 / FPS],
        "observation.state": [-1 / FPS, 0.0],
        TOP: [-1 / FPS, 0.0],
    }
    theirs = library.LeRobotDataset("arm/arm", root=written.root, delta_timestamps=windows, video_backend="torchcodec")
    ours = ps.LeRobotDataset(written.root, delta_timestamps=windows, shuffle="none")
    assert len(ours) == len(theirs) == N
    for row in range(N):
        expected, found = theirs[row], ours[row]
        for name, value in expected.items():
            if name in written.cameras:
                assert value.shape == found[name].shape
                assert (value - found[name] / 255).abs().max() < 3 / 255
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value.double(), torch.as_tensor(found[name]).double()), name
            else:
                assert value == found[name], name
