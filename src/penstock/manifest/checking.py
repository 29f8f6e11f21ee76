"""Check a whole manifest and report every problem, in one pass and bounded memory.

report = check("train.txt", files=True, root="/data/imagenet")
report.ok, report.rows
for problem in report.problems.values():
    print(problem.count, problem.kind, problem.examples)
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, ManifestError, StorageError, StorageNotFoundError
from penstock.manifest.fields import BadRow, parse_rows
from penstock.manifest.formats.base import LinePart, Part, join_root
from penstock.manifest.scan import SURROGATE, shorten
from penstock.manifest.table import Manifest
from penstock.storage import Storage, is_remote
from penstock.storage.names import Urls

__all__ = ["CheckReport", "Problem", "check"]

_BATCH = 4096
_THREADS = 16  # checking files mostly waits for a disk or a server


@dataclass
class Problem:
    """All problems of one kind: the number of rows, and the first ones as "FILE, line N: reason: content"."""

    kind: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class CheckReport:
    """The result of `check`.

    Kinds of problems: "unreadable" (a source cannot be opened; for CSV also a record that does not parse), "fields"
    (too few, too many, not JSON), "label" and other column names (a value that does not parse), "utf-8", "duplicate" (a
    repeated path), "missing" (no such file).
    """

    sources: list[str]
    rows: int = 0
    problems: dict[str, Problem] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def count(self) -> int:
        """The number of problems of all kinds."""
        return sum(problem.count for problem in self.problems.values())


def check(
    source: Urls,
    *,
    files: bool = False,
    duplicates: bool = True,
    examples: int = 10,
    progress: Callable[[int, int], object] | None = None,
    **options: Any,
) -> CheckReport:
    """Check all rows of a manifest.

    Args:
        source: as for `Manifest.open`, which also receives ``options``.
        files: check that each path, joined with root, is a file: one stat or request per row, on 16 threads.
        duplicates: look for repeated paths. Compares 64-bit hashes: with 100 million paths, the chance of a false alarm
            is 1 in 3,700.
        examples: number of examples to report for each kind.
        progress: called after each batch with the number of checked rows and of all rows.

    Returns:
        The report. A source that cannot be opened is a problem in it. Memory: 16 bytes a row with ``duplicates``, else
        none.

    Raises:
        ConfigError: invalid options.
    """
    try:
        manifest = Manifest.open(source, **options)
    except ConfigError:
        raise
    except (ManifestError, StorageError) as error:
        given = [source] if isinstance(source, str | os.PathLike) else list(source)
        report = CheckReport([os.fspath(item) for item in given])
        report.problems["unreadable"] = Problem("unreadable", 1, [str(error)])
        return report
    return _Check(manifest, examples).run(files, duplicates, progress)


class _Check:
    """The state of one check."""

    def __init__(self, manifest: Manifest, examples: int) -> None:
        self.manifest, self._examples = manifest, examples
        self.report = CheckReport([str(path) for path in manifest.sources], len(manifest))

    def run(self, files: bool, duplicates: bool, progress: Callable[[int, int], object] | None) -> CheckReport:
        manifest, start = self.manifest, 0
        look = partial(_is_file, storage=manifest.storage)
        hashes = np.zeros(len(manifest) if duplicates else 0, dtype=np.int64)
        with ThreadPoolExecutor(_THREADS) as pool:
            for part in manifest.parts:
                for begin in range(0, part.rows, _BATCH):
                    rows = np.arange(begin, min(begin + _BATCH, part.rows))
                    paths, good = self._check_batch(part, rows)
                    if duplicates:
                        hashes[start + good] = np.fromiter(map(hash, paths), np.int64, len(paths))
                    if files:
                        full = join_root(os.path.join(manifest.root or "", ""), paths)
                        for row, path, there in zip(good.tolist(), full, pool.map(look, full), strict=True):
                            if not there:
                                self._add(part, row, "missing", f"no such file: {shorten(path)}")
                    if progress is not None:
                        progress(start + int(rows[-1]) + 1, len(manifest))
                start += part.rows
        if duplicates:
            self._find_duplicates(hashes)
        return self.report

    def _check_batch(self, part: Part, rows: npt.NDArray[np.int64]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return the paths of the rows that parse, and their row numbers; record the other rows as problems."""
        if not isinstance(part, LinePart):
            try:
                return part.values(rows)[0], rows
            except ManifestError as error:
                if len(rows) == 1:
                    self._note("row", str(error))
                    return [], rows[:0]
                halves = [self._check_batch(part, half) for half in np.array_split(rows, 2)]
                return halves[0][0] + halves[1][0], np.concatenate([halves[0][1], halves[1][1]])
        lines = part.index.text(rows)
        for row, line in zip(rows.tolist(), lines, strict=True):
            if not line.isascii() and SURROGATE.search(line):
                self._add(part, row, "utf-8", "not UTF-8", line)
        wrong: list[int] = []

        def note(bad: BadRow, number: int) -> None:
            self._add(part, int(rows[number]), bad.kind, bad.reason, lines[number])
            wrong.append(number)

        return parse_rows(part.parser, lines, note)[0], np.delete(rows, wrong)

    def _find_duplicates(self, hashes: npt.NDArray[np.int64]) -> None:
        ordered = np.sort(hashes[hashes != 0])  # 0 marks rows that did not parse
        again = ordered[1:] == ordered[:-1]
        count = int(again.sum())
        if not count:
            return
        values = np.unique(ordered[1:][again])
        candidates = np.flatnonzero(np.isin(hashes, values))
        seen: dict[int, int] = {}
        for row in candidates.tolist():
            part, local = self.manifest.locate(row)
            first = seen.setdefault(int(hashes[row]), row)
            if first != row:
                path = part.values(np.array([local]))[0][0]
                self._add(part, local, "duplicate", f"{shorten(path)} is also the path of row {first}")
                if len(self.report.problems["duplicate"].examples) >= self._examples:
                    break
        self.report.problems["duplicate"].count = count

    def _add(self, part: Part, row: int, kind: str, reason: str, content: str | None = None) -> None:
        """Record a problem."""
        message = ""
        if kind not in self.report.problems or len(self.report.problems[kind].examples) < self._examples:
            place = f"line {part.index.line(row)}" if isinstance(part, LinePart) else f"row {row}"
            message = f"{part.path}, {place}: {reason}" + ("" if content is None else f": {shorten(content)}")
        self._note(kind, message)

    def _note(self, kind: str, message: str) -> None:
        problem = self.report.problems.setdefault(kind, Problem(kind))
        problem.count += 1
        if len(problem.examples) < self._examples:
            problem.examples.append(message)


def _is_file(path: str, storage: Storage | None) -> bool:
    if is_remote(path):
        try:
            (storage or Storage()).open(path)
        except StorageNotFoundError:
            return False
        return True
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return False
