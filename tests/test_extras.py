"""Without an extra's packages: one line that names the extra, from the library and the commands."""

import pytest
from processes import ended

BLOCK = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
TRAIN = ("flax", "orbax", "pyarrow", "safetensors", "tokenizers")
INTEROP = ("jax_privacy", "opacus", "torch")


def run(program, absent):
    return ended("-c", BLOCK.format(absent=absent) + program)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--epochs", "2", "--iters", "4", "--eps", "8", "--delta", "1e-5", "--out", "run"],
        ["data", "build", "corpus", "--data", "stdlib"],
    ],
)
def test_a_command_names_the_missing_extra(words, tmp_path):
    program = f"import os; os.chdir({str(tmp_path)!r})\nfrom mfopt_cli.main import main\n"
    done = run(f"{program}main({words!r})", TRAIN)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().splitlines()[-1].endswith("run pip install '.[train]'")
    assert "Traceback" not in done.stderr


def test_the_library_names_the_missing_extra():
    program = """
import importlib, traceback
for module in ("noise.for_torch", "torch"):
    try:
        importlib.import_module(f"mfopt.{module}")
    except ImportError as problem:
        print(module, traceback.format_exception_only(problem)[-1].splitlines()[-1])
"""
    done = run(program, INTEROP)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["noise.for_torch", "torch"]
    assert all("in the clone of mfopt, run pip install '.[interop]'" in line for line in lines)


def test_other_missing_modules_are_not_explained_away():
    from mfopt._runtime import _extras

    problem = ModuleNotFoundError("No module named 'other'", name="other")
    assert _extras.missing(problem) is problem


def test_dir_shows_what_users_need_and_no_helpers():
    import mfopt

    names = dir(mfopt)
    assert {"load", "BallsInBins", "optimize", "Guarantee", "noise", "calibration"} <= set(names)
    assert not [name for name in names if name.startswith("_") and name != "__version__"]
    assert not {"annotations", "importlib", "Any", "TYPE_CHECKING"} & set(names)
    assert all(hasattr(mfopt, name) for name in names)
