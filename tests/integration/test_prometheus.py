"""The loader's statistics as Prometheus sees them."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.integrations.prometheus import export
from penstock.loader.config import LoaderConfig
from penstock.loader.messages import BatchMetrics, BatchResult
from penstock.loader.statistics import Statistics

prometheus = pytest.importorskip("prometheus_client")


class Counted:
    """Has statistics, as a loader has."""

    def __init__(self) -> None:
        self.statistics = Statistics()

    def stats(self) -> dict[str, Any]:
        return self.statistics.stats({"samples": 9, "failed": 1, "skipped": 1, "replaced": 0, "types": {"OSError": 1}})

    def deliver(self) -> None:
        metrics = BatchMetrics()
        metrics.samples, metrics.fetch, metrics.stages = 3, 0.5, {"decode": 0.375}
        self.statistics.delivered(BatchResult(None, metrics, 0, way="ring"), 100, 0.25, 2, 4)


@pytest.fixture
def registry() -> Any:
    return prometheus.CollectorRegistry()


def test_values_are_read_when_scraped(registry: Any) -> None:
    loader = Counted()
    export(loader, registry=registry, labels={"loader": "train"})
    loader.statistics.begin(LoaderConfig(num_workers=2))

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(f"penstock_{name}", {"loader": "train", **labels})
        return found

    for batches in range(3):
        assert value("batches_total") == batches
        assert value("samples_total") == 3 * batches
        loader.deliver()
    assert value("data_bytes_total") == 300
    assert value("wait_seconds_total") == 0.75
    assert value("first_batch_seconds_total") == 0.25
    assert value("stage_seconds_total", stage="decode") == 1.125
    assert value("stage_seconds_total", stage="fetch") == 0.375
    assert value("delivered_batches_total", way="ring") == 3
    assert value("bad_samples_total", action="skipped") == 1
    assert value("sample_errors_total", type="OSError") == 1
    assert value("workers") == 2
    assert (value("ready_batches_count"), value("ready_batches_sum")) == (2, 4)


def test_the_text_is_valid(registry: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    one, two = Counted(), Counted()
    one.deliver()
    export(one, registry=registry)
    export(two, registry=registry, labels={"loader": "other", "rank": "3"})
    text = prometheus.generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {tuple(sample.labels.values()) for sample in families["penstock_batches"].samples} == {
        ("0",),
        ("other", "3"),
    }
    assert all(family.documentation for family in families.values())


def test_several_loaders_need_labels_of_their_own(registry: Any) -> None:
    first, second = Counted(), Counted()
    exported = export(first, registry=registry, labels={"loader": "train"})
    with pytest.raises(ConfigError, match="another loader is exported"):
        export(second, registry=registry, labels={"loader": "train"})
    exported.close()
    exported.close()
    export(second, registry=registry, labels={"loader": "train"})


def test_a_loader_that_is_gone_is_not_scraped_nor_kept(registry: Any) -> None:
    loader = Counted()
    export(loader, registry=registry, labels={"loader": "train"})
    del loader
    gc.collect()
    assert registry.get_sample_value("penstock_batches_total", {"loader": "train"}) is None
    again = Counted()
    export(again, registry=registry, labels={"loader": "train"})
    assert registry.get_sample_value("penstock_batches_total", {"loader": "train"}) == 0


@pytest.mark.parametrize("name", ["stage", "type", "with space", "__name__", "1st"])
def test_labels_that_cannot_be(registry: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        export(Counted(), registry=registry, labels={name: "x"})


def test_the_default_registry() -> None:
    loader = Counted()
    exported = export(loader, labels={"loader": "by default"})
    try:
        assert prometheus.REGISTRY.get_sample_value("penstock_batches_total", {"loader": "by default"}) == 0
    finally:
        exported.close()
