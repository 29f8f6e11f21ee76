"""Samplers, loader, resume and ledger run where only NumPy, torch and xxhash are installed, with what these require.

The environment is a folder of links to these packages, in an interpreter that finds no others.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from busy_support import HANG
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import penstock

PROGRAM = """
import importlib.util

import torch

import penstock as ps

absent = ["cv2", "pyarrow", "pytest", "rich", "simplejpeg", "tenacity", "typer", "zstandard"]
assert not any(map(importlib.util.find_spec, absent))


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.tensor(index**2), ps.generator().random()


def batches(iterator):
    return [[part.tolist() for part in batch] for batch in iterator]


def main():
    rows = range(100)
    samplers = [
        ps.RandomSampler(rows, shuffle="global"),
        ps.DistributedSampler(rows, num_replicas=4, rank=1, shuffle="block"),
        ps.InfiniteSampler(rows),
        ps.WeightedRandomSampler([1.0] * 100, 50),
        ps.BatchSampler(ps.SequentialSampler(rows), 8, drop_last=False),
        ps.TokenBudgetBatchSampler([3] * 100, 30),
        ps.GroupedBatchSampler(ps.RandomSampler(rows, shuffle="global"), [0, 1] * 50, 8),
    ]
    for sampler in samplers:
        iterator = iter(sampler)
        next(iterator)
        state, following = sampler.state_dict(), next(iterator)
        sampler.load_state_dict(state)
        assert next(iter(sampler)) == following

    def loader(**options):
        return ps.DataLoader(Squares(), batch_size=8, shuffle="global", seed=0, **options)

    with loader(num_workers=2) as first:
        iterator = iter(first)
        next(iterator)
        state, rest = first.state_dict(), batches(iterator)
    resumed = loader()
    resumed.load_state_dict(state)
    assert batches(resumed) == rest
    ledger = ps.Ledger(resumed)
    for step, (squares, _) in enumerate(rest, 1):
        assert [row**2 for row in ledger.rows(step).rows.tolist()] == squares
    assert ledger.steps(int(ledger.rows(5).rows[0]), epoch=0)[0].step == 5


if __name__ == "__main__":
    main()
"""


def required(*names: str) -> Iterator[importlib.metadata.Distribution]:
    """Yield distributions and what they require here, without extras."""
    waiting, seen = list(names), set()
    while waiting:
        if (name := canonicalize_name(waiting.pop())) not in seen:
            seen.add(name)
            found = importlib.metadata.distribution(name)
            requirements = map(Requirement, found.requires or ())
            waiting += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
            yield found


def test_the_core_needs_numpy_torch_and_xxhash_alone(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "penstock").symlink_to(Path(penstock.__file__).parent)
    for distribution in required("numpy", "torch", "xxhash"):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(str(distribution.locate_file(name)))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # Without `site`, whose folder has all packages.
    command = [sys.executable, "-S", str(program)]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
