"""The optional C extension; all else is in pyproject.toml.

The extension is built where a compiler and the headers of libjpeg-turbo are found (Debian: libjpeg62-turbo-dev). Where
they are not, or where building fails, the package is installed without it and decodes whole images with simplejpeg and
OpenCV. PENSTOCK_EXTENSION=required makes the failure an error. Python without the GIL has no stable ABI yet: there, an
extension is for one version of Python.
"""

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/penstock/images/c")
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "penstock.images._jpeg",
            sorted(map(str, FOLDER.glob("*.c"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            libraries=["jpeg"],
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-fvisibility=hidden"],
            optional=os.environ.get("PENSTOCK_EXTENSION") != "required",
            py_limited_api=STABLE_ABI,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
