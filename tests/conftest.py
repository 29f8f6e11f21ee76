"""Fixtures that all tests share."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines are noisy: a slow example is no failure. Runs in CI repeat exactly.
settings.register_profile(
    "penstock",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=100 if os.environ.get("PENSTOCK_TEST_FULL") == "1" else 25,
)
settings.register_profile("ci", parent=settings.get_profile("penstock"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "penstock")


# Before torch is imported. Its threads wait for each other at full speed, and tests are run in more than one process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On import it would ask the network for a newer version, in every process.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

# Shells have what they run in the background (`make test &`) ignore Ctrl-C, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent / "support"))

from full_run import keep_for_full  # noqa: E402  -- the folder that it is in is on the path now

# Imported once, for all processes that tests start by the forkserver. tests/integration adds to it.
FORKSERVER = [
    "torch.distributed.device_mesh",
    "penstock.loader.dataloader",
    "penstock.loader.executors.process.executor",
    "pytest",
]
multiprocessing.set_forkserver_preload(FORKSERVER)


LARGE = ["test_owners_of_data.py", "test_pack.py", "test_odd_batches.py"]
"""Modules with tests that import what others do without: tables pandas, nested tensors SymPy and torch's compiler."""


def pytest_collection_finish() -> None:
    """What has been imported and collected is no work of the garbage collector: tests for leaks call it often, and in
    workers it would copy every page that they share with this process.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of Ray come last: its gRPC stays in the process, and what is forked after that hangs (see run.py). Before
    them those that import much: what is forked after that has twice the page tables to copy.

    What a clock says where others want the same cores is measured again: three times wrong is a failure. So is what the
    marker names: ``clock("did not answer in time")``.
    """
    keep_for_full(items)
    for item in items:
        if clock := item.get_closest_marker("clock"):
            late = ["AssertionError", *clock.args]
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=4, only_rerun=late))
    places = {name: place for place, name in enumerate(LARGE, 1)}
    items.sort(key=lambda item: (Path(__file__).parent / "ray" in item.path.parents, places.get(item.path.name, 0)))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data (``imagenet-sample/``, ``cifar10-jpg.tar.xz``); skips where there is none."""
    folder = os.environ.get("PENSTOCK_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("PENSTOCK_TEST_DATA names no folder of real data")
    return Path(folder)


@pytest.fixture(scope="module", autouse=True)
def _small_process() -> Iterator[None]:
    """What a module's tests have freed goes back to the system: each later fork would copy its page tables. What they
    have left, imports above all, is no work of the collector: what a test that failed still holds stays to the end.
    """
    yield
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache folder, or is told a rank by the environment it runs in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def write_manifest(tmp_path: Path) -> Callable[..., Path]:
    """``write_manifest(n)`` writes ``class_03/img_000031.jpg 3`` lines, class-sorted, ten rows a class."""

    def write(rows: int, name: str = "meta.txt", per_class: int = 10) -> Path:
        path = tmp_path / name
        lines = (f"class_{i // per_class:02d}/img_{i:06d}.jpg {i // per_class}\n" for i in range(rows))
        path.write_text("".join(lines))
        return path

    return write
