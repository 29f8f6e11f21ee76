"""`Preload`: copy a rank's rows into one compact buffer, for manifests on slow network file systems.

The rows are read in file order, and permuted in memory by an index column. The buffer is an Arrow IPC file in anonymous
memory (memfd; a temporary file if the system has none). Running workers map it through the ``/proc`` entry of the
process that wrote it, so it exists once per rank. It is freed when its last user ends.

Cost: the rows of the current mini-epoch, and the same number for the next one, which a thread loads in the background.
While a slice is written, it is in memory twice.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# `take` imports this module. If the background thread did so while the main thread forks a worker, the worker would
# wait for the import lock forever.
import pyarrow.compute
import torch

from penstock.errors import ManifestIOError
from penstock.hashing import mix
from penstock.manifest import Manifest, Record
from penstock.manifest.indices import as_arrow, as_numpy
from penstock.order.permutation import Indices
from penstock.plan.share import EpochView, LookAhead, MiniEpoch
from penstock.progress import progress_bar
from penstock.threads import Daemon

__all__ = ["Preload", "PreloadedRows"]

_CHUNK = 1 << 18  # rows between two updates of the progress bar
_AT, _ROW = "__at__", "__row__"


class PreloadedRows(NamedTuple):
    """A slice in memory: ``at[i]`` is the index of the slice's i-th sample in the columns, which are in file order."""

    batch: pa.RecordBatch
    at: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def records(self, manifest: Manifest, local: Indices) -> list[Record]:
        """Return the records of these samples of the slice, parsed from memory."""
        where = self.at[local]
        return manifest.parse(self.batch.take(as_arrow(where)), self.rows[where])


class Preload(LookAhead):
    """The preloaded slices of one rank: the current one and, in the background, the next one.

    Args:
        manifest: the source of the rows.
        progress: True shows a progress bar on stderr, False none, None only if stderr is a terminal.
    """

    def __init__(self, manifest: Manifest, *, progress: bool | None) -> None:
        self._manifest = manifest
        self._progress = progress
        self._publish()
        self._open: tuple[int, PreloadedRows] | None = None
        self._reset()

    def _publish(self) -> None:
        """Create the state that this dataset shares with its copies in workers."""
        # Distinguishes datasets at the same mini-epoch.
        self._nonce = secrets.randbits(62)
        # Two slots, read by running workers: key of the mini-epoch, pid and file descriptor of the writer, size.
        self._slots = torch.zeros((2, 4), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def _reset(self) -> None:
        """Create the state that belongs to this process alone: descriptors by slot, and the background threads."""
        self._pid = os.getpid()
        self._files: dict[int, int] = {}
        self._threads: dict[int, _PreloadThread] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._files, self._pid)

    def __getstate__(self) -> dict[str, Any]:
        names = ["_manifest", "_progress"]
        # Pickled for a worker. Any other copy preloads its own rows.
        if get_spawning_popen() is not None:
            names += ["_nonce", "_slots"]
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_slots" not in state:
            self._publish()
        self._open = None
        self._reset()

    def records(self, view: EpochView, local: Indices) -> list[Record]:
        """Return the records of some samples of a view, from memory."""
        return self.get(view).records(self._manifest, local + view.place.skip)

    def prepare(self, view: EpochView, following: EpochView) -> None:
        """Load the rows of a view, and start to load the rows of the next one in the background."""
        self.get(view)
        self.prefetch(following)

    def get(self, view: EpochView) -> PreloadedRows:
        """Return the rows of a view's whole mini-epoch: mapped if a process has loaded them, else loaded now."""
        key = self._key(view.place.whole)
        opened = self._open
        if opened is None or opened[0] != key:
            if self._pid != os.getpid():
                self._reset_after_fork()
            thread = self._threads.pop(key, None)
            if thread is not None:
                thread.result()
            found = self._map(key)
            if found is None:
                found = self._preload(view, lambda: False)
            self._open = opened = key, found
        return opened[1]

    def _reset_after_fork(self) -> None:
        """Reset after a fork: drop the parent's threads and locks, and close its files, which this process must not
        keep alive.
        """
        inherited = list(self._files.values())
        self._reset()
        for descriptor in inherited:
            os.close(descriptor)

    def prefetch(self, view: EpochView) -> None:
        """Start to load another slice in the background; it replaces the slice that is not in use."""
        key = self._key(view.place.whole)
        if key not in self._threads and not bool((self._slots[:, 0] == key).any()):
            self._threads = {key: _PreloadThread(lambda stopping: self._preload(view, stopping))}

    def _preload(self, view: EpochView, stopping: Callable[[], bool]) -> PreloadedRows:
        """Load a slice and publish it; return it mapped.

        It is mapped here because other threads might replace it before a later lookup.
        """
        key = self._key(view.place.whole)
        with self._lock, _anonymous_file() as file:
            found = self._map(key)
            if found is not None:
                # Another thread has loaded it in the meantime.
                return found
            in_use = 0 if self._open is None else self._open[0]
            slot = 1 if int(self._slots[0, 0]) == in_use else 0
            rows = view.order[view.partition.positions() % max(view.partition.n, 1)]
            _write(file, self._manifest, rows, key, self._progress, stopping)
            size = file.tell()
            file.flush()
            preloaded = _read(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), key)
            if preloaded is None:
                raise ManifestIOError(f"the rows preloaded for {view.place} could not be mapped")
            old = self._files.get(slot)
            self._files[slot] = os.dup(file.fileno())
            self._slots[slot] = torch.tensor([key, self._pid, self._files[slot], size])
            if old is not None:
                os.close(old)
            return preloaded

    def _key(self, place: MiniEpoch) -> int:
        return mix(self._nonce, *place.numbers) >> 1 or 1

    def _map(self, key: int) -> PreloadedRows | None:
        for published, pid, descriptor, size in self._slots.tolist():
            if published != key:
                continue
            try:
                if pid == os.getpid():
                    opened = os.dup(descriptor)
                else:
                    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
            except OSError:
                # Without /proc, or if the writer has ended, this process loads the rows itself.
                return None
            try:
                return _read(mmap.mmap(opened, size, prot=mmap.PROT_READ), key)
            except (OSError, ValueError):
                # As in `_read`: the descriptor's number now belongs to another file.
                return None
            finally:
                os.close(opened)
        return None


