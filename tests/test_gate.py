"""The gate: what common steps enter, and how large each package is, only falls.

    python tests/test_gate.py            print each figure that is not the recorded one
    python tests/test_gate.py --write    record what is measured in gate.json
    python tests/test_gate.py --list     print the functions of each step, with the number of their calls

A figure above the recorded one fails. So does one that is 2 % lower (of a step: a quarter), until it is recorded. A
change that must raise a figure records it, and its commit says why.

A step is taken through public names in a fresh interpreter: once for imports and caches, then under `sys.setprofile`,
all threads together. A function is a code object of ``src/penstock`` that ``def`` or ``lambda`` made. Comprehensions
and generator expressions count as the function that they are in: newer interpreters inline some of them.
"""

from __future__ import annotations

import ast
import gc
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import cv2
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.images import native
from penstock.images.transforms import HorizontalFlip, RandomCrop

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "penstock"
GATE = TESTS / "gate.json"
SLACK, SLACK_OF_STEPS = 0.02, 0.25
"""A recorded figure may be higher than the measured one by this share of it. In some runs a slot of memory grows."""

Figures = dict[str, dict[str, int]]
Calls = Counter[str]
"""Functions, as ``loader/window.py:112 Window.next``, with the number of their calls, or of batches that enter them."""

_OWN = os.path.dirname(ps.__file__) + os.sep
_NO_FUNCTIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_OPTIMIZED = 1  # a flag of code that is not the body of a module or class
_calls: Counter[tuple[str, int, str]] = Counter()


def note(frame: FrameType, event: str, argument: object) -> None:
    """Count a call; the profile function of all threads."""
    code = frame.f_code
    if event == "call" and code.co_flags & _OPTIMIZED and code.co_name not in _NO_FUNCTIONS:
        _calls[code.co_filename, code.co_firstlineno, code.co_qualname] += 1


def take_calls() -> Calls:
    """Return the calls of Penstock's functions since the last time."""
    calls = dict(_calls)
    _calls.clear()
    own = {code: count for code, count in calls.items() if code[0].startswith(_OWN)}
    return Counter({f"{file.removeprefix(_OWN)}:{line} {name}": count for (file, line, name), count in own.items()})


@contextmanager
def recorded() -> Iterator[Calls]:
    """Count the calls in a block, without the garbage collector's, which come at any time."""
    calls: Calls = Counter()
    gc.disable()
    take_calls()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        calls.update(take_calls())
        gc.enable()


SIZE, WARM, STEADY = 32, 26, 400  # samples; batches before steady ones, and of those
RARE = 1 / 25
"""A function that fewer batches enter is in no steady batch: the next block of an order, a group of small batches."""


class Tensors:
    """Small tensors. In a worker, it writes into a folder how many of the steady batches enter each function."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch
        self.samples, self.batches = 0, Counter[str]()

    def __len__(self) -> int:
        return SIZE * self.epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.samples == 0:
            time.sleep(0.2)  # no answer comes before `iter(loader)` has returned
            self.first_worker = torch.utils.data.get_worker_info().id == 0
            gc.disable()
            sys.setprofile(note)
        self.samples += 1
        number, rest = divmod(self.samples, SIZE)
        if rest == 0:
            self.count_batch(number)
        # The consumer waits for some batches: for each, and for those of one worker, when the other's are ready.
        if number % 100 >= 75 or (number % 100 >= 50 and self.first_worker):
            time.sleep(0.0003)
        return torch.full((16,), float(index))

    def count_batch(self, number: int) -> None:
        """Count the functions since the same sample of the batch before."""
        calls = take_calls()
        if number > WARM:
            self.batches.update(dict.fromkeys(calls, 1))
            path = self.folder / f"{os.getpid()}.new"
            path.write_text(json.dumps([number - WARM, self.batches]))
            path.replace(path.with_suffix(".json"))


def loader_steps(folder: Path, epoch: int) -> Iterator[tuple[str, Calls]]:
    """A steady batch in process mode, the next epoch's start, and a state in the middle of it."""
    loader = ps.DataLoader(Tensors(folder, epoch), SIZE, shuffle=True, seed=1, num_workers=2)  # type: ignore[arg-type]
    iterator = iter(loader)
    consumer: Calls = Counter()
    for number in range(epoch):
        if number % 100 < 25:
            time.sleep(0.003)  # the workers wait for the consumer
        with recorded() as calls:
            next(iterator)
        if WARM <= number < WARM + STEADY:
            consumer.update(dict.fromkeys(calls, 1))
    assert next(iterator, None) is None
    worker, made = Counter[str](), 0
    for file in folder.glob("*.json"):
        count, batches = json.loads(file.read_text())
        worker.update(batches)
        made += count
    consumer = Counter({name: count for name, count in consumer.items() if count >= RARE * STEADY})
    worker = Counter({name: count for name, count in worker.items() if count >= RARE * made})
    yield "a steady batch, in the consumer", consumer
    yield "a steady batch, in a worker", worker
    yield "a steady batch, together", consumer + worker
    with recorded() as calls:
        iterator = iter(loader)
    yield "iter(loader)", calls
    for _ in range(WARM):
        next(iterator)
    loader.state_dict()
    with recorded() as calls:
        loader.state_dict()
    yield "loader.state_dict()", calls


