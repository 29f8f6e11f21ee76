"""What holds for every command: its help, ``--json``, how it ends, and what it imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from busy_support import HANG
from full_run import full_only
from interpreter_support import Popen
from typer.testing import CliRunner

from penstock.tools.cli.app import app, main

NOBODY = "nowhere/nothing"

MISSING: dict[str, list[str]] = {
    "doctor": [NOBODY],
    "demo": ["--data", NOBODY],
    "manifest check": [NOBODY],
    "manifest info": [NOBODY],
    "manifest head": [NOBODY],
    "manifest build": [NOBODY],
    "manifest sizes": [NOBODY],
    "manifest warm": [NOBODY],
    "clips index": [NOBODY],
    "images index": [NOBODY],
    "shards index": [NOBODY],
    "shards info": [NOBODY],
    "shards ls": [NOBODY],
    "shards cat": [NOBODY, "0.jpg"],
    "shards verify": [NOBODY],
    "shards pack": [NOBODY, "out"],
    "tokenize": [NOBODY, "--tokenizer", NOBODY, "--out", "out"],
    "lengths": [NOBODY, "--out", "lengths.npy"],
    "cache info": ["--folder", NOBODY],
    "cache clear": ["--folder", NOBODY],
    "cache verify": ["--folder", NOBODY],
    "profile": [NOBODY],
    "ledger": [f"{NOBODY}.py:loader", "--step", "1"],
    "plan": [],  # reads nothing
    "shuffle-quality": [NOBODY],
    "bench clips": [NOBODY],
    "serve": [NOBODY],
}
"""A line for each command that names something that is not there."""

UNWRITABLE: dict[str, list[str]] = {
    "manifest sizes": ["train.txt", "--output", f"{NOBODY}/sizes"],
    "manifest build": ["train.txt", "--cache-dir", "file/cache"],
    "clips index": ["train.txt", "--out", f"{NOBODY}/clips"],
    "images index": ["train.txt", "--out", f"{NOBODY}/entries"],
    "shards index": ["a.tar", "--out", "file/folder"],
    "shards pack": ["train.txt", "file/folder"],
    "profile": ["train.txt", "--html", f"{NOBODY}/page.html"],
    "plan": ["--samples", "10", "--bytes", "10", "--plot", f"{NOBODY}/plan.png"],
    "serve": ["train.txt", "--ready-file", f"{NOBODY}/ready"],
    "demo": ["--out", "file/folder"],
}
"""A line for each command that writes something, to where it cannot be written."""


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


ALL = dict(commands(typer.main.get_command(app)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a manifest, a shard, and a file that is no folder."""
    from penstock.shards import TarWriter

    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("train.txt").write_text("".join(f"{k}.jpg 1\n" for k in range(3)))
    with TarWriter("a.tar") as shard:
        for k in range(3):
            shard.write({"__key__": str(k), "txt": b"text"})
    return tmp_path


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code of a command line in this process: what ``penstock`` does, from its entry point on."""
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_every_command_has_a_line_here() -> None:
    assert set(ALL) == set(MISSING)


@pytest.mark.parametrize("name", ALL)
def test_help(name: str) -> None:
    """One screen wide, with an example, and --json."""
    result = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "--json" in result.stdout
    body, example, line = result.stdout.rpartition("Example:  ")
    assert example
    assert line.startswith(f"penstock {name} ")
    assert max(map(len, body.splitlines())) <= 80


def test_help_lists_commands_in_groups_a_line_each() -> None:
    lines = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for title in ("Start here:", "Data:", "Speed and order:", "Services:"):
        assert title in lines
    listed = [match[1] for line in lines if (match := re.match(r"  ([a-z][a-z-]*)  +[A-Z]", line))]
    assert set(listed) == {name.split()[0] for name in ALL}


@pytest.mark.parametrize("name", ALL)
def test_wrong_usage_is_2(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--no-such-option"], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "No such option: --no-such-option" in err
    assert "--help" in err or "-h" in err


SEEDED = {
    "plan": ["--samples", "10", "--bytes", "10"],
    "shards pack": ["train.txt", "out"],
    "shuffle-quality": ["train.txt"],
}


def test_the_commands_with_seeds_are_these() -> None:
    helps = {name: CliRunner().invoke(app, [*name.split(), "--help"]).stdout for name in ALL}
    assert {name for name, text in helps.items() if "--seed " in text} == set(SEEDED)


@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64])
def test_a_seed_out_of_range_is_2(
    name: str, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*name.split(), *SEEDED[name], "--seed", str(seed)], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--seed" in err
    assert "64-bit integer" in err


@pytest.mark.parametrize("name", [name for name, arguments in MISSING.items() if arguments])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_what_is_not_there_is_1(
    name: str, as_json: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error, or what a check found on standard output; never a traceback."""
    assert run([*name.split(), *MISSING[name], *["--json"] * as_json], monkeypatch) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert "nowhere" in out + err
    if not out:
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    elif as_json:
        assert json.loads(out)["ok"] is False
    assert not list(folder.glob("out*/*.tar"))


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_cannot_be_written_is_1(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "plan":
        pytest.importorskip("matplotlib")
    assert run([*name.split(), *UNWRITABLE[name]], monkeypatch) == 1
    _, err = capsys.readouterr()
    assert "Traceback" not in err
    assert re.search("^error: .*(nowhere|file/)", err, re.MULTILINE), err


def test_debug_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.errors import ManifestError

    monkeypatch.setattr(sys, "argv", ["penstock", "--debug", "manifest", "info", NOBODY])
    with pytest.raises(ManifestError):
        main()


def penstock(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


@full_only("a program for each", but=["rich"])
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["shards", "ls", "a.tar"], ["manifest", "head", "train.txt"]],
    ids=["typer", "print", "rich"],
)
def test_nobody_reads_the_output(arguments: list[str], folder: Path) -> None:
    """As ``| head -1`` does, only sooner."""
    reader, writer = os.pipe()
    os.close(reader)
    with penstock(*arguments, stdout=writer) as process:
        os.close(writer)
        _, err = process.communicate(timeout=HANG)
    assert (process.returncode, err) == (141, "")


