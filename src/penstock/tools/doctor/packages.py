"""Installed packages: required ones, which must work, and those of extras, with the features that need them."""

from __future__ import annotations

import glob
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from penstock.tools.doctor.result import Advice

__all__ = ["Images", "Package", "Torch", "images", "packages", "torch"]

_MODULES = {"opencv-python-headless": "cv2"}  # modules whose name differs from their package
_EXTRAS = {
    "ray": "executor='ray', which makes batches on the nodes of a cluster",
    "av": "clips of video and audio",
    "soxr": "audio clips at another sample rate",
    "prometheus-client": "`penstock serve --metrics-port`, and a loader's metrics",
    "lmdb": "LMDB databases as sources",
    "tokenizers": "tokenizing text with a tokenizer.json: TokenizedDataset, `penstock tokenize`",
    "obstore": "s3://, gs://, az://, http:// and https:// addresses",
    "botocore": "credentials and profiles in ~/.aws",
    "fsspec": "addresses of other stores, and hf://",
    "huggingface-hub": "hf:// addresses",
}
_REQUIREMENT = re.compile(
    r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*(?:>=\s*([0-9.]+))?[^;]*(?:;.*extra == ['\"](\w+)['\"])?"
)
_NO_EXTENSION = (
    "the C extension for JPEG is not built: crops need the whole image decoded, which takes about 1.4 times as long "
    "for ImageNet's files, and twice as long at 11 megapixels"
)
_BUILD_EXTENSION = (
    "install a C compiler and the headers of libjpeg-turbo (Debian: apt-get install gcc libjpeg62-turbo-dev), then "
    "install penstock again"
)


@dataclass(frozen=True)
class Package:
    """A package that Penstock or one of its extras requires.

    Attributes:
        version: installed version; None if the package is not installed.
        oldest: oldest version that works.
        extra: the extra that includes it; None if it is required.
        needed_for: features that need it.
        error: why it cannot be imported. Only required packages are imported.
    """

    name: str
    version: str | None
    oldest: str | None
    extra: str | None
    needed_for: str
    error: str | None


@dataclass(frozen=True)
class Torch:
    """The CUDA version of the torch build, the GPUs that it sees, and its threads."""

    cuda: str | None
    gpus: int
    threads: int


@dataclass(frozen=True)
class Images:
    """Image decoders: whether each library, by name, and the C extension are available, and what that is built with."""

    backends: dict[str, bool]
    extension: bool
    libjpeg_turbo: str | None


def packages(progress: Callable[[int, int], object]) -> tuple[list[Package], list[Advice]]:
    """Check all packages. Importing the required ones takes seconds, because of torch."""
    try:
        lines = requires("penstock") or []
    except PackageNotFoundError:
        lines = []
    parsed = [match.groups() for match in map(_REQUIREMENT.match, lines) if match]
    core = {name: oldest for name, oldest, extra in parsed if extra is None}
    extras = {_normal(name): (oldest, extra) for name, oldest, extra in parsed if extra not in (None, "dev", "all")}
    found = []
    for done, (name, oldest) in enumerate(core.items()):
        progress(done, len(core))
        error = _import(_MODULES.get(name, name))
        found.append(Package(name, _version(name, error), oldest, None, "all of Penstock", error))
    for name, what in _EXTRAS.items():
        oldest, extra = extras.get(name, (None, None))
        if extra is not None:
            found.append(Package(name, _version(name, ""), oldest, extra, what, None))
    advice = [one for package in found for one in _judged(package)]
    if not core:
        advice.append(_not_installed())
    return found, advice


def _not_installed() -> Advice:
    return Advice(
        "penstock",
        "it runs from a source tree and is not installed, so its requirements are unknown and were not checked",
        "install it: pip install -e CHECKOUT",
    )


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _import(module: str) -> str | None:
    """Return the reason why a module cannot be imported; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may raise any error: a missing library, another version of NumPy
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    return None


def _version(name: str, error: str | None) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # another package may provide the module, such as opencv-python
        return "unknown" if error is None else None


def _judged(package: Package) -> list[Advice]:
    spec = f"'{package.name}>={package.oldest}'" if package.oldest else package.name
    if package.extra is None and package.error is not None:
        state = "is not installed" if package.version is None else f"{package.version} cannot be imported"
        what = f"it is required, and {state}: {package.error}"
        return [Advice(package.name, what, f"pip install --force-reinstall {spec}", failure=True)]
    if package.version is None or not package.oldest or not _older(package.version, package.oldest):
        return []
    what = f"version {package.version} is installed, and {package.oldest} is the oldest that is tested"
    return [Advice(package.name, what, f"pip install -U {spec}", failure=package.extra is None)]


def _older(found: str, oldest: str) -> bool:
    """Compare versions by numbers: "2.10" is newer than "2.9". Suffixes ("rc1", "+cpu") do not count."""
    numbers = [[int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", text)[0])] for text in (found, oldest)]
    return bool(numbers[0]) and numbers[0] < numbers[1]


def torch(found: Sequence[Package]) -> tuple[Torch | None, list[Advice]]:
    """Return how torch was built, and its GPUs; None if it cannot be imported."""
    if any(package.name == "torch" and package.error for package in found):
        return None, []
    import torch as module

    gpus = module.cuda.device_count() if module.cuda.is_available() else 0
    state = Torch(module.version.cuda, gpus, module.get_num_threads())
    if gpus or not glob.glob("/dev/nvidia[0-9]*"):
        return state, []
    reason = "is built without CUDA" if state.cuda is None else f"is built for CUDA {state.cuda} and finds no GPU"
    what = f"this machine has a GPU, but torch {reason}"
    return state, [Advice("torch", what, "compare `nvidia-smi` with the builds on pytorch.org/get-started")]


def images(found: Sequence[Package]) -> tuple[Images | None, list[Advice]]:
    """Return the available image decoders; None if a required package is missing."""
    if any(package.error for package in found):
        return None, []
    from penstock.images import native
    from penstock.images.backends import BACKENDS, installed

    here = installed()
    state = Images({name: name in here for name in BACKENDS}, native.is_available(), native.libjpeg_turbo())
    advice = [] if state.extension else [Advice("C extension", _NO_EXTENSION, _BUILD_EXTENSION)]
    return state, advice
