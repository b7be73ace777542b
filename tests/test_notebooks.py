"""Every notebook runs from top to bottom, shows what it computes, and defines no algorithm."""

import platform
import re

import pytest
from sources import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code(path):
    notebook = nbformat.read(path, as_version=4)
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def printed(notebook):
    """Lines that its code cells print."""
    return [
        line
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
        for line in output.text.splitlines()
    ]


NUMBER = re.compile(r"(noise multiplier|sigma|σ =|norm)?\s*\d+(?:\.(\d+))?(%?)")


def room(match, value):
    """Largest difference from a stored number: what searches on other processors may end with.

    0.3% and the last digit; 10% of σ and of what is proportional to it, since C may be scaled; 0.6
    of a share in percent.
    """
    if match[3]:
        return 0.6
    return (0.1 if match[1] else 0.003) * value + 1.001 * 10 ** -len(match[2] or "")


def differences(old, new):
    """Pairs of stored and printed lines that differ by more than they may."""
    if len(old) != len(new):
        return [f"{len(old)} lines are stored, {len(new)} printed"]
    collected = []
    for was, line in zip(old, new, strict=True):
        unchanged = NUMBER.sub(r"\1", was) == NUMBER.sub(r"\1", line)
        for original, updated in zip(NUMBER.finditer(was), NUMBER.finditer(line), strict=False):
            first, second = (
                float(re.search(r"[\d.]+", match[0])[0]) for match in (original, updated)
            )
            unchanged = unchanged and abs(second - first) <= room(original, first)
        if not unchanged:
            collected.append(f"- {was}\n+ {line}")
    return collected


@pytest.mark.release
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_it_computes(path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    stored = printed(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    assert stored
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    assert not any(output.output_type == "error" for output in outputs)
    made_by = notebook.metadata.language_info.version.split(".")[:2]
    if "train" in path.stem and made_by != platform.python_version().split(".")[:2]:
        return  # its data are the standard library of one version
    assert not differences(stored, printed(notebook))


def test_a_stale_output_is_seen():
    # the first was stored for months where a run gave the second
    assert differences(["... noise multiplier 3.668"], ["... noise multiplier 1.03062"])
    assert differences(["BLT sigma 1.03 RMSE 11.766"], ["BLT sigma 1.03 RMSE 11.85"])
    assert differences(["banded 6.72 (8) +11.5%"], ["banded 6.72 (8) +12.5%"])
    assert differences(["one"], ["one", "two"])
    assert not differences(["BLT sigma 1.03 RMSE 11.766"], ["BLT sigma 1.06 RMSE 11.77"])


@pytest.mark.ci
def test_what_the_notebooks_call_exists_and_takes_their_arguments(tmp_path):
    api = pytest.importorskip("mypy.api")  # with the cache of the check of types
    files = [tmp_path / f"notebook_{path.stem[:2]}.py" for path in NOTEBOOKS]
    for file, path in zip(files, NOTEBOOKS, strict=True):
        file.write_text(code(path))
    wrong = tmp_path / "control.py"
    wrong.write_text("import mfopt\nmfopt.factorize(size=2)\nmfopt.no_such_name\n")
    errors = api.run([*map(str, files), str(wrong)])[0]
    kinds = re.findall(r"(\w+)\.py:\d+: error: .*\[((?:attr|call|import|name)-[\w-]+)\]", errors)
    assert {name for name, _ in kinds} == {"control"} and len(kinds) == 2, errors