def image_steps(folder: Path, jpeg: bytes) -> Iterator[tuple[str, Calls]]:
    """A folder that nobody has opened before, its first row, and samples of a list, alone and in a batch."""
    for number in range(3 * SIZE):
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg)
    with recorded() as calls:
        dataset = ps.open(folder, size=16)
    yield "ps.open(folder of images, size=)", calls
    with recorded() as calls:
        dataset[0]
    yield "its first row", calls
    listing = folder / "list.txt"
    listing.write_text("".join(f"{path} 0\n" for path in sorted(folder.glob("*/*.jpg"))))
    images = ps.ImageDataset(ps.RankDataset(listing, seed=0), transform=[RandomCrop(32, padding=4), HorizontalFlip()])
    alone = []
    for number in range(8):
        with recorded() as calls:
            images[number]
        alone.append(calls)
    yield "a small image", min(alone, key=Counter.total)  # the list's file is looked at now and then
    iterator = iter(ps.DataLoader(images, SIZE))
    next(iterator)
    with recorded() as calls:
        next(iterator)
    yield f"{SIZE} small images in a batch", calls


def tar_steps(url: str) -> Iterator[tuple[str, Calls]]:
    """A tar on a server that nobody has read before, without an index."""
    with recorded() as calls:
        shards = ps.open(url)
    yield "ps.open(URL of a tar without an index)", calls
    with recorded() as calls:
        next(iter(ps.DataLoader(shards, 16)))
    yield "its first batch", calls


def steps(root: Path) -> dict[str, Calls]:
    """Return the calls of each step, taken for the second time."""
    from store_server import Store

    threading.setprofile(note)  # threads that stay are counted in later steps, too
    jpeg = cv2.imencode(".jpg", np.full((32, 32, 3), 7, np.uint8))[1].tobytes()
    found: dict[str, Calls] = {}
    # Before anything is read from a store, whose library is then prepared for each fork of a worker.
    for name, epoch in (("first", 2 * WARM), ("second", 2 * WARM + STEADY)):
        folder = root / name
        folder.mkdir()
        found |= loader_steps(folder, epoch)
    with Store(root) as store:
        for name in ("first", "second"):
            folder = root / name
            with tarfile.open(folder / "shard.tar", "w") as tar:
                for number in range(2 * SIZE):
                    info = tarfile.TarInfo(f"{number:03d}.jpg")
                    info.size = len(jpeg)
                    tar.addfile(info, io.BytesIO(jpeg))
            found |= image_steps(folder / "images", jpeg)
            found |= tar_steps(f"{store.url}/{name}/shard.tar")
    return found


