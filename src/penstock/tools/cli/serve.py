"""``penstock serve``: serve manifests and a cache in the foreground, also under systemd and Kubernetes.

The address is printed to standard output, or as one JSON object with ``--json``. The log, lines of Python's `logging`,
goes to standard error. SIGTERM and Ctrl-C stop the server after open streams finish; SIGHUP reopens changed manifests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from penstock.errors import ConfigError
from penstock.tools.cli.interrupt import AtOnce
from penstock.tools.cli.manifest_options import Reading, print_json, reading, shown
from penstock.tools.cli.signals import Signals
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.server.auth import TLS
    from penstock.server.service import Server
    from penstock.server.status import Metrics
    from penstock.storage import Cache

__all__ = ["PORT", "command", "named_files"]

PORT = 8815
"""The port of a server unless another one is given."""

_log = logging.getLogger(__name__)
_RELOAD = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
_STOP = [signal.SIGTERM, signal.SIGINT]


class _Level(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def _option(text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **{"show_default": False, **more})


_ACCESS, _WATCH = "Access", "Monitoring"
_ADDRESS = {"show_default": True}

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MANIFEST", help="Manifests, each served under its file name without extension.", show_default=False
    ),
]
Names = Annotated[
    list[str] | None,
    _option("A dataset with its name; FILE may be a quoted pattern; repeatable.", "--name", metavar="NAME=FILE"),
]
Copies = Annotated[bool, _option("Also serve the copies in this machine's cache.", "--cache")]
CopiesFolder = Annotated[Path | None, _option("Serve the copies of the cache in this folder.", metavar="DIR")]
Host = Annotated[str, _option("Address to listen on; all except loopback need a token.", **_ADDRESS)]
Port = Annotated[int, _option("Port to listen on; 0 chooses a free one.", min=0, max=65535, **_ADDRESS)]
Token = Annotated[Path | None, _option("File with the token that clients must send.", panel=_ACCESS)]
Cert = Annotated[Path | None, _option("PEM file with the server's certificate chain.", panel=_ACCESS)]
Key = Annotated[Path | None, _option("PEM file with the server's key.", panel=_ACCESS)]
Roots = Annotated[Path | None, _option("PEM file of a CA; clients then need its certificate.", panel=_ACCESS)]
Insecure = Annotated[bool, _option("Listen on any address without a token.", "--insecure", panel=_ACCESS)]
Ready = Annotated[Path | None, _option("File with the address while the server listens.", panel=_WATCH)]
MetricsPort = Annotated[
    int | None, _option("Port of the status page, metrics and health over HTTP.", min=0, max=65535, panel=_WATCH)
]
MetricsHost = Annotated[str | None, _option("Address for --metrics-port; by default loopback.", panel=_WATCH)]
Level = Annotated[_Level, _option("Lowest level of log lines; debug logs every stream.", panel=_WATCH, **_ADDRESS)]
LogJson = Annotated[bool, typer.Option("--log-json", hidden=True)]
Json = Annotated[bool, typer.Option("--json", help="Print the address as one JSON object.")]
MaxStreams = Annotated[int, _option("Most concurrent streams; further clients wait.", min=1, **_ADDRESS)]
Grace = Annotated[float, _option("Seconds for streams to finish when the server stops.", min=0.0, **_ADDRESS)]


class _Access(NamedTuple):
    """The arguments of `Server` that control access."""

    token: str | None
    tls: TLS | None
    insecure: bool

    def weakness(self, address: str) -> str | None:
        """Return a warning if access at the server's address is not safe, else None."""
        if self.insecure:
            return "anyone who reaches this address can read the served data"
        if self.token and not self.tls and not _is_loopback(address):
            return "the token crosses the network unencrypted: use TLS"
        return None


@reading
def command(
    files: Files = None,
    *,
    how: Reading,
    name: Names = None,
    cache: Copies = False,
    cache_folder: CopiesFolder = None,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    grace: Grace = 20.0,
    max_streams: MaxStreams = 1024,
    token_file: Token = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    tls_client_ca: Roots = None,
    insecure: Insecure = False,
    ready_file: Ready = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = None,
    log_level: Level = _Level.info,
    log_json: LogJson = False,
    as_json: Json = False,
) -> None:
    """Serve manifests, and the copies of a cache, to training jobs over Arrow Flight.

    SIGTERM and Ctrl-C stop the server after its streams; SIGHUP opens changed manifests again. The server has no state,
    so servers of the same files are interchangeable.
    """
    # Any client can cause many lines in gRPC's own log. gRPC reads this variable when it is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "none")
    with AtOnce():
        from penstock.server import Limits, Server

    copies = _cache(cache_folder) if cache or cache_folder is not None else None
    sources = named_files(files or [], name or []) if files or name or copies is None else {}
    access = _Access(_read_token(token_file), _tls(tls_cert, tls_key, tls_client_ca), insecure)
    if metrics_host is not None and metrics_port is None:
        raise ConfigError("--metrics-host needs --metrics-port: add it")
    if log_json:
        raise ConfigError(
            "--log-json is gone: for JSON lines, run penstock.server.Server in a program that sets a logging.Formatter "
            "for the logger 'penstock' (logging.config.dictConfig)"
        )
    _remove(ready_file)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("penstock").setLevel(log_level.upper())
    with Signals(*_RELOAD) as signals:
        metrics = _metrics(metrics_port)
        manifests = {each: how.open(source, bars=not as_json) for each, source in sources.items()}
        listen: dict[str, Any] = {"host": host, "port": port, **access._asdict()}
        with (
            Server(manifests, cache=copies, limits=Limits(streams=max_streams), observer=metrics, **listen) as server,
            _status(server, metrics, metrics_host or "127.0.0.1", metrics_port) as url,
        ):
            signals.catch(*_STOP)
            with _ready(ready_file, server.address):
                _announce(server, copies, url, as_json=as_json)
                if weakness := access.weakness(server.address):
                    _log.warning("insecure: %s", weakness)
                last = _until_stopped(signals, server)
            _log.info("stopping after %s; %s get %g s", last.name, counted(server.streams, "stream"), grace)
            # A second signal ends the process without waiting.
            for number in _STOP:
                signal.signal(number, signal.SIG_DFL)
            server.close(grace=grace)
    _end(last, server.streams)


