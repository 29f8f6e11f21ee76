"""`RemoteManifest`: the manifest behind a metadata server, as a `Manifest`.

    manifest = Client("grpc://a:7000").manifest("train")
    manifest[5]                     one round trip
    manifest.records([5, 3, 5])     one round trip
    manifest.parse(batch, rows)     none: records of rows that came by `Client.slice`

Nothing of it is on this machine: what it is came with the first answer, rows come when they are asked for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa

from penstock.errors import ManifestError
from penstock.manifest import Manifest, Record
from penstock.manifest.fields import BadRow
from penstock.manifest.formats.base import ParsedPart, Parser, Part
from penstock.manifest.formats.mapped import ColumnPart
from penstock.manifest.indices import Indices, Rows
from penstock.manifest.lines import TooMuch
from penstock.manifest.scan import shorten
from penstock.server.layout import Layout
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.server.client import Client

__all__ = ["RemoteManifest"]


class RemoteManifest(Manifest):
    """A table on a server; see `Manifest`. Made by `Client.manifest`.

    Reads raise what `Client.rows` raises. It stands for one version of the data set, also after the server has loaded
    a newer one. Pickling sends the client and what is known of the table, no rows.
    """

    fork_safe = False
    """Data sets over it are not forked: gRPC does not survive that."""

    def __init__(self, client: Client, name: str, layout: Layout, stored: pa.Schema, view: range | None = None) -> None:
        """Not for general use: call `Client.manifest`."""
        self._made_of = client, name, layout, stored
        self._fetch = _Fetch(client, name, layout, stored)
        starts = accumulate((rows for rows, _ in layout.parsers), initial=0)
        parts: list[Part] = [
            _Lines(self._fetch, parser, rows, start)
            for (rows, parser), start in zip(layout.parsers, starts, strict=False)
        ]
        super().__init__(parts or [_Columns(self._fetch)], layout.root, {}, layout.view if view is None else view)

    @property
    def sources(self) -> tuple[Path, ...]:
        """None: the files are the server's."""
        return ()

    @property
    def nbytes(self) -> int:
        """Size of the server's files in bytes."""
        return self._fetch.layout.nbytes

    @cached_property
    def fingerprint(self) -> str:
        """The same as of the files."""
        return replace(self._fetch.layout, view=self._range).fingerprint

    @property
    def whole_fingerprint(self) -> str:
        """The same as of the files."""
        return self._fetch.layout.whole

    def prefix_fingerprints(self, rows: int) -> list[str]:
        """See `Manifest.prefix_fingerprints`; the server reads its file."""
        if self._range != self._whole:
            raise ManifestError("a view has no prefix; ask the whole manifest")
        if not 0 <= rows <= len(self):
            raise ManifestError(f"rows must be from 0 to {len(self)}, not {rows}")
        client, name, _, _ = self._made_of
        return list(client.prefix_fingerprints(name, self.fingerprint, rows))

    def _view(self, rows: range) -> Manifest:
        return RemoteManifest(*self._made_of, rows)

    def reopened(self) -> Manifest:
        """The version that the server has now."""
        client, name, _, _ = self._made_of
        return client.manifest(name)

    def records(self, indices: Indices) -> list[Record]:
        """The records at ``indices`` (any order, repeats allowed), in one round trip."""
        return self.parse(self.gather(indices), indices)

    def gather(self, rows: Indices, most: int | None = None) -> pa.RecordBatch:
        """Rows as they are stored, in one round trip; for `parse`."""
        return _no_more_than(most, self._fetch(self._rows(rows)))

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteManifest, (*self._made_of, self._range)

    def __repr__(self) -> str:
        client, name, _, _ = self._made_of
        return f"<RemoteManifest of {counted(len(self), 'row')}: {', '.join(self.columns)}; {name} of {client!r}>"


class _Fetch:
    """Gets rows of the whole manifest, of which the server may serve a view."""

    def __init__(self, client: Client, name: str, layout: Layout, stored: pa.Schema) -> None:
        self.client, self.name, self.layout, self.stored = client, name, layout, stored
        self._fingerprint = layout.fingerprint

    def __call__(self, rows: Rows) -> pa.RecordBatch:
        view = self.layout.view
        served = rows if (view.start, view.step) == (0, 1) else (rows - view.start) // view.step
        return self.client.rows(self.name, self._fingerprint, served)


class _Remote:
    """What is common to parts: numbers of rows are the part's own."""

    nbytes = 0
    fingerprint = ""

    def __init__(self, fetch: _Fetch) -> None:
        self.fetch = fetch
        self.path = f"{fetch.name} of {fetch.client!r}"

    def check(self) -> None:
        """The server checks, at each read."""

    def fingerprints_at(self, rows: int) -> list[str]:
        """Not of parts: ask the manifest."""
        raise ManifestError(f"{self.path} knows no fingerprints of its parts")


class _Lines(_Remote, ParsedPart):
    """Rows that one parser reads."""

    def __init__(self, fetch: _Fetch, parser: Parser, rows: int, start: int) -> None:
        _Remote.__init__(self, fetch)
        ParsedPart.__init__(self, parser)
        self.rows, self._start = rows, start

    def one(self, row: int) -> list[Any]:
        return [values[0] for values in self.values(np.array([row]))]

    def values(self, rows: Rows) -> list[list[Any]]:
        return self.values_of(self.gather(rows), rows)

    def raw(self, rows: Rows) -> pa.LargeBinaryArray:
        return self.fetch(rows + self._start).column(0)

    def _fail(self, bad: BadRow, row: int) -> NoReturn:
        content = shorten(self.raw(np.array([row]))[0].as_py())
        raise ManifestError(f"{self.path}, row {row + self._start}: {bad.reason}: {content}") from None


class _Columns(_Remote, ColumnPart):
    """Rows in columns."""

    def __init__(self, fetch: _Fetch) -> None:
        _Remote.__init__(self, fetch)
        self.rows, self.schema = fetch.layout.rows, fetch.stored

    def gather(self, rows: Rows, most: int | None = None) -> pa.RecordBatch:
        return _no_more_than(most, self.fetch(rows))


def _no_more_than(most: int | None, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch. TooMuch if it has more bytes than that: how many is known here only once they have come."""
    if most is not None and batch.nbytes > most:
        raise TooMuch
    return batch
