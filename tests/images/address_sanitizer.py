"""Run the tests of the C extension under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/images/address_sanitizer.py [pytest arguments]

The package is copied to a temporary folder and the extension built there with both sanitizers (gcc with libasan and
libubsan, the headers of Python and libjpeg-turbo), so nothing in the tree is touched. Exit code 77 where they are
missing, otherwise that of pytest; a report of a sanitizer ends the run with an error.

CFLAGS and LDFLAGS name another libjpeg-turbo than that of the system, as for setup.py:

    .ci/libjpeg-turbo 3.1.3 /tmp/libjpeg
    CFLAGS=-I/tmp/libjpeg/include LDFLAGS=-L/tmp/libjpeg/lib python tests/images/address_sanitizer.py
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MISSING = 77
CHECKS = "-fsanitize=address,undefined,float-cast-overflow,float-divide-by-zero"  # gcc's `undefined` leaves floats out
FLAGS = ("-fvisibility=hidden", "-g", "-O1", "-fno-omit-frame-pointer", CHECKS, "-fno-sanitize-recover=all")


def library(name: str) -> str | None:
    """Where gcc has a runtime of a sanitizer."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


def flags(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


def has_headers() -> bool:
    text = "#include <Python.h>\n#include <stdio.h>\n#include <jpeglib.h>\n"
    command = ["gcc", "-E", *flags("CFLAGS"), f"-I{sysconfig.get_paths()['include']}", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).returncode == 0


def build(package: Path) -> bool:
    sources = sorted(str(path) for path in (package / "images" / "c").glob("*.c"))
    output = package / "images" / "_jpeg.abi3.so"
    include = sysconfig.get_paths()["include"]
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *FLAGS, *flags("CFLAGS")]
    command += [f"-I{include}", *sources, "-o", str(output), *flags("LDFLAGS"), "-ljpeg"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    runtimes = [library("libasan.so"), library("libubsan.so")]
    if None in runtimes or not has_headers():
        print("no gcc with libasan and libubsan here, or no headers of Python and libjpeg-turbo", file=sys.stderr)
        return MISSING
    with tempfile.TemporaryDirectory(prefix="penstock-asan-") as folder:
        package = Path(folder, "penstock")
        shutil.copytree(ROOT / "src" / "penstock", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        if not build(package):
            return 1
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "LD_PRELOAD": " ".join(str(path) for path in runtimes),
            "PYTHONMALLOC": "malloc",  # so that the sanitizer sees each object
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python itself leaves memory behind at its end
        }
        tests = [str(path) for path in sorted((ROOT / "tests" / "images").glob("test_native*.py"))]
        # -s: a report is written to the descriptor of standard error, as the process ends
        command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-n", "0", *arguments]
        check = "from penstock.images import native; m = native._jpeg; print(m.LIBJPEG_TURBO_VERSION, m.__file__)"
        where = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
        if where.returncode or folder not in where.stdout:
            print(where.stdout, where.stderr, file=sys.stderr)
            return 1
        print(f"libjpeg-turbo {where.stdout.split()[0]}", flush=True)
        return subprocess.run([*command, *tests], env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
