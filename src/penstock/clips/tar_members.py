"""Videos and recordings inside tar archives. Each is read as a byte range of its archive.

A member's name contains its location: ``shards/a.tar!1536+90210!clips/7.mp4`` is 90,210 bytes from byte 1,536 on.
"""

from __future__ import annotations

import contextlib
import json
import re
import tarfile
from typing import Any, NamedTuple

from penstock.clips.media import MediaFile, open_file
from penstock.errors import ClipError
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["TarMember", "members_of"]

_NUMBER = re.compile(r"-?[0-9]{1,18}")
_LARGEST = 1 << 20  # maximum bytes of a label member: a number, a caption, JSON


class TarMember(NamedTuple):
    """A media file in an archive.

    Attributes:
        name: names of archive and member, with its location.
        label: from the members with the same key: the number in ``.cls`` if it is the only one; else a dict with the
            entries of ``.json``, ``text`` from ``.txt`` and ``label`` from ``.cls``; None if there are none.
    """

    name: str
    label: Any


def members_of(archive: str, endings: tuple[str, ...], storage: Storage | None) -> list[TarMember]:
    """Return the members of an archive with these file name extensions, in order.

    Args:
        archive: its path or URL.
        endings: extensions, in lower case.
        storage: access to object stores.

    Raises:
        ClipError: it is not a tar archive, or is damaged.
        StorageError: it cannot be read.

    Costs: reads the headers of all members, and the other members up to 1 MiB.
    """
    clips: list[tuple[str, str]] = []
    beside: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(fileobj=MediaFile(open_file(archive, storage)), mode="r:") as opened:
            for member in opened:
                key, _, ending = member.name.rpartition(".")
                if not member.isreg():
                    continue
                if member.issparse():
                    raise ClipError(f"{shown(archive)!r}: {member.name!r} is sparse, so it is not a byte range")
                if member.name.lower().endswith(endings):
                    clips.append((f"{archive}!{member.offset_data}+{member.size}!{member.name}", key))
                elif member.size <= _LARGEST and (content := opened.extractfile(member)) is not None:
                    beside.setdefault(key, {})[ending.lower()] = content.read()
    except (tarfile.TarError, EOFError) as error:
        raise ClipError(f"{shown(archive)!r} is not a tar archive, or is damaged: {error}") from error
    return [TarMember(name, _label(beside.get(key, {}))) for name, key in clips]


def _label(found: dict[str, bytes]) -> Any:
    texts = {ending: data.decode("utf-8", "replace").strip() for ending, data in found.items()}
    values: dict[str, Any] = {}
    if (said := texts.get("json")) is not None:
        values["json"] = said
        with contextlib.suppress(ValueError, RecursionError):  # invalid JSON stays text
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
