"""The notebook is stored with its outputs, except times and machines; a run has the same ones again.

``python docs/tools/tour.py`` stores them anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from interpreter_support import FULL

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
from tour import NOTEBOOK, code, read, run, strip, varies  # noqa: E402

ELSEWHERE = re.compile(r"/(?:tmp|home|root|work|Users)/|\d\.?\d* (?:ms|us|s)\b|samples/s")


def text(cell: Any) -> str:
    """What a cell has printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pictures(cell: Any) -> list[list[str]]:
    """The kinds of data that a cell shows; their bytes are those of a version of a library."""
    return [sorted(output.data) for output in cell.outputs if output.output_type != "stream"]


def test_outputs_are_stored_as_a_run_leaves_them() -> None:
    notebook = read()
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code(notebook)] == [*range(1, len(code(notebook)) + 1)]
    again = read()
    strip(again)
    assert again == notebook
    said = "".join(map(text, code(notebook)))
    for words in ("five batches, bit for bit", "'replaced': 1", "1360 left", "epoch 1: limited by storage"):
        assert words in said
    assert ELSEWHERE.findall(said) == []
    assert [kinds for cell in code(notebook) for kinds in pictures(cell)] == [["image/jpeg", "text/plain"]]


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="a kernel of Jupyter, for code that other tests run, too; PENSTOCK_TEST_FULL=1")
def test_a_run_has_the_outputs_that_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # nothing of this user's is read or written
    before = sorted(NOTEBOOK.parent.iterdir())
    notebook = read()
    run(notebook, timeout=HANG)
    said = "".join(text(cell) for cell in code(notebook) if varies(cell))
    assert "samples" in said, "the report"
    assert "Best on this machine" in said, "the verdict of the profile"
    strip(notebook)
    for cell, stored in zip(code(notebook), code(read()), strict=True):
        assert (text(cell), pictures(cell)) == (text(stored), pictures(stored)), cell.id
    assert sorted(NOTEBOOK.parent.iterdir()) == before
