"""What is imported until the first batch: in fresh interpreters, counted and by name, so that no clock is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from full_run import full_only

HEAVY = {
    *("pyarrow", "pandas", "ray", "fsspec", "tenacity", "tornado", "filelock", "rich", "typer", "cv2", "PIL"),
    *("accelerate", "transformers", "prometheus_client", "zstandard"),
}
OTHER_EXECUTORS = {"executors.threads", "executors.process", "executors.ray", "autotune", "throughput"}
PROGRAM = """
import sys, json, torch
before = set(sys.modules)
import penstock as ps

class Rows(torch.utils.data.Dataset):
    manifest = ps.Manifest.open(sys.argv[1])

    def __len__(self):
        return len(self.manifest)

    def __getitem__(self, index):
        return self.manifest[index].label

    def load(self, indices):
        return [record.label for record in self.manifest.records(indices)]

class Imported(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.zeros(3), sorted(sys.modules)

rows, found = Rows(), []
for how in {}, {"num_workers": 2, "executor": "thread"}, {"num_workers": 1, "executor": "process"}:
    loader = ps.DataLoader(rows, batch_size=64, shuffle="global", seed=0, **how)
    batch = next(iter(loader))
    assert rows.load(range(200)) == list(range(200))
    loader.close()
    found.append(sorted(set(sys.modules) - before))
*_, (_, last) = ps.DataLoader(Imported(), batch_size=None, num_workers=1, executor="process")
found.append(sorted(set(last) - before))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text manifest with its index."""
    from penstock import Manifest

    path = tmp_path_factory.mktemp("imports") / "train.txt"
    path.write_text("".join(f"a/{k}.jpg {k}\n" for k in range(1000)))
    Manifest.open(path)
    return path


def imported(source: Path, program: str) -> Any:
    """Return the modules that a program says it has imported."""
    command = [sys.executable, "-c", program, str(source)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


@pytest.fixture(scope="module")
def by_executor(source: Path) -> list[set[str]]:
    """What is imported inline, then with threads, then with processes, all in one fresh interpreter; then in a worker
    that has delivered batches.
    """
    return [set(modules) for modules in imported(source, PROGRAM)]


def test_a_first_batch_needs_few_modules(by_executor: list[set[str]]) -> None:
    modules = by_executor[0]
    assert not {name.partition(".")[0] for name in modules} & HEAVY
    executors = {f"penstock.loader.{name}" for name in OTHER_EXECUTORS}
    assert not modules & executors
    rare = {"penstock.integrations.dispatch_batches", "penstock.samplers.grouped", "penstock.storage.remote"}
    assert not modules & rare
    assert len(modules) < 117, sorted(modules)  # 115, as this was written


def test_each_executor_imports_itself_alone(by_executor: list[set[str]]) -> None:
    _, threads, processes, _ = by_executor
    assert "penstock.loader.executors.threads" in threads
    assert not threads & {"penstock.loader.executors.process", "penstock.loader.executors.ray"}
    assert "penstock.loader.executors.process.executor" in processes
    assert "penstock.loader.executors.ray" not in processes
    for modules in threads, processes:
        assert not {name.partition(".")[0] for name in modules} & HEAVY


def test_a_worker_imports_little_more(by_executor: list[set[str]]) -> None:
    *_, processes, worker = by_executor
    assert "numpy.ma" not in worker
    assert len(worker - processes) < 10, sorted(worker - processes)


@full_only("an interpreter for each")
def test_each_format_imports_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"path": "{k}.jpg", "label": {k}}}\n' for k in range(1000)))
    program = (
        "import json, sys, penstock; manifest = penstock.Manifest.open(sys.argv[1]); manifest.records(range(100))\n"
        "assert 'pyarrow' not in sys.modules and 'penstock.manifest.formats.arrow' not in sys.modules\n"
        "assert manifest.take([1]).num_rows == 1\nprint(json.dumps(list(sys.modules)))"
    )
    assert "pyarrow" in imported(tmp_path / "train.jsonl", program)


def test_check_is_a_function_whatever_came_first() -> None:
    program = (
        "import penstock.manifest.checking, penstock.manifest\nfrom penstock.manifest import check\n"
        "assert callable(check) and check is penstock.manifest.check"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
