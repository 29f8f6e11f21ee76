"""The optional C extension, and the example that `penstock demo` runs; all else is in pyproject.toml.

The extension is built where a compiler and the headers of libjpeg-turbo are found (Debian: libjpeg62-turbo-dev). Where
they are not, or where building fails, the package is installed without it and decodes whole images with simplejpeg and
OpenCV. PENSTOCK_EXTENSION=required makes the failure an error. Python without the GIL has no stable ABI yet: there, an
extension is for one version of Python. Wheels hold the demo, its training program and its images as penstock/examples.
"""

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

SOURCES = ("_jpeg", "baseline", "track", "scan", "idct", "pixels", "resize", "remark", "vectors")
HEADERS = (*SOURCES[1:], "cpython")
DEMO = ("train_ddp.py", "data/NOTICE", "data/cifar10-small.tar.xz")
DEMO += tuple(f"demo/{path.name}" for path in sorted(Path("examples/demo").glob("*.py")))
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildWithDemo(build_py):
    """Copies what the demo needs beside the modules; in a checkout it is found where it is."""

    def run(self) -> None:
        super().run()
        for name in () if self.editable_mode else DEMO:
            target = Path(self.build_lib, "penstock", "examples", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(Path("examples", name)), str(target))


setup(
    cmdclass={"build_py": BuildWithDemo},
    ext_modules=[
        Extension(
            "penstock.images._jpeg",
            [f"src/penstock/images/{name}.c" for name in SOURCES],
            depends=[f"src/penstock/images/{name}.h" for name in HEADERS],
            libraries=["jpeg"],
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
            optional=os.environ.get("PENSTOCK_EXTENSION") != "required",
            py_limited_api=STABLE_ABI,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
