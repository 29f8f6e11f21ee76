"""``penstock images index`` on real files: what it prints, writes, and exits with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import cv2
import pytest
from cli_support import said
from jpeg_support import by_opencv, jpeg, noise

import penstock
from penstock.errors import ImageError, ManifestIOError, PenstockError
from penstock.images import native
from penstock.images.entries import ImageIndex
from penstock.images.transforms import CenterCrop
from penstock.manifest import Manifest

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")


def run(*arguments: object, code: int = 0) -> str:
    """Run ``penstock images index``; the standard output, with runs of blanks as one."""
    return said("images", "index", *arguments, code=code)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """``train.txt``: three JPEGs, and a progressive one."""
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(noise(60, 80, number)))
    (tmp_path / "3.jpg").write_bytes(by_opencv(noise(40, 40), cv2.IMWRITE_JPEG_PROGRESSIVE, 1))
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{number}.jpg {number}\n" for number in range(4)))
    return path


def opened(path: object, manifest: Manifest) -> list[bool]:
    index = ImageIndex.open(str(path), manifest)
    return [index.entries(one.row, Path(one.path).read_bytes()) is not None for one in manifest]


def test_written_beside_the_manifest(images: Path) -> None:
    text = run(images, "--root", images.parent, "--workers", 2)
    assert re.search(r" images 4 in .* images/s, ", text)
    assert f" written {images}.entries (" in text
    assert " without entries 1 image: progressive, " in text
    assert opened(f"{images}.entries", Manifest.open(images, root=images.parent)) == [True] * 3 + [False]
    assert ImageIndex.open(f"{images}.entries", Manifest.open(images)).step == 8


def test_elsewhere_with_another_step(images: Path, tmp_path: Path) -> None:
    run(images, "--root", images.parent, "--step", 2, "--out", tmp_path / "mine")
    assert ImageIndex.open(tmp_path / "mine", Manifest.open(images)).step == 2
    assert not Path(f"{images}.entries").exists()
    with pytest.raises(ManifestIOError, match="--out"):
        run(images, "--out", tmp_path / "nowhere" / "index")


def test_of_a_folder(images: Path, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "1.jpg").write_bytes(jpeg(noise(60, 80)))
    text = run(tmp_path / "pictures")
    assert " images 2 in " in text
    dataset = penstock.open(tmp_path / "pictures", transform=[CenterCrop(20)], index=True)
    assert dataset[0][0].shape == (3, 20, 20)


def test_images_that_cannot_be_read_give_exit_code_1(images: Path, tmp_path: Path) -> None:
    (tmp_path / "0.jpg").unlink()
    (tmp_path / "2.jpg").unlink()
    text = run(images, "--root", tmp_path, "--examples", 1, code=1)
    assert "row 0: image" in text
    assert "row 2: image" not in text
    assert "2 of 4 images cannot be read" in text
    found = json.loads(run(images, "--root", tmp_path, "--json", code=1))
    size = Path(f"{images}.entries").stat().st_size
    assert (found["images"], found["indexed"], found["broken"], found["output_bytes"]) == (4, 1, 2, size)
    assert [error["row"] for error in found["errors"]] == [0, 2]
    assert found["output"] == f"{images}.entries"


def test_no_image_at_all_writes_nothing_and_leads_to_root(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ImageError, match=r"nothing is written: 4 cannot be read, the first: .*--root"):
        run(images)
    assert not Path(f"{images}.entries").exists()


def test_options_become_part_of_the_identity(images: Path) -> None:
    run(images, "--root", images.parent, "--label", "str")
    with pytest.raises(PenstockError, match="build it again"):
        ImageIndex.open(f"{images}.entries", Manifest.open(images))
    assert len(ImageIndex.open(f"{images}.entries", Manifest.open(images, label="str"))) == 4
