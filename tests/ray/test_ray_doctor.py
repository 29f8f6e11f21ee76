"""``penstock doctor --ray`` reaches a cluster."""

from __future__ import annotations

from typing import Any

from penstock.tools.doctor import services


def test_a_cluster_that_answers(cluster: Any) -> None:
    found, advice = services.ray_cluster(cluster.address, installed=True)
    assert found == services.RayCluster(cluster.address, 4, 6.0, None)
    assert not advice