def taken_steps() -> dict[str, Calls]:
    """Return the calls of each step in a fresh interpreter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "RANK", "WORLD"))}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**kept, "XDG_CACHE_HOME": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__, "--steps", folder]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=300)
    return {step: Counter(calls) for step, calls in json.loads(done.stdout).items()}


def of_steps(taken: dict[str, Calls]) -> Figures:
    """Return files, functions and calls; of batches, calls differ."""
    found = {}
    for step, calls in taken.items():
        found[step] = {"files": len({name.partition(":")[0] for name in calls}), "functions": len(calls)}
        if "small image" in step:
            found[step]["calls"] = calls.total()
    return found


def of_packages() -> Figures:
    """Return lines, functions and classes of each package; ``penstock`` are the modules beside them."""
    found: dict[str, Counter[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        text, (package, *rest) = path.read_text(), path.relative_to(SOURCE).parts
        counts = found.setdefault(package if rest else "penstock", Counter(lines=0, functions=0, classes=0))
        nodes = [type(node) for node in ast.walk(ast.parse(text))]
        counts["lines"] += text.count("\n")
        counts["functions"] += nodes.count(ast.FunctionDef) + nodes.count(ast.AsyncFunctionDef)
        counts["classes"] += nodes.count(ast.ClassDef)
    in_c = [path.read_text().count("\n") for path in SOURCE.rglob("*.[ch]")]
    return {name: dict(counts) for name, counts in found.items()} | {"in C": {"lines": sum(in_c)}}


def read(kind: str) -> Figures:
    """Return recorded figures."""
    figures: Figures = json.loads(GATE.read_text())[kind]
    return figures


def differences(now: Figures, before: Figures, slack: float = 0.0) -> list[str]:
    """Return a line for each figure that is higher than it was, or lower by more than the slack."""
    lines = []
    for name in {**before, **now}:
        old, new = before.get(name, {}), now.get(name, {})
        for what in {**old, **new}:
            was, is_ = old.get(what, 0), new.get(what, 0)
            if is_ > was or was - is_ > slack * is_:
                lines.append(f"{name}: {is_:,} {what}, {was:,} recorded, {'higher' if is_ > was else 'lower'}")
    return lines


ADVICE = """
What is lower is recorded by: python tests/test_gate.py --write
What is higher has to become lower. --list prints the functions. If it must be higher, record it, and say why in the
commit."""


@pytest.mark.skipif(sys.platform != "linux" or not native.is_available(), reason="other functions are used here")
def test_steps_enter_no_more() -> None:
    differ = differences(of_steps(taken_steps()), read("steps"), SLACK_OF_STEPS)
    assert not differ, "\n".join([*differ, ADVICE])


def test_packages_do_not_grow() -> None:
    differ = differences(of_packages(), read("packages"), SLACK)
    assert not differ, "\n".join([*differ, ADVICE])


def test_what_is_higher_or_much_lower_is_named() -> None:
    before = {"a": {"lines": 1000, "classes": 10}, "b": {"lines": 1}}
    assert differences({"a": {"lines": 981, "classes": 10}, "b": {"lines": 1}}, before, SLACK) == []
    now = {"a": {"lines": 980, "classes": 11}, "c": {"lines": 2}}
    assert differences(now, before, SLACK) == [
        "a: 980 lines, 1,000 recorded, lower",
        "a: 11 classes, 10 recorded, higher",
        "b: 0 lines, 1 recorded, lower",
        "c: 2 lines, 0 recorded, higher",
    ]


def main(arguments: list[str]) -> None:
    """Do what the first lines of this file say."""
    if arguments[:1] == ["--steps"]:
        sys.path.append(str(TESTS / "support"))
        print(json.dumps(steps(Path(arguments[1]))))
        return
    taken = taken_steps()
    if "--list" in arguments:
        for step, calls in taken.items():
            print(f"\n{step}")
            print("\n".join(f"{count:6} {name}" for name, count in sorted(calls.items())))
        return
    figures = {"steps": of_steps(taken), "packages": of_packages()}
    for kind, now in figures.items():
        print("".join(f"{line}\n" for line in differences(now, read(kind))), end="")
    if "--write" in arguments:
        # A figure's row is a line, so that changes of two packages are no conflict.
        kinds = [
            f'  "{kind}": {{\n'
            + ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in now.items())
            + "\n  }"
            for kind, now in figures.items()
        ]
        GATE.write_text("{\n" + ",\n".join(kinds) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
