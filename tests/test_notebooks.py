"""The notebooks of examples/ run from the first cell to the last, warn of nothing, and are stored without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def run(notebook, folder):
    """Run all cells in a kernel of their own; an error of a cell is an error, and so is a line on stderr."""
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    printed = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert printed
    assert not [output.text for output in printed if output.get("name") == "stderr"]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    """Return whether a cell has an output or the number of a run."""
    return any(cell.outputs or cell.execution_count for cell in code_cells(notebook))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_without_outputs_and_runs(file, tmp_path):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert not outputs(notebook)
    run(notebook, tmp_path)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("source", "error"),
    [("assert 1 + 1 == 3", CellExecutionError), ("import warnings; warnings.warn('x')", AssertionError)],
)
def test_a_cell_that_fails_or_warns_is_found(source, error, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    with pytest.raises(error):
        run(notebook, tmp_path)
    assert outputs(notebook)
