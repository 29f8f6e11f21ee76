"""The optional C extension; all else is in pyproject.toml.

It is built where a compiler and the headers of libjpeg-turbo are found (Debian: libjpeg62-turbo-dev). Where they are
not, or where building fails, the package is installed without it and decodes whole images with simplejpeg and OpenCV.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "penstock.images._jpeg",
            ["src/penstock/images/_jpeg.c"],
            libraries=["jpeg"],
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
