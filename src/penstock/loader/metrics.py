"""`export`: a loader's statistics for Prometheus, read when they are scraped. Needs the extra: ``penstock[metrics]``.

    from prometheus_client import start_http_server
    from penstock.loader.metrics import export

    start_http_server(9400)
    export(loader, labels={"loader": "train"})

    penstock_wait_seconds_total{loader="train"} 12.5          rate() of it is the share of the time spent waiting
    penstock_stage_seconds_total{loader="train",stage="decode"} 341.0

A batch costs nothing more; a scrape costs what ``loader.stats()`` costs. The loader is not kept alive.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["Export", "export"]

# Name, what it says, where in stats().
_COUNTERS = (
    ("batches", "batches that the training got", "batches"),
    ("samples", "samples in them", "samples"),
    ("data_bytes", "bytes in them", "bytes"),
    ("wait_seconds", "time that the training waited for data", "wait_seconds"),
    ("first_batch_seconds", "of that for the first batches of passes", "first_batch_seconds"),
    ("train_seconds", "time between a batch and the request for the next", "train_seconds"),
    ("work_cpu_seconds", "processor time of the dataset, all workers together", "cpu_seconds"),
    ("passes", "passes begun", "passes"),
    ("failed_batches", "batches that came as an error", "failed_batches"),
    ("worker_restarts", "workers that died and were replaced", "restarts"),
)
_LABELLED = (
    ("stage_seconds", "time of the work on batches by stage", "stage"),
    ("delivered_batches", "batches by the way they came", "way"),
    ("bad_samples", "samples that on_error dealt with", "action"),
    ("sample_errors", "exceptions of samples by type, failed replacements included", "type"),
)
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class _Loader(Protocol):
    def stats(self) -> dict[str, Any]: ...


class Export:
    """What `export` returns: the loader is scraped until `close`, or until it is gone."""

    def __init__(self, collector: _Loaders, loader: _Loader, labels: dict[str, str]) -> None:
        self.labels = labels
        self._collector = collector
        self._loader = weakref.ref(loader)

    def stats(self) -> dict[str, Any] | None:
        """Of the loader; None if it is gone."""
        loader = self._loader()
        return None if loader is None else loader.stats()

    @property
    def gone(self) -> bool:
        """Whether the loader has been collected."""
        return self._loader() is None

    def close(self) -> None:
        """Take the loader out of the registry. Idempotent."""
        self._collector.remove(self)


class _Loaders:
    """All loaders of one registry, in which a name may be registered once only."""

    def __init__(self) -> None:
        self._exports: tuple[Export, ...] = ()  # replaced as a whole: scrapes come from other threads
        self._number = 0

    def add(self, loader: _Loader, labels: Mapping[str, str] | None) -> Export:
        """Scrape this one as well."""
        if labels is None:
            labels = {"loader": str(self._number)}
            self._number += 1
        mine = _checked(labels)
        living = tuple(other for other in self._exports if not other.gone)
        if any(other.labels == mine for other in living):
            raise ConfigError(f"another loader is exported with the labels {mine}: give each its own, or close() that")
        added = Export(self, loader, mine)
        self._exports = (*living, added)
        return added

    def remove(self, export: Export) -> None:
        """Scrape it no longer."""
        with _exporting:
            self._exports = tuple(other for other in self._exports if other is not export)

    def describe(self) -> Iterator[Metric]:
        """The names, for the registry."""
        return iter(_families().values())

    def collect(self) -> Iterator[Metric]:
        """The values, for a scrape."""
        families = _families()
        for one in self._exports:
            stats = one.stats()
            if stats is not None:
                _fill(families, stats, one.labels)
        return iter(families.values())


_collectors: weakref.WeakKeyDictionary[Any, _Loaders] = weakref.WeakKeyDictionary()

_exporting = threading.RLock()
"""Held to add a loader, and to take one out: threads may train beside each other."""


def export(
    loader: _Loader, *, registry: CollectorRegistry | None = None, labels: Mapping[str, str] | None = None
) -> Export:
    """Have Prometheus scrape this loader.

    Args:
        loader: a `penstock.DataLoader`; what it counts from its beginning on.
        registry: of prometheus_client; by default the one that its servers use.
        labels: tell loaders apart; by default ``loader="0"``, ``"1"``, ... in the order they are exported.

    Raises:
        ConfigError: labels that another loader has, or that Prometheus does not allow; prometheus-client is missing.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client: pip install 'penstock[metrics]'") from error
    where: Any = REGISTRY if registry is None else registry
    with _exporting:
        collector = _collectors.get(where)
        if collector is None:
            collector = _Loaders()
            where.register(collector)
            _collectors[where] = collector
        return collector.add(loader, labels)


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    taken = {label for _, _, label in _LABELLED}
    for name in labels:
        if not _LABEL.fullmatch(name) or name in taken:
            raise ConfigError(f"{name!r} cannot be the name of a label: letters, digits and _, and none of {taken}")
    return {name: str(value) for name, value in labels.items()}


def _families() -> dict[str, Metric]:
    """Every metric, empty."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    families: dict[str, Metric] = {}
    for name, text, _ in (*_COUNTERS, *_LABELLED):
        families[name] = CounterMetricFamily(f"penstock_{name}", f"Penstock loader: {text}.")
    families["workers"] = GaugeMetricFamily("penstock_workers", "Penstock loader: workers.")
    text = "Penstock loader: finished batches that a request found."
    families["ready_batches"] = SummaryMetricFamily("penstock_ready_batches", text)
    return families


def _fill(families: dict[str, Metric], stats: dict[str, Any], labels: dict[str, str]) -> None:
    def count(name: str, value: float, **more: str) -> None:
        families[name].add_sample(f"penstock_{name}_total", {**labels, **more}, value)

    for name, _, key in _COUNTERS:
        count(name, stats[key])
    for stage, seconds in stats["stages"].items():
        count("stage_seconds", seconds, stage=stage)
    for way, batches in stats["ways"].items():
        count("delivered_batches", batches, way=way)
    errors, queue = stats["errors"], stats["queue"]
    for action in ("skipped", "replaced"):
        count("bad_samples", errors.get(action, 0), action=action)
    for error, times in errors.get("types", {}).items():
        count("sample_errors", times, type=error)
    families["workers"].add_sample("penstock_workers", labels, stats["workers"])
    ready = families["ready_batches"]
    ready.add_sample("penstock_ready_batches_count", labels, queue["requests"])
    ready.add_sample("penstock_ready_batches_sum", labels, queue["ready"] * queue["requests"])
