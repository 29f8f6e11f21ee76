"""The notebook runs from its first cell to its last, shows what it promises, and is stored without output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from interpreter_support import FULL

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"

nbformat = pytest.importorskip("nbformat")


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_no_output_is_stored() -> None:
    nbformat.validate(read())
    assert [cell.id for cell in code(read()) if cell.outputs or cell.execution_count is not None] == []


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="a kernel of Jupyter, for code that other tests run, too; PENSTOCK_TEST_FULL=1")
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # nothing of this user's is read or written
    notebook = read()
    before = sorted(NOTEBOOK.parent.iterdir())
    client = nbclient.NotebookClient(notebook, timeout=HANG, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()  # raises the error of a cell, with its traceback
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    said = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    for words in ("five batches, bit for bit", "'replaced': 1", "Best on this machine", "epoch 1: limited by storage"):
        assert words in said
    assert sorted(NOTEBOOK.parent.iterdir()) == before
