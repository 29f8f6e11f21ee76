"""``penstock doctor``: what is installed here, what is missing, and what that costs.

Goes to standard output, with ``--json`` as one JSON object. What is missing is no error: the exit code is 0.
"""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from penstock.cli.manifest_options import console, pairs

__all__ = ["command"]

_PACKAGES = ("penstock", "torch", "numpy", "pyarrow", "simplejpeg", "opencv-python-headless", "pillow")
_EXTRAS = {"ray": "ray", "albumentations": "augment", "prometheus-client": "metrics", "lmdb": "lmdb", "s3fs": "cloud"}
_NO_EXTENSION = (
    "The C extension for JPEG is not built: crops decode the whole image, which takes about 1.4 times as long on "
    "ImageNet's files, and twice as long at 11 megapixels. Install a C compiler and the headers of libjpeg-turbo "
    "(Debian: apt-get install gcc libjpeg62-turbo-dev), then install penstock again."
)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command(*, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show what is installed here, what is missing, and what that costs."""
    from penstock.images import native
    from penstock.images.backends import BACKENDS, installed

    packages = {name: _version(name) for name in _PACKAGES}
    extras = {name: _version(name) for name in _EXTRAS}
    backends = installed()
    hints = [] if native.is_available() else [_NO_EXTENSION]
    if as_json:
        report = {
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)),
            "packages": packages,
            "extras": extras,
            "image_backends": {name: name in backends for name in BACKENDS},
            "extension": native.is_available(),
            "hints": hints,
        }
        print(json.dumps(report))
        return
    out = console()
    rows = [("Python", platform.python_version()), ("CPUs", str(len(os.sched_getaffinity(0))))]
    rows += [(name, found or "not installed") for name, found in packages.items()]
    rows += [(name, found or f"not installed (penstock[{_EXTRAS[name]}])") for name, found in extras.items()]
    rows += [(f"images: {name}", "yes" if name in backends else "no") for name in BACKENDS]
    out.print(pairs("Here", rows))
    for hint in hints:
        out.print(hint)
