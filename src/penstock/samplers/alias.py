"""Alias tables: a weighted draw in constant time, from a table that all processes of a machine share.

Walker's method: n columns of equal width, each split between an item of its own and one alias. A draw chooses a column
and a side. The table is built in closed form, without a loop over items: the sweeping algorithm of Huebschle-Schneider
and Sanders ("Parallel weighted random sampling", ESA 2019). With weights scaled to a mean of 1, items are *light* (at
most 1) or *heavy*. The sweep fills light columns from the present heavy item until that one falls to 1 or less, and
then closes it with the next heavy one. Where each light item meets the sweep, and where each heavy one closes, follows
from two prefix sums: D, the deficits of the light items, and S, the surpluses of the heavy ones.

File: 64 bytes of header (magic, n, xxh3 of the weights, checksum), n float64 probabilities, n int64 aliases.
"""

from __future__ import annotations

import os
import struct
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from penstock import storage
from penstock.errors import ManifestIOError, SamplerError
from penstock.hashing import mix_array
from penstock.order.permutation import Indices, normalise
from penstock.samplers.draws import scale
from penstock.storage.cache import UNWRITABLE, file_lock

__all__ = ["AliasTable", "build_table", "check_weights", "draw", "shared_table", "weights_digest"]

Weights = npt.NDArray[np.float64]

_MAGIC = b"PSTKALI1"
_HEADER = struct.Struct("<8sQQQ")
_HEADER_SIZE = 64
_ADVICE = "{}: the table of the weights cannot be kept there: {}; pass a folder that can be written as cache_dir="


class AliasTable(NamedTuple):
    """``keep[i]``: the share of column i that is its own item's; ``alias[i]``: the item of the rest."""

    keep: Weights
    alias: Indices


def check_weights(weights: Weights) -> None:
    """Refuse weights that no distribution has.

    Raises:
        SamplerError: empty, NaN, infinite or negative weights (the message names the first), or none above zero.
    """
    if weights.size == 0:
        raise SamplerError("weights are empty: there is nothing to draw")
    if not (weights.min() >= 0 and weights.max() < np.inf):  # NaN passes through both, so this sees it too
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            at = int(bad[0])
            raise SamplerError(
                f"weights must be finite and not negative: weight {at} is {weights[at]} ({bad.size} bad of "
                f"{weights.size})"
            )
    if weights.max() <= 0:
        raise SamplerError(f"all {weights.size} weights are zero: there is nothing to draw")


def build_table(weights: Weights) -> AliasTable:
    """The alias table of float64 weights that passed `check_weights`.

    Vectorised: two prefix sums and two binary searches. Memory while it is built: about 80 bytes a weight.
    """
    n = len(weights)
    scaled = weights / weights.max()
    scaled *= n / scaled.sum()
    light, heavy = np.flatnonzero(scaled <= 1), np.flatnonzero(scaled > 1)
    alias = np.arange(n, dtype=np.int64)
    keep = scaled
    if len(heavy):
        deficits = np.concatenate([[0.0], np.cumsum(1 - scaled[light])])  # entry i: before light item i
        surpluses = np.cumsum(scaled[heavy] - 1)
        # Light item i is filled up by the heavy one that is open when the sweep gets there.
        filler = np.searchsorted(surpluses, deficits[:-1], side="right")
        alias[light] = heavy[np.minimum(filler, len(heavy) - 1)]
        # Heavy item j closes at the first light item with D >= S_j; what it lacks then comes from the next heavy one.
        closing = np.searchsorted(deficits, surpluses, side="left")
        closed = closing < len(deficits)
        closed[-1] = False  # by rounding alone: the last one has nothing left to take from
        left = np.ones(len(heavy))
        left[closed] = 1 + surpluses[closed] - deficits[closing[closed]]
        keep[heavy] = left
        alias[heavy[:-1]] = heavy[1:]
    else:
        keep[:] = 1  # all weights are equal, up to rounding
    np.clip(keep, 0, 1, out=keep)
    return AliasTable(keep, alias)


def draw(table: AliasTable, positions: Indices, key: int) -> Indices:
    """The item drawn at each position, a function of (key, position): int64 of the shape of the positions.

    The upper half of ``hash * n`` is the column, its lower half the place within it, with a resolution of n / 2**64.
    """
    hashes = mix_array(key, positions.view(np.uint64))
    n = len(table.keep)
    columns = scale(hashes, n)
    hashes *= np.uint64(n)
    within = hashes.astype(np.float64)
    within *= 2.0**-64
    return np.where(within < table.keep[columns], columns, table.alias[columns])


class WeightedOrder:
    """``count`` weighted draws with replacement, indexed like an order."""

    def __init__(self, table: AliasTable, count: int, key: int) -> None:
        self._table, self._count, self._key = table, count, key

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: npt.NDArray[np.int64]) -> Indices:
        return draw(self._table, normalise(index, self._count), self._key)


def weights_digest(weights: Weights) -> int:
    """xxh3 of the weights: what a table and a state are known by."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(weights).view(np.uint8).data)


def shared_table(weights: Weights, cache_dir: str | os.PathLike[str] | None = None) -> AliasTable:
    """The table from a mapped file in the cache folder, built there first if need be; one builder at a time.

    16 bytes a weight on disk, in memory once for all processes of a machine. Where the user's cache folder has no room,
    the table is made in the memory of this process, with a warning.

    Raises:
        ManifestIOError: the folder that was given cannot be written.
    """
    digest = weights_digest(weights)
    name = f"{digest:016x}-{len(weights)}.alias"
    path = storage.kept_path("weights", name) if cache_dir is None else Path(cache_dir) / name
    try:
        table = _map(path, len(weights), digest)
        if table is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(path):
                table = _map(path, len(weights), digest)
                if table is None:
                    _write(path, build_table(weights), digest)
                    table = _map(path, len(weights), digest)
    except OSError as error:
        if cache_dir is None and error.errno in UNWRITABLE:
            warnings.warn(
                f"{_ADVICE.format(path, error.strerror)}. Until then each process has a table of its own in memory, 16 "
                "bytes a weight",
                stacklevel=2,
            )
            return build_table(weights)
        raise ManifestIOError(_ADVICE.format(path, error.strerror or error)) from error
    if table is None:
        raise ManifestIOError(_ADVICE.format(path, "it was written, but what is read back is something else"))
    return table


def _header(n: int, digest: int) -> bytes:
    body = _HEADER.pack(_MAGIC, n, digest, 0)[:-8]
    return (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(_HEADER_SIZE, b"\0")


def _write(path: Path, table: AliasTable, digest: int) -> None:
    with storage.write_kept(path) as file:
        for part in (np.frombuffer(_header(len(table.keep), digest), np.uint8), table.keep, table.alias):
            view = part.view(np.uint8).data
            while len(view):  # the file is not buffered: a write may take less than it was given
                view = view[file.write(view) :]


def _map(path: Path, n: int, digest: int) -> AliasTable | None:
    """The table in a file; None where there is none or it is not whole, so that it is built again."""
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
        return None
    if len(mapped) != _HEADER_SIZE + 16 * n or mapped[:_HEADER_SIZE].tobytes() != _header(n, digest):
        return None
    body = np.asarray(mapped)[_HEADER_SIZE:]
    table = AliasTable(body[: 8 * n].view(np.float64), body[8 * n :].view(np.int64))
    # A damaged body may give wrong weights, but no index that is none; 8 ms for 10 million weights. (NaN fails, too.)
    sound = table.alias.min() >= 0 and table.alias.max() < n and table.keep.min() >= 0 and table.keep.max() <= 1
    return table if sound else None
