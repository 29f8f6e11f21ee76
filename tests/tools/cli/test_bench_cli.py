"""``penstock bench clips``: ways to read clips of the user's videos, in a table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner
from video_support import all_frames, clip_of, write_video

from penstock.clips.compare import _has_torchcodec, by_pyav, by_torchcodec
from penstock.errors import ClipError
from penstock.tools.cli.app import app


def test_clips(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", 30)
    write_video(tmp_path / "b.mp4", 5)
    command = ["bench", "clips", str(tmp_path), "--frames", "8", "--clips", "3", "--rounds", "2"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.exception
    said = json.loads(result.stdout)
    assert (said["files"], said["left_out"]) == (1, 1)
    assert {"penstock", "pyav"} <= said["clips_per_second"].keys()
    assert all(len(values) == 2 for values in said["clips_per_second"].values())
    shown = CliRunner().invoke(app, command).stdout
    assert "1 file, clips of 8 frames" in shown
    assert "left out: 1 file with too few frames" in shown
    result = CliRunner().invoke(app, ["bench", "clips", str(tmp_path / "b.mp4"), "--frames", "8"])
    assert isinstance(result.exception, ClipError)


def test_all_ways_read_the_same_clip(tmp_path: Path) -> None:
    frames = all_frames(write_video(tmp_path / "a.mp4", 40))
    times = [frame.time for frame in frames[7:23:3]]
    expected = clip_of(frames, range(7, 23, 3))
    assert np.array_equal(by_pyav(str(tmp_path / "a.mp4"), times).numpy(), expected)
    if _has_torchcodec():
        assert np.array_equal(by_torchcodec(str(tmp_path / "a.mp4"), range(7, 23, 3)).numpy(), expected)