def named_files(files: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the files to serve by name: ``train.txt`` as "train", ``NAME=FILE`` as NAME.

    Raises:
        ConfigError: no files, a repeated name, or a missing name.
    """
    pairs = []
    for file in files:
        if any(character in file for character in "*?["):
            raise ConfigError(f"{file!r} is a pattern, so its dataset needs a name: --name 'train={file}'")
        pairs.append((Path(file).stem, file))
    for text in names:
        given, equals, file = text.partition("=")
        if not (equals and given.strip() and file.strip()):
            raise ConfigError(f"--name {text!r}: expected NAME=FILE, for example --name train=lists/train.txt")
        pairs.append((given.strip(), file.strip()))
    if not pairs:
        raise ConfigError("nothing to serve: add manifests, --name NAME=FILE or --cache")
    result: dict[str, str] = {}
    for each, file in pairs:
        if each in result:
            raise ConfigError(
                f"{result[each]!r} and {file!r} would both have the name {each!r}: use --name OTHER={file}"
            )
        result[each] = file
    return result


def _cache(folder: Path | None) -> Cache:
    from penstock.storage import Cache

    return Cache(folder)


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    if not token:
        raise ConfigError(f"{path} is empty: write the token into it")
    return token


def _tls(cert: Path | None, key: Path | None, client_roots: Path | None) -> TLS | None:
    from penstock.server.auth import TLS

    if cert is None and key is None and client_roots is None:
        return None
    if cert is None or key is None:
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    return TLS(cert, key, client_roots)


def _metrics(port: int | None) -> Metrics | None:
    if port is None:
        return None
    from penstock.server.status import Metrics

    return Metrics()


@contextlib.contextmanager
def _status(server: Server, metrics: Metrics | None, host: str, port: int | None) -> Iterator[str | None]:
    """Serve the status page until the block ends, if a port is given; yield its URL."""
    if metrics is None or port is None:
        yield None
        return
    from penstock.server.status import status_server

    with status_server(server, metrics, host=host, port=port) as url:
        yield url


def _announce(server: Server, cache: Cache | None, url: str | None, *, as_json: bool) -> None:
    """Print and log the address and the served datasets."""
    datasets = server.datasets
    if as_json:
        served = [{"name": one.name, "rows": one.rows, "fingerprint": one.fingerprint} for one in datasets]
        said = {"address": server.address, "datasets": served, "status": url, "cache": cache and str(cache.folder)}
        print_json(said)
    else:
        print(f"listening on {server.address}")
        for one in datasets:
            print(f"  {shown(one.name)}: {counted(one.rows, 'row')}, fingerprint {one.fingerprint}")
        if cache is not None:
            print(f"  the copies in {shown(str(cache.folder))}")
        if url is not None:
            print(f"status page and metrics on {url}")
    sys.stdout.flush()
    _log.info("listening on %s", server.address)


def _is_loopback(address: str) -> bool:
    return any(f"//{host}" in address for host in ("127.", "localhost", "[::1]"))


def _remove(ready_file: Path | None) -> None:
    """Remove the ready file, even if an earlier server left it behind."""
    from penstock.storage.files import MANIFEST

    if ready_file is not None:
        with MANIFEST.naming(ready_file, "cannot remove"):
            ready_file.unlink(missing_ok=True)


@contextlib.contextmanager
def _ready(path: Path | None, address: str) -> Iterator[None]:
    """Write the address to the ready file atomically; remove it when the block ends."""
    from penstock.storage import write_atomically
    from penstock.storage.files import MANIFEST

    if path is None:
        yield
        return
    with MANIFEST.naming(path, "cannot write"), write_atomically(path) as file:
        file.write(f"{address}\n".encode())
    try:
        yield
    finally:
        _remove(path)


def _until_stopped(signals: Signals, server: Server) -> signal.Signals:
    """Reload at each SIGHUP; return the signal that stops the server."""
    while (number := signals.wait()) in _RELOAD:
        before = {one.name: one.fingerprint for one in server.datasets}
        try:
            server.reload()
        except Exception as error:  # the old datasets are still valid, and jobs depend on this server
            reason = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
            _log.error("reload failed: %s", "; ".join(reason))
        changed = [f"{one.name} is {one.fingerprint}" for one in server.datasets if one.fingerprint != before[one.name]]
        _log.info("reloaded: %s", ", ".join(changed) or "nothing has changed")
    return number


def _end(last: signal.Signals, left: int) -> NoReturn:
    """Exit with the code for a signal; ``left`` is the number of unfinished streams."""
    _log.info("stopped%s", f", {counted(left, 'stream')} unfinished" if left else "")
    code = 130 if last == signal.SIGINT else 0
    if left:
        os._exit(code)  # a normal exit would wait for the clients of these streams
    raise typer.Exit(code)
