"""What is released: a source distribution and wheels built of it, with and without a compiler, installed and used.

Nothing is downloaded: builds use the packages that are here, and wheels are installed without their dependencies into a
folder that comes first on the path. `.ci/release` does the same in empty environments.
"""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from busy_support import HANG
from full_run import full_only

import penstock

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path

import numpy as np

import penstock as ps
from penstock.images import native
from penstock.images.decode import decode

assert Path(ps.__file__).is_relative_to(sys.argv[1]), ps.__file__
import simplejpeg

image = np.full((16, 16, 3), 200, np.uint8)
assert abs(int(decode(simplejpeg.encode_jpeg(image)).mean()) - 200) < 3
print(native.is_available())
"""
LOADS = """
with ps.DataLoader(range(32), batch_size=8, num_workers=2, executor="process", seed=0) as loader:
    assert sorted(number for batch in loader for number in batch.tolist()) == list(range(32))
"""


@dataclass
class Built:
    """A source distribution, and wheels made of it: as usual, and where no compiler works."""

    sdist: Path
    wheel: Path
    plain_wheel: Path


def build(kind: str, source: Path, to: Path, **environment: str) -> Path:
    """One artefact."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(to), str(source)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = to.iterdir()
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    where = tmp_path_factory.mktemp("artefacts")
    sdist = build("sdist", ROOT, where / "sdist")
    sources = []
    for name in ("usual", "plain"):
        with tarfile.open(sdist) as archive:
            archive.extractall(where / name, filter="data")
        sources.append(next((where / name).iterdir()))
    with ThreadPoolExecutor() as pool:
        usual = pool.submit(build, "wheel", sources[0], where / "wheel")
        plain = pool.submit(build, "wheel", sources[1], where / "plain-wheel", CC="false")
        return Built(sdist, usual.result(), plain.result())


def install(wheel: Path, to: Path) -> dict[str, str]:
    """Install a wheel; the environment in which it is found first."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(to), str(wheel)], check=True, timeout=HANG)
    return {**os.environ, "PYTHONPATH": str(to)}


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """What a program prints that has to end well."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@full_only("builds; `make dist` does it, too")
def test_sdist_has_what_building_and_testing_take(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "NOTICE",
        "README.md",
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "src/penstock/py.typed",
        "src/penstock/images/c/module.c",
        "src/penstock/images/_jpeg.pyi",
        "examples/data/NOTICE",
        "examples/demo/demo.py",
        "examples/data/cifar10-small.tar.xz",
        "tests/run.py",
        "docs/index.md" if (ROOT / "docs/index.md").is_file() else "docs/architecture.md",
    } <= names
    tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py")}
    assert tests <= names, f"not in the sdist: {sorted(tests - names)[:5]}"
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_has_the_package_alone(built: Built) -> None:
    modules = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/penstock/**/*.py")}
    for wheel, compiled in ((built.wheel, None), (built.plain_wheel, False)):
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
            headers = email.message_from_bytes(archive.read(metadata))
        assert modules <= names, f"not in the wheel: {sorted(modules - names)[:5]}"
        assert {"penstock/py.typed", "penstock/images/_jpeg.pyi"} <= names
        assert not [name for name in names if "cifar" in name or "/examples/" in name]
        assert {metadata.replace("METADATA", f"licenses/{name}") for name in ("LICENSE", "NOTICE")} <= names
        assert {name.split("/")[0] for name in names} == {"penstock", metadata.split("/")[0]}
        assert not [name for name in names if name.endswith((".c", ".pyc")) or "/tests/" in name]
        assert headers["Version"] == penstock.__version__
        if compiled is not None:
            assert compiled == any(name.endswith(".so") for name in names)


def test_the_demo_of_a_wheel_is_in_a_checkout(built: Built, tmp_path: Path) -> None:
    """Its images are not covered by the licence of the package."""
    with zipfile.ZipFile(built.plain_wheel) as archive:
        archive.extractall(tmp_path)
    command, environment = [sys.executable, "-m", "penstock", "demo"], {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    assert "make demo" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_is_written_in_one_place(built: Built) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    assert f"-{penstock.__version__}" in built.sdist.name


@full_only("builds and installs; `make dist` does it, too")
def test_installed_wheel_loads_and_has_its_commands(built: Built, tmp_path: Path) -> None:
    environment = install(built.wheel, tmp_path / "site")
    compiled = run([sys.executable, "-c", PROGRAM + LOADS, str(tmp_path / "site")], tmp_path, environment)
    if os.environ.get("PENSTOCK_TEST_EXTENSION") == "required":
        assert compiled == "True\n"
    assert (tmp_path / "site" / "penstock" / "py.typed").is_file()
    command = str(tmp_path / "site" / "bin" / "penstock")
    assert run([command, "--version"], tmp_path, environment) == f"penstock {penstock.__version__}\n"


@full_only("builds; `make dist` does it, too")
def test_without_a_compiler_it_is_installed_without_the_extension(built: Built, tmp_path: Path) -> None:
    environment = install(built.plain_wheel, tmp_path / "site")
    assert run([sys.executable, "-c", PROGRAM, str(tmp_path / "site")], tmp_path, environment) == "False\n"
