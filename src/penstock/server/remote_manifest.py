"""`RemoteManifest`: a dataset of a metadata server, as a `Manifest`.

    manifest = Client("grpc://a:8815").manifest("train")
    manifest[5]                     one round trip
    manifest.records([5, 3, 5])     one round trip
    manifest.parse(batch, rows)     no round trip: records of rows from `Client.rows`

No data is on this machine: the first answer described the dataset, and rows are requested when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa

from penstock.errors import ManifestError
from penstock.manifest import Manifest, Record
from penstock.manifest.fields import BadRow, Parser
from penstock.manifest.formats.arrow import ColumnPart
from penstock.manifest.formats.base import ParsedPart, Part
from penstock.manifest.indices import Indices, Rows
from penstock.manifest.lines import TooMuch
from penstock.manifest.scan import shorten
from penstock.server.wire_format import WireFormat
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.server.client import Client

__all__ = ["RemoteManifest", "RemoteRows"]


class RemoteManifest(Manifest):
    """A table on a server; see `Manifest`. Create it with `Client.manifest`.

    Reads raise the errors of `Client.rows`. It stays at one version of the dataset, even after the server has loaded a
    newer one. A pickle holds the client and the form, but no rows.
    """

    fork_safe = False
    """Datasets over it must not be forked: gRPC does not survive a fork."""

    def __init__(self, remote: RemoteRows, view: range | None = None) -> None:
        """Internal: call `Client.manifest`."""
        self._remote, form = remote, remote.form
        parts: list[Part] = []
        start = 0
        for rows, parser in form.parsers:
            parts.append(_Lines(remote, parser, rows, start))
            start += rows
        super().__init__(parts or [_Columns(remote)], form.root, {}, form.view if view is None else view)

    @property
    def sources(self) -> tuple[Path, ...]:
        """Empty: the files are on the server."""
        return ()

    @property
    def nbytes(self) -> int:
        """The size of the server's files in bytes."""
        return self._remote.form.nbytes

    @cached_property
    def fingerprint(self) -> str:
        """The same as of the files."""
        return replace(self._remote.form, view=self.view).fingerprint

    @property
    def whole_fingerprint(self) -> str:
        """The same as of the files."""
        return self._remote.form.whole

    def _prefixes(self, rows: int) -> list[str]:
        return list(self._remote.client.prefix_fingerprints(self._remote.name, self.fingerprint, rows))

    def _view(self, rows: range) -> Manifest:
        return RemoteManifest(self._remote, rows)

    def reopened(self) -> Manifest:
        """Return the current version on the server."""
        return self._remote.client.manifest(self._remote.name)

    def records(self, indices: Indices) -> list[Record]:
        """Return the records at ``indices`` (any order, repeats allowed), in one round trip."""
        return self.parse(self.gather(indices), indices)

    def gather(self, rows: Indices, most: int | None = None) -> pa.RecordBatch:
        """Return rows in their stored form, in one round trip; see `parse`."""
        return self._remote.fetch(self._rows(rows), most)

    def gather_ahead(self, requests: Iterable[Indices]) -> Iterator[pa.RecordBatch]:
        """Yield what `gather` returns for each request. The next ones are sent in advance, see `Client.batches`."""
        remote, rows = self._remote, map(self._rows, requests)
        return remote.client.batches(remote.name, remote.fingerprint, map(remote.served, rows))

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteManifest, (self._remote, self.view)

    def __repr__(self) -> str:
        return f"<RemoteManifest of {counted(len(self), 'row')}: {', '.join(self.columns)}; {self._remote}>"


class RemoteRows:
    """Fetches rows by their number in the whole manifest; the server may serve only a view of it."""

    def __init__(self, client: Client, name: str, form: WireFormat, wire_schema: pa.Schema) -> None:
        self.client, self.name, self.form, self.wire_schema = client, name, form, wire_schema
        self.fingerprint = form.fingerprint

    def __str__(self) -> str:
        return f"{self.name} of {self.client!r}"

    def fetch(self, rows: Rows, most: int | None) -> pa.RecordBatch:
        """Return rows; TooMuch if they have more than ``most`` bytes, which is known only after they have arrived."""
        batch = self.client.rows(self.name, self.fingerprint, self.served(rows))
        if most is not None and batch.nbytes > most:
            raise TooMuch
        return batch

    def served(self, rows: Rows) -> Rows:
        """Return the numbers of rows in what the server serves."""
        view = self.form.view
        return rows if (view.start, view.step) == (0, 1) else (rows - view.start) // view.step


class _Remote:
    """The common base of remote parts; row numbers count within the part."""

    nbytes = 0
    fingerprint = ""

    def __init__(self, remote: RemoteRows) -> None:
        self.remote = remote
        self.path = str(remote)

    def check(self) -> None:
        """Do nothing: the server checks its files at each read."""


class _Lines(_Remote, ParsedPart):
    """Rows of one parser."""

    def __init__(self, remote: RemoteRows, parser: Parser, rows: int, start: int) -> None:
        _Remote.__init__(self, remote)
        ParsedPart.__init__(self, parser)
        self.rows, self._start = rows, start

    def raw(self, rows: Rows, most: int | None = None) -> pa.LargeBinaryArray:
        return self.remote.fetch(rows + self._start, most).column(0)

    def _fail(self, bad: BadRow, row: int) -> NoReturn:
        content = shorten(self.raw(np.array([row]))[0].as_py())
        raise ManifestError(f"{self.path}, row {row + self._start}: {bad.reason}: {content}") from None


class _Columns(_Remote, ColumnPart):
    """Rows in columns."""

    def __init__(self, remote: RemoteRows) -> None:
        super().__init__(remote)
        self.rows, self.schema, self.names = remote.form.rows, remote.wire_schema, list(remote.wire_schema.names)

    def gather(self, rows: Rows, most: int | None = None) -> pa.RecordBatch:
        return self.remote.fetch(rows, most)
