"""Image columns: structs of an encoded file and its path, as in `datasets`, or bytes."""

from __future__ import annotations

import json
import os
from typing import Any

import pyarrow as pa

from penstock.errors import DataFileError, ImageError
from penstock.images.decode import decode
from penstock.images.limits import open_pillow
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.remote import read_file
from penstock.storage.urls import is_inside, path_of
from penstock.tables.values import is_text

__all__ = ["encoded", "features_of", "image_base", "image_columns", "make_image"]


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """Return the features that `datasets` stores in a schema: ``{"label": {"_type": "ClassLabel", ...}}``."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def image_columns(schema: pa.Schema, features: dict[str, Any]) -> list[str]:
    """Return the image columns: by the features of `datasets`, or else structs of ``bytes`` and ``path``."""
    found = []
    for field in schema:
        said, kind = features.get(field.name), field.type
        pair = pa.types.is_struct(kind) and {kind.field(k).name for k in range(kind.num_fields)} == {"bytes", "path"}
        is_image = isinstance(said, dict) and said.get("_type") == "Image"
        if (pair or is_text(kind)) if is_image else (pair and said is None):
            found.append(field.name)
    return found


def encoded(
    array: pa.Array, base: str | None, storage: Storage | None, rows: list[str]
) -> list[tuple[bytes | None, str]]:
    """Return the file of each image (None for null) and its name for messages.

    Args:
        array: the column.
        base: the folder or address of images that are not in the table.
        rows: the row of each image, for messages.

    Raises:
        DataFileError: a row names a file outside ``base``.
        DataFileIOError, StorageError: it does not exist, or cannot be read.
    """
    if pa.types.is_struct(array.type):
        names = [array.type.field(k).name for k in range(array.type.num_fields)]
        columns = dict(zip(names, array.flatten(), strict=True))
        files, paths = columns["bytes"].to_pylist(), columns["path"].to_pylist()
    else:
        files, paths = array.to_pylist(), [None] * len(array)
        if not any(isinstance(value, bytes) for value in files):
            files, paths = paths, files
    found = []
    for data, path, row in zip(files, paths, rows, strict=True):
        if data is None and path is not None:
            if base is None:
                raise DataFileError(
                    f"{row}: the bytes of {path!r} are not in the table. images_from= of ps.open, TableDataset and "
                    "TableFiles names the folder or address from which it may read images"
                )
            name = path.removeprefix(base)
            if not is_inside(name):
                raise DataFileError(f"{row}: {path!r} is not a file in images_from={base!r}")
            data = read_file(base + name, storage)
        found.append((data, f"{row} ({path})" if path else row))
    return found


def image_base(images_from: str | os.PathLike[str] | None) -> str | None:
    """Return the folder or address of `TableFiles` that paths of images begin with, with a slash at its end."""
    if images_from is None:
        return None
    path = path_of(images_from)
    return os.fspath(images_from).rstrip("/") + "/" if path is None else os.path.join(os.path.abspath(path), "")


def make_image(data: bytes | None, name: str, images: str) -> Any:
    """Return an image in the requested form, see `penstock.tables.TableFiles`."""
    if data is None or images == "bytes":
        return data
    with stage("decode"):
        if images == "rgb":
            return decode(data, path=name)
        from PIL import Image

        try:
            image = open_pillow(data)
            image.load()
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise ImageError(f"{name!r} cannot be decoded: {error}") from error
        return image
