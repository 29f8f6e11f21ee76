"""Open the loader that ``penstock profile`` measures: from a program, or over a manifest, shards or a folder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.wording import counted, kind_text

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as TorchDataLoader

    from penstock.tools.cli.manifest_options import Reading

__all__ = ["load", "load_object", "load_path", "names_a_loader"]

_SIDE = 224  # default side length of crops, in pixels
_ENCODED = ("jpeg", "png")  # MDS column types that hold the bytes of image files


def names_a_loader(target: str) -> bool:
    """Return whether the target is ``MODULE:LOADER`` or ``FILE.py:LOADER``, not a path or a URL."""
    module, colon, attribute = target.rpartition(":")
    return bool(colon and module) and not os.path.exists(target) and attribute.replace(".", "_").isidentifier()


def load(target: str) -> TorchDataLoader[Any]:
    """Return the named loader of a program, or the loader that the named function returns without arguments.

    Raises:
        ConfigError: no such module or name, or it is not a loader.
    """
    from torch.utils.data import DataLoader as TorchDataLoader

    found = load_object(target)
    if not isinstance(found, TorchDataLoader):
        raise ConfigError(
            f"{target} is {kind_text(found)}: name a torch.utils.data.DataLoader, a penstock.DataLoader, or a "
            "function without arguments that returns one"
        )
    return found


def load_object(target: str) -> Any:
    """Return the named object of a program. A function or class is called without arguments.

    Raises:
        ConfigError: no such module or name.
    """
    from torch.utils.data import DataLoader as TorchDataLoader
    from torch.utils.data import Dataset

    place, _, attribute = target.rpartition(":")
    found: Any = _module(place)
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(f"{place} has no {attribute!r}; it has {_loaders(found)}") from None
    return _called(found, target) if callable(found) and not isinstance(found, TorchDataLoader | Dataset) else found


def _module(place: str) -> Any:
    sys.path.insert(0, os.getcwd())  # like `python -m`
    if not place.endswith(".py"):
        if place.startswith(".") or "/" in place:
            raise ConfigError(f"{place!r} is not a module: write package.module, or name the file {place}.py")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
                other = ", nor a file or folder" if not os.path.exists(place) else "; for a path leave ':NAME' out:"
                raise ConfigError(f"there is no module {error.name!r}{other} {place!r}") from None
            raise
    path = Path(place).resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {place!r}")
    if "." in path.stem:  # workers that are not forked import the file by name
        renamed = path.stem.replace(".", "_")
        raise ConfigError(
            f"{place}: Python cannot import a file with a dot in its name: rename it, for example to {renamed}.py"
        )
    sys.path.insert(0, str(path.parent))  # for the file's own imports, and for workers that are not forked
    module = importlib.import_module(path.stem)
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise ConfigError(f"{place}: another module has the name {path.stem!r} ({module.__file__}); rename the file")
    return module


def _called(function: Any, target: str) -> Any:
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions have no signature
        return function()
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"{target} cannot be called without arguments ({error}): name a function that returns the loader"
        ) from None
    return function()


def _loaders(module: Any) -> str:
    from torch.utils.data import DataLoader as TorchDataLoader

    names = [name for name, value in vars(module).items() if isinstance(value, TorchDataLoader)]
    return ", ".join(names) if names else "no loaders"


def load_path(source: str, *, how: Reading, batch_size: int, size: int | None) -> TorchDataLoader[Any]:
    """Return a loader over `penstock.open` of a path. Images are cropped and flipped; other samples are unchanged.

    Raises:
        PenstockError: an unknown or unreadable path; a size for samples that are not images.
    """
    import penstock as ps
    from penstock.storage.urls import shown
    from penstock.tools.cli.manifest_options import Reading

    if source.endswith(".py"):
        raise ConfigError(f"{source} is a program: write {source}:NAME of a DataLoader or a function that returns one")
    usual = Reading().arguments()
    given = {name: value for name, value in how.arguments().items() if value != usual[name]}
    try:
        dataset: Any = ps.open(source, **given)
    except ConfigError as error:
        if " have no " not in str(error):
            raise
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"the options of 'How to read' are for manifests, but {shown(source)} is not one: leave {options} out "
            f"({error})"
        ) from error
    if isinstance(dataset, Sized) and not len(dataset):
        raise ConfigError(f"{source} is empty, so there is nothing to measure")
    if _holds_images(dataset):
        from penstock.images.transforms import HorizontalFlip, RandomResizedCrop

        _check_memory(size or _SIDE, min(batch_size, len(dataset)))
        dataset = ps.ImageDataset(dataset, transform=[RandomResizedCrop(size or _SIDE), HorizontalFlip()])
        return ps.DataLoader(dataset, batch_size=batch_size, num_workers=0)
    if isinstance(dataset, ps.MDSDataset) and (column := _image_column(dataset)) is not None:
        _check_memory(size or _SIDE, min(batch_size, len(dataset)))
        dataset = ps.open(source, images="bytes", load=_CropColumn(column, size or _SIDE), **given)
    elif size is not None:
        raise ConfigError(
            f"--size is for images, but no file of {shown(source)} has an image's extension: leave it out"
        )
    if isinstance(dataset, ps.RankDataset) and dataset.load is None:
        dataset = ps.open(source, load=ps.LoadBytes(), **given)
    collate: Any = None if _collates(dataset) else list
    return ps.DataLoader(dataset, batch_size=batch_size, collate_fn=collate, num_workers=0)


def _check_memory(size: int, samples: int) -> None:
    """Check, before measuring, that two batches fit into memory: the current and the next one."""
    from penstock.memory import available_memory
    from penstock.tools.cli.manifest_options import byte_size

    batch, free = samples * 3 * size * size, available_memory()
    if free is not None and 2 * batch > free:
        raise ConfigError(
            f"at {size} x {size} pixels a batch of {counted(samples, 'image')} takes {byte_size(batch)}, and "
            f"{byte_size(free)} of memory are free: use a smaller --size or --batch-size"
        )


class _CropColumn:
    """Decodes, crops and flips the image of an MDS sample."""

    pure = True

    def __init__(self, column: str, size: int) -> None:
        from penstock.images.transforms import Compose, HorizontalFlip, RandomResizedCrop, ToTensor

        self.column = column
        self.transform = Compose([RandomResizedCrop(size), HorizontalFlip(), ToTensor()])

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        from penstock.images.decode import decode
        from penstock.stages import stage

        with stage("decode"):
            image = decode(sample[self.column])
        with stage("augment"):
            return {**sample, self.column: self.transform(image)}


def _image_column(dataset: Any) -> str | None:
    return next((name for name, encoding in dataset.folder.columns.items() if encoding in _ENCODED), None)


def _holds_images(dataset: Any) -> bool:
    import penstock as ps
    from penstock.errors import ImageError
    from penstock.images.sample_record import SampleRecord, is_image

    if isinstance(dataset, ps.TableDataset):
        return isinstance(dataset.table, ps.TableFiles) and bool(dataset.table.image_columns)
    if getattr(dataset, "load", None) is not None or not isinstance(dataset, ps.RankDataset | ps.ShardDataset):
        return False
    first = next(_first(dataset), None)
    if not isinstance(first, dict):
        return first is not None and is_image(str(first.path).partition("?")[0])
    try:
        SampleRecord(first)
    except ImageError:
        return False
    return True


def _first(dataset: Any) -> Iterator[Any]:
    if len(dataset):
        yield from dataset.records([0])


def _collates(dataset: Any) -> bool:
    """Return whether samples can be stacked, that is, have the same shape and type."""
    from torch.utils.data import IterableDataset, default_collate

    if isinstance(dataset, IterableDataset):
        samples = [sample for _, sample in zip(range(8), dataset, strict=False)]
    else:
        samples = [dataset[k] for k in range(min(8, len(dataset)))]
    try:
        default_collate(samples)
    except (TypeError, RuntimeError, ValueError):  # bytes, PIL images, arrays of several sizes
        return False
    return True
