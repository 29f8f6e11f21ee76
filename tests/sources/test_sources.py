"""One suite for every `Source`: rows by their numbers, in any order, without a rank, an epoch or an order."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from dataset_support import serving
from full_run import full_only
from source_cases import PER_FILE, SOURCES, number_of, numbers, send_numbers, write_text

from penstock.errors import ManifestError
from penstock.plan.source import Source
from penstock.server import Client

N = 12
VARIANTS: dict[str, list[int]] = {
    "before": list(range(8)),
    "now": list(range(N)),
    "changed": [0, 1, 2, 9, *range(4, N)],
}
"""Rows of a source: before it grew, now, and with one of them changed."""
NAMES = [*SOURCES, "server"]

Make = Callable[[str], Source]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server that serves every variant."""
    folder = tmp_path_factory.mktemp("served")
    for variant, rows in VARIANTS.items():
        write_text(folder / variant, rows)
    with serving(**{variant: folder / variant for variant in VARIANTS}) as (address, _):
        yield Client(address)


def maker(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    """Return what makes one variant of a source, in a folder of its own each time."""
    if name == "server":
        client: Client = request.getfixturevalue("served")
        return client.manifest

    def make(variant: str) -> Source:
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return SOURCES[name](folder, VARIANTS[variant])

    return make


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker(request.param, tmp_path, request)


def test_it_has_the_protocol(make: Make) -> None:
    source = make("now")
    assert isinstance(source, Source)
    assert len(source) == N


def test_records_come_in_the_order_that_is_asked_for(make: Make) -> None:
    source = make("now")
    for rows in ([], [0], [N - 1], [5, 3, 5, 0], list(range(N)), list(range(N))[::-1]):
        assert numbers(source, rows) == rows


def test_negative_rows_count_from_the_end(make: Make) -> None:
    assert numbers(make("now"), [-1, 0, -N]) == [N - 1, 0, 0]


@pytest.mark.parametrize("row", [N, N + 1, -N - 1, 1 << 62, -(1 << 62)])
def test_rows_outside_are_refused(make: Make, row: int) -> None:
    source = make("now")
    for rows in ([row], [0, row], [row, N - 1]):
        with pytest.raises(IndexError):
            numbers(source, rows)
    assert numbers(source, [4]) == [4]


def test_records_are_nobody_elses(make: Make) -> None:
    source = make("now")
    rows = np.array([7, 2, -1], dtype=np.int64)
    source.records(rows)
    assert rows.tolist() == [7, 2, -1], "the rows that were asked for"
    one, two = source.records(np.array([5, 5], dtype=np.int64))
    if isinstance(one, dict):
        one.clear()
    assert number_of(two) == 5
    assert numbers(source, [5]) == [5]


def test_the_same_rows_have_one_fingerprint(make: Make) -> None:
    assert make("now").fingerprint == make("now").fingerprint
    assert len({make(variant).fingerprint for variant in VARIANTS}) == len(VARIANTS)


def test_a_server_has_the_fingerprint_of_its_file(served: Client, tmp_path: Path) -> None:
    assert served.manifest("now").fingerprint == SOURCES["text"](tmp_path, VARIANTS["now"]).fingerprint


def test_a_source_that_grew_knows_what_it_was(make: Make) -> None:
    before, now, changed = make("before"), make("now"), make("changed")
    assert now.is_prefix_of_current(before.fingerprint, 8)
    assert now.is_prefix_of_current(now.fingerprint, N)
    assert not now.is_prefix_of_current(before.fingerprint, PER_FILE)
    assert not now.is_prefix_of_current("0" * 32, 8)
    assert not before.is_prefix_of_current(now.fingerprint, N)
    assert not changed.is_prefix_of_current(before.fingerprint, 8)


@pytest.mark.parametrize("rows", [-1, 7, N + 1])
def test_a_length_that_it_never_had_is_no_prefix(make: Make, rows: int) -> None:
    # There are no rows -1 or N + 1, which a manifest says.
    with contextlib.suppress(ManifestError):
        assert not make("now").is_prefix_of_current(make("before").fingerprint, rows)


def test_a_copy_is_the_same_source(make: Make) -> None:
    source = make("now")
    source.records(np.array([1]))
    copy = pickle.loads(pickle.dumps(source))
    assert (len(copy), copy.fingerprint, numbers(copy, [7, 2])) == (N, source.fingerprint, [7, 2])


def test_a_copy_is_a_handle(make: Make) -> None:
    source = make("now")
    numbers(source, range(N))
    assert len(pickle.dumps(source)) < 4000


def test_it_is_read_by_several_threads(make: Make) -> None:
    source = make("now")

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(5):
            rows = [rng.randrange(N) for _ in range(6)]
            assert numbers(source, rows) == rows

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read, range(8)))


@full_only("imports everything anew; copies are pickled without")
def test_a_spawned_process_reads_them_all(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sources = {name: maker(name, tmp_path, request)("now") for name in NAMES}
    expected = [(name, source.fingerprint, [7, 2, N - 1]) for name, source in sources.items()]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send_numbers, args=(sources, theirs))
    process.start()
    theirs.close()
    assert [ours.recv() for _ in sources] == expected
    process.join()