class _PreloadThread:
    """A slice that a background thread loads; `result` raises the thread's exception."""

    def __init__(self, work: Callable[[Callable[[], bool]], object]) -> None:
        self._error: BaseException | None = None
        self._thread = Daemon(partial(self._run, work), name="penstock-preload")

    def _run(self, work: Callable[[Callable[[], bool]], object], thread: Daemon) -> None:
        try:
            work(lambda: thread.stopping)
        # Raised in `result`.
        except BaseException as error:
            self._error = error

    def result(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _write(
    file: BinaryIO,
    manifest: Manifest,
    rows: Indices,
    key: int,
    progress: bool | None,
    stopping: Callable[[], bool],
) -> None:
    """Write one record batch: stored columns and row numbers in file order, and the index of each sample in them."""
    order = np.argsort(rows, kind="stable")
    at = np.empty_like(order)
    at[order] = np.arange(len(order))
    in_file_order = rows[order]
    parts = []
    with progress_bar("preloading rows", len(rows), progress, in_bytes=False) as advance:
        for begin in range(0, max(len(rows), 1), _CHUNK):
            if stopping():
                raise ManifestIOError("preloading rows was stopped, because the program ends")
            chunk = in_file_order[begin : begin + _CHUNK]
            parts.append(manifest.gather(chunk))
            advance(len(chunk))
    batch = pa.Table.from_batches(parts).combine_chunks()
    table = batch.append_column(_AT, as_arrow(at)).append_column(_ROW, as_arrow(in_file_order))
    table = table.replace_schema_metadata({"key": str(key)})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=max(1, len(rows)))


def _read(mapped: mmap.mmap, key: int) -> PreloadedRows | None:
    try:
        reader = pa.ipc.open_file(pa.py_buffer(mapped))
    except pa.ArrowInvalid:
        # The descriptor's number now belongs to another file.
        return None
    if (reader.schema.metadata or {}).get(b"key") != str(key).encode():
        return None
    if reader.num_record_batches == 0:
        empty = np.empty(0, dtype=np.int64)
        return PreloadedRows(pa.RecordBatch.from_pylist([], schema=reader.schema), empty, empty)
    batch = reader.get_batch(0)
    return PreloadedRows(batch.drop_columns([_AT, _ROW]), as_numpy(batch.column(_AT)), as_numpy(batch.column(_ROW)))


def _anonymous_file() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("penstock-rows"), "w+b")
    return cast(BinaryIO, tempfile.TemporaryFile())


def _close_all(files: dict[int, int], pid: int) -> None:
    if pid == os.getpid():
        while files:
            os.close(files.popitem()[1])
