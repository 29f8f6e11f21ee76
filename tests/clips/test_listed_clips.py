"""`clips=`: rows of a table say which part of which file a clip is, and what belongs to it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from loader_conformance import check_elastic, check_resume
from loader_support import EXECUTORS, plain
from sound_support import all_samples, write_sound
from video_support import all_frames, clip_of, picture, write_video

import penstock as ps
from penstock.errors import ClipError, ConfigError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

RATE = 24
ROWS: list[dict[str, Any]] = [
    {"path": "a.mp4", "start": 0.0, "end": 1.0, "caption": "it begins", "score": 0.5},
    {"path": "b.mp4", "start": 0.5, "end": None, "caption": "all the rest", "score": 1.5},
    {"path": "a.mp4", "start": 1.0, "end": 1.1, "caption": "a moment", "score": 2.5},
    {"path": "a.mp4", "start": None, "end": 0.25, "caption": "no start", "score": 3.5},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("listed")
    for number, name in enumerate("ab"):
        write_video(root / f"{name}.mp4", 48, pictures=lambda frame, number=number: picture(50 * number + frame))
        write_sound(root / f"{name}.flac", 2.0, codec="flac", rate=8_000, channels=1, seed=number)
    return root


def test_frames_are_those_of_the_time(folder: Path) -> None:
    frames = {name: all_frames(folder / f"{name}.mp4") for name in "ab"}
    dataset = ps.VideoDataset(folder, clips=ROWS, frames=4, step=2, random_start=False, shuffle="none")
    assert len(dataset) == 4
    # Frames 24, 25 and 26 are shown from 1.0 s on and before 1.1 s.
    expected = [("a", [0, 2, 4, 6]), ("b", [12, 14, 16, 18]), ("a", [24, 26, 26, 26]), ("a", [0, 2, 4, 5])]
    for row, (name, numbers) in enumerate(expected):
        video, label = dataset[row]
        assert np.array_equal(video.numpy(), clip_of(frames[name], numbers))
        assert label == {"caption": ROWS[row]["caption"], "score": ROWS[row]["score"]}


def test_random_starts_stay_within_the_time(folder: Path) -> None:
    frames = all_frames(folder / "a.mp4")
    dataset = ps.VideoDataset(folder, clips=[{"path": "a.mp4", "start": 0.5, "end": 1.0}], frames=4, step=2, seed=1)
    starts = set()
    for epoch in range(20):
        dataset.set_epoch(epoch)
        video, said = dataset[0]
        starts.add(said["frame"])
        assert np.array_equal(video.numpy(), clip_of(frames, range(said["frame"], said["frame"] + 8, 2)))
    assert min(starts) >= 12
    assert max(starts) + 6 < 24
    assert len(starts) > 3


def test_samples_are_those_of_the_time(folder: Path) -> None:
    samples = all_samples(folder / "b.flac")
    rows = {"path": ["b.flac"] * 3, "start": [0.25, 1.5, 1.9], "end": [0.75, 1.6, 5.0], "label": [7, 8, 9]}
    dataset = ps.AudioDataset(folder, clips=rows, seconds=0.2, random_start=False, shuffle="none")
    for row, (begin, end) in enumerate([(2_000, 3_600), (12_000, 12_800), (15_200, 16_000)]):
        audio, label = dataset[row]
        assert audio.shape == (1, 1_600)
        assert np.array_equal(audio[:, : end - begin].numpy(), samples[:, begin:end])
        assert not audio[:, end - begin :].any()
        assert label == rows["label"][row]
    whole = ps.AudioDataset(folder, clips=rows, shuffle="none")
    assert whole.lengths.tolist() == [4_000, 800, 800]
    assert np.array_equal(whole[0][0].numpy(), samples[:, 2_000:6_000])
    slower = ps.AudioDataset(folder, clips=rows, sample_rate=4_000, shuffle="none")
    assert slower.lengths.tolist() == [2_000, 400, 400]
    assert slower[0][0].shape == (1, 2_000)


@pytest.mark.parametrize("kind", ["dicts", "arrow", "parquet", "jsonl"])
def test_rows_come_from_anywhere(folder: Path, tmp_path: Path, kind: str) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in map(_json, ROWS)))
    rows: Any = {
        "dicts": lambda: ROWS,
        "arrow": lambda: table,
        "parquet": lambda: ps.TableFiles(tmp_path / "rows.parquet"),
        "jsonl": lambda: ps.JsonFiles(tmp_path / "rows.jsonl"),
    }[kind]()
    dataset = ps.VideoDataset(folder, clips=rows, frames=2, size=8, shuffle="none")
    expected = ps.VideoDataset(folder, clips=ROWS, frames=2, size=8, shuffle="none")
    again = pickle.loads(pickle.dumps(dataset))
    for row in range(4):
        for one in (dataset, again):
            assert torch.equal(one[row][0], expected[row][0])
            assert one[row][1] == expected[row][1]
    assert again.fingerprint == dataset.fingerprint


def _json(row: dict[str, Any]) -> str:
    import json

    return json.dumps(row)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_executor_makes_the_same_batches(folder: Path, executor: str) -> None:
    def run(executor: str) -> list[Any]:
        dataset = ps.VideoDataset(folder, clips=ROWS * 3, frames=4, size=8, seed=2)
        loader = ps.DataLoader(dataset, batch_size=5, executor=executor, num_workers=EXECUTORS[executor])
        return [plain(batch) for _ in range(2) for batch in loader]

    assert run(executor) == run("inline")


def test_resume(folder: Path) -> None:
    rows = [{"path": "a.mp4", "start": number / 10, "label": number} for number in range(13)]

    def loader(rank: int = 0, world: int = 1) -> Any:
        dataset = ps.VideoDataset(folder, clips=rows, frames=2, size=8, rank=rank, world_size=world, seed=2)
        return ps.DataLoader(dataset, batch_size=2)

    check_resume(loader)
    check_elastic(loader, lambda batch: batch[1].tolist(), 13, [(2, 2), (3, 1), (1, 3)])
    other = ps.VideoDataset(folder, clips=[*rows[:-1], {**rows[-1], "label": 99}], frames=2, size=8, seed=2)
    with pytest.raises(StateError):
        other.load_state_dict(ps.VideoDataset(folder, clips=rows, frames=2, size=8, seed=2).state_dict())


def test_a_time_without_frames(folder: Path) -> None:
    rows = [{"path": "a.mp4", "start": 50.0, "end": 60.0}, {"path": "missing.mp4"}]
    dataset = ps.VideoDataset(folder, clips=rows, frames=2, shuffle="none")
    with pytest.raises(ClipError, match=r"a\.mp4.* has no frame in the time range of row 0"):
        dataset[0]
    with pytest.raises(ClipError, match=r"missing\.mp4"):
        dataset[1]
    with pytest.raises(ClipError, match="has no audio in the time range of row 0"):
        ps.AudioDataset(folder, clips=[{"path": "a.flac", "start": 9}])[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clips": []}, "no rows"),
        ({"clips": [{"file": "a.mp4"}]}, "row 0 has no path"),
        ({"clips": [{"path": "a.mp4", "start": 2, "end": 1}]}, "row 0 has the times 2 to 1"),
        ({"clips": [{"path": "a.mp4", "start": "x"}]}, "row 0 has the times 'x'"),
        ({"clips": [{"path": "a.mp4", "start": -1}]}, "row 0 has the times -1"),
        ({"clips": "clips.csv"}, "clips= takes a list of dicts"),
        ({"clips": ROWS, "stride": 4}, "stride= is for whole files"),
        ({"clips": ROWS, "labels": [1]}, "labels= is for whole files"),
    ],
)
def test_arguments(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ps.VideoDataset(folder, **options)


def test_the_first_argument_is_a_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the folder that the paths are relative to"):
        ps.VideoDataset([folder / "a.mp4"], clips=ROWS)


def test_rows_need_not_have_the_same_keys(folder: Path) -> None:
    rows = [{"path": "a.mp4", "caption": "all"}, {"path": "a.mp4", "start": 1.0, "end": 1.5, "speaker": 3}]
    for order in (rows, rows[::-1]):
        dataset = ps.VideoDataset(folder, clips=order, frames=2, random_start=False, shuffle="none")
        records = dataset.files.records(np.arange(2))
        assert [(one.first, one.end) for one in records] == [
            (0, 48) if "start" not in row else (24, 36) for row in order
        ]
        assert [one.label for one in records] == [
            {"caption": row.get("caption"), "speaker": row.get("speaker")} for row in order
        ]
    for wrong in ({"path": ["a.mp4"], "start": [1, 2]}, [{"path": "a.mp4", "x": 1}, {"path": "a.mp4", "x": "word"}]):
        with pytest.raises(ConfigError, match="clips=: the columns cannot become an Arrow table"):
            ps.VideoDataset(folder, clips=wrong)


@pytest.mark.parametrize(("name", "rate"), [("a.mp4", 24), ("a.mp4", 30), ("a.mkv", 24), ("a.mkv", 30), ("a.mp4", 60)])
def test_times_that_were_computed_are_those_of_frames(tmp_path: Path, name: str, rate: int) -> None:
    """A frame's number divided by the rate is its time, however the file has rounded that."""
    write_video(tmp_path / name, 90, rate=rate)
    rows = [{"path": name, "start": k / rate, "end": (k + 4) / rate} for k in range(86)]
    dataset = ps.VideoDataset(tmp_path, clips=rows, frames=4, random_start=False, shuffle="none")
    records = dataset.files.records(np.arange(86))
    assert [(one.first, one.end) for one in records] == [(k, k + 4) for k in range(86)]


def test_times_count_from_where_the_file_begins(tmp_path: Path) -> None:
    """Whatever its container's clock says then."""
    late = write_video(tmp_path / "late.mkv", 48, times=lambda number: 240 * 3600 + 10 * number)
    with av.open(str(late)) as source, av.open(str(tmp_path / "late.ts"), "w") as out:
        copy = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = copy
                out.mux(packet)
    for name in ("late.mkv", "late.ts"):
        rows = [{"path": name, "start": 1.0, "end": 2.0}]
        dataset = ps.VideoDataset(tmp_path, clips=rows, frames=4, random_start=False)
        video, said = dataset[0]
        assert said == {"path": str(tmp_path / name), "frame": 24, "seconds": pytest.approx(1.0, abs=0.001)}
        assert np.array_equal(video.numpy(), clip_of(all_frames(tmp_path / name), range(24, 28)))
