"""Random programs over files: a chain of data sets delivers what its files hold, and nothing that they held before.

A program writes files of one format, opens them where they lie or out of a store, and puts filters, mixtures, tokens
and packs on top. Then a second job opens the same files, or they are written again with the same size in the same
second, and are opened anew: an index, a copy, a filter or a table in the cache that is out of date would deliver wrong
rows. A data set that was opened before delivers the rows of that time, or an error.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from file_program_support import FORMATS, LOADERS, Chain, Row, write
from hypothesis import given, settings
from hypothesis import strategies as st
from store_server import Store

from penstock.errors import PenstockError
from penstock.storage import Storage

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*does not declare itself pure")

FULL = os.environ.get("PENSTOCK_TEST_FULL") == "1"
EVERY_RUN = settings(derandomize=not FULL, print_blob=True, max_examples=300 if FULL else 6)


class Place(NamedTuple):
    """Where programs have their files: a folder of them all, the store that serves it, and another process."""

    folder: Path
    store: Store
    other: ProcessPoolExecutor


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "bucket").mkdir()
    context = multiprocessing.get_context("spawn")
    with Store(folder) as store, ProcessPoolExecutor(1, mp_context=context) as other:
        yield Place(folder / "bucket", store, other)


def read_pickled(chain: Chain, dataset: bytes) -> list[str] | None:
    """Return the texts of a data set of another process; None if it has an error."""
    try:
        return sorted(chain.texts(pickle.loads(dataset)))
    except PenstockError:
        return None


def opened(chain: Chain, names: list[list[str]], rows: list[list[Row]], cache: Path | None, out: Path) -> Any:
    return chain.make(*names, *rows, cache and Storage(cache=cache), out)


def read_anew(chain: Chain, names: list[list[str]], rows: list[list[Row]], cache: Path | None, out: Path) -> list[str]:
    """Open files as a second job does, and return their texts."""
    return sorted(chain.texts(opened(chain, names, rows, cache, out)))


class Program(NamedTuple):
    """What happens: the number of rows, where they are, and what becomes of them after the first epoch."""

    chain: Chain
    count: int
    remote: bool
    in_place: bool
    second_job: bool
    rewrites: int


@st.composite
def programs(draw: st.DrawFn, kind: str) -> Program:
    steps = ["filter"] * draw(st.booleans()) + ["mixture"] * draw(st.booleans())
    if FORMATS[kind].texts:
        over = ["tokens", "packs"] if "mixture" in steps else ["tokens", "job", "packs"]
        steps += draw(st.sampled_from([[], [], over[:1], over[1:2] if len(over) > 2 else [], [over[-2], "packs"]]))
    loader = draw(st.sampled_from(["inline", "inline", "threads", "fork", *(list(LOADERS) if FULL else [])]))
    remote = draw(st.booleans())
    if remote and loader == "fork":
        loader = "forkserver"
    return Program(
        Chain(kind, tuple(steps), loader),
        draw(st.integers(4, 24)),
        remote,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2)),
    )


def run(program: Program, place: Place, folder: Path) -> None:
    chain, rewrites = program.chain, program.rewrites
    folder.mkdir()
    before: tuple[Any, list[str]] | None = None
    for version in range(rewrites + 1):
        rows = [[Row(first + number, version) for number in range(program.count)] for first in (0, 5000)]
        files = [
            write(folder / name, chain.kind, part, in_place=program.in_place)
            for name, part in zip("ab", rows, strict=True)
        ]
        names = [[_address(place, file) if program.remote else str(file) for file in part] for part in files]
        wanted = chain.rows(*rows)
        if before is not None:
            _still(chain, place, *before)
        cache = place.folder.parent / f"cache-{folder.name}" if program.remote else None
        job = None
        if program.second_job:
            job = place.other.submit(read_anew, chain, names, rows, cache, folder / f"tokens-{version}-b")
        dataset = opened(chain, names, rows, cache, folder / f"tokens-{version}")
        assert sorted(chain.texts(dataset)) == wanted
        assert job is None or job.result(120) == wanted
        before = dataset, wanted


def _address(place: Place, file: Path) -> str:
    return f"{place.store.url}/{file.relative_to(place.folder.parent)}"


def _still(chain: Chain, place: Place, dataset: Any, wanted: list[str]) -> None:
    """Read a data set whose files were written again."""
    if "job" in chain.steps:
        return  # its tokens have not changed
    found = read_pickled(chain, pickle.dumps(dataset))
    assert found is None or found == wanted
    found = place.other.submit(read_pickled, chain, pickle.dumps(dataset)).result(120)
    assert found is None or found == wanted


@pytest.mark.parametrize("kind", FORMATS)
def test_a_chain_delivers_what_its_files_hold(place: Place, kind: str) -> None:
    number = iter(range(10**6))

    @EVERY_RUN
    @given(programs(kind))
    def every(program: Program) -> None:
        run(program, place, place.folder / f"{kind.replace(' ', '-')}-{next(number)}")

    every()
