"""Every notebook runs from top to bottom, imports mfopt, and defines no algorithm."""

import ast
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code(path: Path) -> str:
    notebook = nbformat.read(path, as_version=4)
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def test_the_notebooks_are_there() -> None:
    assert {"01-optimize.ipynb", "02-compare.ipynb", "03-train.ipynb"} <= {
        path.name for path in NOTEBOOKS
    }


@pytest.mark.release
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    printed = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    assert printed
    assert not any(output.output_type == "error" for output in printed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_short_and_defines_no_algorithm(path: Path) -> None:
    source = code(path)
    assert "mfopt" in source and len(source.splitlines()) <= 150
    tree = ast.parse(source)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert len(node.body) <= 4, f"{path.name}: {node.name} belongs into the library"
