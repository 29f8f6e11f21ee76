"""Every code block of README and docs runs: Python blocks as one script a document, shell blocks line by line.

Commands that measure are tested in tests/tools/cli, and are run here with ``PENSTOCK_TEST_FULL=1``; else only
understood. A block runs in a folder that holds ``train.txt`` (200 rows, class-sorted), ``val.txt`` (50 rows), the
images they name under ``data/``, and text with a tokenizer. Shell lines that set up or build something are known by
their first word and are not run. A server is started, asked to stop once it listens, and has to end well. Configuration
files name commands and options that are there. Blocks marked ``py`` show programs of other libraries, or of a cluster:
they compile, and are not run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import interpreter_support
import numpy as np
import pytest
import text_support
from busy_support import HANG
from interpreter_support import FULL
from lerobot_support import write_lerobot
from video_support import write_video

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = ("make", "git", "pip", "python", "cd", "source", "torchrun", "pre-commit", "sudo", ".venv/bin/python")
ELSEWHERE = {
    "ray.md",  # run by tests/ray, whose clusters are one at a time
    "integrations.md",  # run by tests/integration, which has imported the frameworks
}
MEASURE = () if FULL else ("bench", "doctor", "plan", "profile", "shuffle-quality")
QUICKSTARTS = "quickstart"  # a folder whose pages are run by test_quickstarts.py, in environments of their own
SHELL = {"bash", "sh", "console"}
TEXT = {"text", "toml", "json", "yaml", "ini", "make", "py", "diff"}


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
    for name in ("pipes.parquet", "part-0.parquet"):
        text_support.write_table(root / name, text_support.TEXTS)
    for name in ("ant/a.mp4", "ant/b.mp4", "bee/c.mp4"):
        (root / "videos" / name).parent.mkdir(parents=True, exist_ok=True)
        write_video(root / "videos" / name)
    write_lerobot(root / "robots")
    text_support.tokenizer().save(str(root / "tokenizer.json"))
    return root


def blocks(document: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(document.read_text())


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(command: str, folder: Path) -> None:
    """A line of a shell. One of Penstock's alone needs none, and neither the installed script, as others do. What it
    measures is measured for a moment only.
    """
    command = re.sub(r"--seconds \d+", "--seconds 0.2", command)
    how: dict[str, Any] = {"cwd": folder, "env": environment(), "timeout": HANG}
    if command.startswith("penstock ") and not set(command) & set("|&;<>()$`*?[]{}~="):
        done = interpreter_support.run(["-m", *shlex.split(command)], imports=["penstock.tools.cli.app"], **how)
    else:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, **how)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def run_server(command: str, folder: Path) -> None:
    """Start ``penstock serve``, wait until it listens, and stop it. Ports are any free ones."""
    command = re.sub(r"port \d+", "port 0", command)
    with (folder / "serve.log").open("wb") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        server.terminate()
        assert server.wait(timeout=HANG) == 0
        assert line.startswith("listening on "), f"{command}\n{line}{(folder / 'serve.log').read_text()}"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_says_its_language(document: Path) -> None:
    known = SHELL | TEXT | {"python"}
    fences = re.findall(r"^```(\w*)$", document.read_text(), re.MULTILINE)[::2]
    assert [language for language in fences if language not in known] == []


def test_what_is_only_shown_compiles() -> None:
    shown = [(path.name, code) for path in DOCUMENTS for language, code in blocks(path) if language == "py"]
    assert shown
    for name, code in shown:
        compile(code, name, "exec")


@pytest.mark.parametrize(
    "document",
    [
        d
        for d in DOCUMENTS
        if any(lang == "python" for lang, _ in blocks(d)) and d.name not in ELSEWHERE and d.parent.name != QUICKSTARTS
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_python_blocks_run(document: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    run_python(document, tmp_path)


def run_python(document: Path, tmp_path: Path, *, imports: Iterable[str] = ()) -> None:
    """The Python blocks of a document, in this folder; what they import may be imported beforehand."""
    script = tmp_path / f"{document.stem}_blocks.py"
    script.write_text("\n\n".join(code for language, code in blocks(document) if language == "python"))
    how: dict[str, Any] = {"cwd": tmp_path, "env": environment(), "timeout": HANG, "imports": imports}
    done = interpreter_support.run(["-W", "ignore", str(script)], **how)
    assert done.returncode == 0, f"{script.name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "document",
    [d for d in DOCUMENTS if any(lang in SHELL for lang, _ in blocks(d)) and d.parent.name != QUICKSTARTS],
    ids=lambda path: str(path.relative_to(ROOT)),
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
            assert command.startswith(("penstock ", "openssl ")), f"{document.name}: do not know how to run {command!r}"
            if command.startswith("penstock serve"):
                run_server(command, tmp_path)
            elif command.split()[1] in MEASURE:
                understood(shlex.split(command)[1:])
            elif not command.startswith("penstock demo"):
                run(command, tmp_path)


def commands(text: str, language: str) -> list[list[str]]:
    """The command lines in a systemd unit or in Kubernetes objects."""
    if language == "ini":
        return [shlex.split(line) for line in re.findall(r"^ExecStart=(.*)$", text.replace("\\\n", " "), re.MULTILINE)]
    yaml = pytest.importorskip("yaml")
    specs = [
        item["spec"]["template"]["spec"] for item in yaml.safe_load_all(text) if "template" in item.get("spec", {})
    ]
    return [one["command"] + one["args"] for spec in specs for one in spec["containers"]]


@pytest.mark.parametrize(
    "document",
    [d for d in DOCUMENTS if any(lang in ("ini", "yaml") for lang, _ in blocks(d))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_in_configuration_files_are_there(document: Path) -> None:
    found = [line for lang, text in blocks(document) if lang in ("ini", "yaml") for line in commands(text, lang)]
    assert found
    for name, *arguments in found:
        assert Path(name).name == "penstock"
        understood(arguments)


def understood(arguments: list[str]) -> None:
    """Raise what `penstock` would end with if there were no such command or option."""
    from typer.main import get_command

    from penstock.tools.cli.app import app

    command: Any = get_command(app)
    name = "penstock"
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)
