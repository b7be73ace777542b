"""The source distribution holds what its own tests and pages need."""

import os
import shutil
import tarfile
import zipfile

import pytest
from processes import python
from sources import ROOT

FOLDERS = ("artifacts", "cli", "mfopt", "notebooks", "tests", "docs", ".ci")
FILES = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md")
MOST_BYTES = 3_100_000  # of the archive
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def test_everything_is_in_the_sdist_and_nothing_that_was_compiled(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree, output = tmp_path / "tree", tmp_path / "out"  # a copy, without what tools leave in it
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", ".ipynb_checkpoints")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in (*FILES, "pyproject.toml", "setup.py", "mkdocs.yml", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    required = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    (tree / "tests" / "__pycache__").mkdir()
    (tree / "tests" / "__pycache__" / "x.cpython-311.pyc").touch()
    python("-c", BUILD, output, cwd=tree)
    (archive,) = output.glob("*.tar.gz")
    assert archive.stat().st_size < MOST_BYTES
    with tarfile.open(archive) as packed:
        actual = {name.partition("/")[2] for name in packed.getnames()}
    assert required <= actual, sorted(required - actual)[:10]
    assert not [name for name in actual if "__pycache__" in name]


@pytest.mark.release
def test_a_source_is_the_same_bytes_again_and_type_checkers_find_editable_installs(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    for name in ("cli", "mfopt"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in (*FILES, "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree / name)
    dated = {"SOURCE_DATE_EPOCH": "1760000000", "MFOPT_TREE": "https://example.org/tree/"}
    collected = []
    for name in ("first", "second"):
        (tree / "mfopt" / "words.py").touch()  # another date of a file
        python("-c", BUILD, tmp_path / name, cwd=tree, env=os.environ | dated)
        (archive,) = (tmp_path / name).glob("*.tar.gz")
        collected.append(archive.read_bytes())
    assert collected[0] == collected[1]
    with tarfile.open(archive) as packed:
        assert {entry.mtime for entry in packed.getmembers()} == {1760000000}
        (about,) = (name for name in packed.getnames() if name.count("/") == 1 and "PKG" in name)
        text = packed.extractfile(about).read().decode()
    assert "](https://example.org/tree/docs/index.md#questions)" in text and "](docs/" not in text
    assert "](https://example.org/tree/artifacts/accuracy/accuracy.png?raw=true)" in text
    python("-c", BUILD.replace("sdist", "editable"), tmp_path / "wheel", cwd=tree)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (paths,) = (name for name in packed.namelist() if name.endswith(".pth"))
        assert packed.read(paths).decode().split() == [str(tree), str(tree / "cli")]
