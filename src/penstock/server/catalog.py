"""`Catalog`: the data sets that a server knows, by name, and their versions, by fingerprint.

    catalog = Catalog({"train": "train.txt"})
    version = catalog.find("train", None)            the newest
    catalog.reload()                                 new versions of changed files
    catalog.find("train", version.fingerprint)       a job goes on with the version that it began with

Only what was named at the start can be asked for: no request carries a path. A version is a few kilobytes and a mapped
file, so the last `KEPT` are kept. It is the *file* that must stay as it was: replace files by renaming.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, PenstockError, ServerChangedError, TicketError, UnknownDataSetError
from penstock.manifest import Manifest
from penstock.server.layout import describe
from penstock.server.protocol import decode_key, encode_key

__all__ = ["KEPT", "LAYOUT", "Catalog", "Served", "Version"]

KEPT = 8
"""Versions of a data set that stay."""

LAYOUT = b"penstock"
"""Where a schema's metadata has the layout of the rows, see `penstock.server.layout`."""


@dataclass(frozen=True)
class Served:
    """One data set as a server's operator sees it."""

    name: str
    rows: int
    fingerprint: str
    nbytes: int
    source: str
    versions: int


class Version:
    """One version of a data set."""

    def __init__(self, name: str, manifest: Manifest) -> None:
        self.name, self.manifest, self.fingerprint = name, manifest, manifest.fingerprint
        self.rows = len(manifest)
        self._layout = describe(manifest)

    @cached_property
    def stored(self) -> pa.Schema:
        """The schema of the rows as they cross."""
        return self.manifest.gather(np.empty(0, np.int64)).schema

    @cached_property
    def schema(self) -> pa.Schema:
        """The same, with the layout."""
        return self.stored.with_metadata({LAYOUT: self._layout.encode()})

    @cached_property
    def row_bytes(self) -> float:
        """Bytes of a row on the wire, on average, about."""
        whole = sum(part.rows for part in self.manifest.parts)
        return 8 + self.manifest.nbytes / max(whole, 1)


class Catalog:
    """Data sets by name. Safe in threads.

    Raises:
        ConfigError: a name that cannot be that of a data set.
        ManifestError: a file that cannot be opened.
    """

    def __init__(self, manifests: Mapping[str, str | Path | Manifest]) -> None:
        self._lock = threading.Lock()
        self._versions: dict[str, tuple[Version, ...]] = {}
        for name, source in manifests.items():
            _check_name(name)
            manifest = source if isinstance(source, Manifest) else Manifest.open(source)
            self._versions[name] = (Version(name, manifest),)

    def newest(self) -> list[Version]:
        """The newest version of each data set, in the order of the names given."""
        return [versions[0] for versions in self._versions.values()]

    def served(self) -> list[Served]:
        """All data sets as the operator sees them."""
        return [_served(versions) for versions in list(self._versions.values())]

    def find(self, name: str | None, fingerprint: str | None) -> Version:
        """A version of a data set; without a name the only data set, without a fingerprint the newest version.

        Raises:
            UnknownDataSetError: no such name, or none was given and there are several.
            ServerChangedError: no such version.
        """
        if name is None and len(self._versions) == 1:
            name = next(iter(self._versions))
        if name is None or name not in self._versions:
            problem = "say which data set" if name is None else f"there is no data set {name!r}"
            has = ", ".join(map(repr, self._versions)) or "none, only the copies of a cache"
            raise UnknownDataSetError(f"{problem}: this server has {has}")
        versions = self._versions[name]
        for version in versions:
            if fingerprint in (None, version.fingerprint):
                return version
        raise ServerChangedError(
            f"{name!r} has the fingerprint {versions[0].fingerprint} on this server, and {fingerprint} is asked for: "
            "its file is another one, or was replaced too often since. Give all servers the same file, or begin anew"
        )

    def reload(self) -> list[str]:
        """Open all files again. Names whose content changed get a new version, and are returned.

        Raises:
            ManifestError: files that cannot be opened. All others are reloaded first, and theirs stay as they were.
        """
        changed, failures = [], []
        with self._lock:
            for name, versions in list(self._versions.items()):
                try:
                    version = Version(name, versions[0].manifest.reopened())
                except PenstockError as error:
                    error.add_note(f"while reloading {name!r}, which goes on with the version it had")
                    failures.append(error)
                    continue
                if version.fingerprint != versions[0].fingerprint:
                    changed.append(name)
                others = [old for old in versions if old.fingerprint != version.fingerprint]
                self._versions[name] = (version, *others)[:KEPT]
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"and {other}")
            raise failures[0]
        return changed


def _served(versions: tuple[Version, ...]) -> Served:
    newest = versions[0]
    sources = newest.manifest.sources
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    source = f"{sources[0]}{more}"
    return Served(newest.name, newest.rows, newest.fingerprint, newest.manifest.nbytes, source, len(versions))


def _check_name(name: str) -> None:
    try:
        decode_key(encode_key(name, None))
    except TicketError as error:
        raise ConfigError(str(error)) from None
