"""Starts real ranks with gloo process groups; what they run is at module level, so that they can import it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist


def start_ranks(world: int, run: Callable[..., Any], *args: Any, seconds: float = 60) -> list[Any]:
    """``run(rank, *args)`` in so many processes with a gloo group; what each returns, or its exit code if it died.

    Raises:
        AssertionError: a rank raised, with its traceback, or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world, folder, theirs, run, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
                assert wait([pipe, process.sentinel], seconds), f"rank {rank} did not end within {seconds} s"
                try:
                    kind, value = pipe.recv() if pipe.poll() else ("died", process.exitcode)
                except EOFError:
                    process.join(seconds)
                    kind, value = "died", process.exitcode
                assert kind != "raised", f"rank {rank}:\n{value}"
                results.append(value)
        finally:
            for pipe, process in zip(pipes, processes, strict=True):
                process.join(1)
                with suppress(ProcessLookupError):
                    process.kill()
                process.join()
                pipe.close()
    return results


def _rank(rank: int, world: int, folder: str, pipe: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=20)
        )
        pipe.send(("returned", run(rank, *args)))
        dist.barrier()
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    finally:
        with suppress(Exception):
            dist.destroy_process_group()


def die() -> None:
    """As by the out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def write_rows(folder: Path, rows: int) -> Path:
    path = folder / "meta.txt"
    path.write_text("".join(f"{i}.jpg {i // 10}\n" for i in range(rows)))
    return path