def test_interrupted_is_130(tmp_path: Path) -> None:
    program = tmp_path / "slow.py"
    program.write_text("import time\ndef make():\n    print('ready', flush=True)\n    while True: time.sleep(0.05)\n")
    command = ["-m", "penstock", "profile", f"{program}:make"]
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG)
    assert (process.returncode, err) == (130, "")


HEAVY = {
    "torch", "numpy", "pyarrow", "cv2", "simplejpeg", "ray", "rich", "pydantic", "albumentations", "fsspec",
    "matplotlib", "prometheus_client", "asyncio", "penstock.loader",
}  # fmt: skip


@pytest.mark.parametrize(
    "program",
    ["import penstock", "from penstock.tools.cli import app\nfor line in LINES: app.app(line, standalone_mode=False)"],
    ids=["import", "help"],
)
def test_starts_without_what_is_heavy(program: str) -> None:
    """`import penstock`, and the help of all commands, one after the other in one process."""
    lines = [["--help"], ["--version"], *([*name.split(), "--help"] for name in ALL)]
    check = f"import sys\nLINES = {lines}\n{program}\nprint(sorted(set(sys.modules) & {HEAVY}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n"


class TestCompletion:
    """By the protocol of shells: the line so far in the environment, words on standard output."""

    def ask(self, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=HANG, env={**os.environ, **environment}, check=True
        )

    def test_bash_completes(self, tmp_path: Path) -> None:
        """The script that --show-completion prints, run by bash as it does at TAB."""
        program = tmp_path / "penstock"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
        program.chmod(0o755)
        test = """
            source <(penstock --show-completion)
            COMP_WORDS=(penstock man) COMP_CWORD=1
            $(complete -p penstock | sed 's/.*-F \\([^ ]*\\) .*/\\1/') penstock
            echo "${COMPREPLY[@]}"
            COMP_WORDS=(penstock manifest check --dup) COMP_CWORD=3
            _penstock_completion penstock
            echo "${COMPREPLY[@]}"
        """
        environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
        done = subprocess.run(["bash", "-c", test], capture_output=True, text=True, timeout=HANG, env=environment)
        assert done.stdout == "manifest\n--duplicates\n", done.stderr
        installed = subprocess.run(
            ["bash", "-c", "penstock --install-completion; exit $?"], capture_output=True, env=environment
        )
        assert installed.returncode == 0, installed.stderr
        assert "penstock" in (tmp_path / ".bashrc").read_text()

    @full_only("a shell for each; Bash is always tested")
    @pytest.mark.parametrize("shell", ["zsh", "fish"])
    def test_other_shells(self, shell: str) -> None:
        script = self.ask(_PENSTOCK_COMPLETE=f"source_{shell}").stdout
        assert f"complete_{shell}" in script
        words = self.ask(
            _PENSTOCK_COMPLETE=f"complete_{shell}",
            _TYPER_COMPLETE_ARGS="penstock shards ",
            _TYPER_COMPLETE_FISH_ACTION="get-args",
        ).stdout
        for name in ("index", "info", "ls", "cat", "verify", "pack"):
            assert name in words
