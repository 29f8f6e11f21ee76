"""Processes that are forked from one that has used obstore, which would hang in them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from busy_support import HANG

from penstock import DataLoader
from penstock.storage import Storage, open_source, read_object

DATA = os.urandom(300_000)


def in_child(work: Callable[[], bool]) -> bool:
    """Whether the work, done in a forked child, is good; False if the child does not end."""
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = work()
        finally:
            os._exit(0 if good else 1)
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


class Reading:
    """Some parts of an object, for a loader."""

    def __init__(self, url: str) -> None:
        self.source = open_source(url)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> bytes:
        return self.source.read_at(index * 1000, 1000)


@pytest.mark.parametrize("loaders", [DataLoader, torch.utils.data.DataLoader])
def test_workers_of_a_loader(server: Any, loaders: Any) -> None:
    data = Reading(server.put("a.bin", DATA))
    assert data[0] == DATA[:1000]
    loader = loaders(data, num_workers=2, batch_size=4, collate_fn=list, multiprocessing_context="fork")
    for _ in range(2):
        assert b"".join(piece for batch in loader for piece in batch) == DATA[:32_000]
        assert data[1] == DATA[1000:2000]


def test_children_of_children(server: Any) -> None:
    url = server.put("a.bin", DATA)
    source = open_source(url)

    def reads() -> bool:
        return source.read_at(5, 9) == DATA[5:14] and read_object(url) == DATA

    assert reads()
    assert in_child(lambda: reads() and in_child(lambda: reads() and in_child(reads)) and reads())
    assert in_child(lambda: in_child(reads)), "the child in between does not read"
    assert reads()


def test_a_child_ends_as_others_do(server: Any) -> None:
    """Also one that goes through the interpreter's end, with objects of the parent in it."""
    url = server.put("a.bin", DATA)
    program = f"""
import os, sys
from penstock.storage import open_source
source = open_source({url!r})
stream = source.stream()
stream.read(5)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert source.read_at(5, 5) == stream.read(5)
del source, stream
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG)


def test_where_there_can_be_no_copy(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.put("a.bin", DATA)
    assert read_object(url) == DATA

    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)

    def fails() -> bool:
        for _ in range(2):
            with pytest.raises(OSError, match=r"Operation not permitted.*multiprocessing_context='forkserver'"):
                Storage(attempts=1).read(url)
        return True

    assert in_child(fails)
    assert read_object(url) == DATA
