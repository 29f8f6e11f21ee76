"""``penstock doctor``: check this machine and its packages, and say how to solve problems.

The checks are in `penstock.tools.doctor`. This module prints the results as tables, or as one JSON object with
``--json``. The exit code is 1 if something required or requested does not work, but not for suggested improvements.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import ConfigError
from penstock.tools.cli.manifest_options import Json, bar, byte_size, console, pairs, print_json, shown
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.tools.doctor import Diagnosis
    from penstock.tools.doctor.filesystems import Place

__all__ = ["command"]


def command(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", help="Files and folders that training uses.  [default: current folder]"),
    ] = None,
    *,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="A Ray cluster that must answer: HOST:PORT or auto.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="HOST:PORT", help="A metadata server that must answer; or grpc+tls://..."),
    ] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with the server's token.")] = None,
    tls_roots: Annotated[
        Path | None,
        typer.Option("--tls-roots", help="PEM file with the server's CA; HOST:PORT then means TLS."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine: packages, hardware limits, paths, and how to solve problems.

    The exit code is 1 if a required or requested thing does not work.
    """
    from penstock.tools.doctor import diagnose

    if server is None and (token_file, tls_roots) != (None, None):
        raise ConfigError("--token-file and --tls-roots need --server: add it")
    with bar("checking", show=not as_json) as progress:
        found = diagnose(
            paths or ["."], ray=ray, server=server, token_file=token_file, tls_roots=tls_roots, progress=progress
        )
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    if not found.ok:
        raise typer.Exit(1)


def _print(found: Diagnosis) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out = console()
    out.print(pairs("Installed", list(_installed(found))))
    out.print(pairs("Optional", list(_optional(found))))
    out.print(pairs("This machine", list(_machine(found))))
    out.print(pairs("Paths", list(_places(found))))
    services = list(_services(found))
    if services:
        out.print(pairs("Services", services))
    failures = [advice for advice in found.advice if advice.failure]
    for title, some, style in (
        ("Does not work", failures, "red"),
        ("Could be better", [advice for advice in found.advice if not advice.failure], "yellow"),
    ):
        if some:
            out.print(title, style=f"bold {style}")
        for advice in some:
            out.print(
                Padding(Text(shown(f"{advice.about}: {advice.what}")), (0, 0, 0, 2), expand=False), soft_wrap=False
            )
            out.print(
                Padding(Text(shown(f"-> {advice.do}"), style="bold"), (0, 0, 0, 4), expand=False), soft_wrap=False
            )
    if not found.advice:
        out.print("No problems.", style="green")


def _installed(found: Diagnosis) -> Iterator[tuple[str, str]]:
    yield "penstock", found.penstock
    yield "Python", f"{found.python}, {found.system}"
    for package in found.packages:
        if package.extra is None:
            text = package.version or "not installed"
            yield package.name, text if package.error is None else f"{text}: {package.error}"
            if package.name == "torch" and found.torch is not None:
                cuda = f"CUDA {found.torch.cuda}" if found.torch.cuda else "without CUDA"
                yield "", f"{cuda}, {counted(found.torch.gpus, 'GPU')}, {counted(found.torch.threads, 'thread')}"


def _optional(found: Diagnosis) -> Iterator[tuple[str, str]]:
    if found.images is not None:
        yield "C extension", "yes" if found.images.extension else "no: crops need the whole image decoded"
        if found.images.libjpeg_turbo is not None:
            yield "", f"baseline JPEGs by its own decoder, others by libjpeg-turbo {found.images.libjpeg_turbo}"
        here = [name for name, there in found.images.backends.items() if there]
        others = [name for name, there in found.images.backends.items() if not there]
        yield "image backends", ", ".join(here) + (f" (missing: {', '.join(others)})" if others else "")
    for package in found.packages:
        if package.extra is not None:
            yield package.name, package.version or f"no: {package.needed_for} (penstock[{package.extra}])"


def _machine(found: Diagnosis) -> Iterator[tuple[str, str]]:
    cores, memory = found.cores, found.memory
    limits = [f"{cores.machine} in the machine"] if cores.affinity < cores.machine else []
    limits += ["a container's quota"] if cores.usable < cores.affinity else []
    yield "cores", f"{cores.usable} ({', '.join(limits)})" if limits else f"{cores.usable}"
    if memory.usable is not None and memory.available is not None and memory.total is not None:
        limited = memory.usable < memory.available
        usual = f"{byte_size(memory.available)} free of {byte_size(memory.total)}"
        yield "memory", f"{byte_size(memory.usable)} (a container's limit; {usual})" if limited else usual
    if found.shared_memory is not None:
        shared = found.shared_memory
        yield "/dev/shm", f"{byte_size(shared.free)} free of {byte_size(shared.size)}"
    if found.open_files is not None:
        soft, hard = ("no limit" if n is None else f"{n:,}" for n in (found.open_files.soft, found.open_files.hard))
        yield "open files", soft if soft == hard else f"{soft}, can be raised to {hard}"


def _places(found: Diagnosis) -> Iterator[tuple[str, str]]:
    for place in found.places:
        yield shown(place.path), _place(place)
    cache = found.cache
    if cache.path is None:
        yield "cache folder", f"none: {cache.error}"
    else:
        free = "" if cache.free is None else f", {byte_size(cache.free)} free"
        yield "cache folder", f"{shown(cache.path)}: {cache.kind}, mode {cache.mode}{free}"


def _place(place: Place) -> str:
    if place.error is not None:
        return place.error
    what = "" if place.type is None else f" ({place.type}, mounted on {shown(place.mount or '')})"
    free = "" if place.free is None else f", {byte_size(place.free)} free"
    return f"{place.kind}{what}{free}{'' if place.writable else ', not writable'}"


def _services(found: Diagnosis) -> Iterator[tuple[str, str]]:
    if (ray := found.ray) is not None:
        answer = (
            "runs on this machine"
            if ray.cpus is None
            else f"{counted(ray.nodes or 0, 'node')}, {counted(round(ray.cpus), 'CPU')}"
        )
        yield "Ray", f"{ray.address}: {'cannot be used, see below' if ray.error else answer}"
    if (server := found.server) is not None:
        if server.datasets is None:
            yield "server", f"{server.address}: cannot be used, see below"
        else:
            rows = ", ".join(f"{shown(name)} ({counted(rows, 'row')})" for name, rows in server.datasets.items())
            yield "server", f"{server.address}: {rows}"
