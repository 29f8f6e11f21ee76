"""Where the C extension has to be there: without it its tests are skipped, and nobody would notice."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from penstock.images import native

SOURCES = Path(__file__).resolve().parents[2] / "src" / "penstock" / "images" / "c"


def test_it_is_built_where_it_can_be() -> None:
    """`.ci/run` says that compiler and headers are there, by PENSTOCK_TEST_EXTENSION=required."""
    if os.environ.get("PENSTOCK_TEST_EXTENSION") == "required":
        assert native.is_available(), "penstock.images._jpeg was not built: pip install -v -e . says why"


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="the system does not list what its processor can do")
def test_it_knows_whether_the_processor_has_avx2() -> None:
    """A wrong "no" halves the speed and changes nothing else, so no other test would see it."""
    if not native.is_available():
        pytest.skip("without the C extension")
    listed = platform.machine() == "x86_64" and " avx2 " in Path("/proc/cpuinfo").read_text()
    assert bool(native._jpeg.AVX2) == listed


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm lists the names of a shared object")
def test_it_exports_nothing_but_its_beginning() -> None:
    """Another library with one of its names would take the place of a function."""
    if not native.is_available():
        pytest.skip("without the C extension")
    found = subprocess.run(["nm", "-D", "--defined-only", native._jpeg.__file__], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert [line.split()[-1] for line in found.stdout.splitlines()] == ["PyInit__jpeg"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc lists the macros of a source")
@pytest.mark.parametrize("free_threaded", [False, True])
def test_the_stable_abi_is_asked_for_where_there_is_one(free_threaded: bool) -> None:
    """Python.h without the GIL is an error with it, and setup.py goes on without the extension."""
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").is_file():
        pytest.skip("without the headers of Python")
    command = ["gcc", "-E", "-dM", f"-I{include}", *(["-DPy_GIL_DISABLED=1"] if free_threaded else [])]
    done = subprocess.run([*command, str(SOURCES / "module.c")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "#define Py_PYTHON_H" in done.stdout
    assert ("#define Py_LIMITED_API" in done.stdout) != free_threaded
    assert [path.name for path in SOURCES.glob("*.[ch]") if "Python.h" in path.read_text()] == ["module.c"]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_warn_of_nothing(compiler: str) -> None:
    if shutil.which(compiler) is None or not native.is_available():
        pytest.skip(f"without {compiler}, or the C extension")
    command = [compiler, "-fsyntax-only", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Wconversion"]
    command += [
        "-Wshadow",
        "-Werror",
        "-isystem",
        sysconfig.get_path("include"),
        *map(str, sorted(SOURCES.glob("*.c"))),
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    if "No such file" in found.stderr or "file not found" in found.stderr:
        pytest.skip("without the headers")
    assert found.returncode == 0, found.stderr


@pytest.mark.skipif(shutil.which("clang-format") is None, reason="clang-format says how C is laid out")
def test_c_is_laid_out_by_clang_format() -> None:
    fuzz = Path(__file__).resolve().parents[1] / "fuzz"
    files = [path for folder in (SOURCES, fuzz) for path in sorted(folder.glob("*.[ch]"))]
    found = subprocess.run(["clang-format", "--dry-run", "-Werror", *files], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
