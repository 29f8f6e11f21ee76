"""Checks of services: a Ray cluster and a metadata server. Each gets one request with a timeout of seconds."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.tools.doctor.result import Advice

__all__ = ["RayCluster", "Server", "ray_cluster", "server"]

_RAY_PATIENCE = 30.0  # seconds, mostly for imports on a busy machine; a closed port is detected at once
_KNOCK = 2.0
_SERVER_PATIENCE = 5.0
_DO_SERVER = "start it (penstock serve), correct the address, or pass --token-file and --tls-roots if it needs them"
_ASK = """
import json, sys
from penstock.processes import end_with_parent
end_with_parent(int(sys.argv[2]))
from penstock.errors import PenstockError
from penstock.loader.executors.ray.cluster import attach, ray
try:
    attach(sys.argv[1])
except PenstockError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
alive = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps({"nodes": len(alive), "cpus": ray.cluster_resources().get("CPU", 0.0)}))
"""


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster.

    Attributes:
        address: address of the cluster.
        nodes, cpus: live nodes, and their CPUs; None if it did not answer, or the check did not attach to it.
        error: why there was no answer.
    """

    address: str
    nodes: int | None
    cpus: float | None
    error: str | None


@dataclass(frozen=True)
class Server:
    """A metadata server, with the rows of each dataset by name; None if it did not answer."""

    address: str
    datasets: Mapping[str, int] | None
    error: str | None


def ray_cluster(address: str | None, *, installed: bool) -> tuple[RayCluster | None, list[Advice]]:
    """Attach to the cluster at an address; without an address, look for a cluster on this machine."""
    if address is None:
        return _running_here()
    do = "start it (ray start --head), or pass the address and port of its head node"
    place = _host_and_port(address)
    error = (place and _knock(place)) if address.strip() else "the address is empty"
    state = RayCluster(address, None, None, error)
    if not installed:
        state, do = RayCluster(address, None, None, "Ray is not installed"), "pip install 'penstock[ray]'"
    elif state.error is None:
        state = _attach(address)
    return state, [Advice("Ray", f"{address}: {state.error}", do, failure=True)] if state.error else []


def _running_here() -> tuple[RayCluster | None, list[Advice]]:
    """Find a cluster by RAY_ADDRESS or the file that `ray start` writes; only test whether its port is open."""
    address = os.environ.get("RAY_ADDRESS", "")
    with contextlib.suppress(OSError):
        address = address or (Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster").read_text().strip()
    place = _host_and_port(address)
    if place is None:
        return None, []
    state = RayCluster(address, None, None, _knock(place))
    if state.error is None:
        return state, []
    what = f"RAY_ADDRESS or an earlier `ray start` names a cluster at {address}: {state.error}"
    return state, [Advice("Ray", what, "if it has ended: run ray stop, and unset RAY_ADDRESS")]


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Parse ``HOST:PORT`` or ``ray://HOST:PORT``; return None for other forms, which only Ray can resolve."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("ray://")
    return (host, int(port)) if host and port.isdigit() and "://" not in host else None


def _knock(place: tuple[str, int]) -> str | None:
    """Return the reason why a port does not answer; None if it does."""
    try:
        socket.create_connection(place, _KNOCK).close()
    except (OSError, OverflowError) as error:
        return f"no answer ({error})"
    return None


def _attach(address: str) -> RayCluster:
    """Attach in a subprocess: Ray cannot be detached completely from a process, and may wait for minutes."""
    command = [sys.executable, "-c", _ASK, address, str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RAY_PATIENCE)
    except subprocess.TimeoutExpired:
        return RayCluster(address, None, None, f"no answer within {_RAY_PATIENCE:.0f} s")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return RayCluster(address, None, None, (done.stderr.strip().splitlines() or ["it ended without an answer"])[-1])
    return RayCluster(address, answer.get("nodes"), answer.get("cpus"), answer.get("error"))


def server(
    address: str | None,
    *,
    token_file: str | os.PathLike[str] | None = None,
    tls_roots: str | os.PathLike[str] | None = None,
) -> tuple[Server | None, list[Advice]]:
    """Return the datasets of a metadata server. With ``tls_roots``, an address without a scheme means TLS."""
    if address is None:
        return None, []
    from penstock.errors import PenstockError
    from penstock.server import Client
    from penstock.server.address import parse_address

    full = address
    try:
        place = parse_address(address, tls=tls_roots is not None)
        full = str(place)
        error = _knock((place.host, place.port))
        if error is not None:  # the client would retry
            return Server(full, None, error), [Advice("server", f"{full}: {error}", _DO_SERVER, failure=True)]
        client = Client(full, token_file=token_file, tls_roots=tls_roots, timeout=_SERVER_PATIENCE)
        try:
            datasets = {one.name: one.rows for one in client.list()}
        finally:
            client.close()
    except PenstockError as failure:
        return Server(full, None, str(failure)), [Advice("server", str(failure), _DO_SERVER, failure=True)]
    return Server(full, datasets, None), []
