"""``penstock clips index`` on real files: what it prints, writes, and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import refusal, said
from video_support import write_video

import penstock as ps


def run(*arguments: object, code: int = 0) -> str:
    """Run the command; the standard output, with runs of blanks as one."""
    return said("clips", "index", *arguments, code=code)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two folders of a video each."""
    for name, frames in (("ant", 20), ("bee", 30)):
        (tmp_path / "videos" / name).mkdir(parents=True)
        write_video(tmp_path / "videos" / name / "a.mp4", frames)
    return tmp_path / "videos"


def test_a_data_set_uses_what_it_writes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "videos.clips"
    text = run(folder, "--out", out)
    assert "files 2, " in text
    assert "frames 50" in text
    assert str(out) in text.replace("\n", "")
    assert len(ps.VideoDataset(folder, stride=10, frames=5, index=out)) == 5
    assert not (tmp_path / "cache/penstock/clips").exists()
    run(folder)
    (kept,) = (tmp_path / "cache/penstock/clips").iterdir()
    written = kept.stat().st_mtime_ns
    ps.VideoDataset(folder)
    assert kept.stat().st_mtime_ns == written


def test_files_that_are_no_videos(folder: Path, tmp_path: Path) -> None:
    (folder / "bee/b.mp4").write_text("no video")
    said = json.loads(run(folder, "--out", tmp_path / "all.clips", "--json", code=1))
    assert (said["files"], said["frames"], said["broken"]) == (3, 50, 1)
    assert "b.mp4" in said["errors"][0]
    assert said["output_bytes"] == (tmp_path / "all.clips").stat().st_size
    assert "1 of 3 files have no clips" in run(folder, "--out", tmp_path / "all.clips", code=1)


def test_nothing_to_index(tmp_path: Path) -> None:
    assert "contains no file of this kind" in refusal("clips", "index", tmp_path)
    assert "no file matches" in refusal("clips", "index", tmp_path / "*.mp4")
