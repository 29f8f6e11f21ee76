"""Clips out of tar archives: each member is read as a range of its archive, on a disk and in a store."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sound_support import all_samples, write_sound
from store_server import Store
from video_support import all_frames, clip_of, picture, write_video

import penstock as ps
from penstock.clips.media import parse_member
from penstock.clips.tar_members import members_of
from penstock.errors import ClipError, ConfigError, DataFileChangedError


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """Two archives of two videos each, with their labels, and the videos beside them."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    for shard in range(2):
        with ps.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(2):
                key = 2 * shard + number
                draw = lambda frame, key=key: picture(100 * key + frame)  # noqa: E731
                path = write_video(tmp_path / f"{key}.mp4", 40, pictures=draw)
                writer.write({"__key__": f"clips/{key}", "mp4": path.read_bytes(), "cls": key + 5})
    return folder


def test_frames_are_those_of_the_files(bucket: Path, tmp_path: Path) -> None:
    dataset = ps.VideoDataset(bucket, frames=4, step=2, stride=10, shuffle="none")
    assert len(dataset) == 16
    for row in range(16):
        video, label = dataset[row]
        assert label == row // 4 + 5
        frames = all_frames(tmp_path / f"{row // 4}.mp4")
        begin = row % 4 * 10
        assert np.array_equal(video.numpy(), clip_of(frames, range(begin, begin + 8, 2)))


def test_stores_are_read_by_ranges(bucket: Path) -> None:
    local = ps.VideoDataset(str(bucket / "{0,1}.tar"), frames=4, shuffle="none")
    with Store(bucket.parent) as store:
        remote = ps.VideoDataset([f"{store.url}/bucket/{number}.tar" for number in range(2)], frames=4, shuffle="none")
        store.reset()
        for row in range(4):
            assert torch.equal(remote[row][0], local[row][0])
        assert store.counts()["bytes"] < sum(path.stat().st_size for path in bucket.iterdir())
        moved = ps.VideoDataset(bucket, frames=4, index=bucket.parent / "clips", shuffle="none")
        assert torch.equal(moved[1][0], local[1][0])


def test_recordings_with_captions(tmp_path: Path) -> None:
    with ps.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(2):
            path = write_sound(tmp_path / f"{number}.flac", 0.5, codec="flac", rate=8_000, seed=number)
            writer.write(
                {"__key__": str(number), "flac": path.read_bytes(), "txt": "words", "json": {"speaker": number}}
            )
    dataset = ps.AudioDataset(tmp_path / "a.tar", shuffle="none")
    audio, label = dataset[1]
    assert np.array_equal(audio.numpy(), all_samples(tmp_path / "1.flac"))
    assert label == {"text": "words", "speaker": 1}


def test_an_archive_that_was_changed_or_is_none(bucket: Path, tmp_path: Path) -> None:
    dataset = ps.VideoDataset([bucket / "0.tar"], frames=2, shuffle="none")
    data = (bucket / "0.tar").read_bytes()
    (bucket / "0.tar").write_bytes(data + bytes(10_240))
    with pytest.raises(DataFileChangedError):
        dataset[0]
    (tmp_path / "no.tar").write_text("no archive " * 100)
    with pytest.raises(ClipError, match=r"no\.tar' is not a tar archive"):
        ps.VideoDataset(tmp_path / "no.tar")
    with ps.TarWriter(str(tmp_path / "none.tar")) as writer:
        writer.write({"__key__": "a", "txt": "b"})
    with pytest.raises(ConfigError, match="contain no member of this kind"):
        ps.VideoDataset(tmp_path / "none.tar")


def test_names_say_the_place() -> None:
    assert parse_member("s3://bucket/a.tar!512+100!x!1+2!y.mp4") == ("s3://bucket/a.tar", 512, 100)
    assert parse_member("http://h/a.tar?X-Amz-Signature=1!512+100!7.mp4") == (
        "http://h/a.tar?X-Amz-Signature=1",
        512,
        100,
    )
    assert parse_member("a.tar") is None


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_that_are_long(tmp_path: Path, format: int) -> None:
    """Their headers lie across the blocks in which an archive is read."""
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as out:
        for number in range(600):
            out.addfile(tarfile.TarInfo(f"{number:0600d}.mp4"))
    assert len(members_of(str(tmp_path / "a.tar"), (".mp4",), None)) == 600


def test_labels(tmp_path: Path) -> None:
    """They are the same in whichever order members lie, and what is no number or no JSON is text."""
    beside: list[tuple[dict[str, bytes], Any]] = [
        ({"cls": b"7"}, 7),
        ({"cls": b"7", "json": b'{"label": 3, "x": 1}'}, {"label": 7, "x": 1}),
        ({"json": b'{"label": 3}'}, {"label": 3}),
        ({"cls": b"--5"}, "--5"),
        ({"cls": "²".encode()}, "²"),
        ({"cls": b"9" * 5000}, "9" * 5000),
        ({"json": b"[" * 100_000}, {"json": "[" * 100_000}),
        ({"json": b"[1]", "txt": b"words"}, {"json": [1], "text": "words"}),
        ({"other": b"1"}, None),
    ]
    for reverse in (False, True):
        with tarfile.open(tmp_path / "a.tar", "w") as out:
            for number, (files, _) in enumerate(beside):
                members = sorted([("mp4", b""), *files.items()], reverse=reverse)
                for ending, data in members:
                    info = tarfile.TarInfo(f"{number}.{ending}")
                    info.size = len(data)
                    out.addfile(info, io.BytesIO(data))
        found = members_of(str(tmp_path / "a.tar"), (".mp4",), None)
        assert [one.label for one in found] == [label for _, label in beside]


def test_a_list_of_folders_of_archives(bucket: Path) -> None:
    dataset = ps.VideoDataset([bucket, bucket / "0.tar"], frames=2, shuffle="none")
    assert [dataset[row][1] for row in range(6)] == [5, 6, 7, 8, 5, 6]


def test_archives_beside_files(bucket: Path, tmp_path: Path) -> None:
    write_video(bucket / "a.mp4")
    with pytest.raises(ConfigError, match=r"contains tar archives, and beside them .*a\.mp4"):
        ps.VideoDataset(bucket)
