"""`export`: a loader's statistics for Prometheus, read at each scrape. Needs ``pip install 'penstock[metrics]'``.

    from prometheus_client import start_http_server
    from penstock.integrations.prometheus import export

    start_http_server(9400)
    export(loader, labels={"loader": "train"})

    penstock_wait_seconds_total{loader="train"} 12.5          its rate() is the share of time spent waiting
    penstock_stage_seconds_total{loader="train",stage="decode"} 341.0

Batches get no slower; a scrape costs as much as ``loader.stats()``. The loader is not kept alive.
"""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["Export", "export"]

# Name, help text, key in stats().
_COUNTERS = (
    ("batches", "batches delivered to the training", "batches"),
    ("samples", "samples in them", "samples"),
    ("data_bytes", "bytes in them", "bytes"),
    ("wait_seconds", "time that the training waited for data", "wait_seconds"),
    ("first_batch_seconds", "waiting time for the first batches of passes", "first_batch_seconds"),
    ("train_seconds", "time between a batch and the next request", "train_seconds"),
    ("work_cpu_seconds", "CPU time of the dataset in all workers", "cpu_seconds"),
    ("passes", "passes over the loader", "passes"),
    ("failed_batches", "batches that raised an error", "failed_batches"),
    ("worker_restarts", "workers that died and were replaced", "restarts"),
)
_LABELLED = (
    ("stage_seconds", "working time by stage", "stage"),
    ("delivered_batches", "batches by transport", "way"),
    ("bad_samples", "samples that on_error handled", "action"),
    ("sample_errors", "exceptions of samples by type, including failed replacements", "type"),
)


class _Loader(Protocol):
    def stats(self) -> dict[str, Any]: ...


class Export:
    """The registration of a loader, returned by `export`. Active until `close`, or until the loader is collected."""

    def __init__(self, loader: _Loader, labels: dict[str, str], collector: _Collector) -> None:
        self.labels = labels
        self._collector = collector
        self._loader = weakref.ref(loader)

    def stats(self) -> dict[str, Any] | None:
        """Return the loader's statistics; None if it has been collected."""
        loader = self._loader()
        return None if loader is None else loader.stats()

    @property
    def gone(self) -> bool:
        """Whether the loader has been collected."""
        return self._loader() is None

    def close(self) -> None:
        """Remove the loader from the registry. Idempotent."""
        with _exporting:
            self._collector.exports = [other for other in self._collector.exports if other is not self]


class _Collector:
    """Collects all loaders in one registry, which accepts each metric name only once."""

    def __init__(self) -> None:
        self.exports: list[Export] = []
        """Replaced as a whole: scrapes come from other threads."""
        self.numbers = itertools.count()

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics' names, for the registry."""
        return iter(_families([]))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics' values, for a scrape."""
        return iter(_families(self.exports))


_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()

_exporting = threading.RLock()
"""Lock for adding and removing loaders, since several threads may train at once."""


def export(
    loader: _Loader, *, registry: CollectorRegistry | None = None, labels: Mapping[str, str] | None = None
) -> Export:
    """Register a loader for Prometheus.

    Args:
        loader: a `penstock.DataLoader`; exports its statistics from its beginning.
        registry: a prometheus_client registry; by default the one of its servers.
        labels: labels that distinguish loaders; by default ``loader="0"``, ``"1"``, ... in the order of export.

    Raises:
        ConfigError: labels that another loader has or that Prometheus does not allow, or a missing prometheus-client.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client: pip install 'penstock[metrics]'") from error
    where: Any = REGISTRY if registry is None else registry
    with _exporting:
        collector = _collectors.get(where)
        if collector is None:
            collector = _collectors[where] = _Collector()
            where.register(collector)
        given = {"loader": next(collector.numbers)} if labels is None else labels
        taken = {label for _, _, label in _LABELLED}
        for name in given:
            if not re.fullmatch("(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name in taken:
                raise ConfigError(
                    f"{name!r} cannot be the name of a label: use letters, digits and _, but none of {taken}"
                )
        added = Export(loader, {name: str(value) for name, value in given.items()}, collector)
        living = [other for other in collector.exports if not other.gone]
        if any(other.labels == added.labels for other in living):
            raise ConfigError(
                f"another loader is exported with the labels {added.labels}: use different labels, or close() that "
                "export"
            )
        collector.exports = [*living, added]
    return added


def _families(exports: Sequence[Export]) -> list[Metric]:
    """Return every metric, with the values of some loaders."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    about = "Penstock loader: "
    counters: dict[str, Metric] = {
        name: CounterMetricFamily(f"penstock_{name}", f"{about}{text}.") for name, text, _ in (*_COUNTERS, *_LABELLED)
    }
    workers: Metric = GaugeMetricFamily("penstock_workers", f"{about}workers.")
    ready: Metric = SummaryMetricFamily("penstock_ready_batches", f"{about}finished batches at each request.")
    for one in exports:
        if (stats := one.stats()) is None:
            continue
        errors, queue = stats["errors"], stats["queue"]
        labelled = {
            "stage_seconds": stats["stages"],
            "delivered_batches": stats["ways"],
            "bad_samples": {action: errors.get(action, 0) for action in ("skipped", "replaced")},
            "sample_errors": errors.get("types", {}),
        }
        for name, _, key in _COUNTERS:
            counters[name].add_sample(f"penstock_{name}_total", one.labels, stats[key])
        for name, _, label in _LABELLED:
            for what, value in labelled[name].items():
                counters[name].add_sample(f"penstock_{name}_total", {**one.labels, label: what}, value)
        workers.add_sample("penstock_workers", one.labels, stats["workers"])
        ready.add_sample("penstock_ready_batches_count", one.labels, queue["requests"])
        ready.add_sample("penstock_ready_batches_sum", one.labels, queue["ready"] * queue["requests"])
    return [*counters.values(), workers, ready]
