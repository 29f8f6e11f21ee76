"""``penstock bench readers``: every installed back end on the user's files, in a table, a picture and JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner
from video_support import all_frames, clip_of, write_video

from penstock.clips.compare import _has_torchcodec, by_pyav, by_torchcodec
from penstock.errors import ClipError, ConfigError, ImageError
from penstock.images import native
from penstock.images.backends import installed
from penstock.images.compare import TASKS, compare, sample, synthetic_jpegs
from penstock.tools.cli.app import app


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three JPEGs, in folders; a PNG; a text; a JPEG that is cut off."""
    image = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    for name in ("a/1.jpg", "a/2.JPEG", "b/3.jpg", "b/4.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        ok, data = cv2.imencode(path.suffix.lower(), image)
        assert ok
        path.write_bytes(data.tobytes())
    cut = (tmp_path / "images" / "a/1.jpg").read_bytes()
    (tmp_path / "images" / "b" / "cut.jpg").write_bytes(cut[: len(cut) // 2])
    (tmp_path / "images" / "b" / "labels.txt").write_text("cat dog")
    return tmp_path / "images"


def test_json(folder: Path) -> None:
    result = CliRunner().invoke(
        app, ["bench", "readers", str(folder), "--json", "--rounds", "1", "--threads", "2", "--target", "32"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["format"], report["files"], report["other_formats"], report["target"]) == ("jpeg", 3, 1, 32)
    assert report["threads"] == [1, 2]
    for name in set(installed()) & {"native", "simplejpeg", "opencv", "pillow"}:
        assert report["failed"][name] == 1
        measured = {(entry["task"], entry["threads"]) for entry in report["images_per_second"][name]}
        tasks = set(TASKS) - ({"header"} if name == "opencv" else set())
        assert measured == {(task, threads) for task in tasks for threads in (1, 2)}
        assert all(entry["value"] > 0 for entry in report["images_per_second"][name])
    assert any("whole images" in line for line in report["advice"])


def test_table_and_picture(folder: Path, tmp_path: Path) -> None:
    plot = tmp_path / "readers.png"
    arguments = ["--rounds", "1", "--threads", "1", "--backend", "simplejpeg", "--backend", "opencv"]
    result = CliRunner().invoke(app, ["bench", "readers", str(folder), *arguments, "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    for text in ("3 jpeg files", "1 file that simplejpeg cannot read", "1 file of other formats", "crop", "opencv"):
        assert text in result.output
    assert "pillow" not in result.output
    picture = cv2.imread(str(plot))
    assert picture is not None
    assert picture.shape[1] > 600


def test_what_is_missing_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda: False)
    arguments = ["--rounds", "1", "--threads", "1", "--backend", "simplejpeg", "--json"]
    result = CliRunner().invoke(app, ["bench", "readers", str(folder), *arguments])
    assert "libjpeg62-turbo-dev" in " ".join(json.loads(result.stdout)["advice"])


def test_no_folder_no_images_no_back_end(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is not a folder"):
        sample(tmp_path / "nowhere", count=3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="contains no image files"):
        sample(tmp_path / "empty", count=3)
    result = CliRunner().invoke(app, ["bench", "readers", str(folder), "--backend", "libpng"])
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match="at least 1"):
        compare(synthetic_jpegs(1), threads=(0,))


def test_png_and_made_up_files(folder: Path) -> None:
    for path in folder.glob("*/*.[jJ]*"):
        path.unlink()
    files = sample(folder, count=10)
    assert (files.kind, len(files.data)) == ("png", 1)
    result = compare(files, target=16, rounds=1)
    assert "simplejpeg" not in result.speed
    assert result.best("decode", 1) in installed()
    assert result.best("decode", 7) is None
    made = synthetic_jpegs(2)
    assert compare(made, rounds=1, backends=["opencv"]).files == 2


def with_stray_bytes(data: bytes) -> bytes:
    at = 4 + int.from_bytes(data[4:6], "big")  # behind APP0
    return data[:at] + b"\0\0\0" + data[at:]


def cmyk(size: tuple[int, int]) -> bytes:
    out = io.BytesIO()
    Image.new("CMYK", size, (10, 20, 30, 40)).save(out, "JPEG")
    return out.getvalue()


def test_odd_files_are_left_out_or_measured(tmp_path: Path) -> None:
    good, pixel = synthetic_jpegs(1).data[0], io.BytesIO()
    Image.new("RGB", (1, 1)).save(pixel, "JPEG")
    odd = {"good": good, "cmyk": cmyk((90, 60)), "stray": with_stray_bytes(good), "pixel": pixel.getvalue()}
    odd["cut"] = good[: len(good) // 2]
    for name, data in odd.items():
        (tmp_path / f"{name}.jpg").write_bytes(data)
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    arguments = ["bench", "readers", str(tmp_path), "--rounds", "1", "--threads", "1"]
    for name in set(installed()) & {"native", "simplejpeg", "opencv", "pillow"}:
        result = CliRunner().invoke(app, [*arguments, "--backend", name, "--json"])
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        left_out = 2 if name == "simplejpeg" else 1  # its header wants no stray bytes; nobody decodes half a file
        assert (report["files"], report["failed"][name], report["unreadable"]) == (5 - left_out, left_out, 1)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for text in ("left out: 1 file that cannot be read", "2 files that simplejpeg cannot read"):
        assert text in result.output


def test_only_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "nowhere.jpg")
    with pytest.raises(ImageError, match="1 that cannot be read"):
        sample(tmp_path, count=3)


def test_a_back_end_of_another_format(folder: Path) -> None:
    for path in folder.glob("*/*.[jJ]*"):
        path.unlink()
    with pytest.raises(ConfigError, match="reads no png"):
        compare(sample(folder, count=3), backends=["simplejpeg"])


@pytest.mark.parametrize("name", ["nowhere/readers.png", "readers.docx", "images"])
def test_a_plot_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("penstock.images.compare.compare", lambda *_, **__: pytest.fail("measured"))
    plot = folder.parent / name
    result = CliRunner().invoke(app, ["bench", "readers", str(folder), "--plot", str(plot)])
    assert isinstance(result.exception, ConfigError)
    assert "cannot draw into" in str(result.exception)


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
