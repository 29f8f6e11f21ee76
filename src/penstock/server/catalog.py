"""`Catalog`: the datasets of a server, by name, and their versions, by fingerprint.

    catalog = Catalog({"train": "train.txt"})
    version = catalog.find("train", None)            the newest
    catalog.reload()                                 new versions of changed files
    catalog.find("train", version.fingerprint)       a job continues with the version that it began with

Only datasets named at startup are served: no request carries a path. A version takes a few kilobytes and a
mapped file, and the last `KEPT` versions stay available. Their *files* must not change: replace files by renaming.
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
from penstock.order.permutation import Indices
from penstock.server.copies import CACHE
from penstock.server.protocol import decode_key, encode_key
from penstock.server.wire_format import KEY, describe

__all__ = ["KEPT", "Catalog", "Served", "Version"]

KEPT = 8
"""Versions of a dataset that stay available."""


@dataclass(frozen=True)
class Served:
    """A dataset as the server's operator sees it."""

    name: str
    rows: int
    fingerprint: str
    nbytes: int
    source: str
    versions: int


class Version:
    """One version of a dataset."""

    def __init__(self, name: str, manifest: Manifest) -> None:
        self.name, self.manifest, self.fingerprint = name, manifest, manifest.fingerprint
        self.rows = len(manifest)
        self._format = describe(manifest)

    def gather(self, numbers: Indices, most: int | None = None) -> pa.RecordBatch:
        """Return rows in their stored form, see `Manifest.gather`."""
        return self.manifest.gather(numbers, most)

    @cached_property
    def wire_schema(self) -> pa.Schema:
        """The schema of the rows on the wire."""
        return self.gather(np.empty(0, np.int64)).schema

    @cached_property
    def schema(self) -> pa.Schema:
        """The same schema, with the format in its metadata."""
        return self.wire_schema.with_metadata({KEY: self._format.encode()})


class Catalog:
    """Datasets by name. Thread-safe.

    Raises:
        ConfigError: an invalid dataset name; a manifest of another server.
        ManifestError: a file that cannot be opened.
    """

    def __init__(self, manifests: Mapping[str, str | Path | Manifest]) -> None:
        self._lock = threading.Lock()
        self._versions: dict[str, tuple[Version, ...]] = {}
        for name, source in manifests.items():
            if name == CACHE:
                raise ConfigError(f"{name!r} is the dataset name of a server's cache: choose another one")
            try:
                decode_key(encode_key(name, None))
            except TicketError as error:
                raise ConfigError(str(error)) from None
            manifest = source if isinstance(source, Manifest) else Manifest.open(source)
            if not manifest.sources:
                raise ConfigError(f"{name!r} is {manifest!r}: serve its files, since another server has them already")
            self._versions[name] = (Version(name, manifest),)

    def newest(self) -> list[Version]:
        """Return the newest version of each dataset, in the given order of names."""
        return [versions[0] for versions in self._versions.values()]

    def served(self) -> list[Served]:
        """Return all datasets as the operator sees them."""
        found = []
        for name, versions in list(self._versions.items()):
            manifest = versions[0].manifest
            source, more = str(manifest.sources[0]), len(manifest.sources) - 1
            source += f" and {more} more" if more else ""
            found.append(Served(name, len(manifest), manifest.fingerprint, manifest.nbytes, source, len(versions)))
        return found

    def find(self, name: str | None, fingerprint: str | None) -> Version:
        """Return a version of a dataset; by default the only dataset, and its newest version.

        Raises:
            UnknownDataSetError: unknown name, or no name although there are several datasets.
            ServerChangedError: unknown version.
        """
        if name is None and len(self._versions) == 1:
            name = next(iter(self._versions))
        if name is None or name not in self._versions:
            problem = "say which dataset" if name is None else f"there is no dataset {name!r}"
            has = ", ".join(map(repr, self._versions)) or "none, only the copies of a cache"
            raise UnknownDataSetError(f"{problem}: this server has {has}")
        versions = self._versions[name]
        for version in versions:
            if fingerprint in (None, version.fingerprint):
                return version
        raise ServerChangedError(
            f"{name!r} has the fingerprint {versions[0].fingerprint} on this server, but {fingerprint} was requested: "
            "its file differs, or was replaced too often since. Give all servers the same file, or start a new run"
        )

    def reload(self) -> list[str]:
        """Reopen all files; return the names whose content changed, which get a new version.

        Raises:
            ManifestError: files that cannot be opened. The others are reloaded first; the failed ones keep
                their version.
        """
        changed, failures = [], []
        with self._lock:
            for name, versions in list(self._versions.items()):
                try:
                    version = Version(name, versions[0].manifest.reopened())
                except PenstockError as error:
                    error.add_note(f"while reloading {name!r}, which keeps its current version")
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
