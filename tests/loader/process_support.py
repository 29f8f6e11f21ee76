"""Data sets and functions for the tests of worker processes, in a module that these can import."""

from __future__ import annotations

import json
import os
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.loader.executors.process.ring import BOARD, Ring, SharedFile, Slot
from penstock.loader.executors.process.transport import pack, unpack


def write_to(file: SharedFile, connection: Any) -> None:
    """Write into a file that was inherited, and say which it is."""
    os.pwrite(file.fd, b"from the worker", 0)
    connection.send(os.fstat(file.fd).st_ino)
    connection.close()


class Frames(Dataset[torch.Tensor]):
    """Sample i is i (modulo 251), so many times."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8)


class TwoWords(Exception):
    """Cannot be made from a message."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one}, {other}")


class Keyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class NoWords(Exception):
    def __init__(self) -> None:
        super().__init__("nothing to say")


class Unspeakable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise TypeError("no words")


class Mute(Exception):
    """Says the same whatever the message."""

    def __str__(self) -> str:
        return "..."


class NotAnError(Exception):
    """Makes something else."""

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls, *args) if args == ("real",) else 5


def raise_value() -> None:
    raise ValueError("bad value")


def raise_key() -> None:
    raise KeyError("a\nb")


def raise_unicode() -> None:
    b"\xff".decode()


def raise_json() -> None:
    json.loads("{")


def raise_two_words() -> None:
    raise TwoWords("first", "second")


def raise_called_process() -> None:
    raise subprocess.CalledProcessError(3, ["ls"])


def raise_keyword() -> None:
    raise Keyword(code=5)


def raise_no_words() -> None:
    raise NoWords


def raise_unspeakable() -> None:
    raise Unspeakable


def raise_mute() -> None:
    raise Mute("this")


def raise_unpicklable() -> None:
    raise ValueError(lambda: 0)


def raise_local() -> None:
    class Local(Exception):
        pass

    raise Local("local")


def raise_not_an_error() -> None:
    raise NotAnError("real")


def raise_group() -> None:
    raise ExceptionGroup("both", [ValueError("one"), TypeError("other")])


def raise_chained() -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        raise LookupError("no such luck") from error


def raise_system() -> None:
    raise OSError(5, "Input/output error", "/some/file")


def raise_file() -> None:
    open("/no/such/file").close()


def raise_stop() -> None:
    raise StopIteration("early")


def raise_import() -> None:
    raise ImportError("no module", name="x", path="y")


def raise_assertion() -> None:
    raise AssertionError


def raise_recursion() -> None:
    raise_recursion()


def raise_surrogate() -> None:
    raise ValueError("\udcff.jpg")


def raise_huge() -> None:
    raise ValueError("x" * 3_000_000)


def raise_syntax() -> None:
    compile("a b", "file", "exec")


def raise_attribute() -> None:
    None.no_such_thing  # type: ignore[attr-defined]  # noqa: B018


def raise_torch() -> None:
    torch.zeros(3).view(2)


RAISERS = {
    name.removeprefix("raise_").replace("_", " "): function
    for name, function in dict(globals()).items()
    if name.startswith("raise_")
}


class Raises(Dataset[int]):
    """Sample 3 of 8 raises."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            RAISERS[self.name]()
        return index


class Pair(NamedTuple):
    """A sample of two parts."""

    one: Any
    other: Any


def _image(index: int) -> torch.Tensor:
    return torch.arange(index, index + 20 * 30 * 3).to(torch.uint8).view(20, 30, 3).permute(2, 0, 1)


KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.full((50, 20), i),
    "row": lambda i: torch.tensor([i]),
    "number": lambda i: i,
    "image": lambda i: (_image(i), i),
    "dict": lambda i: {"image": _image(i), "text": f"a {i}", "raw": b"%d" % i, "x": i / 2, "deep": {"y": [i, (i, i)]}},
    "pair": lambda i: Pair(np.full((40, 40), i, np.float32), Pair("a", torch.tensor(i % 2 == 0))),
    "lists": lambda i: [[i, f"{i}"], (np.int8(i), np.float64(i))],
    "text only": lambda i: f"{i}",
    "text pair": lambda i: (f"{i}", f"{-i}"),
    "mixed numbers": lambda i: (i, i if i % 7 else i / 2),
    "grows": lambda i: torch.full((10 + i // 16 * 2000,), i),
    "other types": lambda i: torch.zeros(2000, dtype=torch.float32 if i < 30 else torch.float64),
    "sometimes more": lambda i: {"a": torch.full((2000,), i)} | ({"b": i} if i % 16 < 8 else {}),
    "sometimes images": lambda i: _image(i) if i % 5 else _image(i).contiguous(),
    "nothing": lambda i: (torch.zeros(0), i),
    "sparse and not": lambda i: {"a": torch.full((2000,), i), "e": {}},
    "ordered": lambda i: OrderedDict(b=i, a=torch.full((2000,), i)),
    "bfloat16": lambda i: torch.full((2000,), i, dtype=torch.bfloat16),
    "long text": lambda i: ("x" * 10_000 * (i % 3), i),
}
"""Samples of all kinds, by index."""

_FAULTY: dict[str, Callable[[int], Any]] = {
    "unequal": lambda i: torch.zeros(3 if i != 6 else 4),
    "text or none": lambda i: {"x": torch.zeros(2000), "caption": f"{i}" if i % 8 < 4 else None},
}


class Samples(Dataset[Any]):
    """Samples of a kind, or of several (``a/b/c``), each as long as the others."""

    pure = True

    def __init__(self, name: str, size: int) -> None:
        self.names = name.split("/")
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        name = self.names[index * len(self.names) // self.size]
        return (KINDS | _FAULTY)[name](index)


def deliver(ring: Ring, lent: tuple[int, int], batch: Any) -> Any:
    """A batch that a worker makes in a slot that was lent, as the consumer gets it."""
    slot = Slot(ring.file, *lent)
    data = pack(batch, slot)
    assert slot.used
    return unpack(data, ring.lease(slot.number, slot.extent, slot.used))


def allocated(ring: Ring) -> int:
    """Bytes of memory that the slots of a ring have, once what has come back is looked at."""
    number, extent = ring.lend()
    ring.give_back(number, extent)
    return os.fstat(ring.file.fd).st_blocks * 512 - BOARD


def looks_like(tensors: list[torch.Tensor], value: int) -> bool:
    """Whether all numbers are this one."""
    return all(bool((tensor == value).all()) for tensor in tensors)
