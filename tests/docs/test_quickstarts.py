"""Each quick start shows the program that is in examples/quickstart, and the program prints what its page says.

The commands of a page run in a new folder, with an empty home, in interpreters of their own: with what is installed
here, and in a full run in an environment that has the wheel and the packages that the page names, and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from busy_support import HANG
from full_run import full_only
from s3_support import CREDENTIALS, REGION, s3_server
from test_code import blocks

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "examples" / "quickstart"
INDEX = ROOT / "docs" / "quickstart" / "index.md"
PAGES = [path for path in sorted(INDEX.parent.glob("*.md")) if path != INDEX]
NEEDS = {"webdataset": ["lightning", "obstore", "moto"], "text": ["tokenizers"], "trainer": ["transformers"]}
LINKED = {"make_shards.py"}  # writes what those who have no data train on; pages do not show it


@pytest.fixture
def bucket(page: Path) -> Iterator[dict[str, str]]:
    """Variables of the environment by which the programs of a page find a bucket."""
    if "s3://" not in page.read_text():
        yield {}
        return
    with s3_server() as address:
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=HANG).close()
        yield {"AWS_ENDPOINT_URL": address, **CREDENTIALS, **REGION}


def test_pages_show_the_programs() -> None:
    shown = [code for page in PAGES for language, code in blocks(page) if language == "python"]
    stored = {path.read_text(): path.name for path in PROGRAMS.glob("*.py") if path.name not in LINKED}
    assert [stored.get(code, code) for code in shown if code not in stored] == []
    assert sorted(stored.values()) == sorted(stored[code] for code in shown)


def test_the_index_lists_the_pages() -> None:
    assert set(re.findall(r"^\| .*\]\(([\w-]+\.md)\)", INDEX.read_text(), re.MULTILINE)) == {
        page.name for page in PAGES
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_print_what_pages_say(page: Path, bucket: dict[str, str], tmp_path: Path) -> None:
    for name in NEEDS.get(page.stem, []):
        pytest.importorskip(name)
    path = os.environ.get("PYTHONPATH")
    variables = bucket if path is None else {"PYTHONPATH": path, **bucket}
    follow(page, tmp_path, Path(sys.executable).parent, variables)


@full_only("installs torch into an empty environment")
@pytest.mark.timeout(3 * HANG)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_in_an_environment_with_what_the_page_names(
    page: Path, bucket: dict[str, str], wheel: Path, tmp_path: Path
) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True, timeout=HANG)
    [command] = re.findall(r"^pip install (.*?) *# in a checkout", page.read_text(), re.MULTILINE)
    packages = [re.sub(r"^'?\.(\[\w+\])?'?$", rf"{wheel}\1", word) for word in command.split()]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt"]
    done = subprocess.run([*pip, *packages], cwd=ROOT, capture_output=True, text=True, timeout=2 * HANG)
    if "Failed to establish a new connection" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    follow(page, tmp_path, python.parent, bucket)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.glob("*.whl")
    return built


def follow(page: Path, folder: Path, programs: Path, variables: dict[str, str]) -> None:
    """Run the commands of a page one by one, and compare what they print with what the page says.

    Args:
        page: its blocks of console have commands behind ``$ ``, each with its output.
        folder: a new one.
        programs: where python, torchrun and penstock are.
        variables: of the environment, besides its PATH and an empty home.
    """
    here, home = folder / "here", folder / "home"
    home.mkdir()
    shutil.copytree(PROGRAMS, here)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "GLOO_SOCKET_IFNAME": "lo", **variables}
    said = [session(text) for language, text in blocks(page) if language == "console"]
    assert said
    for command, expected in [step for steps in said for step in steps]:
        done = subprocess.run(
            ["bash", "-c", command], cwd=here, env=environment, capture_output=True, text=True, timeout=HANG
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        # torchrun runs Python with -u, which writes the end of a line separately: lines of two ranks may touch.
        printed = [
            line.rstrip() for line in re.sub(r"(?<=\w)(?=rank \d, )", "\n", done.stdout).splitlines() if line.strip()
        ]
        assert shown(printed, expected) == sorted(expected), command


def session(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a block, each with the lines that it prints."""
    parts = [part.splitlines() for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
    return [(part[0], [line for line in part[1:] if line]) for part in parts]


def shown(printed: list[str], expected: list[str]) -> list[str]:
    """Return what the page has to show: ranks print in any order, and ``...`` stands for lines of a framework."""
    if "..." in expected:
        return sorted(["...", *(line for line in printed if line in expected)])
    return sorted(printed)
