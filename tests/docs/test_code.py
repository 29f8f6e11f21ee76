"""Every code block of README and docs runs: Python blocks as one script a document, shell blocks line by line.

A block runs in a folder that holds ``train.txt`` (200 rows, class-sorted), ``val.txt`` (50 rows) and the images they
name under ``data/``. Shell lines that set up or build something are known by their first word and are not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = ("make", "git", "pip", "python", "cd", "source", "torchrun", "pre-commit", "sudo", ".venv/bin/python")
SHELL = {"bash", "sh", "console"}
TEXT = {"text", "toml", "json", "yaml", "make"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("docs")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(200):
        name = f"class_{i // 20:02d}/img_{i:04d}.jpg"
        (root / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        image = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        cv2.imwrite(str(root / "data" / name), cv2.resize(image, (64, 48)))
        lines.append(f"{name} {i // 20}\n")
    (root / "train.txt").write_text("".join(lines))
    (root / "val.txt").write_text("".join(lines[::4]))
    return root


def blocks(document: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(document.read_text())


def run(arguments: list[str], folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_its_language(document: Path) -> None:
    known = SHELL | TEXT | {"python"}
    fences = re.findall(r"^```(\w*)$", document.read_text(), re.MULTILINE)[::2]
    assert [language for language in fences if language not in known] == []


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if any(lang == "python" for lang, _ in blocks(d))], ids=lambda path: path.name
)
def test_python_blocks_run(document: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    script = tmp_path / f"{document.stem}_blocks.py"
    script.write_text("\n\n".join(code for language, code in blocks(document) if language == "python"))
    run([sys.executable, "-W", "ignore", str(script)], tmp_path)


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if any(lang in SHELL for lang, _ in blocks(d))], ids=lambda path: path.name
)
def test_shell_blocks_run(document: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for language, code in blocks(document):
        if language not in SHELL:
            continue
        for line in code.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ").split(" #")[0].strip()
            if not command or command.startswith("#") or command.split()[0] in NOT_RUN:
                continue
            if language == "console" and not line.startswith("$ "):
                continue  # output
            assert command.startswith("penstock "), f"{document.name}: do not know how to run {command!r}"
            if not command.startswith("penstock demo"):
                run(["bash", "-c", command], tmp_path)
