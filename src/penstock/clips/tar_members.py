"""Videos and recordings inside of tar archives: each is a range of bytes of its archive, and is read as one.

A member is named by where it is: ``shards/a.tar!1536+90210!clips/7.mp4`` are 90,210 bytes from byte 1,536 on.
"""

from __future__ import annotations

import contextlib
import json
import re
import tarfile
from typing import Any, NamedTuple

from penstock.clips.media import Media, open_file
from penstock.errors import ClipError
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["TarMember", "members_of"]

_NUMBER = re.compile(r"-?[0-9]{1,18}")
_LARGEST = 1 << 20  # bytes of what belongs to a clip: a number, a caption, some JSON


class TarMember(NamedTuple):
    """A file of an archive.

    Attributes:
        name: of the archive and the member, with its place.
        label: the number in the member ``.cls`` of the same name; if there are others, a dict of what ``.json`` says,
            of ``text`` in ``.txt``, and of ``label``; None if there are none.
    """

    name: str
    label: Any


def members_of(archive: str, endings: tuple[str, ...], storage: Storage | None) -> list[TarMember]:
    """Return the files of an archive whose names end like this, in their order.

    Args:
        archive: its path or address.
        endings: in small letters.
        storage: how stores are reached.

    Raises:
        ClipError: it is no tar archive, or damaged.
        StorageError: it cannot be read.

    Costs: the headers of all members are read, and what is shorter than 1 MiB beside the clips.
    """
    clips: list[tuple[str, str]] = []
    beside: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(fileobj=Media(open_file(archive, storage)), mode="r:") as opened:
            for member in opened:
                key, _, ending = member.name.rpartition(".")
                if not member.isreg():
                    continue
                if member.issparse():
                    raise ClipError(f"{shown(archive)!r}: {member.name!r} is sparse, and so no range of the archive")
                if member.name.lower().endswith(endings):
                    clips.append((f"{archive}!{member.offset_data}+{member.size}!{member.name}", key))
                elif member.size <= _LARGEST and (content := opened.extractfile(member)) is not None:
                    beside.setdefault(key, {})[ending.lower()] = content.read()
    except (tarfile.TarError, EOFError) as error:
        raise ClipError(f"{shown(archive)!r} is no tar archive, or damaged: {error}") from error
    return [TarMember(name, _label(beside.get(key, {}))) for name, key in clips]


def _label(found: dict[str, bytes]) -> Any:
    texts = {ending: data.decode("utf-8", "replace").strip() for ending, data in found.items()}
    values: dict[str, Any] = {}
    if (said := texts.get("json")) is not None:
        values["json"] = said
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON is text
            values["json"] = json.loads(said)
        if isinstance(values["json"], dict):
            values = values["json"]
    if (said := texts.get("txt", texts.get("text"))) is not None:
        values["text"] = said
    if (said := texts.get("cls")) is not None:
        number = int(said) if _NUMBER.fullmatch(said) else said
        if not values:
            return number
        values["label"] = number
    return values or None
