"""What runs elsewhere: a Ray cluster and a metadata server. Each is asked once, and waited for by the second."""

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

_RAY_PATIENCE = 30.0  # seconds, most of them for imports on a busy machine; a port that is closed is known at once
_KNOCK = 2.0
_SERVER_PATIENCE = 5.0
_DO_SERVER = "start one (penstock serve), mend the address, or give --token-file and --tls-roots as it asks for them"
_ASK = """
import json, sys
from penstock.processes import end_with_parent
end_with_parent(int(sys.argv[2]))
from penstock.errors import PenstockError
from penstock.loader.executors.ray.cluster import attach, load_ray
try:
    attach(sys.argv[1])
except PenstockError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
ray = load_ray()
alive = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps({"nodes": len(alive), "cpus": ray.cluster_resources().get("CPU", 0.0)}))
"""


@dataclass(frozen=True)
class RayCluster:
    """A cluster.

    Attributes:
        address: that was asked.
        nodes, cpus: that are alive; None where nobody answered, or it was not attached to.
        error: why not.
    """

    address: str
    nodes: int | None
    cpus: float | None
    error: str | None


@dataclass(frozen=True)
class Server:
    """A metadata server: rows of its data sets by name; None where nobody answered."""

    address: str
    datasets: Mapping[str, int] | None
    error: str | None


def ray_cluster(address: str | None, *, installed: bool) -> tuple[RayCluster | None, list[Advice]]:
    """Attach to the cluster with an address; without one, see whether one of this machine is there."""
    if address is None:
        return _running_here()
    do = "start it (ray start --head), or give the address and port of its head"
    place = _host_and_port(address)
    error = (place and _knock(place)) if address.strip() else "the address is empty"
    state = RayCluster(address, None, None, error)
    if not installed:
        state, do = RayCluster(address, None, None, "Ray is not installed"), "pip install 'penstock[ray]'"
    elif state.error is None:
        state = _attach(address)
    return state, [Advice("Ray", f"{address}: {state.error}", do, failure=True)] if state.error else []


def _running_here() -> tuple[RayCluster | None, list[Advice]]:
    """By Ray's own signs: its variable, and the file that `ray start` leaves. Only knocks, which takes no time."""
    address = os.environ.get("RAY_ADDRESS", "")
    with contextlib.suppress(OSError):
        address = address or (Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster").read_text().strip()
    place = _host_and_port(address)
    if place is None:
        return None, []
    state = RayCluster(address, None, None, _knock(place))
    if state.error is None:
        return state, []
    what = f"there are signs of a cluster at {address}: {state.error}"
    return state, [Advice("Ray", what, "ray stop, if there is none any more; unset RAY_ADDRESS")]


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Of ``HOST:PORT`` and ``ray://HOST:PORT``; None for addresses of other forms, which Ray knows."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("ray://")
    return (host, int(port)) if host and port.isdigit() and "://" not in host else None


def _knock(place: tuple[str, int]) -> str | None:
    """The reason why nobody is there."""
    try:
        socket.create_connection(place, _KNOCK).close()
    except (OSError, OverflowError) as error:
        return f"nobody answers ({error})"
    return None


def _attach(address: str) -> RayCluster:
    """Ray stays in a process that was connected to it, and may wait for minutes: a process of its own attaches."""
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
    """Ask a metadata server what it has. An address without a scheme means TLS where ``tls_roots`` is given."""
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
        if error is not None:  # the client would go on trying
            return Server(full, None, error), [Advice("server", f"{full}: {error}", _DO_SERVER, failure=True)]
        client = Client(full, token_file=token_file, tls_roots=tls_roots, timeout=_SERVER_PATIENCE)
        try:
            datasets = {one.name: one.rows for one in client.list()}
        finally:
            client.close()
    except PenstockError as failure:
        return Server(full, None, str(failure)), [Advice("server", str(failure), _DO_SERVER, failure=True)]
    return Server(full, datasets, None), []
