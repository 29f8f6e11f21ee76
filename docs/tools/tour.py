"""Run examples/tour.ipynb and store its outputs: ``python docs/tools/tour.py``.

Outputs of cells with the tag ``varies`` (times, the machine) are not stored, and neither is anything on standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"
VARIES = "varies"


def read() -> Any:
    """Return the notebook as it is stored."""
    return nbformat.read(NOTEBOOK, as_version=4)


def code(notebook: Any) -> list[Any]:
    """Return its cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def varies(cell: Any) -> bool:
    """Return whether the outputs of a cell differ from run to run."""
    return VARIES in cell.metadata.get("tags", [])


def run(notebook: Any, *, timeout: float) -> None:
    """Run all cells in place, in the folder of the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error; its traceback is in the message.
    """
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=timeout, resources=folder, store_widget_state=False).execute()


def strip(notebook: Any) -> None:
    """Leave what every run prints, and nothing else."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(code(notebook), start=1):
        cell.execution_count = number
        cell.metadata.pop("execution", None)
        cell.outputs = [] if varies(cell) else _joined(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number


def _joined(outputs: list[Any]) -> list[Any]:
    """Return outputs with one stream of text where the kernel sent it in parts."""
    found: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and output.name != "stdout":
            continue
        if output.output_type == "stream" and found and found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def main() -> None:
    """Run the notebook and write it."""
    notebook = read()
    run(notebook, timeout=600)
    strip(notebook)
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
