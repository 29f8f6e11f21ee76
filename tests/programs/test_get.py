"""`get` fetches one commit of a repository, and of that the parts which are needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from get import clone
from published import Program


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_parts_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "owner" / "name"
    origin.mkdir(parents=True)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "none"))

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.check_output(["git", "-C", str(origin), *who, *arguments], text=True).strip()

    git("init", "--quiet")
    git("config", "uploadpack.allowFilter", "true")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    commits = []
    for text in ("first", "second"):
        for name in ("code/main.py", "train.py", "docs/large.bin"):
            (origin / name).parent.mkdir(exist_ok=True)
            (origin / name).write_text(text)
        git("add", ".")
        git("commit", "--quiet", "--message", text)
        commits.append(git("rev-parse", "HEAD"))

    program = Program("owner/name", commits[0], ("code", "train.py"), (), "")
    clone(program, tmp_path / "programs" / program.name, f"file://{tmp_path}")
    found = tmp_path / "programs" / "name"
    assert (found / "code" / "main.py").read_text() == (found / "train.py").read_text() == "first"
    assert not (found / "docs").exists()
