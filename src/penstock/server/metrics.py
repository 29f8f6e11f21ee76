"""`registry`: a server's traffic for Prometheus, read when it is scraped. Needs the extra: ``penstock[metrics]``.

    penstock_server_rows_total{dataset="train"} 1.2e+08        rate() of it is rows/s
    penstock_server_bytes_total{dataset="train"} 5.4e+09
    penstock_server_streams_total{dataset="train"} 96
    penstock_server_active_streams{dataset="train"} 8
    penstock_server_errors_total{dataset="train",kind="TicketError"} 1
    penstock_server_dataset_rows{dataset="train",fingerprint="75d6..."} 1e+07
    penstock_server_clients 8

and for the process: memory, CPU time, open files. Requests without a dataset name count under ``dataset=""``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ConfigError
from penstock.server.traffic import Traffic

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["Served", "registry"]

_PREFIX = "penstock_server"


class Served(Protocol):
    """The facts that metrics need about a served dataset."""

    @property
    def name(self) -> str:
        """The name that clients use."""

    @property
    def rows(self) -> int:
        """The number of rows."""

    @property
    def fingerprint(self) -> str:
        """The identity of its content."""


def registry(traffic: Traffic, served: Callable[[], Sequence[Served]]) -> CollectorRegistry:
    """Return a new registry with the metrics of one server and of this process.

    Args:
        traffic: the server's observer.
        served: returns the current datasets.

    Raises:
        ConfigError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client: pip install 'penstock[metrics]'") from error
    result = CollectorRegistry()
    result.register(_Collector(traffic, served))
    ProcessCollector(registry=result)
    return result


class _Collector:
    def __init__(self, traffic: Traffic, served: Callable[[], Sequence[Served]]) -> None:
        self._traffic, self._served = traffic, served

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics, for a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._traffic.snapshot()
        of = ["dataset"]
        rows = CounterMetricFamily(f"{_PREFIX}_rows", "Rows delivered.", labels=of)
        size = CounterMetricFamily(f"{_PREFIX}_bytes", "Bytes delivered.", labels=of)
        streams = CounterMetricFamily(f"{_PREFIX}_streams", "Streams begun.", labels=of)
        active = GaugeMetricFamily(f"{_PREFIX}_active_streams", "Streams open.", labels=of)
        errors = CounterMetricFamily(f"{_PREFIX}_errors", "Requests failed or refused.", labels=["dataset", "kind"])
        held = GaugeMetricFamily(f"{_PREFIX}_dataset_rows", "Rows of a dataset.", labels=["dataset", "fingerprint"])
        for name, counts in now.datasets.items():
            rows.add_metric([name], counts.rows)
            size.add_metric([name], counts.bytes)
            streams.add_metric([name], counts.streams)
            active.add_metric([name], counts.active)
            for kind, count in counts.errors.items():
                errors.add_metric([name, kind], count)
        for kind, count in now.errors.items():
            errors.add_metric(["", kind], count)
        for one in self._served():
            held.add_metric([one.name, one.fingerprint], one.rows)
        yield from (rows, size, streams, active, errors, held)
        yield GaugeMetricFamily(f"{_PREFIX}_clients", "Machines with a stream in the last minute.", len(now.clients))
