"""Run a program with its arguments; ``-m`` and a module, too.

The torchvision of PyPI is built for the torch of PyPI. Beside a torch for CPUs its operators in C++ cannot be loaded,
and so it is not imported either, though none of these programs uses an operator. Their names are declared then, without
code; all of torchvision that is written in Python is the real one.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")


def declare_operators() -> None:
    """Let torchvision be imported where its own operators cannot be loaded."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    declare_operators()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path.insert(0, "")
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
