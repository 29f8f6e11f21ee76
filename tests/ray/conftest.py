"""A real Ray cluster on 127.0.0.1 for the tests of this folder; they are skipped where Ray is not installed.

Nodes import the data sets of `ray_support` and of the tests of loaders and shards by name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDERS = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[1] / name) for name in ("support", "loader", "docs", "shards", "integration")),
]
sys.path[:0] = FOLDERS

_ray = importlib.util.find_spec("ray")
collect_ignore_glob = [] if _ray is not None and _ray.origin else ["test_*.py"]  # this folder's name is "ray", too

_running = contextlib.ExitStack()
_found: list[Any] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start a node again that did not start within Ray's 30 seconds, which nobody can change: the machine was busy."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("clock"):
            late = "node timed out during startup"
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=4, only_rerun=late))


@pytest.fixture(autouse=True)
def _no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[None]:
    """Before Ray is imported: everything on 127.0.0.1, nothing sent anywhere, helpers importable. Workers are as
    important as others (Ray has them at a nice value of 15, with which they hardly start beside other tests), and none
    starts before it is asked for.
    """
    before = dict(os.environ)
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def cluster(ray_environment: None) -> Any:
    """A head without CPUs, and three nodes with two CPUs each; the program is connected to it. All modules here share
    it. It has the dashboard, whose server answers the state API.
    """
    from fork_worker import forking
    from ray_support import running_cluster

    if not _found:
        with contextlib.ExitStack() as starting:
            starting.enter_context(forking())
            _found.append(starting.enter_context(running_cluster(nodes=3, cpus=2, dashboard=True)))
            _running.push(starting.pop_all())
    return _found[0]


def pytest_unconfigure() -> None:
    """It ends with the tests, also where they were interrupted."""
    _found.clear()
    _running.close()
