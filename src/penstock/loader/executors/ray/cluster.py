"""Attach to the given Ray cluster, never to another one; nothing is started or stopped without a request.

The loaders of a program share the connection. Ray ends a cluster started by ``address="local"`` with the program; other
clusters keep running.

Importing this raises ConfigError if Ray is not installed, or too old.
"""

from __future__ import annotations

import os
import socket

from penstock.errors import ClusterError, ConfigError

__all__ = ["attach", "ray", "session"]

_OLDEST = (2, 60)
_CONNECT_TIMEOUT_S = 5.0  # for the head of a cluster to accept a connection

try:
    import ray
except ImportError as error:
    raise ConfigError("executor='ray' needs Ray 2.60 or newer: pip install 'penstock[ray]'") from error
if tuple(int(part) for part in ray.__version__.split(".")[:2]) < _OLDEST:
    raise ConfigError(f"executor='ray' needs Ray 2.60 or newer, this is {ray.__version__}: pip install -U ray")


def attach(address: str | None) -> None:
    """Connect to the cluster with this address, see `RayOptions`.

    Raises:
        ClusterError: it does not exist, or the program is connected to another one.
    """
    if ray.is_initialized():
        connected = ray.get_runtime_context().gcs_address
        named = None if address in (None, "auto", "local") or "://" in str(address) else str(address)
        if named is not None and not _same(named, connected):
            raise ClusterError(
                f"this program is connected to the Ray cluster at {connected}, and RayOptions names {address}: leave "
                "address out, or call ray.shutdown() first"
            )
        return
    named = os.environ.get("RAY_ADDRESS", "") if address in (None, "auto") else str(address)
    host, _, port = named.rpartition(":")
    # Ray would retry for minutes if nobody answers there. It knows other forms of addresses.
    if "://" not in named and host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ClusterError(
                f"no Ray cluster answers at {named} ({error}): start one with `ray start --head --port={port}`, or "
                "leave address (and RAY_ADDRESS) out to take the one that runs on this machine"
            ) from error
    try:
        ray.init(address=address or "auto", configure_logging=False)
    except (ConnectionError, TimeoutError) as error:
        raise ClusterError(
            f"no Ray cluster can be reached at {address or 'auto'!r}: {error}. Start one with `ray start --head` (and "
            "`ray start --address=HOST:6379` on the other machines), name it by RayOptions(address='HOST:6379') or "
            "RAY_ADDRESS, or use RayOptions(address='local') for one on this machine that ends with the program"
        ) from error


def _same(one: str, other: str) -> bool:
    """Return whether two addresses, as host:port, are the same. A name of this machine is that of any host."""
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    if port != other_port:
        return False
    if host == other_host or {host, other_host} & {"localhost", "127.0.0.1"}:
        return True
    try:
        return socket.gethostbyname(host) == socket.gethostbyname(other_host)
    except OSError:
        return False


def session() -> str:
    """Return the id of the program's connection; empty if there is none."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"
